"""What it costs that ranks which diverge are told: an epoch of cora's two-layer GCN with the check and without.

    torchrun --standalone --nproc-per-node 2 benchmarks/faults.py --data cora.npz

The check is the number, kind, size and user's line of every collective call, mixed into the tag of its messages, and
the note of the last calls (``pyg_dist/backend/comm/calls.py``). Without it a call is only counted. Epochs with and
without take turns in the same processes, the first of each pair in turn, and an epoch is as long as its slowest rank.
The median of the pairs' ratios is the result; other programs on the machine disturb both epochs of a pair alike.
``calls`` is how many a rank makes in an epoch, ``us per call`` what the check takes of the processor in each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

import pyg_dist
from pyg_dist.backend.comm import calls
from pyg_dist.backend.comm.group import world_group
from pyg_dist.conv import DistributedGCNConv as GCNConv

RESULT = Path(__file__).resolve().parent / "results" / "faults.json"


def main() -> None:
    """Measure both layouts, print a table and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="cora.npz")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--layouts", nargs="+", default=["halo", "grid"])
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pyg_dist.init()
    found = {layout: measure(read(options.data), layout, options.pairs) for layout in options.layouts}
    if not pyg_dist.is_main():
        return
    report = {"machine": machine.describe(), "ranks": pyg_dist.world_size(), "pairs": options.pairs, "layouts": found}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write("layout  with ms  without ms  median ratio  calls  us per call\n")
    for layout, row in found.items():
        sys.stdout.write(
            f"{layout:6}  {row['with_ms']:7.2f}  {row['without_ms']:10.2f}  {row['median_ratio']:12.4f}  "
            f"{row['calls']:5}  {row['us_per_call']:11.2f}\n"
        )


def read(path: Path) -> Data:
    """The graph of a file of arrays, with each edge in both directions."""
    with np.load(path, allow_pickle=False) as file:
        edges = torch.from_numpy(file["edge_index"].astype(np.int64))
        num_entries = torch.from_numpy(np.diff(file["x_indptr"].astype(np.int64)))
        row = torch.repeat_interleave(torch.arange(num_entries.numel()), num_entries)
        x = torch.zeros(*file["x_shape"].tolist())
        x[row, torch.from_numpy(file["x_indices"].astype(np.int64))] = 1.0
        y, mask = torch.from_numpy(file["y"].astype(np.int64)), torch.from_numpy(file["train_mask"])
    return Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=y, train_mask=mask)


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


def measure(graph: Data, layout: str, num_pairs: int) -> dict[str, float]:
    """Epochs with the check and without, in turns (collective)."""
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
    pairs = []
    for number in range(num_pairs):
        seconds = {}
        for is_on in (True, False) if number % 2 else (False, True):
            with check(is_on):
                seconds[is_on] = timed(epoch)
        pairs.append((seconds[True], seconds[False]))
    return {
        "with_ms": 1e3 * statistics.median(a for a, _ in pairs),
        "without_ms": 1e3 * statistics.median(b for _, b in pairs),
        "median_ratio": statistics.median(a / b for a, b in pairs),
        "calls": per_epoch,
        "us_per_call": us_per_call(),
    }


def timed(epoch: Callable[[], None]) -> float:
    """Seconds of the slowest rank (collective)."""
    world_group().meet()
    start = time.perf_counter()
    epoch()
    taken = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    return float(world_group().all_reduce_(taken, "max"))


def num_calls() -> int:
    """Calls so far, in all groups."""
    return sum(sequence.number for sequence in calls.here.sequences.values())


@contextmanager
def check(is_on: bool) -> Iterator[None]:
    """Switch the check off; it has no option, since it costs next to nothing."""
    original = calls.Calls.next
    if not is_on:
        calls.Calls.next = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        calls.Calls.next = original  # type: ignore[method-assign]


def counted(self: calls.Calls, kind: str, dtype: torch.dtype | None = None, size: int = 0) -> int:
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
