"""Graphs between two sets of nodes, on the halo layout: what a graph promises, and PyG's convs on pairs.

The sources are the nodes of one ``DistributedData``, the targets those of another one. Both have parts of their own,
which leave a rank without nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import Results, assert_same, of_first_rank
from bits import assert_same_bits
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric.nn import (
    EdgeConv,
    FiLMConv,
    GATConv,
    GATv2Conv,
    GENConv,
    GeneralConv,
    GINConv,
    GINEConv,
    GraphConv,
    MessagePassing,
    MFConv,
    NNConv,
    SAGEConv,
    TransformerConv,
)
from torch_geometric.utils import scatter, softmax
from workers import on_ranks

from pyg_dist import DistributedData
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.session.settings import MESSAGE_MIB
from pyg_dist.conv import DistributedConv, DistributedSAGEConv, message_blocks
from pyg_dist.errors import PygDistError, UnsupportedError
from pyg_dist.graph.adjacency import DistributedAdjacency
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import Norm, have_same_edges

M, N, E, F = 19, 13, 90, 4
EXCHANGES = ("hybrid", "post", "pre")


class Case:
    """Plain rows and edges, and the same distributed."""

    def __init__(self, num_ranks: int, exchange: Any = "hybrid", num_edges: int = E, bits: int = 32) -> None:
        sources, targets = random_graph(M, 50, F, seed=1), random_graph(N, 50, F, seed=2)
        options = {"exchange": exchange, "bits": bits}
        rows = [
            DistributedData(graph, partition=uneven_parts(graph.num_nodes, num_ranks, seed), **options)
            for seed, graph in enumerate((sources, targets))
        ]
        rng = torch.Generator().manual_seed(3)
        ends = [torch.randint(0, size - 2, (num_edges,), generator=rng) for size in (M, N)]  # two have no edge
        self.edge_index = torch.stack(ends)
        self.edge_index[0, : num_edges // 4] = 0
        self.weight = torch.rand(num_edges, generator=rng, dtype=torch.float64) + 0.1
        self.attr = torch.randn(num_edges, 3, generator=rng, dtype=torch.float64)
        self.x, self.data, self.exchange = (sources.x, targets.x), rows, exchange
        nodes = [data.graph.node_sharding for data in rows]
        self.handle: Any = DistributedEdgeIndex.over(self.edge_index, nodes[1], rows[0].graph.device, sources=nodes[0])
        self.rows = [data.x for data in rows]

    @property
    def graph(self) -> Any:
        return self.handle.graph

    def dense(self, norm: Norm = Norm.SUM, weight: Tensor | None = None) -> Tensor:
        weight = torch.ones(self.edge_index.shape[1], dtype=torch.float64) if weight is None else weight
        source, target = self.edge_index
        matrix = torch.zeros(N, M, dtype=torch.float64).index_put((target, source), weight, accumulate=True)
        if norm.kind == "mean":
            matrix = matrix / torch.bincount(target, minlength=N).clamp(min=1).view(-1, 1)
        return matrix


def leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_()


def ends(case: Case) -> None:
    """Each end has its own nodes; what knows one set refuses."""
    graph = case.graph
    assert (graph.sources.size, graph.targets.size) == (M, N)
    assert (graph.num_sources, graph.num_local) == tuple(x.to_local().shape[0] for x in case.rows)
    for end in (0, 1):
        assert [graph.owns(x, end) for x in case.rows] == [end == 0, end == 1]
    source, target = graph.ends()
    mine = graph.edge_sharding.global_id
    assert_same_bits(
        torch.stack([graph.neighbour_id[source], graph.targets.global_id[target]]), case.edge_index[:, mine]
    )
    assert_same_bits(graph.full_edge_index(), case.edge_index)
    assert_same_bits(case.handle.reversed.full_tensor(), case.edge_index.flip(0))
    assert (case.handle.reversed.graph.sources.size, case.handle.reversed.graph.targets.size) == (N, M)
    again = type(case.handle).over(case.edge_index, graph.targets, graph.device, sources=graph.sources)
    assert again is case.handle
    assert not have_same_edges(graph, case.handle.reversed.graph)
    for refused in (
        lambda: graph.node_sharding, graph.prepare_subgraphs,
        lambda: graph.operator(Norm.gcn(True), None, torch.float64), lambda: graph.edges().with_loops,
        lambda: graph.edges().without_loops, lambda: graph.edges().loops,
    ):  # fmt: skip
        with pytest.raises(UnsupportedError, match="Expected edges within one set of nodes"):
            refused()


def products(case: Case) -> None:
    """Values, and gradients by x and by weights that learn."""
    graph, rows = case.graph, case.graph.edge_sharding
    for norm in (Norm.SUM, Norm.MEAN):
        for kind in ("none", "constant", "learns"):
            found = []
            for is_ours in (True, False):
                x = leaf((case.rows if is_ours else case.x)[0])
                weight: Any = None if kind == "none" else case.weight.clone().requires_grad_(kind == "learns")
                if is_ours:
                    from pyg_dist.tensor import EdgeTensor

                    of_edges = None if weight is None else EdgeTensor.from_local(rows.slice(weight), rows)
                    out = graph.aggregate(graph.place(x), graph.operator(norm, of_edges, torch.float64))
                else:
                    out = case.dense(norm, weight) @ x
                out.square().sum().backward()
                found.append({"out": out, "x": x.grad} | ({"weight": weight.grad} if kind == "learns" else {}))
            assert_same(*found, f"{norm} weights {kind}")
    x = case.rows[0]
    for _ in range(2):  # the second time it is remembered
        assert_same({"out": DistributedAdjacency(case.graph) @ x}, {"out": case.dense() @ case.x[0]})
    some = case.handle[:, case.weight > 0.5]
    kept = case.edge_index[:, case.weight > 0.5]
    assert_same_bits(some.full_tensor(), kept)
    assert_same({"out": DistributedAdjacency(some.graph) @ x}, {"out": scatter(case.x[0][kept[0]], kept[1], 0, N)})


def single_edges(case: Case) -> None:
    """Rows at both ends, and sums and softmax of edges' values by both."""
    edges, (source, target) = case.handle.edges(), case.edge_index
    for end, ids in enumerate((source, target)):
        ours, stock = leaf(case.rows[end]), leaf(case.x[end])
        fetched, expected = ours[edges.end(end)], stock[ids]
        assert_same_bits(fetched.full_tensor(), expected.detach())
        for out in (fetched, expected):
            out.square().sum().backward()
        assert_same({"slope": ours.grad}, {"slope": stock.grad})
        with pytest.raises(PygDistError, match="take both from one data"):
            case.rows[1 - end][edges.end(end)]
        values = leaf(case.attr)
        sums = edges.reduce(edges.rows.slice(values), end, "sum")
        nodes = (case.graph.sources, case.graph.targets)[end]
        out = nodes.gather(sums)
        (slope,) = torch.autograd.grad(out.square().sum(), values)
        stock = leaf(case.attr)
        expected = scatter(stock, ids, 0, (M, N)[end])
        assert_same({"out": out, "slope": slope}, {
            "out": expected, "slope": torch.autograd.grad(expected.square().sum(), stock)[0]
        })  # fmt: skip
    weights = edges.rows.gather(edges.softmax_by_target(edges.rows.slice(case.attr)))
    assert_same({"softmax": weights}, {"softmax": softmax(case.attr, target, num_nodes=N)})


