"""GATConv, GATv2Conv and TransformerConv by the fused op: stock PyG's numbers."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
from against_stock import Results, assert_same, differences, gradients, meshes
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from random_graphs import random_graph, uneven_parts
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.backend.timing import PHASES
from pyg_dist.conv import DistributedConv

ON_THE_GRID: dict[str, Any] = {
    "GATConv": gnn.GATConv,
    "GATv2Conv": gnn.GATv2Conv,
    "TransformerConv": gnn.TransformerConv,
}
CONVS = ON_THE_GRID  # and on the halo layout
F = 3


class Case(NamedTuple):
    """One conv on one graph."""

    num_nodes: int
    edges: list[tuple[int, int]]
    owners: list[int]
    conv: str
    heads: int
    columns: int
    options: dict[str, Any]
    edge_dim: int  # 0: none
    is_pair: bool
    seed: int = 0
    mesh: dict[str, int] | None = None  # None: the halo layout
    asks: bool = False  # for the weights of edges, too


@st.composite
def cases(draw: Any, world_size: int, on_grid: bool) -> Case:
    num_nodes = draw(st.integers(1, 10))
    node = st.integers(0, num_nodes - 1)
    conv = draw(st.sampled_from(list(CONVS)))
    options: dict[str, Any] = {"concat": draw(st.booleans()), "bias": draw(st.booleans())}
    if conv == "TransformerConv":
        options |= {"beta": draw(st.booleans()), "root_weight": draw(st.booleans())}
    else:
        options |= {
            "add_self_loops": draw(st.booleans()), "residual": draw(st.booleans()),
            "negative_slope": draw(st.sampled_from([0.2, 0.0, 1.5])),
            "fill_value": draw(st.sampled_from(["mean", "add", "max", 0.5])),
        }  # fmt: skip
    return Case(
        num_nodes,
        draw(st.lists(st.tuples(node, node), max_size=40)),
        draw(st.lists(st.integers(0, world_size - 1), min_size=num_nodes, max_size=num_nodes)),
        conv,
        draw(st.integers(1, 5)),
        draw(st.integers(1, 6)),
        options,
        draw(st.integers(0, 2)),
        draw(st.booleans()),
        draw(st.integers(0, 1000)),
        draw(st.sampled_from(meshes(world_size))) if on_grid else None,
        draw(st.booleans()),
    )


def distributed(data: Data, case: Case) -> Any:
    if case.mesh is not None:
        return pyg_dist.DistributedData(data, layout="grid", mesh=case.mesh)
    return pyg_dist.DistributedData(data, partition=torch.tensor(case.owners))


def results(data: Any, case: Case, is_ours: bool) -> Results:
    torch.manual_seed(case.seed)
    conv = CONVS[case.conv](F, case.columns, heads=case.heads, edge_dim=case.edge_dim or None, **case.options).double()
    conv = DistributedConv(conv) if is_ours else conv
    leaves = {name: data[name].detach().clone().requires_grad_() for name in ("x", "edge_attr")}
    x = leaves["x"]
    given = ((x, x.tanh()) if case.is_pair else x, data.edge_index, leaves["edge_attr"] if case.edge_dim else None)
    found: Results = {}
    if case.asks:
        found["out"], (found["edges"], found["weights"]) = conv(*given, return_attention_weights=True)
    else:
        found["out"] = conv(*given)
    loss: Any = 0.0
    for out in found.values():
        if out.is_floating_point():
            score = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape)
            loss = loss + (out * score + 0.1 * out.square()).sum()
    loss.backward()
    return {**found, **gradients(conv, **leaves)}


def compare(case: Case) -> list[str]:
    """On every rank: what stock PyG finds on the whole graph, and ours does not on the distributed one."""
    rng = torch.Generator().manual_seed(case.seed)
    edge_index = torch.tensor(case.edges, dtype=torch.int64).view(-1, 2).t().contiguous()
    data = Data(
        x=torch.randn(case.num_nodes, F, generator=rng, dtype=torch.float64),
        edge_index=edge_index,
        edge_attr=torch.randn(len(case.edges), max(case.edge_dim, 1), generator=rng, dtype=torch.float64),
    )
    expected = results(data, case, is_ours=False)
    try:
        got = results(distributed(data, case), case, is_ours=True)
    except ValueError as error:  # ours are raised on every rank: no need to start new processes
        return [str(error)]
    return differences(got, expected)


HUB = [(k % 9, 3) for k in range(40)] + [(3, k) for k in range(9)]
EXAMPLES = [
    Case(1, [], [0], "GATConv", 1, 1, {"add_self_loops": False}, 1, False),
    Case(3, [], [0, 0, 0], "GATv2Conv", 2, 3, {"add_self_loops": False}, 2, False, asks=True),
    Case(1, [(0, 0), (0, 0)], [0], "GATv2Conv", 2, 3, {"add_self_loops": False}, 2, False),
    Case(4, [], [0, 0, 0, 0], "TransformerConv", 2, 3, {}, 2, True),
    Case(9, HUB, [0] * 9, "GATConv", 3, 5, {"concat": False, "fill_value": "min"}, 2, True),
    # What it multiplies edges' features with is the transposed of what it has.
    Case(2, [(0, 0)], [0, 0], "TransformerConv", 2, 2, {"concat": False, "root_weight": False}, 1, False, asks=True),
]


@pytest.mark.parametrize(
    ("layout", "world_size", "num_examples"),
    [
        *[("halo", 1, 4), ("halo", 3, 10), pytest.param("halo", 4, 10, marks=pytest.mark.slow)],
        *[("grid", 3, 8), pytest.param("grid", 4, 10, marks=pytest.mark.slow)],
    ],
)
def test_random_graphs(workers: Pools, layout: str, world_size: int, num_examples: int) -> None:
    mesh = meshes(world_size)[-1] if layout == "grid" else None

    @settings(
        max_examples=num_examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )  # fmt: skip
    @given(cases(world_size, layout == "grid"))
    @example(EXAMPLES[0]._replace(mesh=mesh))
    @example(EXAMPLES[1]._replace(mesh=mesh))
    @example(EXAMPLES[2]._replace(mesh=mesh))
    @example(EXAMPLES[3]._replace(owners=[0, 0, world_size - 1, 0], mesh=mesh))
    @example(EXAMPLES[4]._replace(owners=[k % world_size for k in range(9)], mesh=mesh))
    @example(EXAMPLES[5]._replace(mesh=mesh))
    def check(case: Case) -> None:
        for rank, differs in enumerate(workers(world_size).run(compare, case)):
            assert not differs, f"on rank {rank}"

    check()


def every_mesh(num_ranks: int) -> list[str]:
    """A hub's in-edges over every second mesh, by each conv."""
    found = []
    for mesh in meshes(num_ranks)[::2]:
        for conv in CONVS:
            options = {} if conv == "TransformerConv" else {"residual": True}
            case = Case(9, HUB, [], conv, 3, 5, options, 2, False, mesh=mesh)
            found += compare(case) + compare(case._replace(asks=True))
    return found


