"""Mini-batches: cutting them, a training step on one, what ranks send for them. One thread, CPU time.

    python benchmarks/sampling.py                                  # graphs A, B and C: ten minutes
    python benchmarks/sampling.py --graphs A --cover GRAPH.npz ... # and the rows sent on these graphs

All contestants of a line take turns in one process, each first as often as the others, and the median of each counts.
*SciPy* is ``A[S][:, S]`` and its transpose; *Alg. 2* the same in torch operations, as ScaleGNN describes it; *subgraph*
PyG's ``Data.subgraph``. A step is forward, backward and Adam of a three-layer SAGE (hidden 256, ReLU, dropout) on a
batch that is ready. ``--cover`` counts the rows of one aggregation over METIS parts, in one process: what one end
leaves of the full-batch lists (rows of sampled nodes, sums for sampled nodes), what both ends leave, and the minimum
cover of the batch's own edges, which is sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import machine
import power_law
import scipy.sparse
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.halo.plan.cover import Cover, RemoteEdges
from pyg_dist.loader import UniformVertexLoader
from pyg_dist.loader.uniform import UniformSampling
from pyg_dist.partition import partition

RESULTS = Path(__file__).resolve().parent / "results" / "sampling.json"
BATCH_SIZE, HIDDEN = 8192, 256


def in_turns(
    calls: dict[str, Callable[[int], Any]], rounds: int, before: Callable[[int], Any] = lambda number: None
) -> dict[str, float]:
    """Median CPU milliseconds of each call, which is given the number of the round; ``before`` it, what does not count.

    Whoever comes first reads rows from memory that the next finds in the cache. So each round begins with another call,
    and every other round runs backwards.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds + 2):
        before(number)
        first = number % len(names)
        for name in (names[first:] + names[:first])[:: -1 if number % 2 else 1]:
            call = calls[name]
            begin = time.process_time()
            call(number)
            times[name].append(1e3 * (time.process_time() - begin))
    return {name: round(statistics.median(values[2:]), 3) for name, values in times.items()}


def by_alg_2(csr: CSR, nodes: Tensor) -> tuple[Tensor, ...]:
    """ScaleGNN, Alg. 2, in torch: rows by prefix sums, a filter by a table, and the transpose by a sort."""
    first = csr.rowptr[nodes]
    count = csr.rowptr[nodes + 1] - first
    ends = count.cumsum(0)
    entry = torch.arange(int(ends[-1])) + torch.repeat_interleave(first - ends + count, count)
    table = torch.full((csr.num_cols,), -1, dtype=torch.int32)
    table[nodes] = torch.arange(nodes.numel(), dtype=torch.int32)
    col = table[csr.col[entry].long()]
    row = torch.repeat_interleave(torch.arange(nodes.numel()), count)[col >= 0]
    entry, col = entry[col >= 0], col[col >= 0]
    order = torch.argsort(col, stable=True)
    pointers = [torch.bincount(ends, minlength=nodes.numel()).cumsum(0) for ends in (row, col)]
    return *pointers, col, entry, row[order], order


class SAGE(nn.Module):
    """Three layers with ReLU and dropout."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        widths = (in_channels, HIDDEN, HIDDEN, num_classes)
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Scores."""
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).relu(), 0.5, self.training)
        return self.convs[-1](x, edge_index)  # type: ignore[no-any-return]


def stepper(model: nn.Module) -> Callable[[Any], None]:
    """A training step on a batch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)
        F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask]).backward()
        optimizer.step()

    return step


def samplings(rounds: int) -> dict[str, float]:
    """S_t of 10^6 and of 10^9 nodes."""
    makers = {f"{n:.0e}": UniformSampling(n, BATCH_SIZE, 10, 0) for n in (10**6, 10**9)}
    times = in_turns({n: lambda k, s=s: s.node_id(k) for n, s in makers.items()}, rounds)  # type: ignore[misc]
    return {**{f"ms of {n}": t for n, t in times.items()}, "ratio": round(times["1e+09"] / times["1e+06"], 2)}


def batches(data: Data, laid_out: DistributedData, rounds: int) -> dict[str, float]:
    """Cutting a batch, beside the others' ways."""
    loader = UniformVertexLoader(laid_out, BATCH_SIZE, prefetch=False)
    nodes = [loader.sampler.node_id(k) for k in range(rounds + 2)]
    local = laid_out.graph.local
    matrix = scipy.sparse.csr_matrix(
        (torch.ones(local.num_entries).numpy(), local.col.numpy(), local.rowptr.numpy()), shape=(data.num_nodes,) * 2
    )

    def by_scipy(k: int) -> Any:
        rows = nodes[k].numpy()
        cut = matrix[rows][:, rows]
        return cut, cut.T.tocsr()

    times = in_turns(
        {
            "graph part": lambda k: local.restricted(nodes[k], nodes[k]),
            "SciPy": by_scipy,
            "Alg. 2": lambda k: by_alg_2(local, nodes[k]),
            "batch": loader._batches.take,
            "subgraph": lambda k: data.subgraph(nodes[k]),
        },
        rounds,
    )
    return {
        **{f"ms of {name}": ms for name, ms in times.items()},
        "SciPy / graph part": round(times["SciPy"] / times["graph part"], 2),
        "Alg. 2 / graph part": round(times["Alg. 2"] / times["graph part"], 2),
        "subgraph / batch": round(times["subgraph"] / times["batch"], 2),
    }


