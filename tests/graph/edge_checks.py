"""Checks of ``graph/protocol.py``: what a graph says of its edges, and its view of single ones, against PyG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from against_stock import assert_same
from bits import assert_same_bits
from product_checks import F, Layout, N, dense, leaf
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.utils import add_remaining_self_loops, scatter, softmax

from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.csr import Block
from pyg_dist.graph.protocol import EdgeView, Norm, have_same_edges


def same_slope(name: str, out: Tensor, expected: Tensor, x: Tensor) -> None:
    results = [{name: y, "slope": torch.autograd.grad(y.square().sum(), x)[0]} for y in (out, expected)]
    assert_same(*results)


def questions(graph: Data, data: Any, how: Layout) -> None:
    """All edges, their ends, self loops and isolated nodes, of several graphs."""
    assert_same_bits(data.graph.full_edge_index(), graph.edge_index)
    for end, want in zip(data.edge_index, graph.edge_index, strict=True):
        assert_same_bits(end.full_tensor(), want)
    laid = data.graph
    assert laid.one_rank_columns < 1  # by the tests' setting
    if laid.edge_sharding.is_on_one_rank and how.get("layout") != "grid":
        assert_same_bits(laid.one_rank_edges, graph.edge_index[:, laid.edge_sharding.global_id])
    ring = torch.stack([torch.arange(N), torch.arange(N).roll(1)])
    cases = {"as it is": graph.edge_index, "ring": ring, "part": ring[:, 3:], "none": ring[:, :0]}
    cases["loops"] = torch.cat([ring[:, 5:], torch.arange(N).expand(2, N)], 1)
    seen = set()
    for name, edge_index in cases.items():
        whole = Data(x=graph.x, edge_index=edge_index)
        laid = type(data)(whole, **how)
        answers = laid.has_isolated_nodes(), laid.has_self_loops()
        assert answers == (whole.has_isolated_nodes(), whole.has_self_loops()), name
        seen.add(answers)
    assert len(seen) >= 3


def same_edges(graph: Data, data: Any, how: Layout) -> None:
    other, laid = type(data)(graph, **how), data.graph
    assert have_same_edges(laid, laid)
    assert not have_same_edges(laid, other.graph)
    drawn = [type(data.edge_index).over(graph.edge_index, laid.node_sharding, laid.device).graph for _ in range(2)]
    assert drawn[0].digest is not None
    assert have_same_edges(*drawn)
    assert not have_same_edges(laid, drawn[0])
    mask = data.edge_weight > 0.5
    once, again = (data.edge_index[:, mask].graph for _ in range(2))
    assert not have_same_edges(data.graph, once), "some are not all"
    assert have_same_edges(once, again), "selected once more"


def edge_view(graph: Data, data: Any, how: Layout) -> None:
    """Rows, edges and exchanges, against the whole graph."""
    laid = data.graph
    view: EdgeView = laid.edge_view
    assert view is laid.edge_view
    assert (view.device, view.loop_rule, view.node_sharding) == (laid.device, laid.loop_rule, laid.node_sharding)
    assert view.group.size == laid.group.size
    ids, here = view.neighbour_id, view.node_sharding.global_id
    assert view.sources is view.targets is view.node_sharding
    assert (view.num_local, view.num_sources, view.num_neighbours) == (len(here), len(here), len(ids))
    assert ids[: view.num_local].tolist() == here.tolist()
    owner = torch.zeros(N, dtype=torch.int64)
    owner[here] = view.group.rank
    assert_same_bits(view.neighbour_rank, view.group.all_reduce_(owner)[ids])
    source, target = view.ends()
    mine = view.edge_sharding.global_id
    boundary = target[source >= view.num_local]
    assert view.num_boundary == (view.num_local - int(boundary.min()) if boundary.numel() else 0)
    assert_same_bits(torch.stack([ids[source], here[target]]), graph.edge_index[:, mine])
    csr = view.csr
    assert_same_bits(csr.row(), target[csr.edge])
    assert_same_bits(csr.col.long(), source[csr.edge])
    order = mine[csr.edge]
    assert all(bool((order[a:b].diff() > 0).all()) for a, b in zip(csr.rowptr[:-1], csr.rowptr[1:], strict=True))
    x = data.x.detach().to_rows().to_local().clone().requires_grad_()
    rows = view.neighbour_rows(x)
    assert_same_bits(rows.detach(), graph.x[ids])
    factor = torch.arange(1.0, len(ids) + 1, dtype=torch.float64).view(-1, 1)
    (gradient,) = torch.autograd.grad((rows * factor).sum(), x)
    assert_same_bits(gradient, view.sum_to_owners(factor.expand(-1, F).contiguous()))
    everywhere = torch.zeros(N, dtype=torch.float64).index_add(0, ids, factor.view(-1))
    assert_same({"sums": gradient[:, 0]}, {"sums": view.group.all_reduce_(everywhere)[here]})


def view_products(graph: Data, data: Any, how: Layout) -> None:
    """Products of a view are the graph's; with other self loops, too."""
    view = data.graph.edge_view
    x = view.place(data.x)
    assert x._sharding is view.node_sharding
    more = data.edge_index.edges().with_loops
    for norm in (Norm.SUM, Norm.MEAN):
        operator = view.operator(norm, None, torch.float64)
        assert_same({"out": view.aggregate(x, operator)}, {"out": dense(graph, norm) @ graph.x})
        with_loops = Data(edge_index=torch.cat([graph.edge_index, torch.arange(N).expand(2, N)], 1))
        operator = view.operator_over(more, norm, None, torch.float64)
        assert_same({"out": view.aggregate(x, operator)}, {"out": dense(with_loops, norm) @ graph.x})


