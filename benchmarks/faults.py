"""How a run ends when something goes wrong: each fault several times, who says what, the status, and how long it takes.

    python benchmarks/faults.py                    # every fault ten times, started by hand
    python benchmarks/faults.py --launcher torchrun --times 3
    python benchmarks/faults.py --kills 200 --load 4   # kills in a row, beside so many busy processes
    python benchmarks/faults.py --restart cora.npz     # from a kill to the next epoch, by torchrun --max-restarts
    python benchmarks/faults.py --soak 1200            # memory, threads and files of two ranks that train
    python benchmarks/faults.py --overhead cora.npz    # epochs with states in memory and without, in turns

Three ranks train a small GCN; in step 20 something happens to rank 1. *Seconds* are from then to the end of the last
process. A run is right if every status is as expected, each line of output that a rank had printed before is there,
and the expected words are in what the others say.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import machine

RANKS, STEPS, FAULTY_STEP = 3, 40, 20
RESULT = Path(__file__).resolve().parent / "results" / "faults.json"
EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TESTS = Path(__file__).resolve().parent.parent / "tests"


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
    "sys.exit(0), too early": Fault(lambda: sys.exit(0), "rank 1 has ended after"),
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


def keep_and_not(graph: str) -> None:
    """What a rank does: turns of epochs after which the state is kept in memory, and of others."""
    import torch

    sys.path.insert(0, str(EXAMPLES))
    import example_graphs
    import full_batch_gcn

    import pyg_dist
    from pyg_dist.checkpoint import Checkpointer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole = power_law_graph() if graph == "A" else example_graphs.read_npz(graph)
    data, train_idx = pyg_dist.DistributedData(whole), whole.train_mask.nonzero().view(-1)
    model = full_batch_gcn.GCN(data.num_features, 64 if graph != "A" else 256, int(whole.y.max()) + 1, 3, 0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    turns, epochs = (40, 25) if graph != "A" else (6, 4)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        loops = {
            memory: Checkpointer(
                f"{folder}/{memory}-{os.environ['MASTER_PORT']}", every=10**6, memory=memory, model=model,
                optimizer=optimizer,
            ).epochs(10**6)
            for memory in (0, 1)
        }  # fmt: skip
        seconds: dict[int, list[float]] = {0: [], 1: []}
        for turn in range(turns):
            for memory in (0, 1) if turn % 2 else (1, 0):
                for epoch in range(epochs + 1):
                    start = time.perf_counter()
                    next(loops[memory])
                    full_batch_gcn.train(model, data, train_idx, optimizer)
                    if turn and epoch:  # the first one of a turn is cold
                        seconds[memory].append(time.perf_counter() - start)
    if pyg_dist.is_main():
        sys.stdout.write(f"overhead {json.dumps({'without': seconds[0], 'with': seconds[1]})}\n")


def power_law_graph() -> Any:
    """Graph A of the benchmarks, with a mask of nodes that train."""
    import power_law
    import torch

    graph = power_law.load("A")
    graph.train_mask = torch.arange(graph.num_nodes) % 2 == 0
    return graph


def resources() -> dict[str, int]:
    """Of this process."""
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"VmRSS:\s+(\d+)", status)
    (threads,) = re.findall(r"Threads:\s+(\d+)", status)
    return {"kib": int(kib), "threads": int(threads), "files": len(os.listdir("/proc/self/fd"))}


class Ended(NamedTuple):
    """A run that has ended."""

    codes: list[int]
    said: str
    seconds: float


def launch(launcher: str, ranks: int, *args: str) -> Ended:
    """Start this file on some ranks, and wait for the last. Each process is forked from one that has the imports."""
    sys.path.insert(0, str(TESTS))
    import forked_python

    python = forked_python.executable()
    command = [python, str(Path(__file__).resolve()), "--rank", *args]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environs = [environ]
    if launcher == "torchrun":
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*torchrun, *command[1:]]
    elif launcher == "mpirun":
        command = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks), *command]
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        environs = [{**place, "RANK": str(rank)} for rank in range(ranks)]
    with tempfile.TemporaryFile("w+") as said:
        started = [subprocess.Popen(command, env=e, stdout=said, stderr=subprocess.STDOUT) for e in environs]
        codes = [process.wait(300) for process in started]
        end = time.time()
        said.seek(0)
        text = said.read()
    begin = re.search(r"fault at (\S+)", text)
    return Ended(codes, text, end - float(begin[1]) if begin else 0.0)


def wrong(fault: str, launcher: str, ended: Ended) -> str:
    """What is not as it should be; "" if all is."""
    others = ended.codes if launcher != "by hand" else [code for rank, code in enumerate(ended.codes) if rank != 1]
    if not all(others):
        return f"status {ended.codes}"
    if -6 in ended.codes:
        return "an abort"
    if not re.search(FAULTS[fault].says, ended.said):
        return "not said"
    missing = [rank for rank in range(RANKS) if f"rank {rank} has come here" not in ended.said]
    return f"lost lines of {missing}" if missing and launcher == "by hand" else ""


def measure(launcher: str, times: int) -> dict[str, Any]:
    """Each fault so many times."""
    rows = {}
    for name, fault in FAULTS.items():
        ends = [launch(launcher, RANKS, "--fault", name) for _ in range(times)]
        seconds, faulty = [end.seconds for end in ends], [wrong(name, launcher, end) for end in ends]
        rows[name] = {
            "median_s": statistics.median(seconds), "worst_s": max(seconds), "bound_s": fault.bound,
            "wrong": [what for what in faulty if what],
        }  # fmt: skip
        sys.stdout.write(
            f"{name:26} median {rows[name]['median_s']:5.2f} s, worst {max(seconds):5.2f} s, bound {fault.bound:4.1f} s"
            f"{'; ' + ', '.join(filter(None, faulty)) if any(faulty) else ''}\n"
        )
        sys.stdout.flush()
    return rows


def busy() -> None:
    """Load."""
    while True:
        sum(range(10_000))


def kills(count: int, load: int) -> dict[str, Any]:
    """Kills in a row, and runs that nothing happens to in between, beside busy processes."""
    with ExitStack() as stack:
        for _ in range(load):
            process = multiprocessing.Process(target=busy, daemon=True)
            process.start()
            stack.callback(process.kill)
        found: list[str] = []
        seconds = []
        for number in range(count):
            ended = launch("by hand", RANKS, "--fault", "kill -9")
            found += filter(None, [wrong("kill -9", "by hand", ended)])
            seconds.append(ended.seconds)
            if number % 10 == 0 and any(launch("by hand", RANKS).codes):
                found.append("a false alarm")
            if number % 10 == 9 or number + 1 == count:
                row: dict[str, Any] = {"kills": number + 1, "load": load, "wrong": found}
                row |= {"median_s": statistics.median(seconds), "worst_s": max(seconds)}
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
    return row


def soak(seconds: float) -> list[dict[str, int]]:
    """Resources of rank 0 of two that train for so long, at ten moments."""
    ended = launch("by hand", 2, "--seconds", str(seconds))
    found = [json.loads(text) for text in re.findall(r"soak (.*)", ended.said)]
    rows = found[:: max(1, len(found) // 10)]
    sys.stdout.write("\n".join(map(str, [ended.codes, *rows])) + "\n")
    return rows


def overhead(graph: str) -> dict[str, float]:
    """What an epoch takes with states in memory after each, and without."""
    ended = launch("by hand", 2, "--overhead", graph)
    if any(ended.codes):
        raise SystemExit(ended.said)
    seconds = json.loads(re.findall(r"overhead (.*)", ended.said)[0])
    row = {f"{name}_ms": 1e3 * statistics.median(of) for name, of in seconds.items()}
    row |= {"epochs": len(seconds["with"]), "ratio": row["with_ms"] / row["without_ms"]}
    sys.stdout.write(f"{row}\n")
    return row


def restart(graph: Path) -> dict[str, float]:
    """Parts of the time from ``kill -9`` of a rank of two to the next epoch, by torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        script = EXAMPLES / "full_batch_gcn.py"
        killer = Path(folder) / "killed.py"
        killer.write_text(KILLED.format(script=script, examples=script.parent, marks=folder))
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
            str(killer), "--data", str(graph), "--epochs", "60", "--resume", f"{folder}/run",
        ]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True)
        marks = {path.name: float(path.read_text()) for path in Path(folder).glob("at *")}
    order = ["at kill", "at start", "at import", "at data", "at epoch"]
    row = {name[3:]: marks[name] - marks["at kill"] for name in order}
    sys.stdout.write(f"seconds after the kill: {row}\n")
    return row


