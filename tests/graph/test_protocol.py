"""``graph/protocol.py``: every name of its protocols on both layouts, against dense matrices and PyG.

A check gets a graph of PyG and the same one as ``DistributedData``, in every layout, on every mesh and partition. It
calls a graph ``laid``, its edge view ``view``, an operator ``operator`` and a subgraph ``sampled``: by these words
``test_every_name_has_its_check`` finds what of a protocol no check has taken.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch
from against_stock import assert_same, meshes
from bits import assert_same_bits
from edge_checks import attention, blocks, edge_view, questions, same_edges, single_edges, view_products
from product_checks import (
    E,
    F,
    Layout,
    N,
    cached,
    edge_sharding,
    linear_sums,
    moved,
    node_sharding,
    operators,
    owns,
    place,
    products,
    selected,
    started,
)
from random_graphs import random_graph, uneven_parts
from torch_geometric.data import Data
from torch_geometric.nn.pool.connect.filter_edges import filter_adj
from torch_geometric.utils import scatter
from workers import Pools

from pyg_dist import DistributedData
from pyg_dist.backend.comm.group import world_group
from pyg_dist.graph.edge_sets import pick
from pyg_dist.graph.protocol import DistributedGraph, EdgeView, GraphProducts, Norm, Operator, SampledGraph
from pyg_dist.graph.sample import Subset


def subgraphs(graph: Data, data: Any, how: Layout) -> None:
    """A graph cuts PyG's subgraph, on each data group."""
    laid, count = data.graph, how.get("mesh", {}).get("data", 1)
    index, world = laid.data_group[0], world_group()
    assert laid.data_group == (index, count)
    assert sorted(world.gather_counts(index)) == sorted([*range(count)] * (world.size // count))
    assert laid.group.size == world.size // count
    assert laid.needs_whole_subsets == (how["layout"] == "grid"), "tiles are of other nodes than a rank's rows"
    assert laid.ranks_per_machine is None, "all ranks are on one machine"
    laid.prepare_subgraphs()
    nodes = torch.arange(0, N, 2)
    expected, sampled = graph.subgraph(nodes), laid.induced(Subset(nodes))
    assert sampled.parent is laid
    node, edge = sampled.pick_nodes(), sampled.pick_edges()
    assert_same_bits(node.full_tensor(), nodes)
    assert_same_bits(node.fetch(data.x).full_tensor(), expected.x)
    found, known = (
        sorted(zip(*ends.tolist(), weights.tolist(), strict=True))
        for ends, weights in (
            (sampled.full_edge_index(), edge.fetch(data.edge_weight).full_tensor()),
            (expected.edge_index, expected.edge_weight),
        )
    )
    assert found == known
    sampled.make_ahead([edge.fetch(data.edge_weight)])
    x = node.fetch(data.x)
    product = sampled.aggregate(sampled.place(x), sampled.operator(Norm.SUM, None, x.dtype))
    source, target = expected.edge_index
    assert_same({"out": product}, {"out": scatter(expected.x[source], target, 0, len(nodes))}, "what was made ahead")


def listed(graph: Data, data: Any, how: Layout) -> None:
    """Nodes in any order keep it, as in PyG's pools."""
    laid, nodes = data.graph, torch.randperm(N, generator=torch.Generator().manual_seed(1))[: N // 2]
    picked = pick(laid.node_sharding, nodes, laid.device)
    sampled = laid.among(picked._sharding)
    edge_index, weight = filter_adj(graph.edge_index, graph.edge_weight, nodes, num_nodes=N)
    assert_same_bits(picked.full_tensor(), nodes)
    assert_same_bits(sampled.full_edge_index(), edge_index)
    assert_same_bits(sampled.pick_edges().fetch(data.edge_weight).full_tensor(), weight)
    x, (source, target) = picked.fetch(data.x), edge_index
    product = sampled.aggregate(sampled.place(x), sampled.operator(Norm.SUM, None, x.dtype))
    assert_same({"out": product}, {"out": scatter(graph.x[nodes][source], target, 0, len(nodes))})


CHECKS = [  # the first one finds a graph that has sent nothing
    cached, node_sharding, edge_sharding, owns, place, products, operators, started, linear_sums, selected, moved,
    questions, same_edges, edge_view, view_products, blocks, attention, single_edges, subgraphs,
    listed,
]  # fmt: skip


def run(layouts: list[Layout]) -> None:
    for layout in layouts:
        how = {name: value for name, value in layout.items() if name != "is_first"}
        graph = random_graph(N, E, F, seed=3)
        data: Any = DistributedData(graph.clone(), **how)
        for check in CHECKS:
            if layout.get("is_first", True) or check.__name__ in PRODUCTS:
                try:
                    check(graph, data, how)
                except AssertionError as error:
                    raise AssertionError(f"{check.__name__} on {how}: {error}") from error


PRODUCTS = {
    "products", "operators", "started", "linear_sums", "cached", "selected", "view_products", "subgraphs", "listed",
}  # fmt: skip
"""Checks of what the kind of an exchange and a mesh's shape are for; all others run on the first of each."""


def layouts_of(num_ranks: int) -> list[Layout]:
    halo = {"layout": "halo", "partition": uneven_parts(N, num_ranks)}
    exchanges = [{**halo, "exchange": kind, "is_first": kind == "hybrid"} for kind in ("hybrid", "post", "pre")]
    shapes = [mesh for mesh in meshes(num_ranks) if max(mesh.values()) < 4]
    grids = [{"layout": "grid", "mesh": mesh, "is_first": k == 0} for k, mesh in enumerate(shapes)]
    groups = next((count for count in (2, 3) if num_ranks % count == 0), 1)
    if groups > 1:  # data groups, each of which holds the graph
        size = num_ranks // groups
        parts = {"partition": uneven_parts(N, size), "mesh": {"data": groups, "part": size}}
        exchanges.append({"layout": "halo", **parts})
        grids.append({"layout": "grid", "mesh": {"data": groups, **meshes(size)[-1]}, "is_first": size > 1})
    return [*exchanges, *grids]


@pytest.mark.parametrize("num_ranks", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_contract(workers: Pools, num_ranks: int) -> None:
    workers(num_ranks).run(run, layouts_of(num_ranks))


def names_of(protocol: type) -> set[str]:
    return {name for name in {*vars(protocol), *inspect.get_annotations(protocol)} if not name.startswith("_")}


@pytest.mark.parametrize(
    ("protocol", "word"),
    [
        (GraphProducts, "laid"),
        (GraphProducts, "view"),
        (DistributedGraph, "laid"),
        (EdgeView, "view"),
        (Operator, "operator"),
        (SampledGraph, "sampled"),
    ],
)
def test_every_name_has_its_check(protocol: type, word: str) -> None:
    """What is new in a protocol fails here until a check takes it."""
    trees = [ast.parse(inspect.getsource(check)) for check in CHECKS]
    taken = {node.attr for tree in trees for node in ast.walk(tree)
             if isinstance(node, ast.Attribute) and ast.unparse(node.value) == word}  # fmt: skip
    assert names_of(protocol) - taken == set()
