"""Models of PyG's own tests of ``HeteroConv``, ``to_hetero``, HGT and HAN, and of ``examples/hetero``, beside PyG."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from against_stock import Results, assert_same, of_first_rank
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    GAT,
    GCN,
    BatchNorm,
    GATConv,
    GCN2Conv,
    GCNConv,
    GINEConv,
    GraphConv,
    GraphSAGE,
    HANConv,
    HeteroConv,
    HGTConv,
    Linear,
    MeanAggregation,
    MessagePassing,
    SAGEConv,
    to_hetero,
    to_hetero_with_bases,
)
from torch_geometric.transforms import ToSparseTensor
from workers import on_ranks

from pyg_dist import DistributedData, distribute

SIZES = {"paper": 20, "author": 13, "term": 7, "nobody": 0}
WIDTHS = {"paper": 8, "author": 6, "term": 3, "nobody": 4}


def graph(*relations: tuple[str, str, str], width: int | None = None) -> HeteroData:
    """Types at the ends of these relations, all with features; every relation with weights and attributes."""
    rng, data = torch.Generator().manual_seed(3), HeteroData()
    for kind in dict.fromkeys(kind for relation in relations for kind in relation[::2]):
        size = SIZES[kind.rpartition(".")[2]]
        data[kind].x = torch.randn(size, width or WIDTHS[kind.rpartition(".")[2]], generator=rng, dtype=torch.float64)
        data[kind].z = torch.randn(size, 3, generator=rng, dtype=torch.float64)
        data[kind].batch = torch.arange(size) * 3 // max(size, 1)
    for source, name, target in relations:
        ends = [data[kind].num_nodes for kind in (source, target)]
        number = 50 * (min(ends) > 0)
        store = data[source, name, target]
        store.edge_index = torch.stack([torch.randint(0, max(size, 1), (number,), generator=rng) for size in ends])
        store.edge_weight = torch.rand(number, generator=rng, dtype=torch.float64)
        store.edge_attr = torch.randn(number, 3, generator=rng, dtype=torch.float64)
    return data


CITES, WRITES, BY = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "by", "author")
KNOWS, HAS = ("author", "knows", "author"), ("term", "in", "paper")


class OfEnds(MessagePassing):
    """A conv that takes further rows of nodes."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = Linear(-1, 5)

    def forward(self, x: Any, edge_index: Any, y: Any, z: Any) -> Any:
        return self.propagate(edge_index, x=x, y=y, z=z)

    def message(self, x_j: Tensor, y_j: Tensor, z_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_j, y_j, z_j], dim=-1))  # type: ignore[no-any-return]


class Plain(nn.Module):
    """For ``to_hetero``: what its tests transform."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, width = kind, 6
        self.lin, self.norm = nn.Linear(width, width), BatchNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.conv, self.gine = SAGEConv(width, width), GINEConv(nn.Linear(width, width))
        self.of_edges = nn.Linear(3, width)
        self.lins = nn.ModuleDict({str(k): nn.Linear(width, width) for k in range(2)})
        self.pool, self.out = MeanAggregation(), nn.Linear(3 * width, 4)


class Twice(Plain):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x).relu_()
        x = self.mlp(x if self.kind == "static" else self.norm(x))
        first = self.conv(x, edge_index).relu_()
        second = self.conv(first, edge_index) + self.lins["0"](first) + self.lins["1"](x)
        return self.out(torch.cat([x, first, second], dim=-1))  # type: ignore[no-any-return]


class WithEdges(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return self.gine(x, edge_index, self.of_edges(edge_attr)).relu()  # type: ignore[no-any-return]


class OfBoth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.gine = nn.Linear(6, 6), GINEConv(nn.Linear(6, 6))

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        edge_attr = self.mlp(edge_attr)
        return self.gine(x, edge_index, edge_attr), edge_attr * 2


class Pooled(Plain):
    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        return self.lin(self.pool(self.conv(x, edge_index), batch))  # type: ignore[no-any-return]


class Both(nn.Module):
    """Rows of nodes and of edges, without a conv."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes, self.of_edges = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        return self.nodes(x), self.of_edges(edge_attr)


