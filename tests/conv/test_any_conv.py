"""Every conv of PyG, stock and through ``distribute``: outputs, losses and every gradient, or a refusal by name."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch_geometric
from against_stock import Results, assert_same, gradients
from convs_of_graphs import Layers, Packs, PacksBeside, TakesAll, TakesBoth, as_graph, of_containers, parts_of
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.utils import add_remaining_self_loops, degree, scatter, softmax
from workers import Pools, on_ranks

import pyg_dist

F, G, NUM_NODES, NUM_EDGES = 6, 4, 47, 310


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    inputs: str = "XE"  # what it is given, by letter: see `arguments`


def mlp(in_channels: int, out_channels: int) -> nn.Module:
    """With batch norm: statistics over all nodes, or all edges, that it is applied to."""
    parts = (nn.Linear(in_channels, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, out_channels))
    return nn.Sequential(*parts)


def degrees() -> Tensor:
    return torch.bincount(torch.bincount(graph().edge_index[1]))


class Scripts(gnn.MessagePassing):
    """As a script may write one: helper functions, messages with an attention of its own, an update, two ends."""

    def __init__(self) -> None:
        super().__init__(aggr=["sum", "max"], node_dim=0)
        self.lin = nn.Linear(F, G)
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Tensor) -> Tensor:
        edge_index, edge_weight = add_remaining_self_loops(edge_index, edge_weight, 0.5, x.size(0))
        source, target = edge_index
        out_degree = scatter(edge_weight, source, dim=0, dim_size=x.size(0), reduce="sum")
        x = torch.cat([x, out_degree.view(-1, 1)], dim=-1)[:, :F]
        difference = (x[target] - x.index_select(0, source)).norm(dim=-1)
        return self.propagate(edge_index, x=x, weight=edge_weight + difference)

    def message(self, x_j: Tensor, weight: Tensor, index: Tensor, size_i: int) -> Tensor:
        attention = softmax(weight * self.temperature, index, num_nodes=size_i)
        return attention.view(-1, 1) * self.lin(x_j) / len(weight) ** 0.5

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return torch.cat([inputs, x], dim=-1)


class OwnNames(gnn.MessagePassing):
    """Arguments by names of its own, weights of edges made by ``edge_update``: edges go where their targets are."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.relation = nn.Linear(F, G), nn.Linear(3, G)

    def forward(self, features: Tensor, links: Tensor, relations: Tensor) -> Tensor:
        # edge_updater_type: (x: Tensor, relations: Tensor)
        alpha = self.edge_updater(links, x=self.lin(features), relations=relations)
        return self.propagate(links, x=features, alpha=alpha, relations=relations)

    def edge_update(self, x_i: Tensor, x_j: Tensor, relations: Tensor, index: Tensor, size_i: int) -> Tensor:
        return softmax((x_i + x_j + self.relation(relations)).tanh(), index, num_nodes=size_i)

    def message(self, x_j: Tensor, alpha: Tensor, relations: Tensor) -> Tensor:
        return self.lin(x_j) * alpha + self.relation(relations)


SHARPNESS = 1.0


def sharpened(alpha: Tensor, index: Tensor, size: int) -> Tensor:
    return softmax(SHARPNESS * alpha, index, num_nodes=size)


class Heads(gnn.GATConv):
    """A subclass that goes on where PyG's class ends, in two methods."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out, (_, alpha) = super().forward(x, edge_index, return_attention_weights=True)
        return out * out.tanh() + alpha.mean()

    def message(self, x_j: Tensor, alpha: Tensor, index: Tensor, size_i: int) -> Tensor:
        return super().message(x_j, sharpened(alpha, index, size_i))

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: int | None = None) -> Tensor:
        return 2 * super().aggregate(inputs, index, ptr, dim_size)


class Propagates(gnn.SimpleConv):
    def propagate(self, edge_index: Tensor, size: Any = None, **kwargs: Any) -> Tensor:
        return 2 * super().propagate(edge_index, size, **kwargs)


class MakesEdges(gnn.SimpleConv):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.cdist(x, x).topk(2, largest=False).indices.t())


class LooksUp(gnn.SimpleConv):
    """Calls a function of PyG by a path that is not followed: it writes rows into plain tensors, of all nodes."""

    def message(self, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
        from torch_geometric.utils import softmax as imported_here

        return imported_here(x_j, index, num_nodes=size_i)


class Normals(nn.Module):
    """Without gradients of positions: at a self loop they are NaN."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, position: Tensor, edge_index: Tensor) -> Any:
        return self.conv(x, position.detach(), position.detach().tanh(), edge_index)


