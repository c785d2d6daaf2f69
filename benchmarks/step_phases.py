"""A training step on a mini-batch by phase, as ScaleGNN's four optimisations come on one after another (its Fig. 5).

    torchrun --standalone --nproc-per-node 4 benchmarks/step_phases.py           # x=2 z=2, some minutes
    PYG_DIST_GRID_SUMS=all_reduce torchrun ... benchmarks/step_phases.py         # ScaleGNN's sums, split columns

ScaleGNN's model (III-A: projection, 3 layers of GCN, RMSNorm, ReLU, dropout and residual, head; hidden 256) on batches
of 8,192 nodes of graph A (``power_law.py``). Each line adds to the one before it: *prefetch*, a thread makes the next
batch; *bf16*, messages of the grid's sums in bfloat16; *fusion*, ``NormReLUDropout`` in place of three functions and an
addition; *overlap*, residuals go early, and gradients by tiles are summed while those by weights are multiplied. All
lines take turns of a few steps in one run. Times are in ms a step, means over the ranks: medians over the turns, and
those of the fastest turn, which other programs have disturbed least. *Processor* is the time that a rank computes, its
threads included: waiting is not in it, and others who use the processors make it little longer. *The bucket alone* is
the sum of all gradients of parameters, when all ranks come to it together: what is sent of it during the backward could
save less than this.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import machine
import power_law
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.session.settings import GRID_EARLY_RESIDUAL, GRID_EARLY_SUMS
from pyg_dist.conv import DistributedGCNConv
from pyg_dist.loader import UniformVertexLoader
from pyg_dist.nn import NormReLUDropout

RESULTS = Path(__file__).resolve().parent / "results" / "step_phases.json"
NUM_LAYERS = 3


class Line(NamedTuple):
    """What is on."""

    name: str
    prefetch: bool = True
    bf16: bool = True
    fusion: bool = True
    overlap: bool = True


LINES = (
    Line("none", False, False, False, False),
    Line("prefetch", True, False, False, False),
    Line("bf16", True, True, False, False),
    Line("fusion", True, True, True, False),
    Line("overlap"),
)


class Model(nn.Module):
    """ScaleGNN, III-A."""

    def __init__(self, in_channels: int, hidden: int, out_channels: int, is_fused: bool) -> None:
        super().__init__()
        self.projection, self.head = nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)
        self.convs = nn.ModuleList(DistributedGCNConv(hidden, hidden, bias=False) for _ in range(NUM_LAYERS))
        make = NormReLUDropout if is_fused else nn.RMSNorm
        self.norms = nn.ModuleList(make(hidden, "rms") if is_fused else make(hidden) for _ in range(NUM_LAYERS))
        self.is_fused = is_fused

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Scores."""
        x = self.projection(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            out = conv(x, edge_index)
            x = norm(out, x) if self.is_fused else F.dropout(norm(out).relu(), 0.5, self.training) + x
        return self.head(x)  # type: ignore[no-any-return]


class Trainer:
    """Trains as a line says, a few steps at a time."""

    def __init__(self, line: Line, data: DistributedData, batch_size: int, hidden: int) -> None:
        torch.manual_seed(0)
        self.line = line
        self.world = pyg_dist.backend.comm.group.world_group()
        self.model = Model(data.num_features, hidden, int(data.y.max()) + 1, line.fusion)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.001)
        loader = UniformVertexLoader(data, batch_size, input_nodes=data.train_mask, prefetch=line.prefetch)
        self.batches = (batch for _ in iter(int, 1) for batch in loader)

    def step(self) -> None:
        """One step."""
        batch = next(self.batches)
        self.optimizer.zero_grad()
        out = self.model(batch.x, batch.edge_index)
        F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask]).backward()
        self.optimizer.step()

    def turn(self, num_steps: int) -> dict[str, float]:
        """Milliseconds a step by phase, the mean over the ranks; the bytes that a rank sends."""
        for setting in (GRID_EARLY_RESIDUAL, GRID_EARLY_SUMS):
            os.environ[setting.name] = str(int(self.line.overlap))
        self.step()
        self.world.meet()
        begin, cpu_begin = time.perf_counter(), time.process_time()
        for _ in range(num_steps):
            self.step()
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
        cpu_seconds = float(self.world.all_reduce_(torch.tensor([cpu_seconds]))) / self.world.size
        with pyg_dist.profile() as profile:
            for _ in range(num_steps):
                self.step()
        tables = [profile.table(rank) for rank in range(len(profile.seconds))]
        phases = {p: sum(sum(row[p] for row in table) for table in tables) for p in tables[0][0]}
        found = {p: 1e3 * total / len(tables) / num_steps for p, total in phases.items() if total}
        sent = sum(profile.sent_bytes) / len(tables) / num_steps / 2**20
        means = {"step": 1e3 * seconds / num_steps, "processor": 1e3 * cpu_seconds / num_steps}
        return {**means, **found, "MiB sent": sent}


def bucket(model: nn.Module, rounds: int = 40) -> dict[str, float]:
    """Milliseconds of the sum of all gradients."""
    world, taken = pyg_dist.backend.comm.group.world_group(), []
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for _ in range(rounds):
        world.meet()
        begin = time.perf_counter()
        world.all_reduce_(flat.clone())
        taken.append(1e3 * (time.perf_counter() - begin))
    fastest, median = min(taken), statistics.median(taken)
    return {"MiB": round(flat.nbytes / 2**20, 2), "median": round(median, 2), "fastest": round(fastest, 2)}


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="A")
    parser.add_argument("--mesh", default="x=2,z=2")
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    mesh = {axis: int(size) for axis, size in (item.split("=") for item in args.mesh.split(","))}
    graph = power_law.load(args.graph)
    data = {
        bf16: DistributedData(graph, layout="grid", mesh=mesh, comm_dtype=torch.bfloat16 if bf16 else None)
        for bf16 in (False, True)
    }
    del graph
    trainers = [Trainer(line, data[line.bf16], args.batch_size, args.hidden) for line in LINES]
    turns: dict[str, list[dict[str, float]]] = {line.name: [] for line in LINES}
    for number in range(args.rounds + 1):
        for k in range(len(trainers)):
            trainer = trainers[(number + k) % len(trainers)]
            found = trainer.turn(args.steps)
            if number:
                turns[trainer.line.name].append(found)
    alone = bucket(trainers[-1].model)
    if not pyg_dist.is_main():
        return
    found = {
        name: {
            "median": {key: round(statistics.median(turn.get(key, 0.0) for turn in taken), 2) for key in taken[0]},
            "fastest": {key: round(value, 2) for key, value in min(taken, key=lambda turn: turn["step"]).items()},
        }
        for name, taken in turns.items()
    }
    for name, values in found.items():
        print(f"{name:9}", values)
    stored: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {}
    sums = data[False].graph.grid.sums
    name = f"{args.graph}, {args.mesh}, {sums}, B = {args.batch_size}, hidden {args.hidden}"
    stored[name] = {"machine": machine.describe(), "ms of a step": found, "ms of the bucket alone": alone}
    args.results.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
