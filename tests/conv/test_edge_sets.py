"""Several edge sets over one graph's nodes: a script's own, reversed, selected and drawn ones."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from against_stock import (
    NUM_CLASSES,
    NUM_FEATURES,
    NUM_NODES,
    Results,
    Side,
    assert_same,
    compare,
    gradients,
    graph,
    of_first_rank,
    sides,
    whole,
)
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.utils import add_self_loops, dropout_edge, softmax, to_undirected
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import DistributedData, distribute
from pyg_dist.conv import inputs
from pyg_dist.errors import LayoutMismatchError, MixedRowsError

WORLD_SIZES = [1, 3]
SHAPE = NUM_FEATURES, NUM_CLASSES

OTHER = torch.randint(0, NUM_NODES, (2, 90), generator=torch.Generator().manual_seed(2))
DISTINCT = OTHER.unique(dim=1)
ROUND = torch.arange(310) % NUM_NODES
LONELY = torch.tensor([[5, 5, 5], [5, 8, 8]])
NO_EDGES = torch.empty(2, 0, dtype=torch.int64)


def products(x: Tensor, ends: Any) -> Tensor:
    """A weight for each edge that learns with the features."""
    return (x[ends[0]] * x[ends[1]]).sum(-1).sigmoid()


def matrix(values: Tensor) -> Tensor:
    """Edges of the script's own as ``[N, N]``, targets by sources."""
    return torch.sparse_coo_tensor(DISTINCT.flip(0), values, (NUM_NODES, NUM_NODES)).to_sparse_csr()


Edges = Callable[[Any, Tensor], tuple[Any, ...]]

EDGES: dict[str, Edges] = {  # the edges and weights that a script makes of its data and features
    "other": lambda d, x: (OTHER,),
    "three edges": lambda d, x: (LONELY,),
    "no edges": lambda d, x: (NO_EDGES,),
    "the same edges": lambda d, x: (d.edge_index if type(d.edge_index) is Tensor else d.edge_index.full_tensor(),),
    "int32": lambda d, x: (OTHER.long() if type(d.edge_index) is Tensor else OTHER.int(),),
    "reversed": lambda d, x: (d.edge_index.flip([0]),),
    "reversed by torch": lambda d, x: (torch.flip(input=d.edge_index, dims=(0,)),),
    "reversed by name": lambda d, x: (d.edge_index.flip(dims=[0]),),
    "reversed by a list": lambda d, x: (d.edge_index[[1, 0]],),
    "reversed by a list of rows": lambda d, x: (d.edge_index[[1, 0], :],),
    "reversed twice": lambda d, x: (d.edge_index.flip(0).flip(0),),
    "mask over edges": lambda d, x: (d.edge_index[:, d.edge_weight > 0.5],),
    "plain mask": lambda d, x: (d.edge_index[:, torch.arange(310) % 3 > 0],),
    "list": lambda d, x: (d.edge_index[:, torch.randperm(310)[:50]],),
    "slice": lambda d, x: (d.edge_index[..., 7:70],),
    "of ends": lambda d, x: (d.edge_index[:, d.edge_index[0] > d.edge_index[1]],),
    "none": lambda d, x: (d.edge_index[:, d.edge_weight > 5],),
    "stacked": lambda d, x: (torch.stack([d.edge_index[1], d.edge_index[0]], dim=0),),
    "undirected": lambda d, x: (to_undirected(d.edge_index),),
    "weights of stacked": lambda d, x: (torch.stack([d.edge_index[1], ROUND]), products(x, d.edge_index)),
    "selected twice": lambda d, x: (d.edge_index[:, d.edge_weight > 0.2][:, 10:100],),
    "selected and reversed": lambda d, x: (d.edge_index[:, d.edge_weight > 0.5].flip(0),),
    "dropout": lambda d, x: (dropout_edge(d.edge_index, 0.4)[0],),
    "dropout of pairs": lambda d, x: (dropout_edge(d.edge_index, 0.4, force_undirected=True)[0],),
    "self loops": lambda d, x: (add_self_loops(d.edge_index, num_nodes=NUM_NODES)[0],),
    "no dropout": lambda d, x: (dropout_edge(d.edge_index.clone(), 0.4, training=False)[0],),
    "sparse matrix": lambda d, x: (matrix(torch.ones(DISTINCT.shape[1]).to(x.dtype)),),
    "weights of a sparse matrix": lambda d, x: (matrix(torch.linspace(0.1, 1, DISTINCT.shape[1]).to(x.dtype)),),
    "weights of others": lambda d, x: (OTHER, torch.linspace(0.1, 1, 90).to(x.dtype)),
    "weights of the reversed": lambda d, x: (d.edge_index.flip(0), d.edge_weight),
    "weights of some": lambda d, x: (d.edge_index[:, d.edge_weight > 0.5], d.edge_weight[d.edge_weight > 0.5]),
    "learning weights": lambda d, x: (OTHER, products(x, OTHER)),
    "learning weights of all": lambda d, x: (d.edge_index, products(x, d.edge_index)),
    "learning weights of some": lambda d, x: (lambda some: (some, products(x, some)))(d.edge_index[:, 5:60]),
}