def attention(case: Case) -> None:
    """Softmax by target, and the sums that it weighs; weights of edges, too."""
    graph, (source, target) = case.graph, case.edge_index
    found: list[dict[str, Tensor]] = []
    for is_ours in (True, False):
        value, query, attr = leaf(case.x[0]), leaf(case.x[1]), leaf(case.attr[:, :2])
        if is_ours:
            local, at_targets = graph.sources.slice(value), graph.targets.slice(query)
            edges = case.handle.edges()
            inputs = AttentionInputs(local, local.sin(), at_targets, edges.rows.slice(attr), at_targets.cos())
            out, of_edges, alpha = graph.attend(edges, inputs, AttentionSpec("dot", 2, scale=0.5), has_weights=True)
            out, of_edges, alpha = graph.targets.gather(out), graph.targets.gather(of_edges), edges.rows.gather(alpha)
        else:
            v, k, q, w = (x.view(-1, 2, 2) for x in (value, value.sin(), query, query.cos()))
            f = attr.unsqueeze(1)
            alpha = softmax(0.5 * ((k[source] * q[target]).sum(2) + (w[target] * f).sum(2)), target, num_nodes=N)
            out, of_edges = (scatter(alpha.unsqueeze(2) * x, target, 0, N).flatten(1) for x in (v[source], f))
        loss = out.square().sum() + out.sum() + of_edges.square().sum()
        slopes = torch.autograd.grad(loss, (value, query, attr))
        found.append(
            {"out": out, "of edges": of_edges, "alpha": alpha} | {f"slope {k}": s for k, s in enumerate(slopes)}
        )
    assert_same(*found)


