"""``graph/protocol.py``: every name of its protocols on both layouts, against dense matrices and PyG.

A check gets a graph of PyG and the same one as ``DistributedData``, in every layout, on every mesh and partition. It
calls a graph ``laid``, its edge view ``view``, an operator ``operator`` and a subgraph ``sampled``: by these words
``test_every_name_has_its_check`` finds what of a protocol no check has taken.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from against_stock import assert_same, meshes
from bits import assert_same_bits
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import add_remaining_self_loops, scatter, softmax
from workers import Workers

from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.csr import Block
from pyg_dist.graph.protocol import (
    DistributedGraph,
    EdgeView,
    GraphProducts,
    Norm,
    Operator,
    SampledGraph,
    have_same_edges,
)

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


def questions(graph: Data, data: Any, how: Layout) -> None:
    """All edges, their ends, self loops and isolated nodes, of several graphs."""
    assert_same_bits(data.graph.full_edge_index(), graph.edge_index)
    for end, want in zip(data.edge_index, graph.edge_index, strict=True):
        assert_same_bits(end.full_tensor(), want)
    laid = data.graph
    assert laid.one_rank_edges is None  # by the tests' setting
    ring = torch.stack([torch.arange(N), torch.arange(N).roll(1)])
    cases = {"as it is": graph.edge_index, "ring": ring, "part": ring[:, 3:], "none": ring[:, :0]}
    cases["loops"] = torch.cat([ring[:, 5:], torch.arange(N).expand(2, N)], 1)
    seen = set()
    for name, edge_index in cases.items():
        whole = Data(x=graph.x, edge_index=edge_index)
        laid = type(data)(whole, **how).graph
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


def same_slope(name: str, out: Tensor, expected: Tensor, x: Tensor) -> None:
    results = [{name: y, "slope": torch.autograd.grad(y.square().sum(), x)[0]} for y in (out, expected)]
    assert_same(*results)


def subgraphs(graph: Data, data: Any, how: Layout) -> None:
    """A graph cuts PyG's subgraph, on each data group."""
    from pyg_dist.backend.comm.group import world_group
    from pyg_dist.graph.sample import Subset

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


CHECKS = [
    node_sharding, edge_sharding, owns, place, products, operators, started, linear_sums, cached, selected, moved,
    questions, same_edges, edge_view, view_products, blocks, attention, single_edges, subgraphs,
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


PRODUCTS = {"products", "operators", "started", "linear_sums", "cached", "selected", "view_products", "subgraphs"}
"""Checks of what an exchange's kind is for."""


def layouts_of(num_ranks: int, name: str) -> list[Layout]:
    halo = {"layout": "halo", "partition": uneven_parts(N, num_ranks)}
    kinds = ("hybrid", "post", "pre") if name in PRODUCTS else ("hybrid",)
    exchanges = [{**halo, "exchange": exchange} for exchange in kinds]
    grids = [{"layout": "grid", "mesh": mesh} for mesh in meshes(num_ranks) if max(mesh.values()) < 4]
    groups = next((count for count in (2, 3) if num_ranks % count == 0), 1)
    if groups > 1:  # data groups, each of which holds the graph
        size = num_ranks // groups
        parts = {"partition": uneven_parts(N, size), "mesh": {"data": groups, "part": size}}
        exchanges.append({"layout": "halo", **parts})
        grids.append({"layout": "grid", "mesh": {"data": groups, **meshes(size)[-1]}})
    return [*exchanges, *grids]


@pytest.mark.parametrize("name", [check.__name__ for check in CHECKS])
@pytest.mark.parametrize("num_ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_contract(workers: Pools, num_ranks: int, name: str) -> None:
    workers(num_ranks).run(run, name, layouts_of(num_ranks, name))


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
