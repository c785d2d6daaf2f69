"""The grid layout's meshes: predicted against measured epochs (Plexus, Fig. 5), and what each choice brings.

    python -m pyg_dist bench                       # first: this machine's constants, which the predictions rest on
    python benchmarks/grid.py                      # all meshes of 4 and 8 ranks on two graphs, some minutes each
    python benchmarks/grid.py --ranks 4 --epochs 5 --graphs power_law

A GCN of three layers, hidden 64, trains full batches; an epoch is forward, loss, backward and Adam's step. All
variants take turns, epoch by epoch: a disturbance hits all of them. The first epoch, which makes and remembers the sums
of layer 1, does not count; of the others the median does, and the shortest stands beside it. Variants: every mesh in
both forms of the sums; on the chosen mesh, four row blocks, bfloat16 messages, and GraphSAGE with and without waiting
for the neighbours' sum before the root's product; and the halo layout. Results are added to
``benchmarks/results/grid.json``, by ranks and graph.
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
from statistics import median
from types import SimpleNamespace
from typing import Any

import machine
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

    def __init__(self, graph: Data, sums: str = "", blocks: int = 1, conv: str = "gcn", **options: Any) -> None:
        from pyg_dist import DistributedData
        from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv

        os.environ["PYG_DIST_GRID_BLOCKS"] = str(blocks)
        if sums:
            os.environ["PYG_DIST_GRID_SUMS"] = sums
        self.data = DistributedData(graph, **options)
        os.environ.pop("PYG_DIST_GRID_SUMS", None)
        torch.manual_seed(0)
        kind = DistributedGCNConv if conv == "gcn" else DistributedSAGEConv
        widths = (graph.x.shape[1], HIDDEN, HIDDEN, int(graph.y.max()) + 1)
        self.convs = torch.nn.ModuleList(kind(a, b) for a, b in pairwise(widths))
        self.optimizer = torch.optim.Adam(self.convs.parameters(), lr=0.01)
        self.seconds: list[float] = []
        self.num_bytes: list[int] = []
        self.losses: list[float] = []

    def epoch(self) -> None:
        from pyg_dist.backend.comm.group import world_group

        world_group().all_true(True)
        start, sent = time.perf_counter(), self.data.traffic.num_bytes
        self.optimizer.zero_grad()
        x = self.data.x
        for conv in self.convs[:-1]:
            x = conv(x, self.data.edge_index).relu()
        out = self.convs[-1](x, self.data.edge_index)
        loss = F.cross_entropy(out[self.data.train_mask], self.data.y[self.data.train_mask])
        loss.backward()
        self.optimizer.step()
        world_group().all_true(True)
        self.seconds.append(time.perf_counter() - start)
        self.num_bytes.append(self.data.traffic.num_bytes - sent)
        self.losses.append(loss.item())

    def wait(self) -> Variant:
        """Let every aggregation end before anything else starts."""
        from pyg_dist.backend.comm.transport import Pending

        start = self.data.graph.start

        def waiting(*args: Any) -> Any:
            started = start(*args)
            if not isinstance(started, Pending):
                return started
            result = started.wait()
            return SimpleNamespace(wait=lambda: result)

        self.data.graph.start = waiting
        return self


def take_turns(variants: dict[str, Variant], epochs: int) -> None:
    """So many epochs of each, and a first one."""
    for _ in range(epochs + 1):
        for variant in variants.values():
            variant.epoch()


def worker(name: str, epochs: int, output: Path) -> None:
    """All ranks together."""
    import pyg_dist
    from pyg_dist.backend.comm.group import world_group
    from pyg_dist.grid.plan.cost import grid_plans
    from pyg_dist.pricing.machine import Machine
    from pyg_dist.pricing.model import Model

    torch.set_num_threads(1)
    pyg_dist.init()
    ranks = world_group().size
    constants = Machine.load().with_ranks_per_node(ranks)
    graph = GRAPHS[name]()
    model = Model.of_layers(graph.num_nodes, graph.num_edges, 64, 16, (3, HIDDEN))
    variants: dict[str, Variant] = {}
    predicted: dict[str, float] = {}
    for plan in grid_plans(model, ranks, constants):
        mesh = {side: plan.shape[side] for side in "xyz"}
        key = _key(plan.shape, plan.sums)
        variants[key] = Variant(graph, plan.sums, layout="grid", mesh=mesh)
        predicted[key] = plan.seconds
    best = grid_plans(model, ranks, constants)[0]
    chosen: dict[str, Any] = {"sums": best.sums, "layout": "grid", "mesh": {side: best.shape[side] for side in "xyz"}}
    variants["chosen, 4 blocks"] = Variant(graph, blocks=4, **chosen)
    variants["chosen, bfloat16"] = Variant(graph, comm_dtype=torch.bfloat16, **chosen)
    variants["chosen, SAGE"] = Variant(graph, conv="sage", **chosen)
    variants["chosen, SAGE, waiting"] = Variant(graph, conv="sage", **chosen).wait()
    variants["halo"] = Variant(graph, layout="halo", partition="metis")
    predicted["halo"] = variants["halo"].data.plan.price(model, constants).seconds
    take_turns(variants, epochs)
    report = {
        "ranks": ranks,
        "graph": name,
        "taken_on": machine.describe() if pyg_dist.is_main() else {},
        "nodes_and_edges": [graph.num_nodes, graph.num_edges],
        "epochs": epochs,
        "variants": {
            key: {
                "median": round(median(variant.seconds[1:]), 5),
                "shortest": round(min(variant.seconds[1:]), 5),
                "first": round(variant.seconds[0], 5),
                "predicted": predicted.get(key),
                "loss": variant.losses[-1],
                "bytes": variant.num_bytes[-1],
            }
            for key, variant in variants.items()
        },
    }
    if pyg_dist.is_main():
        output.write_text(json.dumps(report))


def price(report: dict[str, Any]) -> dict[str, Any]:
    """The report with this machine's constants, and how well they tell the measured order."""
    from pyg_dist.grid.plan.cost import grid_plans
    from pyg_dist.grid.plan.mesh_shape import nearest_cube
    from pyg_dist.pricing.machine import Machine
    from pyg_dist.pricing.model import Model

    ranks, (num_nodes, num_edges), variants = report["ranks"], report["nodes_and_edges"], report["variants"]
    constants = Machine.load().with_ranks_per_node(ranks)
    model = Model.of_layers(num_nodes, num_edges, 64, 16, (3, HIDDEN))
    keys = [_key(plan.shape, plan.sums) for plan in grid_plans(model, ranks, constants)]
    for plan in grid_plans(model, ranks, constants):
        variants[_key(plan.shape, plan.sums)]["predicted"] = plan.seconds
    medians, shortest = ([variants[key][kind] for key in keys] for kind in ("median", "shortest"))
    order = [variants[key]["predicted"] for key in keys]
    cube = variants[_key(nearest_cube(ranks), "reduce_scatter")]
    return report | {
        "constants": asdict(constants),
        "rank_correlation": float(spearmanr(order, medians).statistic),
        "rank_correlation_of_shortest": float(spearmanr(order, shortest).statistic),
        "choice": keys[0],
        "choice_over_best": medians[0] / min(medians),
        "choice_over_best_of_shortest": shortest[0] / min(shortest),
        "cube_over_best": cube["median"] / min(medians),
    }