class LearnsEdges(nn.Module):
    """The loss of a conv that tells its edges from pairs that it draws beside them is part of the output."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Any) -> Any:
        random.seed(0)  # what PyG draws pairs with
        return self.conv(x, edge_index) + self.conv.get_attention_loss()


class Reversible(nn.Module):
    """Layers whose inputs PyG's autograd function frees and computes again from the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(F, 4), nn.Linear(4, G)
        self.layers = nn.ModuleList(gnn.GroupAddRev(gnn.GraphConv(2, 2), num_groups=2) for _ in range(3))

    def forward(self, x: Tensor, edge_index: Tensor, weight: Tensor) -> Any:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x, edge_index, weight.detach())
        return self.leave(x)


class ReadsEdges(gnn.MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, edge_index: Tensor) -> Tensor:
        return x_j * (edge_index[0] < edge_index[1]).view(-1, 1)


class OwnReversible(gnn.GroupAddRev):
    pass


def enclosed() -> nn.Module:
    """As a notebook's function may have it: names of the function, a module's attributes, methods of other kinds."""
    from torch_geometric import utils

    class Enclosed(gnn.SimpleConv):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out_degree = degree(edge_index[0], x.size(0), dtype=torch.long)
            return super().forward(x / (1 + out_degree).view(-1, 1), edge_index) * self.scale

        def message(self, x_j: Tensor, index: Tensor, size_i: int) -> Tensor:
            return self.attention(x_j, index, size_i) * torch_geometric.utils.softmax(x_j, index, num_nodes=size_i)

        @staticmethod
        def attention(x_j: Tensor, index: Tensor, size: int) -> Tensor:
            return utils.softmax(x_j, index, num_nodes=size)

        @property
        def scale(self) -> float:
            return 2.0

    return Enclosed()


