"""How long mini-batches take to the accuracy of full-batch training, and what an evaluation costs; runs in parts.

    python benchmarks/time_to_accuracy.py ../shared/data                           # one data group; minutes
    torchrun --standalone --nproc-per-node 2 benchmarks/time_to_accuracy.py ../shared/data    # 2 groups, or 4
    python benchmarks/time_to_accuracy.py ../shared/data --evaluation              # seconds per evaluation
    python benchmarks/time_to_accuracy.py --report

A 3-layer SAGE (hidden 64, ReLU, dropout 0.5, Adam with lr 0.01) on amazon_computers and coauthor_cs (splits 50/25/25
by numbers keyed with the seed), pubmed (its own split) and an R-MAT graph whose labels are planted. Features have
length one, but for R-MAT; coauthor_cs' 6,805 are projected to 512. Batches have N / 8 nodes for each data group, and
their share of training nodes.

| method | batches |
|---|---|
| full | the whole graph in each step |
| uniform | ``UniformVertexLoader``, sums unbiased; "uniform, 2 groups": the same on two ranks, N / 8 nodes each |
| induced | the same without rescaling |
| random node | PyG's ``RandomNodeLoader``, a partition of the nodes in each epoch |
| saint | reference in torch: GraphSAINT's node sampler, its norms of edges and of the loss from 200 samples |
| fan-out | reference in torch: an eighth of the training nodes, 5 neighbours of each in each layer |

A run ends after ``--points`` evaluations (fan-out, whose steps are long: a third), or 8 without a better validation
accuracy. It is appended to ``results/time_to_accuracy.json`` when it ends, and runs that are there are passed over.
Seconds are CPU time of one thread (of groups: of the rank that took longest), sampling included and evaluations
excluded, which follow each epoch of batches (full batch: every fifth step). The target is 99 % of what full batch
reaches: the mean over seeds of the test accuracy at the best validation accuracy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import SAGEConv
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import coalesce, remove_self_loops, to_undirected

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import example_graphs
import machine
import power_law
from measure import Epoch, Schedule, Variant, interleaved

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend import ops
from pyg_dist.loader import UniformVertexLoader

RESULTS = Path(__file__).resolve().parent / "results" / "time_to_accuracy.json"
GRAPHS = ("amazon_computers", "coauthor_cs", "pubmed", "rmat")
HIDDEN, NUM_LAYERS, DROPOUT, LEARNING_RATE, NUM_BATCHES, FULL_STEPS_PER_POINT = 64, 3, 0.5, 0.01, 8, 5
PATIENCE, FAN_OUT, NUM_PRESAMPLES = 8, 5, 200
METHODS = ("full", "uniform", "induced", "random node", "saint", "fan-out")

Step = Callable[[], Tensor]
"""Gives the loss of a batch."""


# ---- Graphs ----------------------------------------------------------------------------------------------------------


def load(folder: Path | None, name: str, seed: int) -> Data:
    """The graph, its features and its split."""
    if name == "rmat":
        data = planted()
    else:
        assert folder is not None
        data = example_graphs.read_npz(str(folder / f"{name}.npz"))
    if name == "coauthor_cs":
        projection = torch.randn(data.num_features, 512, generator=torch.Generator().manual_seed(0))
        data.x = data.x @ projection
    if name != "rmat":
        data.x = F.normalize(data.x)
    if name != "pubmed":
        number = ops.keyed_uniform(torch.arange(data.num_nodes), 1, seed).view(-1)
        data.train_mask, data.val_mask = number < 0.5, (number >= 0.5) & (number < 0.75)
        data.test_mask = number >= 0.75
    return data


def planted(scale: int = 14, edges_per_node: int = 16, num_classes: int = 8) -> Data:
    """R-MAT (a, b, c, d = 0.57, 0.19, 0.19, 0.05), of whose edges between classes one in five is kept."""
    rng, num_nodes = torch.Generator().manual_seed(7), 1 << scale
    ends = torch.zeros(2, num_nodes * edges_per_node, dtype=torch.int64)
    for _ in range(scale):
        quadrant = torch.multinomial(torch.tensor([0.57, 0.19, 0.19, 0.05]), ends.shape[1], True, generator=rng)
        ends = 2 * ends + torch.stack([quadrant >> 1, quadrant & 1])
    ends = torch.randperm(num_nodes, generator=rng)[ends]
    y = torch.randint(0, num_classes, (num_nodes,), generator=rng)
    is_kept = (y[ends[0]] == y[ends[1]]) | (torch.rand(ends.shape[1], generator=rng) < 0.2)
    edge_index = to_undirected(remove_self_loops(coalesce(ends[:, is_kept]))[0], num_nodes=num_nodes)
    mean = torch.randn(num_classes, 64, generator=rng)
    return Data(x=0.15 * mean[y] + torch.randn(num_nodes, 64, generator=rng), edge_index=edge_index, y=y)


# ---- Models ----------------------------------------------------------------------------------------------------------


class SAGE(nn.Module):
    """Layers with ReLU and dropout."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        widths = (in_channels, *[HIDDEN] * (NUM_LAYERS - 1), num_classes)
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Scores."""
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).relu(), DROPOUT, self.training)
        return self.convs[-1](x, edge_index)  # type: ignore[no-any-return]

    def by_means(self, x: Tensor, means: list[Callable[[Tensor], tuple[Tensor, Tensor]]]) -> Tensor:
        """Scores, where a layer's mean over neighbours, and its own rows, come from a reference's sampler."""
        for layer, (conv, mean) in enumerate(zip(self.convs, means, strict=True)):
            neighbours, own = mean(x)
            x = conv.lin_l(neighbours) + conv.lin_r(own)
            if layer < len(self.convs) - 1:
                x = F.dropout(x.relu(), DROPOUT, self.training)
        return x


# ---- Batches ---------------------------------------------------------------------------------------------------------


def epochs(method: str, data: DistributedData, graph: Data, model: SAGE, seed: int) -> Iterator[Iterable[Step]]:
    """Steps up to the next evaluation, again and again."""
    if method in ("saint", "fan-out"):
        makers: Any = {"saint": saint, "fan-out": fan_out}
        step, rng = makers[method](graph, model), torch.Generator().manual_seed(seed)
        while True:
            yield [lambda: step(rng)] * NUM_BATCHES

    def of(batch: Any) -> Step:
        def loss() -> Tensor:
            out = model(batch.x, batch.edge_index)
            return F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])

        return loss

    if method == "full":
        while True:
            yield [of(data)] * FULL_STEPS_PER_POINT
    loader: Any
    if method == "random node":
        loader = RandomNodeLoader(data, NUM_BATCHES, shuffle=True)
    else:
        size, rescale = data.num_nodes // NUM_BATCHES, method != "induced"
        loader = UniformVertexLoader(
            data, size, seed=seed, input_nodes=data.train_mask, rescale=rescale, prefetch=False
        )
    while True:
        yield (of(batch) for batch in loader)


def _rows(rowptr: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """The edges of some rows of a CSR: the place in ``nodes``, and the place of the edge."""
    count = rowptr[nodes + 1] - rowptr[nodes]
    row = torch.repeat_interleave(torch.arange(nodes.numel()), count)
    return row, torch.arange(row.numel()) + (rowptr[nodes] - count.cumsum(0) + count)[row]


def _csr(data: Data) -> tuple[Tensor, Tensor]:
    """In-neighbours of every node."""
    source, target = data.edge_index
    order = torch.argsort(target, stable=True)
    count = torch.bincount(target, minlength=data.num_nodes)
    return F.pad(count.cumsum(0), (1, 0)), source[order]


def saint(data: Data, model: SAGE) -> Callable[[torch.Generator], Tensor]:
    """GraphSAINT, node sampler (Zeng et al., 2020): P(u) ~ ||A_:u||^2, norms by how often nodes and edges are drawn."""
    rowptr, col = _csr(data)
    count = (rowptr[1:] - rowptr[:-1]).clamp(min=1).float()
    row = torch.repeat_interleave(torch.arange(data.num_nodes), rowptr[1:] - rowptr[:-1])
    importance = torch.zeros(data.num_nodes).index_add_(0, col, count[row] ** -2) + 1e-9
    size = data.num_nodes // NUM_BATCHES
    place = torch.empty(data.num_nodes, dtype=torch.int64)

    def draw(rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        nodes = torch.multinomial(importance, size, replacement=True, generator=rng).unique()
        place.fill_(-1)[nodes] = torch.arange(nodes.numel())
        target, edge = _rows(rowptr, nodes)
        is_inside = place[col[edge]] >= 0
        return nodes, target[is_inside], edge[is_inside]

    of_node, of_edge, rng = torch.zeros(data.num_nodes), torch.zeros(col.numel()), torch.Generator().manual_seed(0)
    for _ in range(NUM_PRESAMPLES):
        nodes, _, edges = draw(rng)
        of_node[nodes] += 1
        of_edge[edges] += 1
    edge_norm = of_node[row] / of_edge.clamp(min=1) / count[row]  # one over alpha, of a mean
    loss_norm = NUM_PRESAMPLES / of_node.clamp(min=1)

    def step(rng: torch.Generator) -> Tensor:
        nodes, target, edge = draw(rng)
        shape = (nodes.numel(), nodes.numel())
        pointers = F.pad(torch.bincount(target, minlength=nodes.numel()).cumsum(0), (1, 0))
        matrix = torch.sparse_csr_tensor(pointers, place[col[edge]], edge_norm[edge], shape)
        transposed = torch.sparse_coo_tensor(torch.stack([place[col[edge]], target]), edge_norm[edge], shape)
        product = _Product.of(matrix, transposed.to_sparse_csr())
        out = model.by_means(data.x[nodes], [lambda h: (product(h), h)] * NUM_LAYERS)
        trains = data.train_mask[nodes]
        losses = F.cross_entropy(out[trains], data.y[nodes][trains], reduction="none")
        weight = loss_norm[nodes][trains]
        return (losses * weight).sum() / weight.sum()

    return step


class _Product(torch.autograd.Function):
    """A sparse matrix times rows, whose transpose is there."""

    @staticmethod
    def of(matrix: Tensor, transposed: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda x: _Product.apply(x, matrix, transposed)  # type: ignore[no-any-return, no-untyped-call]

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, transposed: Tensor) -> Tensor:
        ctx.transposed = transposed
        return matrix @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transposed @ grad, None, None


def fan_out(data: Data, model: SAGE) -> Callable[[torch.Generator], Tensor]:
    """GraphSAGE (Hamilton et al., 2017): neighbours of each node drawn with replacement, layer by layer."""
    rowptr, col = _csr(data)
    trains = data.train_mask.nonzero().view(-1)
    size = max(1, trains.numel() // NUM_BATCHES)

    def drawn(nodes: Tensor, rng: torch.Generator) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
        """The nodes that a layer reads, and what makes its mean of their rows."""
        count = (rowptr[nodes + 1] - rowptr[nodes]).view(-1, 1)
        picked = (torch.rand(nodes.numel(), FAN_OUT, generator=rng) * count).long().clamp(max=(count - 1).clamp(min=0))
        is_there = count > 0
        neighbour = torch.where(is_there, col[(rowptr[nodes].view(-1, 1) + picked).clamp(max=col.numel() - 1)], 0)
        needed, place = torch.cat([nodes, neighbour.view(-1)]).unique(return_inverse=True)
        own, others = place[: nodes.numel()], place[nodes.numel() :].view(-1, FAN_OUT)
        return needed, lambda h: (h[others].mean(1) * is_there, h[own])

    def step(rng: torch.Generator) -> Tensor:
        nodes = seeds = trains[torch.randperm(trains.numel(), generator=rng)[:size]]
        means = []
        for _ in range(NUM_LAYERS):
            nodes, mean = drawn(nodes, rng)
            means.append(mean)
        return F.cross_entropy(model.by_means(data.x[nodes], means[::-1]), data.y[seeds])

    return step


# ---- Runs ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def accuracies(model: nn.Module, data: DistributedData) -> tuple[float, float]:
    """On the nodes that validate and on those that test, whole graph."""
    model.eval()
    hits = model(data.x, data.edge_index).argmax(-1) == data.y
    return hits[data.val_mask].float().mean().item(), hits[data.test_mask].float().mean().item()


def train(folder: Path | None, name: str, method: str, seed: int, num_points: int) -> dict[str, Any]:
    """One run."""
    torch.manual_seed(seed)
    graph = load(folder, name, seed)
    num_groups = pyg_dist.world_size()
    data = DistributedData(graph, mesh={"data": num_groups, "part": 1}) if num_groups > 1 else DistributedData(graph)
    model = pyg_dist.distribute(SAGE(graph.num_features, int(graph.y.max()) + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    num_steps, seconds, points, top, since = 0, 0.0, [], 0.0, 0
    for steps in epochs(method.split(",")[0], data, graph, model, seed):
        model.train()
        begin = time.process_time()
        for step in steps:
            optimizer.zero_grad()
            step().backward()
            optimizer.step()
            num_steps += 1
        seconds += time.process_time() - begin
        slowest = float(data.graph.node_sharding.groups.everyone.all_reduce_(torch.tensor([seconds]), "max"))
        points.append([num_steps, round(slowest, 3), *(round(a, 5) for a in accuracies(model, data))])
        top, since = (points[-1][2], 0) if points[-1][2] > top else (top, since + 1)
        if len(points) == (num_points // 3 if method == "fan-out" else num_points) or since == PATIENCE:
            break
    return {"graph": name, "method": method, "seed": seed, "points": points}


def best(run: dict[str, Any]) -> float:
    """Test accuracy at the best validation accuracy."""
    return float(max(run["points"], key=lambda point: point[2])[3])


def report(found: dict[str, Any]) -> None:
    """A line for each graph and method."""
    for graph in sorted({run["graph"] for run in found["runs"]}):
        of_graph = [run for run in found["runs"] if run["graph"] == graph]
        target = 0.99 * statistics.mean(best(run) for run in of_graph if run["method"] == "full")
        print(f"{graph}: target {target:.4f}")
        for method in dict.fromkeys((*METHODS, *(run["method"] for run in of_graph))):
            runs = [run for run in of_graph if run["method"] == method]
            if not runs:
                continue
            scores = [best(run) for run in runs]
            reached = [next((p for p in run["points"] if p[3] >= target), None) for run in runs]
            there = [point for point in reached if point is not None]
            error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
            line = (
                f"  {method:19} best {statistics.mean(scores):.4f} +- {error:.4f}, reached by {len(there)}/{len(runs)}"
            )
            if there:
                steps, seconds = (statistics.median(point[k] for point in there) for k in (0, 1))
                line += f", median {steps:.0f} steps, {seconds:.2f} s"
            print(line)
    for name, times in found.get("evaluation", {}).items():
        print(f"evaluation of {name}: { {key: value for key, value in times.items() if key != 'machine'} }")


# ---- Evaluations -----------------------------------------------------------------------------------------------------


def evaluation(folder: Path | None, name: str, is_stock: bool) -> Epoch:
    """A function that evaluates once: scores of all nodes, and the test accuracy."""
    torch.manual_seed(0)
    data = power_law.load(name) if name in power_law.SIZES else load(folder, name, 0)
    model: nn.Module = SAGE(data.num_features, int(data.y.max()) + 1).eval()
    if is_stock:
        data = ToSparseTensor(layout=torch.sparse_csr)(data)
    else:
        data, model = DistributedData(data), pyg_dist.distribute(model)
    edges, mask = data.adj_t if is_stock else data.edge_index, data.train_mask

    @torch.no_grad()
    def evaluate() -> float:
        hits = model(data.x, edges).argmax(-1) == data.y
        return hits[mask].float().mean().item()

    return evaluate


def evaluations(folder: Path | None, names: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Two ranks of one thread beside stock PyG's CSR forward on two threads, in turns.

    Where others use the processors, what two threads cost is half of one thread's processor time at least, and that of
    the busier rank stands beside it.
    """
    for name in names:
        variants = [
            Variant("stock PyG, CSR, 2 threads", evaluation, (folder, name, True), 1, 2),
            Variant("pyg_dist, 2 ranks", evaluation, (folder, name, False), 2, 1),
            Variant("stock PyG, CSR, 1 thread", evaluation, (folder, name, True), 1, 1),
        ]
        taken = interleaved(variants, Schedule(num_rounds=5, epochs_per_turn=7, num_retakes=1))
        stock, ours, alone = (taken[variant.name] for variant in variants)
        half, busier = statistics.median(alone.cpu_seconds) / 2, statistics.median(ours.cpu_seconds)
        found = {
            "stock s": round(stock.median, 4),
            "2 ranks s": round(ours.median, 4),
            "2 ranks / stock": round(ours.median / stock.median, 3),
            "half of stock's processor s, 1 thread": round(half, 4),
            "processor s of the busier rank": round(busier, 4),
            "by processor time": round(busier / half, 3),
            "share of the processors that others used": [max(stock.foreign), max(ours.foreign)],
        }
        print(name, found, flush=True)
        yield name, found


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="of archives")
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--points", type=int, default=30, help="evaluations of a run")
    parser.add_argument("--minutes", type=float, default=20.0, help="no run begins after them")
    parser.add_argument("--evaluation", action="store_true", help="measure evaluations instead; also of graph A")
    parser.add_argument("--report", action="store_true", help="print what is stored")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {"runs": []}
    if args.report:
        return report(found)
    if args.evaluation:
        for name, times in evaluations(args.folder, [*args.graphs, "A"]):
            found.setdefault("evaluation", {})[name] = {**times, "machine": machine.describe()}
            args.results.write_text(json.dumps(found) + "\n")
        return report(found)
    torch.set_num_threads(1)
    pyg_dist.init()
    num_groups = pyg_dist.world_size()
    methods = METHODS if num_groups == 1 else (f"uniform, {num_groups} groups",)
    known = {(run["graph"], run["method"], run["seed"]) for run in found["runs"]}
    begin = time.monotonic()
    for seed in range(args.seeds):
        for name in args.graphs:
            for method in methods:
                is_late = torch.tensor([int(time.monotonic() - begin > 60 * args.minutes)])
                is_late = pyg_dist.backend.comm.group.world_group().all_reduce_(is_late, "max")
                if (name, method, seed) in known or is_late:
                    continue
                found["runs"].append(train(args.folder, name, method, seed, args.points))
                found["machine"] = machine.describe()
                if pyg_dist.rank() == 0:
                    args.results.write_text(json.dumps(found) + "\n")
    if pyg_dist.rank() == 0:
        report(found)
    return None


if __name__ == "__main__":
    main()
