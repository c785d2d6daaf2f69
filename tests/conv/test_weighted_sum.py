"""Convs that sum weighted rows: by one product and the chosen exchange, on both layouts, as stock PyG has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from against_stock import Results, assert_same, gradients, meshes, of_first_rank
from random_graphs import random_graph, uneven_parts
from test_attention_memory import LargestPerEdge
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import scatter, softmax
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.conv.weighted_sum import SumForm, sum_form

F, G, NUM_NODES, NUM_EDGES = 6, 4, 47, 310

ON_THE_GRID: dict[str, Callable[[], nn.Module]] = {
    "TAGConv": lambda: gnn.TAGConv(F, G),
    "SGConv": lambda: gnn.SGConv(F, G, K=2),
    "SSGConv": lambda: gnn.SSGConv(F, G, alpha=0.1, K=2),
    "APPNP": lambda: gnn.APPNP(3, 0.1),
    "APPNP, one hop": lambda: gnn.APPNP(1, 0.3),
    "APPNP, no hop": lambda: gnn.APPNP(0, 0.3),
    "APPNP, alpha 1": lambda: gnn.APPNP(2, 1.0),
    "APPNP, without norm": lambda: gnn.APPNP(2, 0.1, normalize=False),
    "GCN2Conv": lambda: gnn.GCN2Conv(F, 0.1),
    "GCN2Conv, identity": lambda: gnn.GCN2Conv(F, 0.3, theta=0.5, layer=2),
    "GCN2Conv, two weights": lambda: gnn.GCN2Conv(F, 0.3, theta=0.5, layer=2, shared_weights=False),
    "GCN2Conv, cached": lambda: gnn.GCN2Conv(F, 0.3, cached=True),
    "GCN2Conv, alpha 1": lambda: gnn.GCN2Conv(F, 1.0),
    "GraphConv": lambda: gnn.GraphConv(F, G),
    "GraphConv, mean": lambda: gnn.GraphConv(F, G, aggr="mean"),
    "GatedGraphConv": lambda: gnn.GatedGraphConv(F, 2),
    "GINConv": lambda: gnn.GINConv(nn.Sequential(nn.Linear(F, G), nn.Tanh())),
    "GINConv, eps": lambda: gnn.GINConv(nn.Sequential(nn.Linear(F, G), nn.Tanh()), eps=0.3),
    "GINConv, learned eps": lambda: gnn.GINConv(nn.Sequential(nn.Linear(F, G), nn.Tanh()), train_eps=True),
    "LGConv": lambda: gnn.LGConv(),
    "MixHopConv": lambda: gnn.MixHopConv(F, G),
    "SimpleConv": lambda: gnn.SimpleConv(combine_root="sum"),
    "SimpleConv, loops": lambda: gnn.SimpleConv(combine_root="self_loop"),
    "ARMAConv": lambda: gnn.ARMAConv(F, G, num_stacks=2, num_layers=2),
    "PDNConv": lambda: gnn.PDNConv(F, G, 3, 5),
    "ChebConv": lambda: gnn.ChebConv(F, G, K=3),
    "ChebConv, rw": lambda: gnn.ChebConv(F, G, K=3, normalization="rw"),
    "ChebConv, none": lambda: gnn.ChebConv(F, G, K=2, normalization=None),
    "ClusterGCNConv": lambda: gnn.ClusterGCNConv(F, G, diag_lambda=0.3),
    "FAConv": lambda: gnn.FAConv(F),
    "FAConv, without loops": lambda: gnn.FAConv(F, add_self_loops=False),
    "FAConv, weighted": lambda: gnn.FAConv(F, normalize=False),
    "FAConv, mean": lambda: gnn.FAConv(F, aggr="mean"),
    "a script's": lambda: Tutorial(),
    "a script's, by its norm": lambda: Tutorial(looks=False),
    "a script's, softmax": lambda: Softmax(),
    "FAConv, max": lambda: gnn.FAConv(F, aggr="max"),
}
WHOLE_ROWS = ("a script's, softmax", "FAConv, max")
"""What needs them on the grid, for its weights or its aggregation; the last ones, since the graph keeps them."""
GCN2S = ("GCN2Conv", "GCN2Conv, identity", "GCN2Conv, two weights", "GCN2Conv, cached", "GCN2Conv, alpha 1")
GINS = ("GINConv", "GINConv, eps", "GINConv, learned eps")
UNWEIGHTED = (*GINS, "PDNConv", "ClusterGCNConv", "FAConv", "FAConv, without loops", "FAConv, mean", *WHOLE_ROWS)
ALWAYS_WEIGHTED = ("FAConv, weighted",)


def kinds(name: str) -> tuple[str, ...]:
    """Of edge weights, that a conv takes: none, and by turns constant ones, of a kept operator, or learning ones."""
    given = ("none", ("constant", "learn")[list(ON_THE_GRID).index(name) % 2])
    return given[:1] if name in UNWEIGHTED else ("constant", "learn") if name in ALWAYS_WEIGHTED else given


def step(data: Any, make: Callable[[], nn.Module], kind: str, is_ours: bool) -> Results:
    """One conv's output, loss and gradients, with edge weights of a kind."""
    torch.manual_seed(0)
    model = make().double()
    if is_ours:
        pyg_dist.distribute(model)
    leaves = {"x": data.x.detach().clone().requires_grad_()}
    x = leaves["x"]
    given = [x, x.tanh()] if isinstance(model, (gnn.GCN2Conv, gnn.FAConv)) else [x]
    weight = data.edge_weight
    if isinstance(model, gnn.PDNConv):
        kind, weight = "attributes", data.edge_attr
    if kind == "learn":
        weight = leaves["weight"] = data.edge_weight.detach().clone().requires_grad_()
    out = model(*given, data.edge_index, *([] if kind == "none" else [weight]))
    loss = (out.tanh() * (out.sigmoid() + 1)).square().mean() + 0.1 * out[data.train_mask].mean()
    loss.backward()
    return {"out": out, "loss": loss.detach(), **gradients(model, **leaves)}