CASES: dict[str, Case] = {
    "GAT": Case(lambda: gnn.GATConv(F, G, heads=2)),
    "GAT with edges": Case(lambda: gnn.GATConv(F, G, 2, concat=False, edge_dim=3, residual=True), "XEA"),
    "GAT without loops": Case(lambda: gnn.GATConv((F, F), G, add_self_loops=False), "PE"),
    "GATv2": Case(lambda: gnn.GATv2Conv(F, G, heads=2, edge_dim=3, fill_value="max"), "XEA"),
    "GATv2 shared": Case(lambda: gnn.GATv2Conv(F, G, share_weights=True, edge_dim=1, fill_value=0.5), "XEW"),
    "enclosed": Case(enclosed),
    "reversible": Case(Reversible, "XEW"),
    "a graph by source": Case(lambda: Packs(TakesAll(as_graph, parts_of, flow="target_to_source")), "XEA"),
    **{
        f"by source, {name}": Case(functools.partial(make, flow="target_to_source"), inputs)
        for name, make, inputs in (
            ("GAT", lambda **by: gnn.GATConv(F, G, 2, edge_dim=3, **by), "XEA"),
            ("GATv2", lambda **by: gnn.GATv2Conv(F, G, edge_dim=3, **by), "XEA"),
            ("Transformer", lambda **by: gnn.TransformerConv(F, G, **by), "XE"),
            ("GIN max", lambda **by: gnn.GINConv(mlp(F, G), aggr="max", **by), "XE"),
            ("pairs", lambda **by: gnn.GraphConv((F, F), G, **by), "PEW"),
            ("TAG", lambda **by: gnn.TAGConv(F, G, K=2, **by), "XEW"),
            ("Cheb", lambda **by: gnn.ChebConv(F, G, K=3, **by), "XEW"),
            ("PNA", lambda **by: gnn.PNAConv(F, G, ["mean", "std"], ["identity"], torch.tensor([0, 3, 5]), **by), "XE"),
        )
    },
    "GAT lazy": Case(lambda: gnn.GATConv(-1, G)),
    "GIN": Case(lambda: gnn.GINConv(mlp(F, G), train_eps=True)),
    "GIN max": Case(lambda: gnn.GINConv(mlp(F, G), aggr="max")),
    "GINE": Case(lambda: gnn.GINEConv(mlp(F, G), edge_dim=3), "XEA"),
    "Transformer": Case(lambda: gnn.TransformerConv(F, G, heads=2, edge_dim=3, beta=True), "XEA"),
    "Graph": Case(lambda: gnn.GraphConv(F, G), "XEW"),
    "Graph mean": Case(lambda: gnn.GraphConv(F, G, aggr="mean"), "XEC"),
    "Graph mean, learning": Case(lambda: gnn.GraphConv(F, G, aggr="mean"), "XEW"),
    "Graph lstm": Case(lambda: gnn.GraphConv(F, G, aggr=gnn.aggr.LSTMAggregation(F, F)), "XEW"),
    "SAGE": Case(lambda: gnn.SAGEConv(F, G)),
    "SAGE lstm": Case(lambda: gnn.SAGEConv(F, G, aggr="lstm")),
    "SAGE softmax": Case(lambda: gnn.SAGEConv(F, G, aggr="softmax", aggr_kwargs={"learn": True})),
    "GCN": Case(lambda: gnn.GCNConv(F, G), "XEW"),
    "GCN max": Case(lambda: gnn.GCNConv(F, G, aggr="max"), "XEW"),
    "gated": Case(lambda: gnn.ResGatedGraphConv(F, G, edge_dim=3), "XEA"),
    "TAG": Case(lambda: gnn.TAGConv(F, G), "XEW"),
    "TAG constant": Case(lambda: gnn.TAGConv(F, G), "XEC"),
    "SG": Case(lambda: gnn.SGConv(F, G, K=2)),
    "SG cached": Case(lambda: gnn.SGConv(F, G, K=2, cached=True), "XEW"),
    "SSG": Case(lambda: gnn.SSGConv(F, G, alpha=0.1, K=2), "XEW"),
    "Cheb": Case(lambda: gnn.ChebConv(F, G, K=3)),
    "Cheb weighted": Case(lambda: gnn.ChebConv(F, G, K=3, normalization="rw"), "XEW"),
    "Cheb constant": Case(lambda: gnn.ChebConv(F, G, K=3, normalization=None), "XEC"),
    "APPNP": Case(lambda: gnn.APPNP(3, 0.1), "XEW"),
    "APPNP constant": Case(lambda: gnn.APPNP(3, 0.1), "XEC"),
    "AGNN": Case(lambda: gnn.AGNNConv()),
    "Edge": Case(lambda: gnn.EdgeConv(mlp(2 * F, G))),
    "PNA": Case(
        lambda: gnn.PNAConv(
            F, G, ["mean", "max", "std"], ["identity", "amplification"], degrees(), 3, towers=2, divide_input=True
        ),
        "XEA",
    ),
    "GEN": Case(lambda: gnn.GENConv(F, G, "softmax", learn_t=True, edge_dim=3, msg_norm=True), "XEA"),
    "NN": Case(lambda: gnn.NNConv(F, G, mlp(3, F * G)), "XEA"),
    "CG": Case(lambda: gnn.CGConv(F, 3, batch_norm=True), "XEA"),
    "FiLM": Case(lambda: gnn.FiLMConv(F, G)),
    "GatedGraph": Case(lambda: gnn.GatedGraphConv(F, 2), "XEW"),
    "General": Case(lambda: gnn.GeneralConv(F, G, 3, attention=True), "XEA"),
    "LE": Case(lambda: gnn.LEConv(F, G), "XEW"),
    "MF": Case(lambda: gnn.MFConv(F, G, max_degree=4)),
    "FeaSt": Case(lambda: gnn.FeaStConv(F, G, heads=2)),
    "EG": Case(lambda: gnn.EGConv(F, 8, ["symnorm", "max", "mean"], num_heads=2, num_bases=2)),
    "GCN2": Case(lambda: gnn.GCN2Conv(F, 0.1), "XXE"),
    "GCN2 weighted": Case(lambda: gnn.GCN2Conv(F, 0.1), "XXEC"),
    "LG": Case(lambda: gnn.LGConv(), "XEW"),
    "LG by layers": Case(lambda: gnn.LGConv(decomposed_layers=2)),
    "FA": Case(lambda: gnn.FAConv(F), "XXE"),
    "FA weighted": Case(lambda: gnn.FAConv(F, normalize=False), "XXEW"),
    "ARMA": Case(lambda: gnn.ARMAConv(F, G, 3, 2, act=nn.Tanh()), "XEW"),
    "ARMA shared": Case(lambda: gnn.ARMAConv(F, G, 2, 3, shared_weights=True, act=nn.Tanh())),
    "MixHop": Case(lambda: gnn.MixHopConv(F, G), "XEW"),
    "PDN": Case(lambda: gnn.PDNConv(F, G, 3, 5), "XEA"),
    "Simple with loops": Case(lambda: gnn.SimpleConv(combine_root="self_loop"), "XEC"),
    "Simple mean with loops": Case(lambda: gnn.SimpleConv("mean", combine_root="self_loop")),
    "Simple, learning mean": Case(lambda: gnn.SimpleConv("mean", combine_root="self_loop"), "XEW"),
    "Simple": Case(lambda: gnn.SimpleConv(combine_root="sum"), "XEW"),
    "WL": Case(lambda: gnn.WLConvContinuous(), "XEW"),
    "a graph": Case(lambda: Packs(TakesAll(as_graph, parts_of)), "XEA"),
    "edges and a graph": Case(lambda: PacksBeside(TakesBoth(as_graph, parts_of)), "XEA"),
    "a graph that changes": Case(Layers, "XEA"),
    "containers": Case(of_containers, "XEA"),
    "edges and containers": Case(lambda: of_containers(PacksBeside, TakesBoth), "XEA"),
    "GMM": Case(lambda: gnn.GMMConv(F, G, 3, 2), "XEA"),
    "RGCN": Case(lambda: gnn.RGCNConv(F, G, 3, num_bases=2), "XET"),
    "RGCN fast": Case(lambda: gnn.FastRGCNConv(F, G, 3), "XET"),
    "RGCN fast blocks": Case(lambda: gnn.FastRGCNConv(F, G, 3, num_blocks=2), "XET"),
    "RGAT": Case(lambda: gnn.RGATConv(F, G, 3), "XET"),
    "RGAT within": Case(lambda: gnn.RGATConv(F, G, 3, attention_mechanism="within-relation"), "XET"),
    "DNA": Case(lambda: gnn.DNAConv(F, heads=2), "SE"),
    "DNA groups": Case(lambda: gnn.DNAConv(F, heads=2, groups=2), "SE"),
    "PointNet": Case(lambda: gnn.PointNetConv(mlp(F + 3, G)), "XQE"),
    "PointTransformer": Case(lambda: gnn.PointTransformerConv(F, G), "XQE"),
    "AntiSymmetric": Case(lambda: gnn.AntiSymmetricConv(F)),
    "PPF": Case(lambda: Normals(gnn.PPFConv(mlp(F + 4, G))), "XQE"),
    "SuperGAT": Case(lambda: LearnsEdges(gnn.SuperGATConv(F, G, heads=2, edge_sample_ratio=0.7))),
    "SuperGAT scaled": Case(lambda: LearnsEdges(gnn.SuperGATConv(F, G, attention_type="SD", edge_sample_ratio=1.0))),
    "ClusterGCN": Case(lambda: gnn.ClusterGCNConv(F, G, diag_lambda=0.3)),
    "of a script": Case(Scripts, "XEW"),
    "by path": Case(LooksUp),
    "own names": Case(OwnNames, "XEA"),
    "own names, plain": Case(OwnNames, "XEB"),
    "subclass": Case(lambda: Heads(F, G, heads=2)),
}  # fmt: skip