class UsersAndItems(nn.Module):
    """``examples/hetero/bipartite_sage.py``: an embedding of users, two encoders, a decoder of given pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(SIZES["author"], 5)
        self.items = nn.ModuleList(SAGEConv((-1, -1), 5) for _ in range(2))
        self.first, self.second = SAGEConv((-1, -1), 5), SAGEConv((-1, -1), 5)
        self.decoder = nn.Sequential(nn.Linear(10, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, data: Any, pairs: Tensor) -> Any:
        paper, edges = data["paper"].x, data.edge_index_dict
        users = self.users(data["author"].index)
        for conv in self.items:
            paper = conv(paper, edges[CITES]).relu()
        users = self.first((data["paper"].x, users), edges[BY]).relu()
        users = self.second((paper, users), edges[BY]).relu()
        return self.decoder(torch.cat([users[pairs[0]], paper[pairs[1]]], dim=-1)).view(-1)


class MetaPaths(nn.Module):
    """``examples/hetero/dmgi_unsup.py``: a GCN for each relation of one type, and corrupted rows beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GCNConv(8, 5) for _ in range(2))
        self.score = nn.Bilinear(5, 5, 1)
        self.mean = nn.Parameter(torch.linspace(0, 1, 5))

    def forward(self, x: Any, edge_indices: list[Any], order: Tensor) -> list[Any]:
        scores = []
        for conv, edges in zip(self.convs, edge_indices, strict=True):
            hidden, other = conv(x, edges).relu(), conv(x[order], edges).relu()
            summary = hidden.mean(dim=0, keepdim=True)
            scores += [self.score(rows, summary.expand_as(rows)) for rows in (hidden, other)]
        return scores


Case = tuple[HeteroData, Callable[[HeteroData], nn.Module], Callable[[nn.Module, Any], Any]]


def by_relation(model: nn.Module, data: Any) -> Any:
    return model(data.x_dict, data.edge_index_dict)


def hetero_conv(aggr: str | None) -> Case:
    """The first test of ``HeteroConv``: weights for some convs, attributes for others, a relation without a conv."""
    convs = lambda _: HeteroConv(  # noqa: E731
        {
            CITES: GCNConv(-1, 5), WRITES: SAGEConv((-1, -1), 5),
            BY: GATConv((-1, -1), 5, edge_dim=3, add_self_loops=False),
        }, aggr,
    )  # fmt: skip

    def call(model: nn.Module, data: Any) -> Any:
        attr, weight = {BY: data[BY].edge_attr}, {CITES: data[CITES].edge_weight}
        return model(data.x_dict, data.edge_index_dict, attr, edge_weight_dict=weight)

    return graph(CITES, WRITES, BY, KNOWS), convs, call


class Narrow(SAGEConv):
    """Ones in another dtype than the other relations' results."""

    def forward(self, x: Any, edge_index: Any) -> Any:
        return (super().forward(x, edge_index) * 0 + 1).float()


def many_relations(aggr: str, conv: type[SAGEConv]) -> Case:
    """Five relations with the same targets: rows with and without a bias, and linear maps, or another dtype."""
    gat = lambda **options: GATConv((-1, -1), 5, add_self_loops=False, **options)  # noqa: E731
    made = {
        CITES: gat, WRITES: lambda: conv((-1, -1), 5), ("paper", "like", "paper"): lambda: GraphConv((-1, -1), 5),
        ("author", "reads", "paper"): lambda: gat(bias=False), ("paper", "copies", "paper"): gat,
    }  # fmt: skip
    return graph(*made), lambda _: HeteroConv({of: make() for of, make in made.items()}, aggr), by_relation


def typed(conv: Any, data: HeteroData, channels: Any = -1, **more: Any) -> Case:
    return data, lambda d: conv(channels, 8, more.get("metadata") or d.metadata(), heads=2), by_relation


def transformed(model: Callable[[], nn.Module], data: HeteroData, *inputs: str, aggr: str = "sum") -> Case:
    return (
        data, lambda d: to_hetero(model(), d.metadata(), aggr),
        lambda m, d: m(d.x_dict, *(getattr(d, name) for name in inputs)),
    )  # fmt: skip


def with_bases(
    model: Callable[[], nn.Module], data: HeteroData, *inputs: str, call: Any = None, **channels: int
) -> Case:
    return (
        data, lambda d: to_hetero_with_bases(model(), d.metadata(), 3, channels or None),
        call or (lambda m, d: m(d.x_dict, *(getattr(d, name) for name in inputs))),
    )  # fmt: skip


def users() -> Case:
    data = graph(CITES, BY)
    data["author"].index = torch.arange(SIZES["author"])
    pairs = torch.stack([torch.arange(30) % SIZES["author"], torch.arange(30) * 7 % SIZES["paper"]])
    return data, lambda _: UsersAndItems(), lambda model, d: model(d, pairs)


