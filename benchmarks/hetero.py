"""An epoch on a graph of four types and seven relations, pyg_dist against stock PyG on the same two cores.

    python benchmarks/hetero.py                        # ten million edges, as many rows as ogbn-mag has in its types
    python benchmarks/hetero.py --edges 500000 --models sage --rounds 3
    python benchmarks/hetero.py --device cuda          # one rank on a GPU

R-SAGE and R-GAT are two layers of ``HeteroConv``. Edges are R-MAT's (``pyg_dist/store/sources/rmat.py``), ends taken
modulo the number of nodes. Stock PyG runs in one process with two threads, pyg_dist on one rank with two threads and
with one, and on two ranks with one each; "forgetful", with two threads, keeps no aggregation. The rows that a layer
sends are counted for 2 to 8 ranks, beside those of the homogeneous form ``to_homogeneous()``, with a product for each
relation over the whole halo.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import epoch as one_type
import gpu_measure
import machine
import torch
import torch.nn.functional as F
from measure import Epoch, Schedule, Variant, interleaved
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, SAGEConv
from tqdm import tqdm

from pyg_dist import DistributedData, distribute
from pyg_dist.backend.session.settings import REMEMBER_MIB
from pyg_dist.data.typed_layout import find_parts_by_type
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.relations import HeteroPlan
from pyg_dist.halo.plan.sizes import imbalance
from pyg_dist.plan.parts import PartsOptions
from pyg_dist.store.graph_input import as_one_type, read_hetero
from pyg_dist.store.source import Reading
from pyg_dist.store.sources.rmat import RMat

SHARES = {"paper": 0.38, "author": 0.58, "institution": 0.005, "field": 0.035}
"""Of all nodes, about as in ogbn-mag."""

RELATIONS = {
    ("paper", "cites", "paper"): 0.26, ("author", "writes", "paper"): 0.17, ("paper", "by", "author"): 0.17,
    ("author", "at", "institution"): 0.03, ("institution", "has", "author"): 0.03, ("paper", "on", "field"): 0.17,
    ("field", "of", "paper"): 0.17,
}  # fmt: skip
"""Of all edges."""

FEATURES, HIDDEN, CLASSES = 64, 64, 16


def ends(number: int, sizes: tuple[int, int], seed: int) -> Tensor:
    """R-MAT's edges between nodes of two types."""
    scale = max(max(sizes) - 1, 1).bit_length()
    source = RMat(Path(f"rmat:scale={scale},edges={number},seed={seed}"), Reading())
    chunks = [torch.stack([torch.from_numpy(c.source), torch.from_numpy(c.target)]) for c in source.chunks(number)]
    return torch.cat(chunks, 1) % torch.tensor(sizes).view(2, 1)


def graph_of(num_edges: int) -> HeteroData:
    """The graph; ten edges a node."""
    data, rng = HeteroData(), torch.Generator().manual_seed(0)
    for kind, share in SHARES.items():
        data[kind].x = torch.randn(max(int(share * num_edges / 10), 8), FEATURES, generator=rng)
    data["paper"].y = torch.randint(0, CLASSES, (data["paper"].num_nodes,), generator=rng)
    for seed, (relation, share) in enumerate(RELATIONS.items()):
        sizes = data[relation[0]].num_nodes, data[relation[2]].num_nodes
        data[relation].edge_index = ends(int(share * num_edges), sizes, seed)
    return data