KILLED = """
import os, runpy, signal, sys, time
from pathlib import Path
again = os.environ["TORCHELASTIC_RESTART_COUNT"] != "0"
def mark(name):
    file = Path("{marks}") / f"at {{name}}"
    if again == (name != "kill") and os.environ["RANK"] == "0" and not file.exists():
        file.write_text(str(time.time()))
mark("start")
sys.path.insert(0, "{examples}")
import pyg_dist
from pyg_dist.checkpoint import Checkpointer
mark("import")
inits, epochs = Checkpointer.__init__, Checkpointer.epochs
def __init__(self, *args, **kwargs):
    mark("data")
    inits(self, *args, **kwargs)
def marked(self, *bounds):
    for epoch in epochs(self, *bounds):
        if not again and epoch == 30:
            mark("kill")
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
        yield epoch
        mark("epoch")
Checkpointer.__init__, Checkpointer.epochs = __init__, marked
sys.argv[0] = "{script}"
runpy.run_path("{script}", run_name="__main__")
"""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=["by hand", "torchrun", "mpirun"], default="by hand")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the kills")
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--restart", type=Path, metavar="cora.npz")
    parser.add_argument("--overhead", metavar="GRAPH", help="an archive, or A: 170,000 nodes, 2.3 million edges")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--fault", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank and options.overhead:
        keep_and_not(options.overhead)
        return
    if options.rank:
        train(options.fault, options.seconds)
        return
    found: dict[str, Any]
    if options.kills:
        found = {"kills": kills(options.kills, options.load)}
    elif options.soak:
        found = {"soak": soak(options.soak)}
    elif options.restart:
        found = {"restart": restart(options.restart.resolve())}
    elif options.overhead:
        found = {f"overhead, {Path(options.overhead).stem}": overhead(options.overhead)}
    else:
        found = {f"faults, {options.launcher}": measure(options.launcher, options.times)}
    known = json.loads(options.out.read_text()) if options.out.exists() else {"machine": machine.describe()}
    options.out.write_text(json.dumps(known | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