def metapaths() -> Case:
    data = graph(CITES, ("paper", "like", "paper"))
    order = torch.randperm(SIZES["paper"], generator=torch.Generator().manual_seed(0))
    return data, lambda _: MetaPaths(), lambda model, d: model(d["paper"].x, list(d.edge_index_dict.values()), order)


def sparse(case: Case) -> Case:
    data, make, _ = case
    metadata = copy.copy(data)
    for relation in data.edge_types:
        edge_index = data[relation].edge_index.unique(dim=1)
        del data[relation].edge_attr, data[relation].edge_weight
        data[relation].edge_index = edge_index
    weighted = ToSparseTensor(layout=torch.sparse_csr)(data)
    return weighted, lambda _: make(metadata), lambda model, d: model(d.x_dict, d.adj_t_dict)


def static() -> Case:
    data, make, _ = transformed(lambda: Twice("static"), graph(WRITES, BY, width=6), "edge_index_dict")

    def call(model: nn.Module, data: Any) -> Any:
        x = {kind: torch.stack([rows, rows * 2]) for kind, rows in data.x_dict.items()}
        return model(x, data.edge_index_dict)

    return data, make, call


def others() -> dict[str, Callable[[], Case]]:
    """By name."""
    more = (["paper", "author", "term"], [WRITES, ("term", "in", "author")])
    dotted = [("x.paper", "cites", "x.paper"), ("author", "writes", "x.paper"), ("x.paper", "by", "author")]
    sage = lambda r: SAGEConv((-1, -1), 5)  # noqa: E731
    wide, links = graph(CITES, WRITES, BY, width=6), "edge_index_dict"
    return {
        "GCN2 of two types": lambda: (
            graph(CITES, KNOWS), lambda _: HeteroConv({CITES: GCN2Conv(8, 0.1), KNOWS: GCN2Conv(6, 0.2)}),
            lambda m, d: m(d.x_dict, d.x_dict, d.edge_index_dict, edge_weight_dict={CITES: d[CITES].edge_weight}),
        ),
        "custom conv": lambda: (
            graph(CITES, WRITES, BY), lambda d: HeteroConv({r: OfEnds() for r in d.edge_types}),
            lambda m, d: m(d.x_dict, d.edge_index_dict, d.x_dict, z_dict=d.z_dict),
        ),
        "dots in names": lambda: (
            graph(*dotted), lambda d: HeteroConv({r: sage(r) for r in d.edge_types}), by_relation
        ),
        "HGT": lambda: typed(HGTConv, graph(CITES, WRITES, BY, HAS)),
        "HGT, a loss of one type": lambda: (
            graph(WRITES, BY, HAS, ("paper", "on", "term"), width=8),
            lambda d: nn.ModuleList(HGTConv(8, 8, d.metadata(), heads=2) for _ in range(2)),
            lambda m, d: m[1](m[0](d.x_dict, d.edge_index_dict), d.edge_index_dict)["author"],
        ),
        "HGT, equal widths": lambda: typed(HGTConv, graph(WRITES, BY, width=8), 8),
        "HGT, more types than there are": lambda: typed(HGTConv, graph(WRITES), metadata=more),
        "HGT, sparse": lambda: sparse(typed(HGTConv, graph(WRITES, BY))),
        "HAN": lambda: typed(HANConv, graph(CITES, WRITES, BY, HAS)),
        "HAN of relations within types": lambda: typed(
            HANConv, graph(CITES, ("paper", "like", "paper"), KNOWS), {"paper": 8, "author": 6}
        ),
        "HAN of a type without nodes": lambda: typed(HANConv, graph(WRITES, ("nobody", "writes", "paper"))),
        "to_hetero of a type without edges to it": lambda: transformed(
            lambda: GraphSAGE((-1, -1), 5, num_layers=1), graph(WRITES, ("author", "in", "term")), links
        ),
        "to_hetero, rows of nodes and of edges": lambda: transformed(Both, wide, "edge_attr_dict"),
        "to_hetero, attributes of edges": lambda: transformed(lambda: WithEdges("e"), wide, links, "edge_attr_dict"),
        "to_hetero, pooled": lambda: transformed(lambda: Pooled("p"), graph(WRITES, BY, width=6), links, "batch_dict"),
        "to_hetero of GCN": lambda: transformed(
            lambda: GCN(8, 5, num_layers=2), graph(CITES, ("paper", "like", "paper")), links
        ),
        "to_hetero of GraphSAGE": lambda: transformed(lambda: GraphSAGE((-1, -1), 5, num_layers=3), wide, links),
        "to_hetero of GAT": lambda: transformed(
            lambda: GAT((-1, -1), 6, num_layers=3, add_self_loops=False), wide, links
        ),
        "to_hetero, static": static,
        "bases": lambda: with_bases(lambda: Twice("b"), graph(CITES, WRITES, BY, KNOWS), links, x=6),
        "bases, attributes of edges": lambda: with_bases(lambda: WithEdges("e"), wide, links, "edge_attr_dict"),
        "bases, rows of edges returned": lambda: with_bases(OfBoth, wide, links, "edge_attr_dict", edge_attr=6),
        "bases, no edge_index": lambda: with_bases(Both, wide, "edge_attr_dict"),
        "bases of one relation": lambda: with_bases(lambda: Twice("b"), graph(CITES, width=6), links),
        "bases of relations within a type": lambda: with_bases(
            lambda: Twice("b"), graph(CITES, ("paper", "like", "paper"), width=6), links
        ),
        "bases, a type without nodes": lambda: with_bases(
            lambda: Twice("b"), graph(WRITES, BY, ("nobody", "writes", "paper"), width=6), links
        ),
        "bases, static": lambda: with_bases(lambda: Twice("static"), graph(WRITES, BY, width=6), call=static()[2]),
        "users and items": users,
        "meta-paths": metapaths,
        **{f"HeteroConv, {aggr}": lambda aggr=aggr: hetero_conv(aggr) for aggr in ("sum", "min", "cat", None)},
        **{
            f"HeteroConv of many, {aggr}, {conv.__name__}": lambda aggr=aggr, conv=conv: many_relations(aggr, conv)
            for aggr in ("sum", "mean")
            for conv in (SAGEConv, Narrow)
        },
        **{
            f"to_hetero, {aggr}": lambda aggr=aggr: transformed(lambda: Twice(aggr), wide, links, aggr=aggr)
            for aggr in ("mean", "max", "mul")
        },
    }  # fmt: skip


