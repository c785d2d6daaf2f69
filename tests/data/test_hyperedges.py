"""Hyperedges, each of any number of nodes: PyG's ``HypergraphConv`` and convs of scripts, against stock PyG."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from against_stock import Results, assert_same
from bits import assert_same_bits
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.data.hypergraph_data import HyperGraphData
from torch_geometric.nn import HypergraphConv, MessagePassing
from torch_geometric.utils import scatter
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.conv import special_sums
from pyg_dist.errors import UnsupportedError

N, M, K, F, G = 23, 11, 70, 4, 3
INPUTS = ("alone", "with edges", "HyperGraphData")


def hypergraph(kind: str = "alone", num_hyperedges: int = M) -> Data:
    """One whose last node and hyperedge are empty, with two hyperedges of nearly all nodes and pairs given twice."""
    graph, rng = random_graph(N, 60, F), torch.Generator().manual_seed(7)
    ends = [torch.randint(0, size - 1, (K,), generator=rng) for size in (N, num_hyperedges)]
    ends[1][: K // 3] %= 2
    rows = {
        "attr": torch.randn(num_hyperedges, F, generator=rng, dtype=torch.float64),
        "weight": torch.rand(num_hyperedges, generator=rng, dtype=torch.float64) + 0.1,
    }
    norm = torch.rand(K, generator=rng, dtype=torch.float64)
    if kind == "HyperGraphData":
        rows = {f"edge_{name}": value for name, value in rows.items()}
        return HyperGraphData(x=graph.x, edge_index=torch.stack(ends), y=graph.y, norm=norm, **rows)
    rows = {f"hyperedge_{name}": value for name, value in rows.items()}
    data = Data(x=graph.x, y=graph.y, train_mask=graph.train_mask, norm=norm, hyperedge_index=torch.stack(ends), **rows)
    if kind == "with edges":
        data.edge_index, data.edge_weight = graph.edge_index, graph.edge_weight
    return data


def distributed(data: Data, **options: Any) -> Any:
    parts = uneven_parts(data.num_nodes or 0, pyg_dist.world_size())
    return pyg_dist.DistributedData(data, **({"partition": parts} | options))


class HalfConv(MessagePassing):
    """One way of AllSet: from nodes to hyperedges, or back."""

    def __init__(self, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.lin = nn.Linear(F, F)

    def forward(self, x: Tensor, edge_index: Any, norm: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x).tanh(), norm=norm)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j

    def aggregate(self, inputs: Tensor, index: Tensor) -> Tensor:
        return scatter(inputs, index, dim=self.node_dim, reduce=str(self.aggr))


class NoSize(MessagePassing):
    """A conv of a script that leaves PyG to guess how many hyperedges there are: as many as nodes."""

    def forward(self, x: Tensor, hyperedge_index: Any, norm: Tensor) -> Tensor:
        out = self.propagate(hyperedge_index, x=x, norm=norm)
        return self.propagate(hyperedge_index.flip(0), x=out, norm=norm)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class AllSet(nn.Module):
    def __init__(self, aggr: str = "add") -> None:
        super().__init__()
        self.there, self.back = HalfConv(aggr), HalfConv(aggr)

    def forward(self, x: Tensor, incidence: Any, norm: Tensor) -> Tensor:
        hyperedges = self.there(x, incidence, norm)
        return self.back(hyperedges, incidence.flip(0), norm)  # type: ignore[no-any-return]


class BothWays(MessagePassing):
    """A conv of a script that passes messages to hyperedges and back, the largest of each."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.lin = nn.Linear(F, F)

    def forward(self, x: Tensor, hyperedge_index: Any, hyperedge_attr: Tensor) -> Tensor:
        sizes = x.size(0), hyperedge_attr.size(0)
        out = self.propagate(hyperedge_index, x=self.lin(x), size=sizes)
        return self.propagate(hyperedge_index.flip([0]), x=out + hyperedge_attr, size=sizes[::-1])  # type: ignore[no-any-return]


def by_ends(x: Tensor, incidence: Any, num_hyperedges: int) -> Tensor:
    """UniGNN's sums, outside of any conv."""
    node, hyperedge = incidence
    of_hyperedges = torch.zeros(num_hyperedges, F, dtype=x.dtype).index_add(0, hyperedge, x[node])
    return torch.zeros_like(x).index_add(0, node, of_hyperedges[hyperedge])


ATTENTION: dict[str, dict[str, Any]] = {
    "none": {},
    "node": {"use_attention": True, "heads": 2},
    "edge": {"use_attention": True, "heads": 2, "attention_mode": "edge", "concat": False},
}


MODULES: dict[str, Callable[[], nn.Module]] = {
    "AllSet": AllSet, "AllSet mean": lambda: AllSet("mean"), "BothWays": BothWays, "NoSize": NoSize,
}  # fmt: skip