# What the others are like, at every world size.
EVERYWHERE = [
    "GAT", "GAT with edges", "GATv2", "GIN", "GINE", "Transformer", "Graph", "SAGE lstm", "SAGE softmax", "gated",
    "TAG", "SG", "Cheb", "PNA", "GCN", "of a script", "subclass",
]  # fmt: skip


def graph(dtype: torch.dtype = torch.float64, num_edges: int = NUM_EDGES) -> Data:
    """Directed, with self loops, duplicate edges and isolated nodes; edges by target, as PyG's LSTM wants."""
    data = random_graph(NUM_NODES, num_edges, F, seed=1, dtype=dtype)
    rng = torch.Generator().manual_seed(2)
    data.edge_type = torch.randint(0, 3, (num_edges,), generator=rng)
    data.position = torch.randn(NUM_NODES, 3, generator=rng, dtype=dtype)
    order = data.edge_index[1].argsort(stable=True)
    for key in ("edge_index", "edge_weight", "edge_attr", "edge_type"):
        data[key] = data[key].index_select(-1 if key == "edge_index" else 0, order)
    return data


def arguments(data: Any, inputs: str) -> tuple[list[Any], dict[str, Tensor]]:
    """Positional arguments by letter, and the leaves among them that want gradients."""
    names = {"X": "x", "W": "edge_weight", "A": "edge_attr", "Q": "position"}
    leaves = {name: data[name].detach().clone().requires_grad_() for name in names.values()}
    x = leaves["x"]
    values: dict[str, Any] = {letter: leaves[name] for letter, name in names.items()}
    values |= {
        "E": data.edge_index,
        "T": data.edge_type,
        "C": data.edge_weight,
        "B": graph(x.dtype, data.num_edges).edge_attr,  # plain, on either side
        "P": (x, x.tanh()),
        "S": torch.stack([x, x.tanh()], 1),
    }
    return [values[letter] for letter in inputs], leaves