@pytest.mark.slow
def test_hub_on_every_mesh(workers: Pools) -> None:
    for differs in workers(4).run(every_mesh, 4):
        assert not differs


def second_derivatives(mesh: dict[str, int] | None) -> None:
    case = Case(9, HUB, [0, 1, 0, 1, 1, 0, 0, 0, 1], "GATConv", 2, 4, {}, 2, False, mesh=mesh)
    plain = Data(
        x=torch.linspace(-1, 1, 9 * F, dtype=torch.float64).view(9, F).sin(),
        edge_index=torch.tensor(HUB).t().contiguous(),
        edge_attr=torch.linspace(-1, 1, 2 * len(HUB), dtype=torch.float64).view(-1, 2).cos(),
    )
    ours = distributed(plain, case)
    for conv_class in CONVS.values():
        found: list[Results] = []
        for data in (plain, ours):
            torch.manual_seed(0)
            conv = conv_class(F, 4, heads=2, edge_dim=2).double()
            conv = conv if data is plain else DistributedConv(conv)
            x = data.x.detach().clone().requires_grad_()
            out, (_, weights) = conv(x, data.edge_index, data.edge_attr, return_attention_weights=True)
            (slope,) = torch.autograd.grad(out.square().sum() + weights.square().sum(), x, create_graph=True)
            slope.square().sum().backward()
            found.append(gradients(conv, x=x))
        assert_same(found[1], found[0], conv_class.__name__)


