"""What it costs that ranks which diverge are told: an epoch of cora's two-layer GCN with each check and without it.

    torchrun --standalone --nproc-per-node 2 benchmarks/checks.py --data cora.npz

The check of *calls* is the number, kind, size and user's line of every collective call, mixed into the tag of its
messages, and the note of the last calls (``backend/comm/checks/calls.py``). Without it a call is only counted. The
check of *replicas* is the digests of plain tensors that meet distributed rows, parameters among them, and the number
that small sums carry for it (``backend/comm/checks/replicas.py``). Four epochs with a check and four without it take
turns in the same processes, the first of each pair in turn, after one that is not timed and warms what the switch has
made cold. They are as long as their slowest rank. The median of the pairs' ratios is the result; other programs on the
machine disturb both sides of a pair alike. ``cpu us`` is what a rank's thread takes of the processor for the check in
an epoch, ``calls`` how many calls it makes in it. Parameters are compared in one epoch of eight: *parameters* is what
such an epoch takes beside one that compares other tensors alone, and ``replicas`` at the end is the sum of both, with
an eighth of the one, by the clock and by the processor.

Pairs of epochs of milliseconds differ by several percent either way. So *inside* measures the checks directly: the time
that main threads spend in their functions, as a share of the epochs' time in which they run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import machine
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

import pyg_dist
from pyg_dist.backend.comm import group
from pyg_dist.backend.comm.checks import calls, replicas
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.comm.wires import gloo, point_to_point
from pyg_dist.backend.session.state import current
from pyg_dist.conv import DistributedGCNConv as GCNConv
from pyg_dist.graph import training_state

EPOCHS = 4
RESULT = Path(__file__).resolve().parent / "results" / "checks.json"


def main() -> None:
    """Measure both layouts, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="cora.npz")
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--layouts", nargs="+", default=["halo", "grid"])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pyg_dist.init()
    sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
    from example_graphs import read_npz

    found = {layout: measure(read_npz(str(options.data)), layout, options.pairs) for layout in options.layouts}
    if not pyg_dist.is_main():
        return
    report = {"machine": machine.describe(), "ranks": pyg_dist.world_size(), "pairs": options.pairs, "layouts": found}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write("layout  check       with ms  without ms  median ratio  cpu us  cpu ratio\n")
    for layout, row in found.items():
        for name, times in row["checks"].items():
            sys.stdout.write(
                f"{layout:6}  {name:10}  {times['with_ms']:7.2f}  {times['without_ms']:10.2f}  "
                f"{times['median_ratio']:12.4f}  {times['cpu_us']:6.1f}  {times['cpu_ratio']:9.4f}\n"
            )
        sys.stdout.write(
            f"{layout:6}  {row['calls']} calls, {row['us_per_call']:.2f} us each; "
            f"replicas {row['replicas']['median_ratio']:.4f}, cpu {row['replicas']['cpu_ratio']:.4f}; "
            f"inside: calls {row['inside']['calls']:.2%}, replicas {row['inside']['replicas']:.2%}\n"
        )


class Net(torch.nn.Module):
    """The two-layer GCN of Kipf and Welling."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = GCNConv(in_channels, 16, cached=True)
        self.second = GCNConv(16, out_channels, cached=True)

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        x = F.dropout(x, training=self.training)
        x = F.dropout(self.first(x, edges).relu(), training=self.training)
        return self.second(x, edges)


def measure(graph: Data, layout: str, num_pairs: int) -> dict[str, Any]:
    """Epochs with each check and without it, in turns (collective)."""
    data = pyg_dist.DistributedData(graph, layout=layout)
    torch.manual_seed(0)
    model = Net(graph.num_features, int(graph.y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> None:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()

    for _ in range(5):
        epoch()
    before = num_calls()
    epoch()
    per_epoch = num_calls() - before
    pairs: dict[str, list[tuple[Seconds, Seconds]]] = {name: [] for name in CHECKS}
    for number in range(num_pairs):
        for name, (with_it, without_it) in CHECKS.items():
            taken = {}
            for is_on in (True, False) if number % 2 else (False, True):
                with with_it() if is_on else without_it():
                    taken[is_on] = timed(epoch)
            pairs[name].append((taken[True], taken[False]))
    checks = {name: compared(of_check) for name, of_check in pairs.items()}
    return {
        "checks": checks,
        "replicas": {
            kind: checks["tensors"][kind] + (checks["parameters"][kind] - 1) / replicas._PARAMETERS_EVERY
            for kind in ("median_ratio", "cpu_ratio")
        },
        "inside": inside(epoch, num_pairs * EPOCHS),
        "calls": per_epoch,
        "us_per_call": us_per_call(),
    }


Seconds = tuple[float, float]
"""Of the slowest rank by the clock, and of this rank's main thread on its processor."""


