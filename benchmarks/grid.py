"""The grid layout's meshes: predicted against measured epochs (Plexus, Fig. 5), and what each choice brings.

    python benchmarks/grid.py                      # calibrates, then all meshes of 4 and 8 ranks on two graphs
    python benchmarks/grid.py --ranks 4 --epochs 5 --graphs power_law
    python benchmarks/grid.py --save               # and keeps the constants where the planner finds them

A GCN of three layers, hidden 64, trains full batches; an epoch is forward, loss, backward and Adam's step. All variants
take turns, epoch by epoch: a disturbance hits all of them. The shortest epoch of each counts. Variants: every
mesh in both forms of the sums; on the chosen mesh, four row blocks and bfloat16 messages; and the halo layout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch_geometric.data import Data

RESULTS = Path(__file__).resolve().parent / "results"
HIDDEN = 64


def power_law(num_nodes: int, num_edges: int, seed: int = 0) -> Data:
    """A few hubs, no communities; both directions of each edge."""
    rng = torch.Generator().manual_seed(seed)
    hubs = (torch.rand(num_edges // 2, generator=rng).pow(3) * num_nodes).long()
    others = torch.randint(0, num_nodes, hubs.shape, generator=rng)
    shuffle = torch.randperm(num_nodes, generator=rng)
    pair = torch.stack([shuffle[hubs], shuffle[others]])
    return _with_features(torch.cat([pair, pair.flip(0)], 1), num_nodes, rng)


def lattice(num_nodes: int, num_edges: int, seed: int = 0) -> Data:
    """Nodes on a circle, linked to near ones: all of the matrix lies at its diagonal."""
    rng = torch.Generator().manual_seed(seed)
    source = torch.randint(0, num_nodes, (num_edges // 2,), generator=rng)
    step = torch.randint(1, 40, source.shape, generator=rng)
    pair = torch.stack([source, (source + step) % num_nodes])
    return _with_features(torch.cat([pair, pair.flip(0)], 1), num_nodes, rng)


def _with_features(edge_index: torch.Tensor, num_nodes: int, rng: torch.Generator) -> Data:
    return Data(
        x=torch.randn(num_nodes, 64, generator=rng),
        edge_index=edge_index,
        y=torch.randint(0, 16, (num_nodes,), generator=rng),
        train_mask=torch.rand(num_nodes, generator=rng) < 0.5,
    )


GRAPHS = {"power_law": lambda: power_law(30_000, 900_000), "lattice": lambda: lattice(60_000, 500_000)}


class Variant:
    """One way to train; its data, model and optimizer live side by side with the others'."""

    def __init__(self, graph: Data, sums: str = "", blocks: int = 1, **options: Any) -> None:
        from pyg_dist import DistributedData
        from pyg_dist.conv import DistributedGCNConv

        os.environ["PYG_DIST_GRID_BLOCKS"] = str(blocks)
        if sums:
            os.environ["PYG_DIST_GRID_SUMS"] = sums
        self.data = DistributedData(graph, **options)
        os.environ.pop("PYG_DIST_GRID_SUMS", None)
        torch.manual_seed(0)
        widths = (graph.x.shape[1], HIDDEN, HIDDEN, int(graph.y.max()) + 1)
        self.convs = torch.nn.ModuleList(DistributedGCNConv(a, b) for a, b in pairwise(widths))
        self.optimizer = torch.optim.Adam(self.convs.parameters(), lr=0.01)
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def epoch(self) -> None:
        from pyg_dist.backend.axis import world_axis

        world_axis().every(True)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        x = self.data.x
        for conv in self.convs[:-1]:
            x = conv(x, self.data.edge_index).relu()
        out = self.convs[-1](x, self.data.edge_index)
        loss = F.cross_entropy(out[self.data.train_mask], self.data.y[self.data.train_mask])
        loss.backward()
        self.optimizer.step()
        world_axis().every(True)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def take_turns(variants: dict[str, Variant], epochs: int) -> dict[str, float]:
    """Seconds of the shortest epoch, the first one left out."""
    for _ in range(epochs + 1):
        for variant in variants.values():
            variant.epoch()
    return {name: min(variant.seconds[1:]) for name, variant in variants.items()}


