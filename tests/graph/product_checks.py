"""Checks of ``graph/protocol.py``: where rows lie, and products, against dense matrices."""

from __future__ import annotations

from typing import Any

import torch
from against_stock import assert_same
from bits import assert_same_bits
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pyg_dist.backend.comm.transport import Pending
from pyg_dist.graph.protocol import Norm, have_same_edges

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
    laid = data.graph
    rows = laid.node_sharding
    assert laid.sources is laid.targets is rows
    assert rows.size == N
    assert (laid.device, laid.loop_rule, laid.digest) == (torch.device("cpu"), "remaining", None)
    everywhere = rows.group.gather_rows(rows.global_id, rows.counts)
    assert everywhere.sort().values.tolist() == list(range(N))
    assert_same_bits(data.y.to_local(), graph.y[rows.global_id])


def edge_sharding(graph: Data, data: Any, how: Layout) -> None:
    """Every edge is on one rank, as its attributes are, which are in the input's order when they are whole."""
    laid = data.graph
    rows = laid.edge_sharding
    assert rows.size == E
    assert sum(rows.counts) == E
    assert_same_bits(data.edge_weight.full_tensor(), graph.edge_weight)


def owns(graph: Data, data: Any, how: Layout) -> None:
    other, laid, view = type(data)(graph, **how), data.graph, data.graph.edge_view
    for owns in (laid.owns, view.owns):
        assert all(owns(value) for value in (data.x, data.y, laid.place(data.x)))
        assert not any(owns(value) for value in (data.edge_weight, other.y))


def place(graph: Data, data: Any, how: Layout) -> None:
    """Values stay, and lie as the sharding says; what lies so already is not moved."""
    laid = data.graph
    for value in (data.x, data.x[:, :2], data.x * 1):
        placed = laid.place(value)
        assert placed._sharding is laid.feature_sharding(value.shape[1])
        assert_same_bits(placed.full_tensor(), value.full_tensor())
        assert laid.place(placed) is placed
    for name in ("x", "y", "train_mask"):
        data[name] = data[name].to_rows()
        kept = data[name]
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
    for factor in (1.0, 1.0, 2.0, 0.5):  # at last as they were, for the next check
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
        outs = [p.wait() if isinstance(p, Pending) else p for p in pending]
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
    with torch.no_grad():
        x.mul_(0.5)  # for the next check
    assert not laid.is_cached(leaf(x), operator)
    assert not laid.is_cached(x, laid.operator(Norm.SUM, leaf(data.edge_weight), torch.float64))


def selected(graph: Data, data: Any, how: Layout) -> None:
    """Some edges, over the same nodes: by mask, none, and some of some."""
    from pyg_dist.tensor.functions.indexing import select_rows

    for mask, number in ((graph.edge_weight > 0.5, 40), (graph.edge_weight > 9.0, 0)):
        some = graph.edge_index[:, mask][:, :number]
        laid = data.graph
        for index in (mask, slice(0, number)):
            laid = laid.select(select_rows(laid.edge_sharding, index))
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