def test_second_derivatives(workers: Pools) -> None:
    workers(3).run(second_derivatives, None)  # the last rank has no edges
    workers(4).run(second_derivatives, {"x": 2, "y": 2})


def graph(num_nodes: int = 40, num_edges: int = 300, dtype: torch.dtype = torch.float64) -> tuple[Data, Any]:
    data = random_graph(num_nodes, num_edges, F, seed=5, dtype=dtype)
    return data, pyg_dist.DistributedData(data, partition=uneven_parts(num_nodes, pyg_dist.world_size()))


def with_dropout() -> Results:
    """The fused sums and weights, and those of PyG's steps, which run where a hook looks at messages: one mask."""
    found: Results = {}
    _, data = graph()
    for name, conv_class in CONVS.items():
        torch.manual_seed(0)
        conv = DistributedConv(conv_class(F, 4, heads=5, dropout=0.4, edge_dim=3).double())
        by_steps = []
        for has_hook in (False, True):
            hook = conv.register_message_forward_hook(lambda conv, inputs, out: None) if has_hook else None
            torch.manual_seed(1)
            conv.zero_grad()
            out, (edges, alpha) = conv(data.x, data.edge_index, data.edge_attr, return_attention_weights=True)
            (out.square().sum() + alpha.square().sum()).backward()
            values = {"out": out.detach(), "edges": edges, "weights": alpha, "next draw": float(torch.rand(()))}
            by_steps.append({**values, **gradients(conv)})
        assert_same(*by_steps, name)
        hook.remove()
        found |= {name: by_steps[0]["out"].full_tensor(), f"{name} weights": by_steps[0]["weights"].full_tensor()}
        assert not torch.allclose(found[name], conv.eval()(data.x, data.edge_index, data.edge_attr).full_tensor())
    return found


def test_dropout_is_that_of_the_steps_at_any_world_size(workers: Pools) -> None:
    alone = workers(1).run(with_dropout)[0]
    assert_same(workers(3).run(with_dropout)[0], alone)


def tiled(plain: Data, mesh: dict[str, int]) -> Any:
    return pyg_dist.DistributedData(plain, layout="grid", mesh=mesh)


@on_ranks(2)
def test_dropout_is_that_of_both_layouts(num_ranks: int) -> None:
    """One mask for both layouts."""
    plain, halo = graph()
    for mesh in meshes(num_ranks):
        grid = tiled(plain, mesh)
        for name, conv_class in CONVS.items():
            found: list[Results] = []
            for data in (halo, grid):
                torch.manual_seed(0)
                conv = DistributedConv(conv_class(F, 4, heads=5, dropout=0.4, edge_dim=3).double())
                out, (edges, alpha) = conv(data.x, data.edge_index, data.edge_attr, return_attention_weights=True)
                (out.square().sum() + alpha.square().sum()).backward()
                values = {"out": out.detach(), "edges": edges, "weights": alpha, "next draw": float(torch.rand(()))}
                found.append({**values, **gradients(conv)})
            assert_same(found[1], found[0], name)


@on_ranks(2)
def test_weights_of_narrow_rows() -> None:
    """Weights of bfloat16 rows, in their dtype: logits are made in float32."""
    plain, halo = graph(dtype=torch.float32)
    for data in (halo, tiled(plain, {"x": 2})):
        for name, conv_class in CONVS.items():
            torch.manual_seed(0)
            stock = conv_class(F, 4, heads=2, edge_dim=3)
            found = []
            for is_ours in (False, True):
                given, dtype = (data, torch.bfloat16) if is_ours else (plain, torch.float32)
                conv = DistributedConv(copy.deepcopy(stock).to(dtype)) if is_ours else stock
                x = given.x.detach().to(dtype).requires_grad_()
                attr = given.edge_attr.to(dtype)
                _, (_, alpha) = conv(x, given.edge_index, attr, return_attention_weights=True)
                assert alpha.dtype == dtype
                alpha.square().sum().backward()
                whole = [t.full_tensor() if is_ours else t for t in (alpha.detach(), x.grad)]
                found.append([t.float() for t in whole])
            for got, expected in zip(*found, strict=True):
                assert float((got - expected).norm() / expected.norm()) < 0.05, name