class Custom(MessagePassing):
    """A script's own, which takes ``size`` and both ends' rows and numbers."""

    def __init__(self, channels: int) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(2 * channels, 5)

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        return self.propagate(edge_index, x=x, size=size)  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j - x_i], dim=-1)).tanh()  # type: ignore[no-any-return]


def mlp(channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(channels, 5), nn.Tanh(), nn.Linear(5, F))


Convs = dict[str, tuple[Callable[[], Any], tuple[str, ...]]]
CONVS: Convs = {
    "sage mean": (lambda: SAGEConv((F, F), 6), ()),
    "sage narrow": (lambda: SAGEConv((F, F), 2), ()),
    "sage max": (lambda: SAGEConv((F, F), 6, aggr="max"), ()),
    "sage median": (lambda: SAGEConv((F, F), 6, aggr="median"), ()),
    "sage lazy, projected": (lambda: SAGEConv((F, -1), 6, project=True, normalize=True), ()),
    "graph": (lambda: GraphConv((F, F), 6), ("edge_weight",)),
    "graph mean": (lambda: GraphConv((F, F), 6, aggr="mean"), ()),
    "gat": (lambda: GATConv((F, F), 3, heads=2, add_self_loops=False), ()),
    "gat attr": (lambda: GATConv((F, F), 3, heads=2, edge_dim=3, residual=True, add_self_loops=False), ("edge_attr",)),
    "gatv2": (lambda: GATv2Conv((F, F), 3, heads=2, edge_dim=3, add_self_loops=False), ("edge_attr",)),
    "film": (lambda: FiLMConv((F, F), 3), ()),
    "mf": (lambda: MFConv((F, F), 3, max_degree=4), ()),
    "transformer": (lambda: TransformerConv((F, F), 3, heads=2, edge_dim=3, beta=True), ("edge_attr",)),
    "gin": (lambda: GINConv(mlp(F), train_eps=True), ()),
    "gine": (lambda: GINEConv(mlp(F), edge_dim=3), ("edge_attr",)),
    "general": (lambda: GeneralConv((F, F), 6, attention=True, heads=2), ()),
    "general dot": (lambda: GeneralConv((F, F), 6, 3, attention=True, attention_type="dot_product"), ("edge_attr",)),
    "edge": (lambda: EdgeConv(nn.Linear(2 * F, 5)), ()),
    "nn": (lambda: NNConv((F, F), 5, nn.Linear(3, F * 5)), ("edge_attr",)),
    "gen": (lambda: GENConv((F, F), 5, edge_dim=3), ("edge_attr",)),
    "custom": (lambda: Custom(F), ()),
    "custom size": (lambda: Custom(F), ("size",)),
}  # fmt: skip
SUMS = ("sage mean", "sage narrow", "graph", "graph mean", "gin")