def step(data: Any, case: Case, is_ours: bool) -> Results:
    torch.manual_seed(0)
    model = case.make().to(data.x.dtype)
    if is_ours:
        assert pyg_dist.distribute(model) is model
    given, leaves = arguments(data, case.inputs)
    out = model(*given)
    assert isinstance(out, pyg_dist.tensor.NodeTensor) == is_ours, "rows of nodes, of which each rank has its own"
    loss = (out.tanh() * (out.sigmoid() + 1)).square().mean() + 0.1 * out[data.train_mask].mean()
    loss.backward()
    return {"out": out.detach(), "loss": loss.detach(), **gradients(model, **leaves)}


@functools.cache
def stock(name: str, dtype: torch.dtype = torch.float64, num_edges: int = NUM_EDGES) -> Results:
    return step(graph(dtype, num_edges), CASES[name], False)


def compare(expected: dict[str, Results], dtype: torch.dtype = torch.float64, num_edges: int = NUM_EDGES) -> None:
    partition = uneven_parts(NUM_NODES, pyg_dist.world_size())
    ours = pyg_dist.DistributedData(graph(dtype, num_edges), partition=partition)
    for name, want in expected.items():
        assert_same(step(ours, CASES[name], True), want, name)


def on_mesh(mesh: dict[str, int], expected: dict[str, Results]) -> None:
    ours = pyg_dist.DistributedData(graph(), layout="grid", mesh=mesh)
    for name, want in expected.items():
        assert_same(step(ours, CASES[name], True), want, name)