def results(data: Any, is_ours: bool, what: str) -> Results:
    torch.manual_seed(1)
    prefix = "hyperedge_" if "hyperedge_attr" in data else "edge_"
    incidence = data[f"{prefix}index"]
    leaves = [
        data[name].detach().clone().requires_grad_() for name in ("x", f"{prefix}attr", f"{prefix}weight", "norm")
    ]
    x, attr, weight, norm = leaves
    kind, _, weighted = what.partition(" ")
    module: Any
    if kind in ATTENTION:
        module = HypergraphConv(F, G, **ATTENTION[kind])
        args: Any = (x, incidence, weight if weighted else None, attr, M if weighted else M + 2)
    else:
        module, args = MODULES[what](), (x, incidence)
        args = (*args, attr) if what == "BothWays" else (*args, norm)
    module = module.double()
    module = pyg_dist.distribute(module) if is_ours else module
    out = module(*args)
    out = out if is_ours else functional.pad(out, (0, 0, 0, N - len(out)))  # scatter ends at the last with a hyperedge
    (out.tanh() * out.detach().sigmoid()).sum().backward()
    found = {"out": out.detach()} | {f"{name}.grad": p.grad for name, p in module.named_parameters()}
    return found | dict(zip(("x", "attr", "weight", "norm"), (leaf.grad for leaf in leaves), strict=True))


WHAT = [f"{kind}{weights}" for kind in ATTENTION for weights in ("", " weights")] + [*MODULES]


def compare(kind: str, options: dict[str, Any]) -> None:
    data = hypergraph(kind)
    ours = distributed(data, **options)
    for what in WHAT:
        assert_same(results(ours, True, what), results(data, False, what), what)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", INPUTS)
def test_same_as_pyg(workers: Pools, world_size: int, kind: str) -> None:
    workers(world_size).run(compare, kind, {})


@pytest.mark.parametrize("options", [
    {"partition": "hypergraph"}, {"partition": "metis", "exchange": "post"}, {"partition": "random", "exchange": "pre"},
    {"layout": "auto", "partition": "metis"},
], ids=str)  # fmt: skip
def test_partitions(workers: Pools, options: dict[str, Any]) -> None:
    if options["partition"] == "hypergraph":
        pytest.importorskip("mtkahypar")
    workers(2).run(compare, "alone", options)


@on_ranks(3)
@pytest.mark.parametrize("kind", INPUTS)
def test_data(kind: str) -> None:
    """Shapes, kinds and whole tensors as of the input; what is assigned lies with the hyperedges, too."""
    data = hypergraph(kind)
    ours, prefix = distributed(data), "edge_" if kind == "HyperGraphData" else "hyperedge_"
    for name in data.keys():  # noqa: SIM118 - Data is no mapping
        assert_same_bits(ours[name].full_tensor(), data[name])
    assert set(ours.keys()) == set(data.keys())
    assert ours.num_nodes == N
    assert ours.num_edges == {"alone": K, "with edges": 60, "HyperGraphData": M}[kind]
    handle, attr = ours[f"{prefix}index"], ours[f"{prefix}attr"]
    assert tuple(handle.shape) == (2, K)
    ours.hyperedge_extra, ours.per_node_of_hyperedge = data[f"{prefix}attr"] * 2, data.norm + 1
    assert ours.hyperedge_extra._sharding is attr._sharding
    assert ours.per_node_of_hyperedge._sharding is ours.norm._sharding
    assert_same_bits(ours.hyperedge_extra.full_tensor(), data[f"{prefix}attr"] * 2)
    ours[f"{prefix}weight"] = attr.sum(1)
    assert_same({"w": ours[f"{prefix}weight"]}, {"w": data[f"{prefix}attr"].sum(1)})
    assert_same({"by ends": by_ends(ours.x, handle, M)}, {"by ends": by_ends(data.x, data[f"{prefix}index"], M)})
    assert set(ours.plan.nodes_of) == {"node", "hyperedge"}
    assert sum(ours.plan.relations["node", "in", "hyperedge"].sizes[r].edges for r in range(ours.plan.ranks)) == K
    for question in (ours.is_undirected, ours.is_coalesced, ours.has_isolated_nodes, ours.has_self_loops):
        if kind == "with edges":
            assert question() == getattr(hypergraph(kind), question.__name__)()
        else:
            with pytest.raises(UnsupportedError, match="Expected edges between nodes"):
                question()
    moved = ours.to("cpu")
    assert moved[f"{prefix}index"] is handle


