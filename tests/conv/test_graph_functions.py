"""PyG's graph functions on distributed edges: values, gradients, and the order of what they return."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_geometric.utils as pyg
from against_stock import Results, assert_same
from random_graphs import random_graph, uneven_parts
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from workers import Pools

import pyg_dist
from pyg_dist.conv.graph_functions import SUBSTITUTES

NUM_NODES, NUM_EDGES = 31, 170
FILL = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)

# A call of the function with edges e, their attributes a [E, 3] and weights w [E].
CASES: dict[str, tuple[Any, Callable[[Any, Any, Any, Any], Any]]] = {
    "remove_self_loops": (pyg.remove_self_loops, lambda f, e, a, w: f(e, a)),
    "add_self_loops": (pyg.add_self_loops, lambda f, e, a, w: f(e, a, num_nodes=NUM_NODES)),
    "add_self_loops 0.5": (pyg.add_self_loops, lambda f, e, a, w: f(e, w, 0.5, NUM_NODES)),
    "add_self_loops tensor": (pyg.add_self_loops, lambda f, e, a, w: f(e, a, FILL, (NUM_NODES, NUM_NODES))),
    "add_self_loops mean": (pyg.add_self_loops, lambda f, e, a, w: f(e, a, "mean", NUM_NODES)),
    "remaining": (pyg.add_remaining_self_loops, lambda f, e, a, w: f(e, w, 2.0, NUM_NODES)),
    "remaining mean": (pyg.add_remaining_self_loops, lambda f, e, a, w: f(e, a, "mean", NUM_NODES)),
    "remaining ones": (pyg.add_remaining_self_loops, lambda f, e, a, w: f(e, a, None, NUM_NODES)),
    "add_self_loops, nodes of the edges": (pyg.add_self_loops, lambda f, e, a, w: f(e, a, "max")),
    "remaining, nodes of the edges": (pyg.add_remaining_self_loops, lambda f, e, a, w: f(e, w)),
    "gcn_norm, nodes of the edges": (gcn_norm, lambda f, e, a, w: f(e, w)),
    "laplacian, nodes of the edges": (pyg.get_laplacian, lambda f, e, a, w: f(e, w, "sym")),
    "softmax": (pyg.softmax, lambda f, e, a, w: f(a, e[1], num_nodes=NUM_NODES)),
    "softmax by source": (pyg.softmax, lambda f, e, a, w: f(a, e[0], num_nodes=NUM_NODES)),
    "softmax by a copy": (pyg.softmax, lambda f, e, a, w: f(a, e[1].clone(), num_nodes=NUM_NODES)),
    "softmax by a plain end": (pyg.softmax, lambda f, e, a, w: f(a, (e + 0)[0], num_nodes=NUM_NODES)),
    "scatter by a plain end": (pyg.scatter, lambda f, e, a, w: f(a, e.view(2, -1)[1], 0, NUM_NODES, "max")),
    "scatter by other ids": (pyg.scatter, lambda f, e, a, w: f(a, (e + 0)[1] % 4, 0, 4, "sum")),
    "scatter by ids at the edges": (pyg.scatter, lambda f, e, a, w: f(a, e[1] % 4, 0, 4, "sum")),
    "degree by a copy": (pyg.degree, lambda f, e, a, w: (f(e[1] * 1, NUM_NODES), w)),
    "scatter": (pyg.scatter, lambda f, e, a, w: f(a, e[1], 0, NUM_NODES, "mean")),
    "scatter to sources": (pyg.scatter, lambda f, e, a, w: f(a, e[0], dim_size=NUM_NODES)),
    "scatter max to sources": (pyg.scatter, lambda f, e, a, w: f(a, e[0], 0, NUM_NODES, "max")),
    "degree": (pyg.degree, lambda f, e, a, w: (f(e[1], NUM_NODES), f(e[0], NUM_NODES, torch.float64), w)),
    "contains": (pyg.contains_self_loops, lambda f, e, a, w: (f(e), w)),
    "gcn_norm": (gcn_norm, lambda f, e, a, w: f(e, w, NUM_NODES)),
    "gcn_norm improved": (gcn_norm, lambda f, e, a, w: f(e, w, NUM_NODES, True)),
    "gcn_norm alone": (gcn_norm, lambda f, e, a, w: f(e, None, NUM_NODES, False, False, dtype=torch.float64)[1] * w),
}  # fmt: skip


def call(name: str, function: Any, edges: Any, data: Any) -> Results:
    attr, weight = (data[key].detach().clone().requires_grad_() for key in ("edge_attr", "edge_weight"))
    out = CASES[name][1](function, edges, attr, weight)
    results: Results = {str(k): v for k, v in enumerate(out if isinstance(out, tuple) else (out,))}
    parts = [v for v in results.values() if isinstance(v, torch.Tensor) and v.is_floating_point() and v.requires_grad]
    sum((part.tanh() * part.sigmoid()).sum() for part in parts).backward()  # type: ignore[union-attr]
    plain = {k: v.detach() if getattr(v, "requires_grad", False) else v for k, v in results.items()}
    return {**plain, "attr": attr.grad, "weight": weight.grad}


def compare(names: list[str], mesh: dict[str, int] | None = None) -> None:
    data = random_graph(NUM_NODES, NUM_EDGES, seed=4)
    data = data.edge_subgraph((data.edge_index < NUM_NODES - 2).all(dim=0))  # the last two have no edges
    if mesh is None:
        ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    else:
        ours = pyg_dist.DistributedData(data, layout="grid", mesh=mesh)
    for name in names:
        stock = CASES[name][0]
        expected = call(name, stock, data.edge_index, data)
        assert_same(call(name, SUBSTITUTES[stock], data.edge_index, data), expected)
        assert_same(call(name, SUBSTITUTES[stock], ours.edge_index.edges(by_operator=True), ours), expected)


@pytest.mark.parametrize("world_size", [1, 3])
def test_same_as_pyg(workers: Pools, world_size: int) -> None:
    workers(world_size).run(compare, list(CASES))


@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 3}, {"y": 2}, {"x": 2, "z": 2}], ids=str)
def test_same_as_pyg_on_the_grid(workers: Pools, mesh: dict[str, int]) -> None:
    workers(math.prod(mesh.values())).run(compare, list(CASES), mesh)


def changed(ids: Any) -> Any:
    """A copy with one other id."""
    ids = ids.clone()
    ids[0] += 1
    return ids


def refusals() -> list[str]:
    data = pyg_dist.DistributedData(random_graph(NUM_NODES, NUM_EDGES, seed=4))
    edges, attr = data.edge_index.edges(), data.edge_attr
    calls: list[Callable[[], Any]] = [
        lambda: SUBSTITUTES[pyg.softmax](attr, data.y),
        lambda: SUBSTITUTES[pyg.softmax](attr, changed(edges[1])),
        lambda: SUBSTITUTES[pyg.softmax](attr, edges[1], dim=1),
        lambda: SUBSTITUTES[pyg.scatter](attr, edges[1], 0, 5),
        lambda: SUBSTITUTES[pyg.scatter](data.x, edges[1]),
    ]
    found = []
    for refused in calls:
        with pytest.raises(pyg_dist.errors.PygDistError) as caught:
            refused()
        found.append(caught.value.message)
    return found


def test_refusals(workers: Pools) -> None:
    expected = [
        *["softmax expected edge_index[0] or edge_index[1] as its index"] * 2,
        "softmax reads values along dimension 1 (got shape [170, 3]",
        "scatter expected all 31 nodes as sources and as targets (got size=5)",
        "Expected a value for each of 170 edges",
    ]  # fmt: skip
    for found in workers(2).run(refusals):
        assert all(message.startswith(start) for message, start in zip(found, expected, strict=True)), found
