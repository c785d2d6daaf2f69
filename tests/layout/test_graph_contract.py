"""``layout/graph.py``: every method of ``DistributedGraph`` on both layouts, against dense matrices and PyG.

A check gets a graph of PyG and the same one as ``DistributedData``, in every layout, on every mesh and partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import assert_same, meshes
from bits import assert_same_bits
from random_graphs import random_graph, uneven_parts
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import scatter, softmax
from workers import Workers

from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.layout.graph import DistributedGraph, EdgeView, Norm, have_same_edges

Pools = Callable[[int], Workers]
Layout = dict[str, Any]
N, E, F = 23, 120, 5
NORMS = [Norm.SUM, Norm.MEAN, Norm.gcn(True), Norm.gcn(True, 2.0), Norm.gcn(False)]


def dense(graph: Data, norm: Norm = Norm.SUM, weight: Tensor | None = None) -> Tensor:
    """The matrix of an aggregation, ``[N, N]`` by target and source; differentiable by the weights."""
    edge_index = graph.edge_index
    weight = torch.ones(edge_index.shape[1], dtype=torch.float64) if weight is None else weight
    if norm.kind == "gcn":
        edge_index, weight = gcn_norm(edge_index, weight, N, norm.loop_value == 2.0, norm.add_self_loops)
    matrix = torch.zeros(N, N, dtype=torch.float64).index_put((edge_index[1], edge_index[0]), weight, accumulate=True)
    if norm.kind == "mean":
        matrix = matrix / torch.bincount(edge_index[1], minlength=N).clamp(min=1).view(-1, 1)
    return matrix


def leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_()


def node_sharding(graph: Data, data: Any, how: Layout) -> None:
    """Every node is on one rank, as its attributes are."""
    rows = data.graph.node_sharding
    assert rows.size == N
    everywhere = rows.group.gather_rows(rows.global_id, rows.counts)
    assert everywhere.sort().values.tolist() == list(range(N))
    assert_same_bits(data.y.to_local(), graph.y[rows.global_id])


def edge_sharding(graph: Data, data: Any, how: Layout) -> None:
    """Every edge is on one rank, as its attributes are, which are in the input's order when they are whole."""
    rows = data.graph.edge_sharding
    assert rows.size == E
    assert sum(rows.counts) == E
    assert_same_bits(data.edge_weight.full_tensor(), graph.edge_weight)


def owns(graph: Data, data: Any, how: Layout) -> None:
    other = type(data)(graph, **how)
    assert all(data.graph.owns(value) for value in (data.x, data.y, data.graph.place(data.x)))
    assert not any(data.graph.owns(value) for value in (data.edge_weight, other.y))


def place(graph: Data, data: Any, how: Layout) -> None:
    """Values stay, and lie as the sharding says; what lies so already is not moved."""
    laid = data.graph
    for value in (data.x, data.x[:, :2], data.x * 1):
        placed = laid.place(value)
        assert placed._sharding is laid.feature_sharding(value.shape[1])
        assert_same_bits(placed.full_tensor(), value.full_tensor())
        assert laid.place(placed) is placed
    for name in ("x", "y", "train_mask"):
        kept = laid.place_attribute(name, data[name])
        assert kept._sharding is laid.attribute_sharding(name, graph[name])
        assert_same_bits(kept.full_tensor(), graph[name])