@on_ranks(2)
def test_hooks_and_other_aggregations_keep_the_steps(num_ranks: int) -> None:
    """Where somebody looks at messages, they are made."""
    data, halo = graph()
    for ours in (halo, *(tiled(data, mesh) for mesh in meshes(num_ranks))):
        for name, conv_class in CONVS.items():
            torch.manual_seed(0)
            stock = conv_class(F, 4, heads=2).double()
            seen: list[int] = []
            stock.register_message_forward_hook(lambda conv, inputs, out, seen=seen: seen.append(out.shape[-1]))
            expected = stock(data.x, data.edge_index)
            got = DistributedConv(stock)(ours.x, ours.edge_index)
            assert seen == [4, 4]
            assert_same({"out": got}, {"out": expected}, name)
            mixed = conv_class(F, 4, aggr="max").double()
            expected = mixed(data.x, data.edge_index)
            assert_same({"out": DistributedConv(mixed)(ours.x, ours.edge_index)}, {"out": expected})
        adapted = gnn.GATConv(F, 4, heads=2).double()
        adapted.lin = torch.nn.Sequential(adapted.lin)  # as an adapter may replace it
        expected, (_, alpha) = adapted(data.x, data.edge_index, return_attention_weights=True)
        got, (edges, weights) = DistributedConv(adapted)(ours.x, ours.edge_index, return_attention_weights=True)
        assert edges.rows is weights._sharding
        assert_same({"out": got, "weights": weights}, {"out": expected, "weights": alpha})


@pytest.mark.parametrize("name", CONVS)
def test_parametrizations_are_read_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A spectral norm takes a step of its power iteration whenever the weight is read in training."""
    monkeypatch.setenv("PYG_DIST_STOCK_ELEMENTS", "0")
    data = random_graph(20, 60, F, 2, seed=1)
    torch.manual_seed(0)
    stock = CONVS[name](F, 4).double()
    for part in list(stock.modules()):
        if isinstance(part, (torch.nn.Linear, gnn.Linear)):
            torch.nn.utils.parametrizations.spectral_norm(part)
            torch.nn.init.normal_(part.parametrizations.weight.original)  # far from where it has been normed
    conv, ours = pyg_dist.distribute(copy.deepcopy(stock)), pyg_dist.DistributedData(data)
    assert_same({"out": conv(ours.x, ours.edge_index)}, {"out": stock(data.x, data.edge_index)})
    assert_same(dict(conv.named_buffers()), dict(stock.named_buffers()))


def phases_of_a_step() -> tuple[list[str], list[str]]:
    """What a rank does in the forward pass, and in the backward pass, as far as edges are concerned."""
    node = torch.arange(20)
    ring = Data(x=torch.randn(20, F, dtype=torch.float64), edge_index=torch.stack([node, (node + 1) % 20]))
    data = pyg_dist.DistributedData(ring, partition=(node >= 10).long())
    conv = pyg_dist.conv.DistributedConv(gnn.TransformerConv(F, 4, heads=2, root_weight=False).double())
    x = data.x.clone().requires_grad_()
    with pyg_dist.profile() as forward:
        loss = conv(x, data.edge_index).square().sum()
    with pyg_dist.profile() as backward:
        loss.backward()
    found = []
    for profile in (forward, backward):
        named = [PHASES[span.phase] for span in profile.spans[pyg_dist.rank()]]
        found.append([name for name in named if name in ("pack", "exchange", "aggregate", "unpack")])
    return found[0], found[1]


def test_inner_targets_are_worked_on_while_rows_fly(workers: Pools) -> None:
    """Keys and values leave, inner targets, then those that need what arrives; gradients of the halo leave first."""
    for forward, backward in workers(2).run(phases_of_a_step):
        inner, boundary = (k for k, name in enumerate(forward) if name == "aggregate")
        assert forward[:inner].count("pack") == 2
        assert "exchange" in forward[inner:boundary]
        of_halo, of_sources, of_targets = (k for k, name in enumerate(backward) if name == "aggregate")
        assert "exchange" in backward[of_halo:of_sources]
        assert backward[of_targets:].count("unpack") == 2