def blocks(graph: Data, data: Any, how: Layout) -> None:
    """Weighted sums by blocks of few edges are those of the whole graph; so are their gradients."""
    view = data.graph.edge_view
    rows, edges = view.node_sharding, data.edge_index.edges()

    def sums(block: Block, pieces: Sequence[Tensor]) -> Tensor:
        out = torch.zeros(block.high - block.low, F, dtype=torch.float64)
        return out.index_add(0, block.target, pieces[0] * pieces[1].view(-1, 1))

    found = []
    for x, weight, is_ours in ((graph.x, graph.edge_weight, True), (graph.x, graph.edge_weight, False)):
        x, weight = leaf(x), leaf(weight)
        if is_ours:
            inputs: Any = [("source", rows.slice(x)), ("edge", edges.rows.slice(weight))]
            out = rows.gather(view.reduce_by_blocks(edges, inputs, sums, 7, nn.Identity()))
        else:
            out = dense(graph, Norm.SUM, weight) @ x
        slopes = torch.autograd.grad(out.square().sum(), (x, weight))
        found.append({"out": out, "x": slopes[0], "weight": slopes[1]})
    assert_same(*found)


def attention(graph: Data, data: Any, how: Layout) -> None:
    """Softmax by target of one logit an edge and head, and the sums that it weighs, of PyG's functions."""
    laid, view, (source, target) = data.graph, data.graph.edge_view, graph.edge_index
    rows = laid.node_sharding
    found: list[dict[str, Tensor]] = []
    for attend, edges in (
        (None, None), (laid.attend, data.edge_index.edges(by_operator=True)), (view.attend, data.edge_index.edges())
    ):  # fmt: skip
        leaves = {"value": leaf(graph.x[:, :4]), "query": leaf(graph.x[:, 1:]), "attr": leaf(graph.edge_attr[:, :2])}
        weight = graph.x[:, :4].cos()
        if attend is not None:
            value, query, of_rows = (rows.slice(x) for x in (leaves["value"], leaves["query"], weight))
            attr = edges.rows.slice(leaves["attr"])
            inputs = AttentionInputs(value, value.sin(), query, attr, of_rows)
            spec = AttentionSpec("dot", 2, scale=0.5)
            *parts, alpha = attend(edges, inputs, spec, has_weights=True)
            out, of_edges = (rows.gather(part) for part in parts)
            alpha = edges.rows.gather(alpha)
        else:
            value, key, query, by_row = (
                x.view(N, 2, 2) for x in (leaves["value"], leaves["value"].sin(), leaves["query"], weight)
            )
            f = leaves["attr"].unsqueeze(1)
            logits = 0.5 * ((key[source] * query[target]).sum(2) + (by_row[target] * f).sum(2))
            alpha = softmax(logits, target, num_nodes=N)
            out, of_edges = (scatter(alpha.unsqueeze(2) * x, target, 0, N).flatten(1) for x in (value[source], f))
        loss = (out * out + out).sum() + of_edges.square().sum()
        slopes = torch.autograd.grad(loss, list(leaves.values()))
        found.append({"out": out, "of edges": of_edges, "alpha": alpha, **dict(zip(leaves, slopes, strict=True))})
    for ours in found[1:]:
        assert_same(ours, found[0])


def single_edges(graph: Data, data: Any, how: Layout) -> None:
    """Edges where they are stored: without and with self loops, rows at them, and sums and softmax of their values."""
    laid, edge_index = data.graph, graph.edge_index
    assert laid.edges().weight is None
    assert_same_bits(laid.edges(data.edge_weight).by_target_rank.weight.full_tensor(), graph.edge_weight)
    edges, other = laid.edges(), edge_index[0] != edge_index[1]
    assert_same_bits(edges.full_tensor(), edge_index)
    left, places = edges.without_loops
    assert_same_bits(left.full_tensor(), edge_index[:, other])
    assert_same_bits(edges.rows.global_id[places], left.rows.global_id)
    loops = torch.arange(N).expand(2, -1)
    assert_same_bits(left.with_loops.full_tensor(), torch.cat([edge_index[:, other], loops], 1))
    values, nodes, rows = leaf(graph.edge_attr), laid.node_sharding, edges.rows
    filled = edges.with_loop_values(nodes.slice(torch.full((N, 3), 7.0).double()), rows.slice(values), "remaining")
    expected = add_remaining_self_loops(edge_index, values, 7.0, N)[1][-N:]
    same_slope("loops", nodes.gather(filled), expected, values)
    same_slope(
        "softmax", rows.gather(edges.softmax_by_target(rows.slice(values))), softmax(values, edge_index[1]), values
    )
    for end in (0, 1):
        sums = nodes.gather(edges.reduce(rows.slice(values), end, "sum"))
        same_slope("sums", sums, scatter(values, edge_index[end], 0, N), values)
        ours, stock = leaf(data.x), leaf(graph.x)
        fetched, expected = edges.fetch(ours, end), stock[edge_index[end]]
        assert_same_bits(fetched.full_tensor(), expected.detach())
        slopes = [torch.autograd.grad(out.square().sum(), x)[0] for out, x in ((fetched, ours), (expected, stock))]
        assert_same({"slope": slopes[0]}, {"slope": slopes[1]})