def products(graph: Data, data: Any, how: Layout) -> None:
    """Values, and gradients by x and by weights that learn, for every norm; without gradients, too."""
    laid = data.graph
    for norm in NORMS:
        for kind in ("none", "constant", "learns"):
            given = [() if kind == "none" else (leaf(d.edge_weight) if kind == "learns" else d.edge_weight,)
                     for d in (data, graph)]  # fmt: skip
            ours, stock = leaf(data.x), leaf(graph.x)
            operator = laid.operator(norm, given[0][0] if given[0] else None, torch.float64)
            assert operator.learns == (kind == "learns")
            got, want = laid.aggregate(laid.place(ours), operator), dense(graph, norm, *given[1]) @ stock
            for out in (got, want):
                (out * out).sum().backward()
            found = [{"out": out, "x": x.grad} for out, x in ((got, ours), (want, stock))]
            if kind == "learns":
                found = [{**results, "weight": w.grad} for results, (w,) in zip(found, given, strict=True)]
            assert_same(*found, f"{norm} weights {kind}")
            with torch.no_grad():
                again = laid.aggregate(laid.place(data.x * 2), laid.operator(norm, *given[0] or (None,), torch.float64))
            assert not again.requires_grad
            assert_same({"out": again}, {"out": 2 * want}, f"{norm} weights {kind}, without gradients")


def operators(graph: Data, data: Any, how: Layout) -> None:
    """An operator is cached while its weights do not change; one of another dtype or norm is another."""
    laid, weight = data.graph, data.edge_weight
    x = laid.place(data.x)
    expected = dense(graph, Norm.SUM, graph.edge_weight) @ graph.x
    for factor in (1.0, 1.0, 3.0):
        weight.mul_(factor)
        expected = expected * factor
        out = laid.aggregate(x, laid.operator(Norm.SUM, weight, torch.float64))
        assert_same({"out": out}, {"out": expected})
    narrow = laid.aggregate(laid.place(data.x.float()), laid.operator(Norm.MEAN, None, torch.float32))
    assert narrow.dtype == torch.float32
    assert_same({"out": narrow}, {"out": (dense(graph, Norm.MEAN) @ graph.x).float()})


def started(graph: Data, data: Any, how: Layout) -> None:
    """``start`` is ``aggregate`` in two steps, between which others run."""
    laid = data.graph
    for norm in NORMS:
        operator, first, second = laid.operator(norm, None, torch.float64), leaf(data.x), leaf(data.x)
        pending = [laid.start(laid.place(x), operator) for x in (first, second * 2)]
        outs = [p.wait() for p in pending]
        sum(out.square().sum() for out in outs).backward()
        matrix = dense(graph, norm)
        want = matrix @ graph.x
        assert_same(
            {"first": outs[0], "second": outs[1], "grad": first.grad, "other grad": second.grad},
            {"first": want, "second": 2 * want, "grad": 2 * matrix.T @ want, "other grad": 8 * matrix.T @ want},
            str(norm),
        )


def linear_sums(graph: Data, data: Any, how: Layout) -> None:
    """``A X W^T + X V^T + b``, with the product finished or under way: values and every gradient."""
    laid, rng = data.graph, torch.Generator().manual_seed(0)
    operator, matrix = laid.operator(Norm.MEAN, None, torch.float64), dense(graph, Norm.MEAN)
    for is_under_way in (False, True):
        parameters = [torch.randn(*s, generator=rng, dtype=torch.float64) for s in ((3, F), (3, F), (3,))]
        found = []
        for x, is_ours in ((leaf(data.x), True), (leaf(graph.x), False)):
            weight, root, bias = (leaf(p) for p in parameters)
            if is_ours:
                tiles = laid.place(x)
                product = (laid.start if is_under_way else laid.aggregate)(tiles, operator)
                out = laid.linear_sum([(product, weight), (laid.align(tiles, tiles), root)], bias)
                assert_same({"alone": laid.linear_sum([(tiles, weight)])}, {"alone": graph.x @ weight.T})
            else:
                out = matrix @ x @ weight.T + x @ root.T + bias
            out.square().sum().backward()
            found.append({"out": out, "x": x.grad, "W": weight.grad, "V": root.grad, "b": bias.grad})
        assert_same(*found, f"under way: {is_under_way}")