CONVS: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: gnn.SAGEConv(*SHAPE),
    "gcn": lambda: gnn.GCNConv(*SHAPE),
    "gcn without loops": lambda: gnn.GCNConv(*SHAPE, add_self_loops=False),
    "max": lambda: gnn.SAGEConv(*SHAPE, aggr="max"),
    "gat": lambda: gnn.GATConv(*SHAPE),
    "graph": lambda: gnn.GraphConv(*SHAPE),
}
WEIGHTED = ("gcn", "gcn without loops", "graph")


def script(edges: Edges, make: Callable[[], nn.Module]) -> Callable[[Side], Results]:
    """Two layers of one conv: over the edges and over the whole graph, forward and backward."""

    def run(side: Side) -> Results:
        conv = make().double()
        conv = conv if side.is_stock else distribute(conv)
        x = side.features()
        out = conv(x, *edges(side.data, x)) + conv(x, side.data.edge_index).tanh()
        loss = side.loss(out)
        loss.backward()
        return {"out": out, "loss": loss, **gradients(conv, x=x)}

    return run


def kinds_of(name: str, world_size: int) -> list[str]:
    """The edges that a conv is given: on several ranks SAGE takes all without weights and GCN all with them; else every
    fourth kind, and every second one with weights. How edges are laid out is no conv's.
    """
    number, plain = list(CONVS).index(name), [kind for kind in EDGES if "weights" not in kind]
    weighted = [kind for kind in EDGES if name in WEIGHTED and "weights" in kind]
    if name in ("sage", "gcn") and world_size > 1:
        return plain if name == "sage" else plain[1::4] + weighted
    return plain[number % 4 :: 4] + weighted[number % 2 :: 2]


def results(side: Side, name: str, kinds: Sequence[str]) -> dict[str, Results]:
    """Of a conv, by kind of edges; of the whole tensors, on every rank."""
    found = {}
    for kind in kinds:
        torch.manual_seed(1)
        found[kind] = whole(script(EDGES[kind], CONVS[name])(side))
    return found


def all_edges(name: str, expected: dict[str, Results]) -> None:
    found = results(sides()[1], name, list(expected))
    for kind in expected:
        assert_same(found[kind], expected[kind], kind)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", CONVS)
def test_edges(workers: Pools, name: str, world_size: int) -> None:
    stock = Side(graph(), gnn.SAGEConv, gnn.GCNConv, is_stock=True)
    workers(world_size).run(all_edges, name, results(stock, name, kinds_of(name, world_size)))


class TwoKinds(gnn.MessagePassing):
    """Reads one node tensor over two edge sets in one call."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.lin = nn.Linear(2 * NUM_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, far_edge_index: Tensor | None = None) -> Tensor:
        both = [self.propagate(edges, x=x) for edges in (edge_index, far_edge_index) if edges is not None]
        return self.lin(torch.cat(both + both[: 2 - len(both)], dim=-1))  # type: ignore[no-any-return]

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()


class OwnName(TwoKinds):
    """No name says that ``far`` has edges, too."""

    def forward(self, x: Tensor, edge_index: Tensor, far: Tensor | None = None) -> Tensor:
        return super().forward(x, edge_index, far)


@on_ranks(1, 3)
def test_models() -> None:
    """PyG's modules that take two edge sets, or turn one around."""
    for make in (
        lambda: gnn.DirGNNConv(gnn.SAGEConv(*SHAPE)),
        lambda: gnn.DirGNNConv(gnn.GATConv(*SHAPE)),
        lambda: gnn.SAGEConv(*SHAPE, flow="target_to_source"),
        lambda: gnn.GCNConv(*SHAPE, flow="target_to_source"),
        TwoKinds,
    ):
        compare(script(lambda d, x: (OTHER,), make))
    compare(script(lambda d, x: (d.edge_index, OTHER), TwoKinds))
    compare(script(lambda d, x: (d.edge_index, d.edge_index.flip([0])), OwnName))
    stock, ours = sides()
    found = []
    for side in (stock, ours):
        from pyg_dist import distribute

        torch.manual_seed(3)
        model = nn.ModuleList([gnn.SignedConv(*SHAPE, True), gnn.SignedConv(NUM_CLASSES, 3, False)]).double()
        first, second = model if side.is_stock else distribute(model)
        x = side.features()
        out = second(first(x, side.data.edge_index, OTHER).tanh(), side.data.edge_index, OTHER)
        side.loss(out).backward()
        found.append({"out": out, **gradients(model, x=x)})
    assert_same(found[1], found[0])