def on_the_grid(shapes: list[dict[str, int]]) -> None:
    """Each conv on one of the meshes, with whole rows made last; every second one on one rank."""
    graph = random_graph(NUM_NODES, NUM_EDGES, F, seed=1)
    for k, mesh in enumerate(shapes):
        data = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh)
        for name, make in list(ON_THE_GRID.items())[k :: max(2, len(shapes))]:
            for kind in kinds(name):
                expected = of_first_rank(partial(step, graph, make, kind, False))
                assert_same(step(data, make, kind, True), expected, f"{name}, {mesh}, {kind}")
            assert ("edge_view" in vars(data.graph)) == (name in WHOLE_ROWS), f"{name} has not gone by tiles"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_grid(workers: Pools, num_ranks: int) -> None:
    workers(num_ranks).run(on_the_grid, meshes(num_ranks))


@pytest.mark.slow
def test_square_and_oblong_grids(workers: Pools) -> None:
    workers(4).run(on_the_grid, [{"x": 2, "y": 2}, {"x": 2, "z": 2}, {"z": 4}])


def bytes_of_norms() -> dict[str, list[int]]:
    """What each of three forward passes sends on the grid, by conv."""
    data = pyg_dist.DistributedData(random_graph(NUM_NODES, NUM_EDGES, F, seed=1), layout="grid", mesh={"x": 2})
    weight, found = data.edge_weight, {}
    convs = {
        "GraphConv": lambda: gnn.GraphConv(F, G),
        "ClusterGCNConv": lambda: gnn.ClusterGCNConv(F, G),
        "ChebConv": lambda: gnn.ChebConv(F, G, K=2),
        "FAConv": lambda: gnn.FAConv(F),
    }
    for name, make in convs.items():
        conv, x = pyg_dist.distribute(make()).double(), data.x.detach().clone()
        given = {"GraphConv": (x, data.edge_index, weight), "FAConv": (x, x, data.edge_index)}
        found[name] = []
        for _ in range(3):
            x.add_(0.0)  # or its aggregation is known
            before = data.traffic.num_bytes
            with torch.no_grad():
                conv(*given.get(name, (x, data.edge_index)))
            found[name].append(data.traffic.num_bytes - before)
    return found


def test_norms_are_kept(workers: Pools) -> None:
    """From the second pass on a conv sends what a conv with weights of its own sends; FAConv sends gates as well."""
    for found in workers(2).run(bytes_of_norms):
        assert found["ClusterGCNConv"][1:] == found["ChebConv"][1:] == found["GraphConv"][1:]
        assert all(first > second == third > 0 for first, second, third in found.values())