def run_conv(case: Case, name: str) -> None:
    make, arguments = CONVS[name]
    torch.manual_seed(4)
    stock = make().double()
    given: dict[str, Any] = {"edge_weight": case.weight, "edge_attr": case.attr, "size": (M, N)}
    with torch.no_grad():  # lazy parameters are made
        stock(case.x, case.edge_index, **{name: given[name] for name in arguments})
    ours = DistributedConv(copy.deepcopy(stock))

    def results(conv: Any, rows: Any, edge_index: Any) -> Results:
        x = tuple(map(leaf, rows))
        extra = {n: v.clone().requires_grad_() if isinstance(v := given[n], Tensor) else v for n in arguments}
        out = conv(x, edge_index, **extra)
        (out.square().sum() + out.sum()).backward()
        found = {"out": out, "x_src": x[0].grad, "x_dst": x[1].grad}
        found |= {f"{n}.grad": v.grad for n, v in extra.items() if isinstance(v, Tensor)}
        return found | {f"{n}.grad": p.grad for n, p in conv.named_parameters()}

    expected = of_first_rank(lambda: results(stock, case.x, case.edge_index))
    assert_same(results(ours, case.rows, case.handle), expected, name)
    plain = ours(tuple(case.rows), case.edge_index, **{n: given[n] for n in arguments})  # laid out over the pair
    assert_same({"out": plain}, {"out": expected["out"]}, f"{name}, plain edges")


def convs(case: Case) -> None:
    """PyG's convs on pairs: values, and gradients of both ends' rows, of edges and of parameters.

    Sums go by each exchange; what needs rows of sources sends them by one plan, so each of these convs takes a turn.
    """
    for number, name in enumerate(CONVS):
        if name in SUMS or EXCHANGES[number % 3] == case.exchange:
            run_conv(case, name)


def by_blocks(case: Case) -> None:
    """The same of messages by blocks of few edges."""
    from unittest.mock import patch

    limit = patch.object(type(MESSAGE_MIB), "value", lambda self: 1e-9)
    estimate = patch.object(message_blocks, "_MAX_MESSAGE_BYTES", 1e18)
    with limit, estimate:
        for name, exchange in zip(("edge", "custom", "gine"), EXCHANGES, strict=True):
            if exchange == case.exchange:
                run_conv(case, name)


def refusals(case: Case) -> None:
    """One line each: a single tensor, ends the other way round, other sizes, self loops."""
    x, edge_index = case.rows, case.handle
    gat, custom = DistributedConv(GATConv((F, F), 2).double()), DistributedConv(Custom(F).double())
    sage = DistributedSAGEConv(F, 2).double()
    for call, message in (
        (lambda: sage(x[0], edge_index), "expected a row for each of the 13 targets of the edges"),
        (lambda: sage((x[1], x[0]), edge_index), "expected a row for each of the 19 sources of the edges"),
        (lambda: sage((x[0], x[1]), edge_index, (M, M)), "expected all 19 sources and all 13 targets"),
        (lambda: custom((x[0], x[1]), edge_index, (N, N)), "expected all 19 sources and all 13 targets"),
        (lambda: gat((x[0], x[1]), edge_index), "add_self_loops=False"),
        (lambda: custom(x[0], edge_index), "expected a row for each of the 13 targets"),
    ):
        with pytest.raises(PygDistError, match=message):
            call()


CHECKS = [ends, products, single_edges, attention, convs, by_blocks, refusals]


@on_ranks(1, 3, pytest.param(4, marks=pytest.mark.slow))
def test_bipartite(num_ranks: int) -> None:
    for exchange in EXCHANGES:
        case = Case(num_ranks, exchange)
        for check in CHECKS if exchange == EXCHANGES[0] else (products, convs):
            check(case)
    for check in (products, attention):
        check(Case(num_ranks, num_edges=0))


@on_ranks(3)
def test_few_bits() -> None:
    """Rounded messages stay near the exact ones, and are exact in evaluation."""
    torch.manual_seed(5)
    exact, rounded = Case(3), Case(3, bits=8)
    conv = DistributedSAGEConv((F, F), 32).double()
    outs = [conv(tuple(map(leaf, case.rows)), case.handle).full_tensor() for case in (exact, rounded)]
    error = (outs[0] - outs[1]).abs().max()
    assert 0 < error < 0.1
    conv.eval()
    assert_same({"out": conv(tuple(rounded.rows), rounded.handle)}, {"out": outs[0]})


@on_ranks(2)
def test_the_grid_refuses() -> None:
    nodes = [DistributedData(random_graph(size, 40), layout="grid", mesh={"x": 2}).graph.targets for size in (M, N)]
    with pytest.raises(UnsupportedError, match="Expected edges within one set of nodes"):
        DistributedEdgeIndex.over(torch.zeros(2, 3).long(), nodes[1], torch.device("cpu"), sources=nodes[0])