def steps(data: Data, laid_out: DistributedData, batch_size: int, rounds: int) -> dict[str, float]:
    """A step on a batch that is ready, a new one each time, and stock PyG's on the same subgraph."""
    loader = UniformVertexLoader(laid_out, batch_size, prefetch=False)
    torch.manual_seed(0)
    model = SAGE(data.num_features, int(data.y.max()) + 1)
    stock = stepper(model)
    torch.manual_seed(0)
    ours = stepper(pyg_dist.distribute(SAGE(data.num_features, int(data.y.max()) + 1)))
    ready: dict[int, tuple[Any, Any]] = {}

    def make(k: int) -> None:
        batch = loader._batches.take(k)
        ready.clear()
        ready[k] = batch, data.subgraph(batch.n_id.full_tensor())

    times = in_turns({"step": lambda k: ours(ready[k][0]), "stock": lambda k: stock(ready[k][1])}, rounds, make)
    cut = in_turns({"batch": loader._batches.take}, rounds)["batch"]
    return {
        "ms of a step": times["step"],
        "ms of stock PyG's": times["stock"],
        "step / stock": round(times["step"] / times["stock"], 3),
        "batch / step": round(cut / times["step"], 3),
    }


def hidden_share(laid_out: DistributedData, rounds: int) -> float:
    """Of the time of making batches, what a thread beside the steps takes off the clock. Needs a free core."""
    model = stepper(pyg_dist.distribute(SAGE(laid_out.num_features, int(laid_out.y.max()) + 1)))
    seconds = {}
    for prefetch in (False, True):
        loader = UniformVertexLoader(laid_out, BATCH_SIZE, num_steps=rounds, prefetch=prefetch)
        for batch in loader:
            model(batch)
        waited = []
        begin = time.perf_counter()
        for batch in loader:
            waited.append(time.perf_counter() - begin)
            model(batch)
            begin = time.perf_counter()
        seconds[prefetch] = statistics.median(waited)
    return round(1 - seconds[True] / seconds[False], 3)


def rows_sent(path: Path, num_parts: int, share: float, num_samples: int) -> dict[str, float]:
    """Rows of one aggregation, all ranks together, means over samples."""
    data = power_law.load(str(path))
    edge_index, num_nodes = data.edge_index, data.num_nodes
    parts = partition(edge_index, num_nodes, num_parts, "metis").long()
    whole = RemoteEdges.of(edge_index, parts, num_parts)
    cover = whole.cover("hybrid")
    totals = torch.zeros(3, dtype=torch.float64)
    sampling = UniformSampling(num_nodes, int(share * num_nodes), num_samples, 0)
    for step in range(num_samples):
        here = torch.zeros(num_nodes, dtype=torch.bool)
        here[sampling.node_id(step)] = True
        of_row, of_sum = here[whole.rows.node][whole.row], here[whole.sums.node][whole.sum]
        one_end = int((cover.left & here[whole.rows.node]).sum() + (cover.right & here[whole.sums.node]).sum())
        both_ends = _used(whole, cover, of_row & of_sum)
        kept = RemoteEdges.of(edge_index[:, here[edge_index].all(0)], parts, num_parts)
        own = kept.cover("hybrid")
        totals += torch.tensor([one_end, both_ends, int(own.left.sum() + own.right.sum())])
    one_end, both_ends, own_cover = (totals / num_samples).tolist()
    return {
        "one end": one_end,
        "both ends": both_ends,
        "own cover": own_cover,
        "own cover / one end": round(own_cover / one_end, 3),
    }


def _used(remote: RemoteEdges, cover: Cover, chosen: Tensor) -> int:
    """Rows and sums of a cover that some of the edges need."""
    is_post = cover.left[remote.row]
    rows, sums = remote.row[chosen & is_post], remote.sum[chosen & ~is_post]
    return rows.unique().numel() + sums.unique().numel()


def beside(laid_out: DistributedData) -> dict[str, float]:
    """Bytes that stay beside batches, over a local node, and that the graph does not have anyway; on one rank."""
    laid_out.graph.prepare_subgraphs()
    links = laid_out.graph.links.links
    fields = [value for part in (links, links.rows, links.sums, links.nodes) for value in vars(part).values()]
    kept = [t for t in fields if isinstance(t, Tensor) and t is not laid_out.graph.share.node_id]
    return {"bytes a local node": round(sum(t.nbytes for t in kept) / laid_out.graph.node_sharding.num_local, 2)}


def main() -> None:
    """Measure, print, and write after each graph."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="*", default=["A", "B", "C"])
    parser.add_argument("--cover", nargs="*", type=Path, default=[], help="archives of graphs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = machine.earlier_results(args.results) or {}
    found["machine"] = machine.describe()

    def put(kind: str, name: str, value: Any) -> None:
        found.setdefault(kind, {})[name] = value
        print(kind, name, value, flush=True)
        args.results.write_text(json.dumps(found, indent=1) + "\n")

    put("S_t", f"B = {BATCH_SIZE}", samplings(args.rounds))
    for path in args.cover:
        put("rows sent, 8 METIS parts, B = N / 10", path.stem, rows_sent(path, 8, 0.1, 10))
    for name in args.graphs:
        data = power_law.load(name)
        laid_out = DistributedData(data)
        put("beside batches", name, beside(laid_out))
        put("batches", name, batches(data, laid_out, args.rounds))
        for batch_size in (1024, BATCH_SIZE):
            put("steps", f"{name}, B = {batch_size}", steps(data, laid_out, batch_size, args.rounds))
        put("hidden share", name, hidden_share(laid_out, args.rounds))


if __name__ == "__main__":
    main()
