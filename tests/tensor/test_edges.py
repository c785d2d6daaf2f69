"""Rows of nodes at their edges, values of edges at their nodes, and the edges as a conv sees them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_stock import assert_same
from bits import assert_same_bits
from random_graphs import random_graph, uneven_parts
from torch_geometric.utils import scatter as scatter_of_pyg
from workers import Pools

import pyg_dist
from pyg_dist import NodeTensor
from pyg_dist.errors import DataError, LayoutMismatchError, MixedRowsError
from pyg_dist.graph.layer_call import running

NUM_NODES, NUM_EDGES = 31, 170


def pair(mesh: dict[str, int] | None = None) -> tuple[Any, Any]:
    """A graph, and the same on the halo layout or on a mesh."""
    data = random_graph(NUM_NODES, NUM_EDGES, seed=4)
    if mesh is not None:
        return data, pyg_dist.DistributedData(data, layout="grid", mesh=mesh)
    return data, pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))


def lifted_and_scattered(mesh: dict[str, int] | None) -> None:
    data, ours = pair(mesh)
    edges, cube = ours.edge_index.edges(by_operator=True), torch.stack([data.x, data.x.tanh()], 1)
    for end in (0, 1):
        ids, plain_ids = edges.end(end), data.edge_index[end]
        assert torch.equal(ids.full_tensor(), plain_ids)
        for x in (data.x, cube, data.y, data.train_mask, data.x[:, 0], data.x.half()):
            at_edges = ids.fetch(as_nodes(x, ours))
            assert at_edges.shape == (NUM_EDGES, *x.shape[1:])
            assert_same_bits(at_edges.full_tensor(), x[plain_ids])
        x, want = ours.x.detach().clone().requires_grad_(), data.x.clone().requires_grad_()
        at_edges, expected = x[ids], want[plain_ids]
        (at_edges * ours.edge_attr[:, :1]).square().sum().backward()
        (expected * data.edge_attr[:, :1]).square().sum().backward()
        assert_same({"x.grad": x.grad}, {"x.grad": want.grad})
        assert_same_bits(ours.x[ours.edge_index[end, :]].full_tensor(), data.x[plain_ids])
        for within in ((slice(None),), (2,), (slice(1, 3),), (..., 0)):
            assert_same_bits(ours.x[(ids, *within)].full_tensor(), data.x[(plain_ids, *within)])
        with pytest.raises(DataError, match="Expected as many columns as rows, "):
            ours.x[ids, [0, 2]]
        columns = torch.arange(NUM_EDGES) % data.x.shape[1]
        assert_same_bits(ours.x[ids, columns].full_tensor(), data.x[plain_ids, columns])
        # The sum of edges is the transpose of the lift.
        values, plain_values = ours.edge_attr.detach().clone().requires_grad_(), data.edge_attr.clone().requires_grad_()
        sums, plain_sums = ids.add_up(values), scatter_of_pyg(plain_values, plain_ids, 0, NUM_NODES)
        (sums * ours.x[:, :3]).sum().backward()
        (plain_sums * data.x[:, :3]).sum().backward()
        assert_same({"sums": sums, "values.grad": values.grad}, {"sums": plain_sums, "values.grad": plain_values.grad})
    for end in (0, 1):  # messages as a script may pass them, with functions of torch alone
        assert_same(passed(ours, ours.edge_index[end], ours.edge_index[1 - end]), passed(data, *by_end(data, end)))
    with pytest.raises(DataError, match=r"expected a source of rows \[5\] in torch.float64"):
        ours.x.index_add(0, ours.edge_index[0], ours.edge_attr)
    for reduce in ("mean", "max", "mul"):
        for end in (0, 1):
            expected = scatter_of_pyg(data.edge_attr, data.edge_index[end], 0, NUM_NODES, reduce)
            assert_same({reduce: edges.end(end).add_up(ours.edge_attr, reduce)}, {reduce: expected})


def by_end(data: Any, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    return data.edge_index[end], data.edge_index[1 - end]


def passed(data: Any, to: torch.Tensor, of: torch.Tensor) -> dict[str, torch.Tensor]:
    """Messages between two ends of the edges: sums in place and not, a degree, and the gradient of what is sent."""
    x = data.x.detach().clone().requires_grad_()
    degree = torch.zeros_like(x[:, 0]).index_add_(0, to, torch.ones_like(of, dtype=x.dtype))
    sums = torch.zeros_like(x).index_add_(0, to, x[of]) / (1 + degree).view(-1, 1)
    index = to.view(-1, 1).expand(-1, x.size(1))
    sums = torch.zeros_like(x).scatter_add_(0, index, sums[of].tanh()) + x.index_add(0, to, x[of], alpha=0.3)
    sums.square().sum().backward()
    assert x.grad is not None
    return {"degree": degree, "sums": sums.detach(), "x.grad": x.grad}


def as_nodes(x: torch.Tensor, ours: Any) -> Any:
    return NodeTensor.from_local(ours.graph.node_sharding.slice(x), ours.graph.node_sharding)


@pytest.mark.parametrize("mesh", [None, {"x": 3}, {"y": 3}], ids=str)
def test_lift_and_scatter(workers: Pools, mesh: dict[str, int] | None) -> None:
    workers(3).run(lifted_and_scattered, mesh)


def test_lift_and_scatter_alone(workers: Pools) -> None:
    workers(1).run(lifted_and_scattered, None)
    workers(1).run(lifted_and_scattered, {"x": 1})


def exchanges() -> list[int]:
    _, ours = pair()
    sources, sent = ours.edge_index.edges().end(0), []

    def count(x: Any, rows_before: int) -> None:
        sources.fetch(x)
        sent.append(ours.traffic.num_rows - rows_before)

    x = ours.x.clone()
    with torch.no_grad(), running(torch.nn.Identity()):
        count(x, ours.traffic.num_rows)
        count(x, ours.traffic.num_rows)
        x.mul_(2.0)
        count(x, ours.traffic.num_rows)
    count(x, ours.traffic.num_rows)
    return sent


def test_lifts_of_one_tensor_share_an_exchange(workers: Pools) -> None:
    """Until it changes, and within one call of a conv."""
    ranks = workers(3).run(exchanges)
    first, second, changed, outside = (sum(sent) for sent in zip(*ranks, strict=True))
    assert first > 0
    assert (second, changed, outside) == (0, first, first)


def views(mesh: dict[str, int] | None) -> None:
    data, ours = pair(mesh)
    edges = ours.edge_index.edges(by_operator=True)
    assert (edges.shape, edges.size(1), len(edges), edges.numel()) == ((2, NUM_EDGES), NUM_EDGES, 2, 2 * NUM_EDGES)
    assert (edges.dtype, edges.device, edges.layout) == (torch.int64, torch.device("cpu"), torch.strided)
    assert torch.equal(edges.full_tensor(), data.edge_index)
    mask = ours.edge_attr[:, 0] > 0
    plain_mask = data.edge_attr[:, 0] > 0
    some = edges[:, mask]
    assert torch.equal(some.full_tensor(), data.edge_index[:, plain_mask])
    values = ours.edge_attr[mask]
    assert values._sharding is some.rows
    some_target = data.edge_index[1][plain_mask]
    assert torch.equal(ours.edge_index[1][mask].full_tensor(), some_target)
    assert torch.equal(ours.x[ours.edge_index[1][mask]].full_tensor(), data.x[some_target])
    others, places = edges.without_loops
    loop = data.edge_index[0] == data.edge_index[1]
    assert torch.equal(others.full_tensor(), data.edge_index[:, ~loop])
    assert others.rows.num_local == places.numel()
    every = torch.arange(NUM_NODES).repeat(2, 1)
    assert torch.equal(others.with_loops.full_tensor(), torch.cat([data.edge_index[:, ~loop], every], 1))
    keys = others.with_loops.rows
    assert torch.equal(keys.gather(keys.rng_key)[-NUM_NODES:], NUM_EDGES + torch.arange(NUM_NODES))
    source, target = edges
    assert torch.equal((source == target).full_tensor(), loop)
    out = torch.empty(2, NUM_EDGES, dtype=torch.int64)
    for refused in (
        lambda: edges.add_(1), lambda: edges.__iadd__(1), lambda: edges.__setitem__(0, 1),
        lambda: torch.add(out, 1, out=edges),
    ):  # fmt: skip
        with pytest.raises(MixedRowsError, match="would change a distributed edge_index, which is fixed: copy it"):
            refused()
    for some_of in (
        lambda e: e + 1, lambda e: 2 * e - e, lambda e: ~e, lambda e: e.max(), lambda e: torch.cat([e, e]),
        lambda e: e[:, 0], lambda e: e[:, [3, 1]], lambda e: e[..., plain_mask], lambda e: e.clone().add_(1),
        lambda e: e.t(), lambda e: e[True], lambda e: e[e < 5], lambda e: e[torch.tensor(0)],
        lambda e: e[torch.tensor([1, 0]) > 0], lambda e: e[torch.tensor([1, 0]).byte()],
        lambda e: e[[True, False]], lambda e: out.copy_(e), lambda e: torch.stack(e.unbind(1)),
    ):  # fmt: skip
        assert torch.equal(some_of(edges), some_of(data.edge_index))
    for some_end in (lambda e, _: e[0, :], lambda e, _: e[-1, ...], lambda e, m: e[1, m], lambda e, m: e[..., m][0]):
        assert torch.equal(some_end(edges, mask).full_tensor(), some_end(data.edge_index, plain_mask))
    assert torch.equal(torch.cat([edges, every], dim=1), torch.cat([data.edge_index, every], 1))
    other = pair()[1]
    with pytest.raises(LayoutMismatchError, match="take both from one"):
        source.fetch(other.x)


@pytest.mark.parametrize("world_size", [1, 3])
def test_edges(workers: Pools, world_size: int) -> None:
    workers(world_size).run(views, None)
    workers(world_size).run(views, {"x": world_size})


def as_many_edges_as_nodes(mesh: dict[str, int] | None) -> None:
    """Values of a graph with as many edges as nodes, whose names do not say of which they are, are of both."""
    from torch_geometric.nn import GATConv, GCNConv, SAGEConv

    data = random_graph(NUM_NODES, NUM_NODES, seed=4)
    data.flow = torch.rand(NUM_NODES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"partition": "random"} if mesh is None else {"layout": "grid", "mesh": mesh}
    results = []
    for graph in (data, pyg_dist.DistributedData(data, **options)):
        torch.manual_seed(2)
        convs = torch.nn.ModuleList([GCNConv(5, 3), GATConv(5, 3, edge_dim=1), SAGEConv(1, 3)]).double()
        gcn, gat, sage = convs if graph is data else pyg_dist.distribute(convs)
        x, edge_index, (source, target) = graph.x.detach().clone().requires_grad_(), graph.edge_index, graph.edge_index
        found = {
            "weights": gcn(x, edge_index, graph.flow),
            "features of edges": gat(x, edge_index, graph.flow.view(-1, 1)),
            "features of nodes": sage(graph.edge_weight.view(-1, 1), edge_index),
            "differences": (x[source] - x[target]).norm(dim=1) - graph.flow,
            "a mask": gcn(x, edge_index[:, graph.flow > 0.5]),
            "both": graph.edge_weight * x[:, 0],
        }
        sum(value.square().sum() for value in found.values()).backward()  # type: ignore[union-attr]
        results.append({name: value.detach() for name, value in found.items()} | {"x.grad": x.grad})
    assert_same(results[1], results[0])


@pytest.mark.parametrize("world_size", [1, 3])
def test_as_many_edges_as_nodes(workers: Pools, world_size: int) -> None:
    workers(world_size).run(as_many_edges_as_nodes, None)
    workers(world_size).run(as_many_edges_as_nodes, {"x": world_size})