class Net(nn.Module):
    """Two layers, then classes of papers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        make = {
            "sage": lambda width: SAGEConv((width, width), HIDDEN),
            "gat": lambda width: GATConv((width, width), HIDDEN // 4, heads=4, add_self_loops=False),
        }[kind]
        self.convs = nn.ModuleList(
            HeteroConv({relation: make(width) for relation in RELATIONS}, aggr="mean") for width in (FEATURES, HIDDEN)
        )
        self.out = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: dict[str, Tensor], edges: object) -> Tensor:
        for conv in self.convs:
            x = {kind: rows.relu() for kind, rows in conv(x, edges).items()}
        return self.out(x["paper"])  # type: ignore[no-any-return]


def training_epoch(num_edges: int, kind: str, is_stock: bool, device: str = "cpu", remember: str = "inf") -> Epoch:
    """Return a function that trains for one epoch; of aggregations as many MiB are kept as ``remember`` says."""
    os.environ[REMEMBER_MIB.name] = remember
    torch.manual_seed(0)
    data = graph_of(num_edges)
    model = Net(kind)
    if not is_stock:
        data, model = DistributedData(data), distribute(model)
    data, model = data.to(device), model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x_dict, data.edge_index_dict), data["paper"].y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def measure_on_gpu(num_edges: int, kinds: list[str], log: gpu_measure.Log) -> None:
    """Median seconds of an epoch, the host's gaps included, and torch's peak memory, graph and model included."""
    place = gpu_measure.Place.of("cuda")

    def measured(kind: str, is_stock: bool) -> dict[str, float]:
        place.clear()
        epoch = training_epoch(num_edges, kind, is_stock, "cuda")
        seconds = place.seconds(epoch, target=1.0, most=20, is_queued=False)
        return {"seconds": seconds, "peak_mib": place.peak_mib(epoch)}

    log.add("machine", machine.describe())
    for kind in kinds:
        for name, is_stock in (("stock PyG", True), ("pyg_dist", False)):
            log.attempt(f"{kind}, {name}", lambda kind=kind, is_stock=is_stock: measured(kind, is_stock))


def rows_sent(num_edges: int) -> Iterator[dict[str, float]]:
    """For some numbers of ranks: the rows that one layer sends, and those that the homogeneous form would send."""
    hetero = read_hetero(graph_of(num_edges), allow_nan=True, warn=False)
    edges = {relation: one.edge_index for relation, one in hetero.relations.items()}
    for num_ranks in (2, 4, 8):
        parts = find_parts_by_type(edges, hetero.num_nodes, None, num_ranks, PartsOptions("metis", 0.03, 0))
        plan = HeteroPlan.of(edges, parts, num_ranks)
        whole = Plan.of(as_one_type(edges, hetero.num_nodes), torch.cat(list(parts.values())), num_ranks)
        one_kind, sent = len(edges) * whole.rows["post"], plan.rows["hybrid"]
        yield {
            "ranks": num_ranks, "by relation": sent, "homogeneous": one_kind,
            "ratio": round(sent / max(one_kind, 1), 3), "edges, max/mean": round(imbalance(plan.edges), 3),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--models", nargs="*", choices=["sage", "gat"], default=["sage", "gat"])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant that count")
    parser.add_argument("--epochs", type=int, default=2, help="epochs in a turn")
    parser.add_argument("--retakes", type=int, default=10, help="repeat a disturbed turn at most so often")
    parser.add_argument("--only", nargs="*", help="only variants whose names end so, such as '1 thread' '2 ranks'")
    parser.add_argument("--no-count", dest="count", action="store_false", help="do not count rows for 2 to 8 ranks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one rank, no counting")
    parser.add_argument("--output", type=Path, help="the JSON file (default: results/hetero.json or hetero-gpu.json)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.device == "cuda":
        output = args.output or one_type.RESULTS / "hetero-gpu.json"
        measure_on_gpu(args.edges, args.models, gpu_measure.Log(output, "hetero"))
        return
    if hasattr(os, "sched_setaffinity"):  # all variants on the same cores; processes inherit this
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: one_type.NUM_CORES])
    description, sent = machine.describe(), []
    for counted in rows_sent(args.edges) if args.count else ():
        sent.append(counted)
        print(", ".join(f"{name}: {value:,}" for name, value in counted.items()))
    schedule, results = Schedule(args.rounds, args.epochs, num_retakes=args.retakes), {}
    for kind in args.models:
        variants = [
            Variant("stock PyG", training_epoch, (args.edges, kind, True), 1, 2),
            Variant("pyg_dist, 1 rank", training_epoch, (args.edges, kind, False), 1, 2),
            Variant("pyg_dist, 1 rank, forgetful", training_epoch, (args.edges, kind, False, "cpu", "0"), 1, 2),
            Variant("pyg_dist, 1 rank, 1 thread", training_epoch, (args.edges, kind, False), 1, 1),
            Variant("pyg_dist, 2 ranks", training_epoch, (args.edges, kind, False), 2, 1),
        ]
        if args.only:
            variants = [variant for variant in variants if variant.name.endswith(tuple(args.only))]
        results[kind] = interleaved(variants, schedule, lambda turns, name=kind: tqdm(turns, desc=name, disable=None))
    print(one_type.table(results))
    one_type.write(args.output or one_type.RESULTS / "hetero.json", description, schedule, results, rows_sent=sent)


if __name__ == "__main__":
    main()