def on_the_grid(mesh: dict[str, int]) -> None:
    data = graph()
    tiles = DistributedData(data, layout="grid", mesh=mesh)
    for name in ("sage", "gcn"):
        for number, (kind, edges) in enumerate(EDGES.items()):
            if "weights of all" in kind or kind == "learning weights of some" or (name == "sage" and "weights" in kind):
                continue  # a row for each edge is the halo layout's
            if number % 2 == (name == "gcn") and "weights" not in kind:
                continue  # the edges are laid out alike for both

            def run(given: Any, is_ours: bool, name: str = name, edges: Edges = edges) -> Results:
                torch.manual_seed(1)
                conv = CONVS[name]().double()
                conv = distribute(conv) if is_ours else conv
                x = given.x.detach().clone().requires_grad_()
                out = conv(x, *edges(given, x)) + conv(x, given.edge_index).tanh()
                out.sin().sum().backward()
                return {"out": out.detach(), **gradients(conv, x=x)}

            expected = of_first_rank(functools.partial(run, data, False))
            assert_same(run(tiles, True), expected, f"{name}, {kind}")


@pytest.mark.parametrize("mesh", [{}, pytest.param({"x": 2}, marks=pytest.mark.slow), {"x": 2, "y": 2}], ids=str)
def test_grid(workers: Pools, mesh: dict[str, int]) -> None:
    workers(max(1, 2 * len(mesh))).run(on_the_grid, mesh)


@on_ranks(1, 2)
def test_weights_of_drawn_edges() -> None:
    """What is derived from weights goes with them."""
    _, ours = sides()
    conv = ours.GCNConv(*SHAPE).double()
    before = len(inputs._DERIVED)
    for _ in range(3):
        drawn, chosen = dropout_edge(ours.data.edge_index, 0.5)
        weight = ours.data.edge_weight[chosen]
        conv(ours.features(), drawn, weight)
        assert len(inputs._DERIVED) == before + 1
        del drawn, chosen, weight
    gc.collect()
    assert len(inputs._DERIVED) == before


@on_ranks(1, 2)
def test_autoencoder() -> None:
    """PyG's test of an autoencoder scores all edges and some pairs, one after another."""
    found = [gnn.GAE(nn.Identity()).test(side.data.x, side.data.edge_index, OTHER) for side in sides()]
    assert found[0] == pytest.approx(found[1], abs=1e-4)  # of equal scores some may differ by rounding


@on_ranks(1, 2)
def test_isolated_nodes() -> None:
    """Nodes that have lost their edges."""
    stock, ours = sides()
    for side in (stock, ours):
        side.data.edge_index = side.data.edge_index[:, side.data.edge_index[0] != 0]
        side.data.edge_index = side.data.edge_index[:, side.data.edge_index[1] != 0]
    for data in (stock.data, ours.data):
        for name in ("edge_weight", "edge_attr"):
            data.pop(name, None)
    assert stock.data.has_isolated_nodes()
    assert ours.data.has_isolated_nodes()


