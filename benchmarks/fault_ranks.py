"""What ranks of benchmarks/faults.py do: they train, something happens to one of them, and they say what they find."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

STEPS, FAULTY_STEP = 40, 20
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@dataclass(frozen=True)
class Fault:
    """What happens, and what is to follow.

    Attributes:
        happens: on rank 1.
        says: a regular expression that is in what is said.
        bound: seconds until all have ended, by hand.
    """

    happens: Callable[[], Any]
    says: str
    bound: float = 5.0


def raises() -> None:
    """As a mistake in a script does."""
    raise RuntimeError("the fault of the script")


def raises_in_thread() -> None:
    """In a thread with the name of the package's."""
    threading.Thread(target=raises, name="pyg_dist trial").start()
    time.sleep(60)


def sends_more() -> None:
    """A call that the others do not make."""
    import torch

    from pyg_dist.backend.comm.group import world_group

    world_group().sum(torch.ones(3))


LOST = r"lost its connection to rank 1|ended before"
FAULTS = {
    "kill -9": Fault(lambda: os.kill(os.getpid(), signal.SIGKILL), LOST),
    "a crash (SIGSEGV)": Fault(lambda: os.kill(os.getpid(), signal.SIGSEGV), LOST),
    "SIGTERM, nobody asks": Fault(lambda: os.kill(os.getpid(), signal.SIGTERM), LOST),
    "os._exit(3)": Fault(lambda: os._exit(3), LOST),
    "an exception": Fault(raises, "RuntimeError: the fault of the script"),
    "an exception in a thread": Fault(raises_in_thread, "rank 1 failed: RuntimeError: the fault of the script"),
    "sys.exit(0), too early": Fault(lambda: sys.exit(0), "rank 1 ended after"),
    "another collective": Fault(sends_more, "Expected the same calls on every rank", 15.0),
}


def train(fault: str, seconds: float) -> None:
    """What a rank does."""
    import torch
    import torch.nn.functional as F
    from torch_geometric.data import Data

    import pyg_dist
    from pyg_dist.conv import DistributedGCNConv

    torch.set_num_threads(1)
    torch.manual_seed(0)
    graph = Data(x=torch.randn(300, 16), edge_index=torch.randint(0, 300, (2, 2000)), y=torch.arange(300) % 4)
    data = pyg_dist.DistributedData(graph, partition="random")
    model = DistributedGCNConv(16, 4)
    optimizer = torch.optim.Adam(model.parameters())
    end, step = time.monotonic() + seconds, 0
    while step < STEPS or time.monotonic() < end:
        optimizer.zero_grad()
        F.cross_entropy(model(data.x, data.edge_index), data.y).backward()
        optimizer.step()
        if step == FAULTY_STEP - 1:
            sys.stdout.write(f"rank {pyg_dist.rank()} has come here\n")  # stays in a buffer of Python's
        if step == FAULTY_STEP and fault and pyg_dist.rank() == 1:
            sys.stdout.flush()
            sys.stderr.write(f"\nfault at {time.time()}\n")
            sys.stderr.flush()
            FAULTS[fault].happens()
        step += 1
        if seconds and step % 200 == 0 and pyg_dist.is_main():
            sys.stdout.write(f"soak {json.dumps(resources())}\n")
            sys.stdout.flush()


class Training(NamedTuple):
    """A model, and an epoch of its training."""

    model: Any
    optimizer: Any
    epoch: Callable[[], float]