def cached(graph: Data, data: Any, how: Layout) -> None:
    """The product with an attribute is sent and added up once for each version; one that learns is not kept."""
    laid = data.graph
    operator, x = laid.operator(Norm.SUM, None, torch.float64), laid.place(data.x)
    assert laid.is_cached(x, operator)
    sent = []
    for _ in range(3):
        before = laid.traffic.num_bytes
        out = laid.aggregate(x, operator)
        sent.append(laid.traffic.num_bytes - before)
    assert laid.is_cached(x, operator)
    assert sent[1:] == [0, 0]
    assert (sum(laid.group.gather_counts(sent[0])) > 0) == (laid.group.size > 1)
    assert_same({"out": out}, {"out": dense(graph) @ graph.x})
    with torch.no_grad():
        x.mul_(2.0)
    assert_same({"out": laid.aggregate(x, operator)}, {"out": 2 * dense(graph) @ graph.x}, "changed in place")
    assert not laid.is_cached(leaf(x), operator)
    assert not laid.is_cached(x, laid.operator(Norm.SUM, leaf(data.edge_weight), torch.float64))


def selected(graph: Data, data: Any, how: Layout) -> None:
    """Some edges, over the same nodes: by mask, none, and some of some."""
    for mask, number in ((graph.edge_weight > 0.5, 40), (graph.edge_weight > 9.0, 0)):
        handle = data.edge_index[:, mask][:, :number]
        some = graph.edge_index[:, mask][:, :number]
        laid = handle.graph
        assert laid.node_sharding is data.graph.node_sharding
        assert_same_bits(laid.full_edge_index(), some)
        part = Data(edge_index=some)
        for norm in NORMS:
            out = laid.aggregate(laid.place(data.x), laid.operator(norm, None, torch.float64))
            assert_same({"out": out}, {"out": dense(part, norm) @ graph.x}, f"{norm} of {number}")


def moved(graph: Data, data: Any, how: Layout) -> None:
    """On the device where it is already: the same edges and products."""
    laid = data.graph
    for other in (laid, laid.to("cpu")):
        assert have_same_edges(laid, other) or other.edge_sharding.size == E
        assert_same_bits(other.full_edge_index(), graph.edge_index)
        out = other.aggregate(other.place(data.x), other.operator(Norm.SUM, None, torch.float64))
        assert_same({"out": out}, {"out": dense(graph) @ graph.x})


def questions(graph: Data, data: Any, how: Layout) -> None:
    """All edges, their ends, self loops and isolated nodes, of several graphs."""
    laid = data.graph
    assert_same_bits(laid.full_edge_index(), graph.edge_index)
    ends = data.edge_index
    for end, want in zip(ends, graph.edge_index, strict=True):
        assert_same_bits(end.full_tensor(), want)
    ring = torch.stack([torch.arange(N), torch.arange(N).roll(1)])
    cases = {"as it is": graph.edge_index, "ring": ring, "part": ring[:, 3:], "none": ring[:, :0]}
    cases["loops"] = torch.cat([ring[:, 5:], torch.arange(N).expand(2, N)], 1)
    seen = set()
    for name, edge_index in cases.items():
        whole = Data(x=graph.x, edge_index=edge_index)
        other = type(data)(whole, **how).graph
        answers = other.has_isolated_nodes(), other.has_self_loops()
        assert answers == (whole.has_isolated_nodes(), whole.has_self_loops()), name
        seen.add(answers)
    assert len(seen) >= 3


def same_edges(graph: Data, data: Any, how: Layout) -> None:
    other = type(data)(graph, **how)
    assert have_same_edges(data.graph, data.graph)
    assert not have_same_edges(data.graph, other.graph)
    mask = data.edge_weight > 0.5
    once, again = (data.edge_index[:, mask].graph for _ in range(2))
    assert not have_same_edges(data.graph, once), "some are not all"
    assert have_same_edges(once, again), "selected once more"