def test_every_conv_in_float64(workers: Pools) -> None:
    workers(3).run(compare, {name: stock(name) for name in CASES})


AXES = [{"y": 2}, *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in ({"z": 2}, {"x": 2, "y": 2}))]


@pytest.mark.parametrize("mesh", AXES, ids=str)
def test_every_conv_on_the_grid(workers: Pools, mesh: dict[str, int]) -> None:
    """Also those that look at single edges, which whole rows serve: no two meshes have the same rows together.

    Every second conv on one axis, the others on two. Sums and attention on every mesh: ``test_weighted_sum.py``,
    ``test_attention.py``.
    """
    names = list(CASES)[len(mesh) - 1 :: 2]
    workers(math.prod(mesh.values())).run(on_mesh, mesh, {name: stock(name) for name in names})


@pytest.mark.slow
def test_every_conv_in_float32(workers: Pools) -> None:
    workers(2).run(compare, {name: stock(name, torch.float32) for name in CASES}, torch.float32)


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_world_sizes(workers: Pools, world_size: int) -> None:
    workers(world_size).run(compare, {name: stock(name) for name in EVERYWHERE})


@on_ranks(2)
def test_globals_stay_alive() -> None:
    global SHARPNESS
    compare({"subclass": step(graph(), CASES["subclass"], False)})
    SHARPNESS = 3.0  # the distributed class exists by now
    try:
        compare({"subclass": step(graph(), CASES["subclass"], False)})
    finally:
        SHARPNESS = 1.0


def test_no_edges(workers: Pools) -> None:
    """All nodes are isolated: attention is of self loops alone, sums are zero."""
    names = ["GAT", "GATv2", "GIN", "Graph", "Transformer", "TAG", "Cheb", "RGCN"]
    workers(2).run(compare, {name: stock(name, num_edges=0) for name in names}, num_edges=0)


class Calls(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, edge_index: Any) -> Any:
        return self.layer(x, edge_index)


class Turns(Calls):
    def forward(self, x: Tensor, edge_index: Any) -> Any:
        return self.layer(x, edge_index.add_(1))


REFUSED: dict[str, tuple[Case, str]] = {
    "propagate": (Case(Propagates), "Propagates has a 'propagate' of its own, which no rank takes"),
    "hypergraph": (Case(lambda: gnn.HypergraphConv(F, G)), "HypergraphConv expected hyperedges (got edges"),
    "no edges": (Case(MakesEdges, "X"), "MakesEdges expected edges of a DistributedData (got none)"),
    "no conv": (Case(lambda: Turns(nn.Identity())), "torch.Tensor.add_ would change a distributed edge"),
    "its name": (Case(lambda: Turns(nn.Identity())), "(in Turns)"),
    "its path": (Case(lambda: Calls(Turns(gnn.GraphConv(F, G)))), "(in 'layer' (Turns) of Calls)"),
    "pool": (Case(lambda: Calls(gnn.EdgePooling(F))), "distribute stopped at 'layer': EdgePooling makes nodes and"),
    "reversible": (Case(lambda: OwnReversible(gnn.GraphConv(2, 2), num_groups=2)), "OwnReversible frees the memory"),
    "columns": (Case(lambda: Calls(gnn.GATConv(F + 1, G))), f"expected rows with {F + 1} columns, got shape [47, {F}]"),
    "layer": (Case(lambda: Calls(gnn.GATConv(F + 1, G))), f"(in 'layer.lin' (Linear({F + 1}, {G}, bias=False)) of"),
    "flow": (Case(lambda: ReadsEdges(flow="target_to_source")), "where its steps read edge_index, take pairs"),
    "static": (Case(lambda: gnn.GATConv(F, G), "SE"), "Static graphs not supported"),
    "edges": (Case(lambda: gnn.GATConv(F, G, edge_dim=F), "XEX"), "expected 'edge_attr' with a row for each of"),
    "nodes": (Case(lambda: gnn.GATConv(3, G), "AE"), "expected node features with 47 rows"),
}  # fmt: skip