def worker(names: list[str], epochs: int, output: Path, save: bool) -> None:
    """All ranks together."""
    import pyg_dist
    from pyg_dist.backend import calibration
    from pyg_dist.backend.axis import world_axis
    from pyg_dist.backend.mesh import nearest_cube
    from pyg_dist.plan.grid_cost import Model, grid_plans
    from pyg_dist.plan.machine import Machine

    torch.set_num_threads(1)
    pyg_dist.init()
    axis = world_axis()
    fit = calibration.fit_spmm(calibration.spmm_samples()) if axis.rank == 0 else None
    rate = calibration.gemm_rate()
    link = calibration.link(axis)
    numbers = torch.tensor([*(fit.coefficients if fit else (0.0,) * 3), rate, *link], dtype=torch.float64)
    a, b, c, rate, bandwidth, latency = axis.broadcast_(numbers).tolist()
    machine = Machine((a, b, c), rate, bandwidth, bandwidth, latency, axis.size, calibration.num_cores())
    if save and pyg_dist.is_main():
        machine.save()
    report: dict[str, Any] = {"ranks": axis.size, "machine": asdict(machine), "fit": fit and fit._asdict()}
    report["graphs"] = {}
    for name in names:
        graph = GRAPHS[name]()
        model = Model(graph.num_nodes, graph.num_nodes + graph.num_edges, (64, HIDDEN, HIDDEN, 16))
        plans = grid_plans(model, axis.size, machine)
        variants, predicted = {}, {}
        for plan in plans:
            mesh = {side: plan.shape[side] for side in "xyz"}
            key = f"{'x'.join(str(n) for n in mesh.values())} {plan.sums}"
            variants[key] = Variant(graph, plan.sums, layout="grid", mesh=mesh)
            predicted[key] = plan.seconds
        best = plans[0]
        mesh = {side: best.shape[side] for side in "xyz"}
        variants["chosen, 4 blocks"] = Variant(graph, best.sums, 4, layout="grid", mesh=mesh)
        variants["chosen, bfloat16"] = Variant(graph, best.sums, layout="grid", mesh=mesh, comm_dtype=torch.bfloat16)
        variants["halo"] = Variant(graph, layout="halo", partition="metis")
        measured = take_turns(variants, epochs)
        pairs = [(predicted[key], measured[key]) for key in predicted]
        cube = nearest_cube(axis.size)
        cube_key = f"{cube.x}x{cube.y}x{cube.z} reduce_scatter"
        report["graphs"][name] = {
            "variants": {
                key: {
                    "seconds": seconds,
                    "predicted": predicted.get(key),
                    "loss": variants[key].losses[-1],
                    "bytes": variants[key].data.traffic.num_bytes // (epochs + 1),
                }
                for key, seconds in measured.items()
            },
            "rank_correlation": float(spearmanr(*zip(*pairs, strict=True)).statistic),
            "chosen_over_best": measured[next(iter(predicted))] / min(measured[key] for key in predicted),
            "cube_over_best": measured[cube_key] / min(measured[key] for key in predicted),
        }
    if pyg_dist.is_main():
        output.write_text(json.dumps(report))


def show(report: dict[str, Any]) -> None:
    fit = report["fit"]
    quality = f"held-out R2 {fit['r2']:.2f} (Plexus' terms {fit['r2_of_paper']:.2f})"
    print(f"\n{report['ranks']} ranks; sparse products: {quality}; load average {os.getloadavg()[0]:.1f}")
    for name, result in report["graphs"].items():
        over = f"the choice {result['chosen_over_best']:.2f} x and the nearest cube {result['cube_over_best']:.2f} x"
        print(f"{name}: rank correlation {result['rank_correlation']:.2f}; {over} the best mesh's epoch")
        for key, v in sorted(result["variants"].items(), key=lambda item: item[1]["seconds"]):
            predicted = "" if v["predicted"] is None else f"{v['predicted'] * 1e3:10.1f} ms predicted"
            print(f"  {key:<24} {v['seconds'] * 1e3:10.1f} ms {v['bytes'] / 1e6:8.2f} MB a rank {predicted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="keep the machine's constants for the planner")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.graphs, args.epochs, args.worker, args.save)
        return
    reports = []
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "report.json"
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            rest = ["--worker", str(output), "--epochs", str(args.epochs), "--graphs", *args.graphs]
            command = [*launcher, __file__, *rest, *(["--save"] if args.save else [])]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            reports.append(json.loads(output.read_text()))
        show(reports[-1])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "grid.json").write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