def edge_view(graph: Data, data: Any, how: Layout) -> None:
    """Every name, against the whole graph."""
    view: EdgeView = data.graph.edge_view
    assert view is data.graph.edge_view
    ids, here = view.neighbour_id, view.node_sharding.global_id
    assert (view.num_local, view.num_neighbours) == (len(here), len(ids))
    assert ids[: view.num_local].tolist() == here.tolist()
    source, target = view.ends()
    mine = view.edge_sharding.global_id
    assert_same_bits(torch.stack([ids[source], here[target]]), graph.edge_index[:, mine])
    assert view.max_in_degree == int(torch.bincount(graph.edge_index[1]).max())
    csr, padded = view.csr, view.neighbour_lists(2)
    assert_same_bits(csr.row(), target[csr.edge])
    assert_same_bits(csr.col.long(), source[csr.edge])
    order = mine[csr.edge]
    assert all(bool((order[a:b].diff() > 0).all()) for a, b in zip(csr.rowptr[:-1], csr.rowptr[1:], strict=True))
    assert [end[:2].tolist() for end in padded] == [[view.num_neighbours] * 2, [0, 0]]
    assert_same_bits(padded[0][2:], csr.col.long())
    assert_same_bits(padded[1][2:], csr.row() + 1)
    x = data.x.detach().to_rows().to_local().clone().requires_grad_()
    rows = view.neighbour_rows(x)
    assert_same_bits(rows.detach(), graph.x[ids])
    factor = torch.arange(1.0, len(ids) + 1, dtype=torch.float64).view(-1, 1)
    (gradient,) = torch.autograd.grad((rows * factor).sum(), x)
    assert_same_bits(gradient, view.sum_to_owners(factor.expand(-1, F).contiguous()))
    everywhere = torch.zeros(N, dtype=torch.float64).index_add(0, ids, factor.view(-1))
    assert_same({"sums": gradient[:, 0]}, {"sums": view.group.all_reduce_(everywhere)[here]})
    assert isinstance(view.operator(Norm.SUM, None, torch.float64).learns, bool)


def attention(graph: Data, data: Any, how: Layout) -> None:
    """Softmax by target of one logit an edge and head, and the sums that it weighs, of PyG's functions."""
    laid, (source, target) = data.graph, graph.edge_index
    rows = laid.node_sharding
    found: list[dict[str, Tensor]] = []
    for is_ours in (False, True):
        leaves = {"value": leaf(graph.x[:, :4]), "query": leaf(graph.x[:, 1:]), "attr": leaf(graph.edge_attr[:, :2])}
        weight = graph.x[:, :4].cos()
        if is_ours:
            value, query, of_rows = (rows.slice(x) for x in (leaves["value"], leaves["query"], weight))
            attr = laid.edge_sharding.slice(leaves["attr"])
            inputs = AttentionInputs(value, value.sin(), query, attr, of_rows)
            spec = AttentionSpec("dot", 2, scale=0.5)
            parts = laid.attend(data.edge_index.edges(by_operator=True), inputs, spec)
            out, of_edges = (rows.gather(part) for part in parts[:2])
        else:
            value, key, query, by_row = (
                x.view(N, 2, 2) for x in (leaves["value"], leaves["value"].sin(), leaves["query"], weight)
            )
            f = leaves["attr"].unsqueeze(1)
            logits = 0.5 * ((key[source] * query[target]).sum(2) + (by_row[target] * f).sum(2))
            alpha = softmax(logits, target, num_nodes=N).unsqueeze(2)
            out, of_edges = (scatter(alpha * x, target, 0, N).flatten(1) for x in (value[source], f))
        loss = (out * out + out).sum() + of_edges.square().sum()
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        found.append({"out": out, "of edges": of_edges, **dict(zip(leaves, slopes, strict=True))})
    assert_same(found[1], found[0])