def _key(shape: Any, sums: str) -> str:
    return f"{shape.x}x{shape.y}x{shape.z} {sums}"


def show(report: dict[str, Any]) -> None:
    over = f"{report['choice']}, the choice, {report['choice_over_best']:.2f} x, and the nearest cube "
    over += f"{report['cube_over_best']:.2f} x"
    print(f"\n{report['ranks']} ranks, {report['graph']} (constants: {report['constants']['source']})")
    print(f"medians: rank correlation {report['rank_correlation']:.2f}; {over} the best mesh's epoch")
    choice = f"the choice {report['choice_over_best_of_shortest']:.2f} x the best"
    print(f"shortest epochs: rank correlation {report['rank_correlation_of_shortest']:.2f}, {choice}")
    for key, v in sorted(report["variants"].items(), key=lambda item: item[1]["median"]):
        predicted = "" if v["predicted"] is None else f"{v['predicted'] * 1e3:10.1f} ms predicted"
        times = f"{v['median'] * 1e3:10.1f} ms (shortest {v['shortest'] * 1e3:8.1f})"
        print(f"  {key:<24} {times} {v['bytes'] / 1e6:8.2f} MB a rank {predicted}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--graphs", nargs="+", choices=list(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.graphs[0], args.epochs, args.worker)
        return
    path = RESULTS / "grid.json"
    reports = {(r["ranks"], r["graph"]): r for r in machine.earlier_results(path) or []}
    for ranks in args.ranks:
        for name in args.graphs:
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "report.json"
                launcher = [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--standalone",
                    "--nproc-per-node",
                    str(ranks),
                ]
                rest = [__file__, "--worker", str(output), "--epochs", str(args.epochs), "--graphs", name]
                subprocess.run([*launcher, *rest], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                reports[ranks, name] = price(json.loads(output.read_text()))
            show(reports[ranks, name])
            RESULTS.mkdir(exist_ok=True)
            path.write_text(json.dumps([reports[key] for key in sorted(reports)], indent=1) + "\n")


if __name__ == "__main__":
    main()