def timed(epoch: Callable[[], None]) -> Seconds:
    """An epoch, the mean of a turn (collective)."""
    epoch()
    world_group().barrier()
    start, start_cpu = time.perf_counter(), time.thread_time()
    for _ in range(EPOCHS):
        epoch()
    cpu = (time.thread_time() - start_cpu) / EPOCHS
    taken = torch.tensor([(time.perf_counter() - start) / EPOCHS], dtype=torch.float64)
    return float(world_group().all_reduce_(taken, "max")), cpu


def inside(epoch: Callable[[], None], num_epochs: int) -> dict[str, float]:
    """Shares of the time of so many epochs that are spent in the functions of each check (collective)."""
    spent = dict.fromkeys(FUNCTIONS, 0)
    with ExitStack() as patches:
        for check, functions in FUNCTIONS.items():
            for owner, name in functions:
                patches.enter_context(mock.patch.object(owner, name, clocked(getattr(owner, name), spent, check)))
        epoch()
        spent.update(dict.fromkeys(FUNCTIONS, 0))
        start = time.perf_counter_ns()
        for _ in range(num_epochs):
            epoch()
        taken = time.perf_counter_ns() - start
    return {check: nanoseconds / taken for check, nanoseconds in spent.items()}


def clocked(function: Callable[..., Any], spent: dict[str, int], check: str) -> Callable[..., Any]:
    """A function that adds its time to that of its check."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start, before = time.perf_counter_ns(), spent[check]
        try:
            return function(*args, **kwargs)
        finally:
            spent[check] = before + time.perf_counter_ns() - start  # what it has called is in it

    return call


def compared(pairs: list[tuple[Seconds, Seconds]]) -> dict[str, float]:
    """Medians over pairs of epochs with a check and without it."""
    return {
        "with_ms": 1e3 * statistics.median(a for (a, _), _ in pairs),
        "without_ms": 1e3 * statistics.median(b for _, (b, _) in pairs),
        "median_ratio": statistics.median(a / b for (a, _), (b, _) in pairs),
        "cpu_us": 1e6 * statistics.median(a - b for (_, a), (_, b) in pairs),
        "cpu_ratio": statistics.median(a / b for (_, a), (_, b) in pairs),
    }


def num_calls() -> int:
    """Calls so far, in all groups."""
    return sum(sequence.number for sequence in current().of(calls.Standing).sequences.values())


@contextmanager
def without_calls() -> Iterator[None]:
    """Switch the check of calls off; it has no option, since it costs next to nothing."""
    with mock.patch.object(calls.Calls, "next", counted):
        yield


@contextmanager
def without_replicas() -> Iterator[None]:
    """Switch the check of replicas off; it has no option, either."""
    with mock.patch.object(replicas.Noted, "add", unnoted), mock.patch.object(group, "_SMALL", -1):
        yield


def unnoted(*_: Any) -> None:
    """``Noted.add`` that does nothing."""


@contextmanager
def parameters(every: int) -> Iterator[None]:
    """Compare parameters, too, before one in so many sums."""
    with mock.patch.object(replicas, "_PARAMETERS_EVERY", every):
        current().add(replicas.Noted()).is_on = True
        replicas.noted().agree()
        yield


FUNCTIONS: dict[str, list[tuple[Any, str]]] = {
    "calls": [(calls.Calls, "next"), (gloo, "message_tag")],
    "replicas": [
        *((replicas.Noted, name) for name in ("tensor", "numbers", "loss", "digest", "agree")),
        (training_state, "note_model"),
        (training_state, "note_step"),
        (point_to_point.PointToPoint, "_packets_like"),
    ],
}
NEVER = 2**63
CHECKS = {
    "calls": (nullcontext, without_calls),
    "tensors": (partial(parameters, NEVER), without_replicas),
    "parameters": (partial(parameters, 1), partial(parameters, NEVER)),
}


def counted(self: calls.Calls, kind: str, dtype: torch.dtype | None = None, size: int = 0, has_tag: bool = True) -> int:
    """``Calls.next`` without what tells calls apart."""
    self.number += 1
    return self.number


_FRAMES = """
def down(n):
    if n:
        return down(n - 1)
    for _ in range(repeats):
        sequence.next("sum")
"""


def us_per_call(depth: int = 25, repeats: int = 5000) -> float:
    """Microseconds of one call's check under so many frames of the package, as in a backward pass."""
    sequence = calls.Calls((0, 1))
    namespace = {"__name__": "pyg_dist.frames", "sequence": sequence, "repeats": repeats}
    exec(compile(_FRAMES, "frames of pyg_dist", "exec"), namespace)
    start = time.process_time()
    namespace["down"](depth)  # type: ignore[operator]
    return 1e6 * (time.process_time() - start) / repeats


if __name__ == "__main__":
    main()