def rows_sent() -> dict[str, float]:
    """The aggregations of rows that a forward and backward pass sends, by conv."""
    graph = random_graph(NUM_NODES, NUM_EDGES, F, seed=1)
    data = pyg_dist.DistributedData(graph, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    sent = {}
    for number, name in enumerate(COLUMNS):
        make = ON_THE_GRID[name]
        for kind in ("none",) if name in UNWEIGHTED else ("none", "constant")[number % 2 :: 2]:
            for _ in range(2):  # the first one builds the operators
                before = data.traffic.num_bytes
                step(data, make, kind, True)
                sent[f"{name}, {kind}"] = (data.traffic.num_bytes - before) / 8 / data.plan.rows["hybrid"]
    return sent


COLUMNS = {
    "TAGConv": 3 * G, "SGConv": 2 * G, "SSGConv": 2 * G, "APPNP": 3 * F, "APPNP, one hop": F,
    **dict.fromkeys(GCN2S, F), "GraphConv": G,
    "GraphConv, mean": G, "GatedGraphConv": 2 * F, "LGConv": F, "MixHopConv": 2 * F, "SimpleConv": F,
    **dict.fromkeys(GINS, F), "ARMAConv": 2 * 2 * G, "ChebConv": 2 * F, "ClusterGCNConv": F,
}  # fmt: skip


def test_rows_sent_are_the_plans(workers: Pools) -> None:
    """Each hop sends the rows of the hybrid plan once forward and once backward, with constant weights and without."""
    ranks = workers(3).run(rows_sent)
    for name in ranks[0]:
        assert sum(sent[name] for sent in ranks) == pytest.approx(2 * COLUMNS[name.rsplit(", ", 1)[0]]), name


@on_ranks(1, 2)
def test_eps_may_change() -> None:
    """Set between calls by a script or a checkpoint; a constant x is summed once for each, not taken of another eps."""
    graph = random_graph(NUM_NODES, NUM_EDGES, F, seed=1)
    data = pyg_dist.DistributedData(graph, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    stock = gnn.GINConv(nn.Identity(), eps=0.25).double()
    ours = pyg_dist.distribute(gnn.GINConv(nn.Identity(), eps=0.25)).double()
    for eps, sends in ((None, True), (None, False), (0.4, True), (-1.0, False), (0.25, False)):
        if eps is not None:
            stock.eps.fill_(eps)
            ours.load_state_dict(stock.state_dict())
        before = data.traffic.num_bytes
        out = ours(data.x, data.edge_index)
        assert (data.traffic.num_bytes > before) == (sends and pyg_dist.world_size() > 1), f"eps = {eps}"
        assert_same({"out": out}, {"out": stock(graph.x, graph.edge_index)}, f"eps = {eps}")
    pairs = {"out": ours((data.x, data.x), data.edge_index)}, {"out": stock((graph.x, graph.x), graph.edge_index)}
    assert_same(*pairs)
    assert_same(
        {"out": ours((data.x, None), data.edge_index)}, {"out": stock((graph.x, None), graph.edge_index)}, "no root"
    )


class Tutorial(gnn.MessagePassing):
    """PyG's tutorial's GCN, which looks at the norm's edges and weights before it sums."""

    def __init__(self, looks: bool = True) -> None:
        super().__init__(aggr="add")
        self.looks = looks

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None) -> Tensor:
        edge_index, norm = gcn_norm(edge_index, edge_weight, x.size(0), dtype=x.dtype)
        if self.looks:
            row, col = edge_index
            norm = norm * (row != col) + 0.5 * norm.mean() * (row == col) + edge_index.size(1)
        return self.propagate(edge_index, x=x, norm=norm)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class Softmax(gnn.MessagePassing):
    """Weights that need all in-edges of a node, of the largest in-edge; then sums."""

    def __init__(self) -> None:
        super().__init__(aggr="add")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        source, target = edge_index
        difference = (x[source] - x[target]).square().mean(1)
        largest = scatter(difference, target, 0, x.size(0), "max")
        weight = softmax(difference - largest[target], target, num_nodes=x.size(0))
        return self.propagate(edge_index, x=x, weight=weight)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


class Halves(gnn.SimpleConv):
    def message(self, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return 0.5 * super().message(x_j, edge_weight)


class Unsqueezes(gnn.SimpleConv):
    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return x_j * edge_weight.unsqueeze(-1)


class LearnsAlpha(gnn.APPNP):
    """As a script may."""

    def __init__(self) -> None:
        super().__init__(2, 0.1)
        self.alpha = nn.Parameter(torch.tensor(0.2))


class Updates(gnn.SimpleConv):
    def update(self, inputs: Tensor) -> Tensor:
        return 2 * inputs


def test_messages_are_recognised() -> None:
    """By what they return, whatever the class; what looks at anything else keeps its steps."""
    plain, either = SumForm("x"), SumForm("x", "edge_weight", False, True)
    always = SumForm("x", "edge_weight", True, True)
    assert {sum_form(c) for c in (gnn.GINConv, gnn.SignedConv)} == {plain}
    optional = (gnn.TAGConv, gnn.APPNP, gnn.GCN2Conv, gnn.GraphConv, gnn.LGConv, gnn.MixHopConv, gnn.SimpleConv,
                gnn.GatedGraphConv, gnn.WLConvContinuous, gnn.LabelPropagation)  # fmt: skip
    assert {sum_form(c) for c in optional} == {either}
    assert {sum_form(c) for c in (gnn.SGConv, gnn.SSGConv, gnn.ARMAConv, gnn.ClusterGCNConv, gnn.PDNConv)} == {always}
    assert {sum_form(c) for c in (gnn.ChebConv, Tutorial)} == {SumForm("x", "norm", True, True)}
    assert sum_form(Unsqueezes) == SumForm("x", "edge_weight", True, False)
    others = (gnn.EdgeConv, gnn.FAConv, gnn.EGConv, gnn.LEConv, gnn.DNAConv, gnn.GENConv, gnn.FiLMConv,
              gnn.GINEConv, gnn.CGConv, gnn.TransformerConv, gnn.GMMConv, Halves, Updates)  # fmt: skip
    assert {sum_form(c) for c in others} == {None}


@on_ranks(2)
def test_other_convs() -> None:
    """Of a script; with a hook, whose messages it sees; with ``cached=True``, whose weights stay as they were."""
    graph = random_graph(NUM_NODES, NUM_EDGES, F, seed=1)
    data = pyg_dist.DistributedData(graph, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    for make in (Tutorial, lambda: Tutorial(looks=False), Halves, Unsqueezes, Updates, LearnsAlpha):
        for kind in ("constant", "learn"):
            assert_same(step(data, make, kind, True), step(graph, make, kind, False), f"{make} {kind}")
    columns = []
    found = []
    for given in (graph, data):
        conv = gnn.GraphConv(F, G).double()
        torch.manual_seed(0)
        conv.reset_parameters()
        if given is data:
            pyg_dist.distribute(conv)
        conv.register_message_forward_hook(lambda _, inputs, out: columns.append(out.shape[0]) or 2 * out)
        found.append({"out": conv(given.x, given.edge_index, given.edge_weight)})
    assert columns == [NUM_EDGES] * 2
    assert_same(found[1], found[0])
    stock, ours = gnn.APPNP(2, 0.1, cached=True), pyg_dist.distribute(gnn.APPNP(2, 0.1, cached=True))
    for _ in range(3):
        assert_same(
            {"out": ours(data.x, data.edge_index, data.edge_weight)},
            {"out": stock(graph.x, graph.edge_index, graph.edge_weight)},
        )
        data.edge_weight.mul_(2.0)
        graph.edge_weight.mul_(2.0)


def other_aggregations(**layout: Any) -> None:
    """Chosen by the constructor, or put in the place of the first one by a script, before and after the first call."""
    graph = random_graph(NUM_NODES, NUM_EDGES, F, seed=1)
    data = pyg_dist.DistributedData(graph, **layout)
    makes: dict[str, Callable[..., nn.Module]] = {
        "FAConv": lambda **aggr: gnn.FAConv(F, **aggr),
        "GINConv": lambda **aggr: gnn.GINConv(nn.Linear(F, G), **aggr),
        "GraphConv": lambda **aggr: gnn.GraphConv(F, G, **aggr),
        "SGConv": lambda **aggr: gnn.SGConv(F, G, **aggr),
        "APPNP": lambda **aggr: gnn.APPNP(2, 0.1, **aggr),
        "ClusterGCNConv": lambda **aggr: gnn.ClusterGCNConv(F, G, **aggr),
        "ARMAConv": lambda **aggr: gnn.ARMAConv(F, G, num_stacks=2, num_layers=2, act=nn.Tanh(), **aggr),
    }
    others = {"mean": gnn.MeanAggregation, "max": gnn.MaxAggregation, "std": gnn.StdAggregation}
    for name, make in makes.items():
        for aggr, module in others.items():
            found: list[Results] = []
            for given in (graph, data):
                torch.manual_seed(0)
                chosen, replaced = make(aggr=aggr).double(), make().double()
                if given is data:
                    pyg_dist.distribute(chosen), pyg_dist.distribute(replaced)
                x = given.x.detach().clone().requires_grad_()
                args = (x, x.tanh(), given.edge_index) if name == "FAConv" else (x, given.edge_index)
                outs = {"chosen": chosen(*args), "sums": replaced(*args)}
                replaced.aggr_module = module()
                outs["replaced"] = replaced(*args)
                sum(out.square().sum() for out in outs.values()).backward()
                found.append(outs | gradients(chosen, x=x))
            assert_same(found[1], found[0], f"{name}, {aggr}")


@pytest.mark.parametrize("world_size", [1, 2])
def test_other_aggregations(workers: Pools, world_size: int) -> None:
    workers(world_size).run(other_aggregations)


def test_other_aggregations_on_the_grid(workers: Pools) -> None:
    workers(2).run(other_aggregations, layout="grid", mesh={"x": 2})


@on_ranks(2)
def test_integer_weights() -> None:
    """Norms with roots refuse them, as PyG's do; sums take them."""
    graph = random_graph(NUM_NODES, NUM_EDGES, F, seed=1)
    graph.edge_weight = torch.arange(NUM_EDGES) % 4
    data = pyg_dist.DistributedData(graph, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    for make in (lambda: gnn.GCNConv(F, G), lambda: gnn.APPNP(2, 0.1), lambda: gnn.ChebConv(F, G, K=2)):
        with pytest.raises(RuntimeError, match="can't be cast"):
            make().double()(graph.x, graph.edge_index, graph.edge_weight)
        with pytest.raises(pyg_dist.errors.DataError, match="expected edge weights of floating type"):
            pyg_dist.distribute(make().double())(data.x, data.edge_index, data.edge_weight)
    for make in (lambda: gnn.GCNConv(F, G, normalize=False), lambda: gnn.GraphConv(F, G)):
        assert_same(step(data, make, "constant", True), step(graph, make, "constant", False))


def largest_per_edge(**layout: Any) -> dict[str, int]:
    """Of training steps, by conv, the most numbers an edge of a tensor; rows have 16 columns or more."""
    num_edges, width = 40_000, 16
    data = pyg_dist.DistributedData(random_graph(20, num_edges, width, seed=5), **layout)
    makes: dict[str, Callable[[], nn.Module]] = {
        "TAGConv": lambda: gnn.TAGConv(width, 16),
        "APPNP": lambda: gnn.APPNP(2, 0.1),
        "GINConv": lambda: gnn.GINConv(nn.Linear(width, 16)),
        "GraphConv": lambda: gnn.GraphConv(width, 16),
        "ChebConv": lambda: gnn.ChebConv(width, 16, K=2),
        "FAConv": lambda: gnn.FAConv(width),
        "FAConv, mean": lambda: gnn.FAConv(width, aggr="mean"),
    }
    found = {}
    for name, make in makes.items():
        for kind in kinds(name):
            with LargestPerEdge(num_edges // pyg_dist.world_size()) as seen:
                step(data, make, kind, True)
            found[f"{name}, {kind}"] = seen.largest
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_tensor_of_edges_and_columns_is_made(workers: Pools, world_size: int) -> None:
    """The ends of edges, and what orders them, have two numbers an edge."""
    for found in workers(world_size).run(largest_per_edge):
        assert max(found.values()) <= 4, found


def test_no_tensor_of_edges_and_columns_is_made_on_the_grid(workers: Pools) -> None:
    for found in workers(2).run(largest_per_edge, layout="grid", mesh={"x": 2}):
        assert max(found.values()) <= 4, found