def flat(found: Any, name: str = "out") -> dict[str, Any]:
    """Outputs of any form by name; ``None`` of a type stays one."""
    if isinstance(found, dict):
        return {key: value for part, one in found.items() for key, value in flat(one, f"{name} {part}").items()}
    if isinstance(found, (list, tuple)):
        return {key: value for part, one in enumerate(found) for key, value in flat(one, f"{name} {part}").items()}
    return {name: found}


def compare(name: str, case: Case, num_ranks: int) -> None:
    """Outputs and gradients; the last rank owns nothing, and of three ranks the first one most."""
    graph, make, call = case
    rng = torch.Generator().manual_seed(0)
    owners = {
        kind: torch.randint(0, max(num_ranks - 1, 1), (graph[kind].num_nodes,), generator=rng)
        for kind in graph.node_types
    }
    data = DistributedData(copy.copy(graph), partition=owners)
    torch.manual_seed(1)
    stock = make(graph).double()
    with torch.no_grad():
        call(stock, graph)
    ours = distribute(copy.deepcopy(stock))

    def results(model: nn.Module, source: Any) -> Results:
        for kind in graph.node_types:
            source[kind].x = source[kind].x.detach().requires_grad_()
        outs = {key: out for key, out in flat(call(model, source)).items() if out is not None}
        sum(F.silu(out).square().sum() for out in outs.values()).backward()
        grads = {f"{key}.grad": p.grad for key, p in model.named_parameters() if p.grad is not None}
        rows = {f"x {kind}": source[kind].x.grad for kind in graph.node_types if source[kind].x.grad is not None}
        return outs | grads | rows

    assert_same(results(ours, data), of_first_rank(lambda: results(stock, graph)), name)


@on_ranks(1, 3)
def test_models_of_pyg(num_ranks: int) -> None:
    """One rank, from which nothing travels, runs every third case."""
    failed = {}
    for name, case in list(others().items())[:: 3 if num_ranks == 1 else 1]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                compare(name, case(), num_ranks)
        except Exception as error:  # all are told
            failed[name] = f"{type(error).__name__}: {error}"
    assert not failed, "\n".join(f"{name}: {why}" for name, why in failed.items())