def tiled(graph: Data, data: Any, how: Layout) -> None:
    """A graph without single edges has others without and with self loops, rows at edges and sums of edges."""
    if how["layout"] == "halo":
        return
    laid = data.graph
    edge_index = graph.edge_index
    other = edge_index[0] != edge_index[1]
    left, places = laid.without_loops
    assert_same_bits(left.full_edge_index(), edge_index[:, other])
    assert_same_bits(laid.edge_sharding.global_id[places], left.edge_sharding.global_id)
    loops = torch.arange(N).expand(2, -1)
    assert_same_bits(left.with_loops.full_edge_index(), torch.cat([edge_index[:, other], loops], 1))
    values = leaf(graph.edge_attr)
    rows, edges = laid.node_sharding, laid.edge_sharding
    row, found = laid.loop_values(edges.slice(values))
    ids = rows.global_id[row]
    for node in rows.global_id.tolist():
        assert_same_bits(found[ids == node].detach(), graph.edge_attr[(edge_index[0] == node) & ~other])
    (slope,) = torch.autograd.grad(found.square().sum(), values)
    assert_same({"slope": slope}, {"slope": 2 * graph.edge_attr * ~other.view(-1, 1)})
    for end in (0, 1):
        sums = rows.gather(laid.sum_edges(edges.slice(values), end))
        expected = scatter(graph.edge_attr, edge_index[end], 0, N)
        assert_same({"sums": sums}, {"sums": expected})
        (slope,) = torch.autograd.grad(sums.square().sum(), values)
        assert_same({"slope": slope}, {"slope": 2 * expected[edge_index[end]]})
        nodes = leaf(graph.x)
        fetched = edges.gather(laid.at_edges(rows.slice(nodes), end))
        assert_same_bits(fetched, graph.x[edge_index[end]])
        (slope,) = torch.autograd.grad(fetched.square().sum(), nodes)
        assert_same({"slope": slope}, {"slope": scatter(2 * fetched, edge_index[end], 0, N)})


def subgraphs(graph: Data, data: Any, how: Layout) -> None:
    """A graph of one data group cuts PyG's subgraph."""
    assert data.graph.data_group == (0, 1)
    data.graph.prepare_subgraphs()
    nodes = torch.arange(0, N, 2)
    part = data.subgraph(nodes)
    expected = graph.subgraph(nodes)
    assert_same_bits(part.n_id.full_tensor(), nodes)
    assert_same_bits(part.x.full_tensor(), expected.x)
    found, known = (
        sorted(zip(*ends.tolist(), strict=True)) for ends in (part.graph.full_edge_index(), expected.edge_index)
    )
    assert found == known


CHECKS = [
    node_sharding, edge_sharding, owns, place, products, operators, started, linear_sums, cached, selected, moved,
    questions, same_edges, edge_view, attention, tiled, subgraphs,
]  # fmt: skip


def run(name: str, layouts: list[Layout]) -> None:
    from pyg_dist import DistributedData

    (check,) = (check for check in CHECKS if check.__name__ == name)
    for how in layouts:
        graph = random_graph(N, E, F, seed=3)
        data: Any = DistributedData(graph.clone(), **how)
        try:
            check(graph, data, how)
        except AssertionError as error:
            raise AssertionError(f"{name} on {how}: {error}") from error


def layouts_of(num_ranks: int) -> list[Layout]:
    halo = {"layout": "halo", "partition": uneven_parts(N, num_ranks)}
    exchanges = [{**halo, "exchange": exchange} for exchange in ("hybrid", "post", "pre")]
    return [*exchanges, *({"layout": "grid", "mesh": mesh} for mesh in meshes(num_ranks))]


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_contract(workers: Pools, num_ranks: int, name: str) -> None:
    workers(num_ranks).run(run, name, layouts_of(num_ranks))


def test_every_method_has_its_check() -> None:
    """What is new in the protocol is missing here until it is named."""
    checked = {
        "node_sharding", "traffic", "feature_sharding", "attribute_sharding", "place_attribute", "place", "owns",
        "operator", "aggregate", "start", "align", "linear_sum", "is_cached", "select", "over", "to", "full_edge_index",
        "has_isolated_nodes", "has_self_loops", "data_group", "prepare_subgraphs", "attend", "without_loops",
        "edges", "edge_view", "induced", "with_loops", "edge_index", "at_edges", "sum_edges", "loop_values",
        "operator_over",
    }  # fmt: skip
    names = {*vars(DistributedGraph)}
    assert {name for name in names if not name.startswith("_")} - checked == set()