class BySource(gnn.MessagePassing):
    """Shares of each source, whose edges another order has."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        share = softmax(x[edge_index[1]].sum(1), edge_index[0], num_nodes=x.size(0))
        return self.propagate(edge_index, x=x, share=share)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, share: Tensor) -> Tensor:
        return share.view(-1, 1) * x_j


@on_ranks(1, 2)
def test_drawn_edges() -> None:
    """They go with their handle, without the help of the garbage collector, which comes late."""
    _, ours = sides()
    convs = [
        ours.SAGEConv(*SHAPE),
        ours.GCNConv(*SHAPE),
        distribute(gnn.GATConv(*SHAPE)),
        distribute(CONVS["max"]()),
        distribute(BySource()),
    ]
    gc.collect()
    gc.disable()
    try:
        for conv in convs:
            drawn = dropout_edge(ours.data.edge_index, 0.5)[0]
            conv.double()(ours.features(), drawn).sum().backward()
            graph = weakref.ref(drawn.graph)
            del drawn
            assert graph() is None, type(conv).__name__
    finally:
        gc.enable()


@on_ranks(1, 2)
def test_what_is_kept() -> None:
    """A conv knows edges again by their values; of edges that change the latest are kept."""
    _, ours = sides()
    conv = ours.SAGEConv(*SHAPE).double()
    kept = ours.data.x._sharding.edge_sets
    for _ in range(3):
        conv(ours.data.x, OTHER.clone())
    assert len(kept) == 1
    (laid_out,) = kept.values()
    assert laid_out.graph.node_sharding is ours.data.graph.node_sharding
    for k in range(6):
        conv(ours.data.x, OTHER[:, k:])
        conv(ours.data.x, OTHER)
    assert len(kept) == 6
    for k in range(6, 12):
        conv(ours.data.x, OTHER[:, k:])
        conv(ours.data.x, OTHER)
    assert len(kept) == 8
    assert any(edges is laid_out for edges in kept.values())
    nodes, x = weakref.ref(ours.data.x._sharding), ours.data.x
    edges = ours.data.edge_index.flip(0)
    ours.data.clear()
    del edges, laid_out, kept, ours
    assert conv(x, OTHER).shape == (NUM_NODES, NUM_CLASSES), "the nodes are all that it takes"
    del x
    gc.collect()
    assert nodes() is None


def ends() -> None:
    stock, ours = sides()
    edge_index, x = ours.data.edge_index, ours.data.x
    row, col = edge_index
    assert torch.equal(torch.stack([row.full_tensor(), col.full_tensor()]), stock.data.edge_index)
    assert torch.equal(edge_index[-1].full_tensor(), stock.data.edge_index[1])
    assert torch.equal(edge_index[0, ours.data.edge_weight > 0.5].full_tensor(), stock.data.edge_index[0][
        stock.data.edge_weight > 0.5
    ])  # fmt: skip
    assert torch.equal((x[row] - x[col]).full_tensor(), stock.data.x[stock.data.edge_index[0]] - stock.data.x[
        stock.data.edge_index[1]
    ])  # fmt: skip
    some = edge_index[:, 3:9]
    assert some.shape == (2, 6)
    assert torch.equal(some.full_tensor(), stock.data.edge_index[:, 3:9])
    assert torch.equal(edge_index.flip(0).full_tensor(), stock.data.edge_index.flip(0))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ends(workers: Pools, world_size: int) -> None:
    workers(world_size).run(ends)


@on_ranks(1, 3)
def test_changes() -> None:
    """What follows a change of the data's edges, of the device, of the ends, and of what a conv has cached."""
    stock, ours = sides()
    data, conv = ours.data, ours.SAGEConv(*SHAPE).double()
    data.reversed_edge_index = data.edge_index.flip(0)
    expected = conv(data.x, data.reversed_edge_index).full_tensor()
    data.to("cpu:0")
    assert data.reversed_edge_index.shape == (2, 310)
    assert torch.equal(conv(data.x, data.reversed_edge_index).full_tensor(), expected)
    cached = ours.GCNConv(*SHAPE, cached=True).double()
    first = cached(data.x, OTHER).full_tensor()
    for k in range(1, 12):
        conv(data.x, OTHER[:, k:])
    assert torch.equal(cached(data.x, OTHER.clone()).full_tensor(), first)
    for side in (stock, ours):
        kept = side.data.edge_weight > 0.5
        side.data.edge_index = side.data.edge_index[:, kept]
        side.data.edge_weight, side.data.edge_attr = side.data.edge_weight[kept], side.data.edge_attr[kept]
    assert (data.num_edges, data.has_self_loops()) == (stock.data.num_edges, stock.data.has_self_loops())
    assert torch.equal(data.edge_index.full_tensor(), stock.data.edge_index)
    other = pyg_dist.DistributedData(stock.data)
    with pytest.raises(LayoutMismatchError, match="over the nodes of this data"):
        data.edge_index = other.edge_index
    ends = data.edge_index[0]
    ends.clamp_(max=3)
    with pytest.raises(MixedRowsError, match="was changed in place"):
        data.x[ends]
    if pyg_dist.world_size() > 1:
        torch.manual_seed(pyg_dist.rank())
        with pytest.raises(pyg_dist.errors.AgreementError, match="the same mask of edges"):
            dropout_edge(other.edge_index, 0.5)


@on_ranks(1, 3)
def test_negative_degrees() -> None:
    """A node whose degree has no root, and which is no source of the selected edges, has a gradient of zero."""
    stock, ours = sides()
    found = []
    for side in (stock, ours):
        for learns in (False, True):
            source, target = side.data.edge_index
            weight = side.data.edge_weight.abs() + 0.1
            weight = torch.where(target == 0, -weight, weight).detach().requires_grad_(learns)
            chosen = source != 0
            torch.manual_seed(4)
            x, conv = side.features(), side.GCNConv(*SHAPE, add_self_loops=False).double()
            out = conv(x, side.data.edge_index[:, chosen], weight[chosen])
            out[torch.arange(1, NUM_NODES)].square().sum().backward()
            found.append(x.grad if side.is_stock else x.grad.full_tensor())
    for expected, got in zip(found[:2], found[2:], strict=True):
        assert expected[0].isfinite().all()
        assert expected.isnan().any(), "of what has an edge to it"
        assert torch.allclose(got, expected, atol=1e-10, rtol=0, equal_nan=True)