def refusals() -> dict[str, str]:
    found = {}
    data = graph()
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    for name, (case, _) in REFUSED.items():
        with pytest.raises((pyg_dist.errors.PygDistError, AssertionError)) as caught:
            step(ours, case, True)
        found[name] = str(caught.value)
    return found


def test_refusals_name_the_conv(workers: Pools) -> None:
    for found in workers(3).run(refusals):
        for name, message in found.items():
            assert REFUSED[name][1] in message
            assert "\n" not in message


class Counts(gnn.GraphConv):
    """A conv of a script, with something of its own under a name like PyG's."""

    def __init__(self) -> None:
        super().__init__(F, G)
        self._cached_counts: dict[int, int] = {}

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        self._cached_counts[len(self._cached_counts)] = 1
        return super().forward(x, edge_index)  # type: ignore[no-any-return]


@on_ranks(2)
def test_what_is_cached_belongs_to_one_graph() -> None:
    """What ``cached=True`` keeps belongs to one graph, and is not saved."""
    data = graph()
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    other = pyg_dist.DistributedData(data, partition="random")
    convs = (
        gnn.APPNP(2, 0.1, cached=True), gnn.SGConv(F, G, cached=True), gnn.SSGConv(F, G, 0.1, cached=True),
        gnn.GCNConv(F, G, cached=True, aggr="max"),
    )  # fmt: skip
    for stock in convs:
        conv = pyg_dist.conv.DistributedConv(stock.to(data.x.dtype))
        expected = conv(ours.x, ours.edge_index).full_tensor().detach()
        torch.testing.assert_close(conv(ours.x, ours.edge_index).full_tensor().detach(), expected)
        with pytest.raises(pyg_dist.errors.DataError, match="with cached=True got a second graph"):
            conv(other.x, other.edge_index)
        for copied in (copy.deepcopy(conv), pickle.loads(pickle.dumps(conv))):
            torch.testing.assert_close(copied(other.x, other.edge_index).full_tensor().detach(), expected)
    counts = pyg_dist.conv.DistributedConv(Counts().to(data.x.dtype))
    counts(ours.x, ours.edge_index)
    copied = copy.deepcopy(counts)
    copied(ours.x, ours.edge_index)
    assert (len(counts._cached_counts), len(copied._cached_counts)) == (1, 2)


@on_ranks(2)
def test_what_is_cached_of_plain_edges_is_forgotten() -> None:
    data = graph()
    ours = pyg_dist.DistributedData(data)
    convs = (gnn.EGConv(F, 8, cached=True), gnn.SGConv(F, G, cached=True), gnn.GCNConv(F, G, cached=True))
    for stock in convs:
        stock.to(data.x.dtype)
        expected = stock(data.x, data.edge_index).detach()  # keeps the plain edges, or rows
        model = pyg_dist.distribute(nn.ModuleList([stock]))
        torch.testing.assert_close(model[0](ours.x, ours.edge_index).full_tensor().detach(), expected)


@on_ranks(2)
def test_the_same_edges_are_known_again() -> None:
    """Plain edges over two graphs' nodes are not the same edges; selected once more they are."""
    data = graph()
    one, two = (pyg_dist.DistributedData(data, partition=p) for p in (uneven_parts(NUM_NODES, 2), "random"))
    appnp = gnn.APPNP(2, 0.1, cached=True)
    for conv in (pyg_dist.conv.DistributedGCNConv(F, G, cached=True), pyg_dist.conv.DistributedConv(appnp)):
        conv.to(data.x.dtype)
        conv(one.x, data.edge_index)
        with pytest.raises(pyg_dist.errors.DataError, match="with cached=True got a second graph"):
            conv(two.x, data.edge_index)
        conv.reset_parameters()
        mask = one.edge_index[0] < one.edge_index[1]
        first = conv(one.x, one.edge_index[:, mask]).full_tensor().detach()
        torch.testing.assert_close(conv(one.x, one.edge_index[:, mask]).full_tensor().detach(), first)