@on_ranks(2)
def test_sums_are_products() -> None:
    """Without attention both sums go by the chosen exchange, and no tensor has a row for each node of a hyperedge."""
    ours = distributed(hypergraph())
    for kind, expected in (("none", 2), ("node", 0)):
        conv = pyg_dist.distribute(HypergraphConv(F, G, **ATTENTION[kind]).double())
        with patch.object(special_sums, "sum_by", wraps=special_sums.sum_by) as products:
            conv(ours.x, ours.hyperedge_index, hyperedge_attr=ours.hyperedge_attr)
        assert products.call_count == expected


@on_ranks(2)
def test_as_many_hyperedges_as_nodes() -> None:
    """Then names say what a row is of."""
    data = hypergraph(num_hyperedges=N)
    ours = distributed(data)
    conv = HypergraphConv(F, G, **ATTENTION["node"]).double()
    expected = conv(data.x, data.hyperedge_index, data.hyperedge_weight, data.hyperedge_attr, N)
    import pyg_dist

    conv = pyg_dist.distribute(conv)
    for rows in (ours, data):  # of the data, and plain ones
        out = conv(ours.x, ours.hyperedge_index, rows.hyperedge_weight, rows.hyperedge_attr, N)
        assert_same({"out": out.detach()}, {"out": expected.detach()})


@on_ranks(1, 3)
def test_plain_hyperedges() -> None:
    """Hyperedges that a script draws in each step, beside rows of any data on the halo layout."""
    drawn = hypergraph()
    plain = random_graph(N, 60, F)
    ours = distributed(plain)
    for kind, options in ATTENTION.items():
        torch.manual_seed(2)
        stock = HypergraphConv(F, G, **options).double()
        torch.manual_seed(2)
        conv = pyg_dist.distribute(HypergraphConv(F, G, **options).double())
        for weight in (None, drawn.hyperedge_weight):
            given = (drawn.hyperedge_index, weight, drawn.hyperedge_attr)
            expected, out = stock(plain.x, *given), conv(ours.x, *given)
            assert_same({kind: out.detach()}, {kind: expected.detach()})
            out.sum().backward()
            expected.sum().backward()
        wanted = {name: p.grad for name, p in stock.named_parameters()}
        assert_same({name: p.grad for name, p in conv.named_parameters()}, wanted)
    both = distributed(drawn)  # over hyperedges that the data has
    again = drawn.hyperedge_index[:, : K // 2]
    out = BothWays().double()
    expected = out(drawn.x, again, drawn.hyperedge_attr)
    found = pyg_dist.distribute(out)(both.x, again, both.hyperedge_attr)
    assert_same({"drawn": found.detach()}, {"drawn": expected.detach()})


def refusals() -> dict[str, str]:
    data, plain = hypergraph(), random_graph(N, 60, F)
    ours = distributed(data)
    conv = pyg_dist.distribute(HypergraphConv(F, G).double())
    grid = pyg_dist.DistributedData(plain, layout="grid")
    short, outside = hypergraph(), hypergraph()
    short.num_hyperedges = 3
    outside.hyperedge_index[0, 0] = N
    calls: dict[str, Callable[[], Any]] = {
        "grid": lambda: pyg_dist.DistributedData(data, layout="grid"),
        "plain on grid": lambda: conv(grid.x, data.hyperedge_index),
        "edges": lambda: conv(distributed(plain).x, distributed(plain).edge_index),
        "too few": lambda: conv(ours.x, ours.hyperedge_index, num_edges=M - 1),
        "subgraph": lambda: ours.subgraph(torch.arange(4)),
        "short": lambda: distributed(short),
        "outside": lambda: distributed(outside),
        "file": lambda: pyg_dist.save_graph(hypergraph("HyperGraphData"), "never.safetensors"),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises(pyg_dist.errors.PygDistError) as caught:
            call()
        found[name] = caught.value.message
    return found


def test_refusals(workers: Pools) -> None:
    expected = {
        "grid": "Expected layout='halo' with hyperedges (got 'grid'",
        "plain on grid": "Expected layout='halo' with hyperedges (got 'grid'",
        "edges": "HypergraphConv expected hyperedges (got edges between nodes): name them data.hyperedge_index",
        "too few": f"HypergraphConv expected num_edges={M}, the hyperedges of the graph, or more (got {M - 1})",
        "subgraph": "Expected one set of edges (got another one in 'hyperedge_index'): delete it",
        "short": f"Expected hyperedges as 'num_hyperedges' has them, at least {M - 1} (got 3 of 'num_hyperedges')",
        "outside": f"Expected 'hyperedge_index[0]' to hold node ids below num_nodes={N} (got {N})",
        "file": "Expected edges between nodes (got a HyperGraphData",
    }
    for found in workers(2).run(refusals):
        for name, message in found.items():
            assert expected[name] in message, message
            assert "\n" not in message