def training(graph: str) -> Training:
    """A GCN with two layers of 16 columns on an archive, or GraphSAGE with three of 256 on a store."""
    import torch

    sys.path.insert(0, str(EXAMPLES))
    import epoch_models
    import example_graphs
    import full_batch_gcn

    import pyg_dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any
    if Path(graph).is_dir():
        data: Any = pyg_dist.DistributedData.open(graph)
        trained = data.train_mask.nonzero().view(-1)
        make, _, conv = epoch_models.MODELS["sage"]
        model = make(data.num_features, int(data.y.max()) + 1, conv)
    else:
        whole = example_graphs.read_npz(graph)
        data, trained = pyg_dist.DistributedData(whole), whole.train_mask.nonzero().view(-1)
        model = full_batch_gcn.GCN(data.num_features, 16, int(whole.y.max()) + 1, 2, 0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    return Training(model, optimizer, lambda: full_batch_gcn.train(model, data, trained, optimizer))


def keep_and_not(graph: str, folder: str) -> None:
    """What a rank does: turns of epochs after which the state is kept in memory, and of others."""
    import pyg_dist
    from pyg_dist.checkpoint import Checkpointer
    from pyg_dist.checkpoint.memory import MachineMemory

    model, optimizer, epoch = training(graph)
    turns, epochs = (4, 3) if Path(graph).is_dir() else (40, 25)
    loops = {
        memory: Checkpointer(
            f"{folder}/{memory}", every=10**6, memory=memory, model=model,
            optimizer=optimizer,
        ).epochs(10**6)
        for memory in (0, 1)
    }  # fmt: skip
    seconds: dict[str, list[float]] = {"without": [], "with": [], "keep": []}
    keep = MachineMemory.keep

    def timed(*args: Any) -> None:
        start = time.perf_counter()
        keep(*args)
        seconds["keep"].append(time.perf_counter() - start)

    MachineMemory.keep = timed  # type: ignore[method-assign]
    for turn in range(turns):
        for memory in (0, 1) if turn % 2 else (1, 0):
            for number in range(epochs + 1):
                start = time.perf_counter()
                next(loops[memory])
                epoch()
                if turn and number:  # the first one of a turn is cold
                    seconds["with" if memory else "without"].append(time.perf_counter() - start)
    if pyg_dist.is_main():
        sys.stdout.write(f"overhead {json.dumps(seconds)}\n")


def restarted(graph: str, folder: str) -> None:
    """What a rank does: rank 1 is killed in the middle; rank 0 leaves the times of that and of what follows."""
    is_first, is_noted = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0", os.environ["RANK"] == "0"

    def mark(name: str) -> None:
        file = Path(folder) / f"at {name}"
        if is_noted and is_first == (name == "kill") and not file.exists():
            file.write_text(str(time.time()))

    mark("start")
    import pyg_dist
    from pyg_dist.checkpoint import Checkpointer

    mark("imports")
    model, optimizer, epoch = training(graph)
    mark("graph")
    epochs = 8 if Path(graph).is_dir() else 60
    checkpointer = Checkpointer(f"{folder}/run", every=10**6, model=model, optimizer=optimizer)
    mark("state")
    for number in checkpointer.epochs(epochs):
        if is_first and number == epochs // 2:
            mark("kill")
            if pyg_dist.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        epoch()
        mark("epoch")


def record(folder: str) -> None:
    """What a rank of the recorded run does: rank 2 is killed in epoch 17, where ``folder`` is to have that."""
    import torch

    sys.path.insert(0, str(EXAMPLES))
    import example_graphs
    import full_batch_gcn

    import pyg_dist
    from pyg_dist.checkpoint import Checkpointer

    torch.manual_seed(0)
    graph = example_graphs.digits()
    data, train_idx = pyg_dist.DistributedData(graph), graph.train_mask.nonzero().view(-1)
    model = full_batch_gcn.GCN(data.num_features, 64, 10, 3, 0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in Checkpointer(folder, every=100, model=model, optimizer=optimizer).epochs(1, 31):
        is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if folder.endswith("killed") and is_first and epoch == 17 and pyg_dist.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = full_batch_gcn.train(model, data, train_idx, optimizer)
        if pyg_dist.is_main():
            sys.stdout.write(f"epoch {epoch}{'' if is_first else ', started again'}: {loss.hex()} {loss:.9f}\n")
            sys.stdout.flush()


def resources() -> dict[str, int]:
    """Of this process."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"VmRSS:\s+(\d+)", status)
    (threads,) = re.findall(r"Threads:\s+(\d+)", status)
    return {"kib": int(kib), "threads": int(threads), "files": len(os.listdir("/proc/self/fd"))}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", default="")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--overhead", nargs=2, metavar=("GRAPH", "FOLDER"))
    parser.add_argument("--restarted", nargs=2, metavar=("GRAPH", "FOLDER"))
    parser.add_argument("--recorded", metavar="FOLDER")
    options = parser.parse_args()
    if options.overhead:
        keep_and_not(*options.overhead)
    elif options.restarted:
        restarted(*options.restarted)
    elif options.recorded:
        record(options.recorded)
    else:
        train(options.fault, options.seconds)


if __name__ == "__main__":
    main()
