"""Messages of a conv's own by blocks of targets: stock PyG's numbers, no tensor with a row for every edge."""

from __future__ import annotations

import functools
import math
import os
import random
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from against_stock import Results, assert_same, gradients
from random_graphs import random_graph, uneven_parts
from test_any_conv import CASES, NUM_NODES, Case, graph, step
from test_attention_memory import LargestPerEdge
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as gnn
from torch_geometric.utils import softmax
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.backend.timing import PHASES
from pyg_dist.conv.message_blocks import _Call

F, G = 6, 4


def mlp(in_channels: int, out_channels: int) -> nn.Module:
    """Without batch norm, whose statistics are over all edges."""
    return nn.Sequential(nn.Linear(in_channels, 5), nn.Tanh(), nn.Linear(5, out_channels))


class Own(gnn.MessagePassing):
    """As a script may write one: parameters of its own in all steps, a softmax, dropout, the number of edges."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__(aggr="mean")
        self.p = p
        self.gate, self.scale = nn.Parameter(torch.linspace(-1, 1, F)), nn.Parameter(torch.ones(3))
        self.root, self.frozen = nn.Linear(F, F), nn.Parameter(torch.full((F,), 0.5), requires_grad=False)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, edge_attr=edge_attr, factor=self.scale.sum())  # type: ignore[no-any-return]

    def message(self, x_i: Any, x_j: Any, edge_attr: Tensor, factor: Tensor, index: Tensor, size_i: int) -> Tensor:
        alpha = softmax((edge_attr * self.scale.exp()).sum(-1), index, num_nodes=size_i) * len(edge_attr) ** 0.25
        rows = functional.dropout(x_j * self.gate.sigmoid() + self.frozen * x_i, self.p, self.training)
        return alpha.view(-1, 1) * rows * factor

    def update(self, inputs: Tensor, x: Tensor) -> Tensor:
        return inputs + self.root(x)


BY_BLOCKS: dict[str, Case] = {
    **{name: CASES[name] for name in ("GIN max", "GINE", "gated", "PNA", "GEN", "CG", "FiLM", "General", "LE")},
    **{name: CASES[name] for name in ("FeaSt", "EG", "GMM", "RGCN", "DNA", "PointTransformer", "of a script")},
    "Edge": Case(lambda: gnn.EdgeConv(mlp(2 * F, G))),
    "Edge of pairs": Case(lambda: gnn.EdgeConv(mlp(2 * F, G), aggr=["mean", "std"]), "PE"),
    "NN": Case(lambda: gnn.NNConv(F, G, mlp(3, F * G)), "XEA"),
    "PointNet": Case(lambda: gnn.PointNetConv(mlp(F + 3, G)), "XQE"),
    "own": Case(Own, "XEA"),
}


def runs_by_blocks() -> Any:
    """What counts the calls of convs that run by blocks."""
    return patch.object(_Call, "run", autospec=True, side_effect=_Call.run)


@functools.cache
def stock(name: str, num_edges: int = 310) -> Results:
    return step(graph(num_edges=num_edges), BY_BLOCKS[name], False)


@patch.dict(os.environ)  # what is set ends with the body
def compare(expected: dict[str, Results], num_edges: int, mib: float, mesh: dict[str, int] | None = None) -> None:
    data = graph(num_edges=num_edges)
    if mesh is None:
        ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    else:
        ours = pyg_dist.DistributedData(data, layout="grid", mesh=mesh)
    os.environ["PYG_DIST_MESSAGE_MIB"] = str(mib)
    for name, want in expected.items():
        with runs_by_blocks() as seen:
            got = step(ours, BY_BLOCKS[name], True)
        assert_same(got, want, name)
        assert (seen.call_count > 0) == (num_edges > 0), name


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_gradient(workers: Pools, world_size: int) -> None:
    """One rank of three has no rows. One alone, on which no rows arrive, runs every third conv."""
    names = [name for k, name in enumerate(BY_BLOCKS) if k % 3 == 0 or world_size > 1 or name == "own"]
    workers(world_size).run(compare, {name: stock(name) for name in names}, 310, 0.006)


@pytest.mark.parametrize("mesh", [{"x": 2}, pytest.param({"x": 2, "y": 2}, marks=pytest.mark.slow)], ids=str)
def test_every_gradient_on_the_grid(workers: Pools, mesh: dict[str, int]) -> None:
    """Whole rows serve them; half of the convs on each mesh."""
    names = list(BY_BLOCKS)[len(mesh) % 2 :: 2]
    workers(math.prod(mesh.values())).run(
        compare, {name: stock(name) for name in names}, 310, 0.006 if len(mesh) == 1 else 0.003, mesh
    )


def test_a_target_a_block(workers: Pools) -> None:
    for num_edges in (310, 0):
        few = {name: stock(name, num_edges) for name in ("Edge", "GEN", "own")}
        workers(2).run(compare, few, num_edges, 0.0001)


def with_dropout(mib: float) -> Results:
    """Dropout in messages, by blocks of that size; and bits, which round the rows that other ranks get."""
    found: Results = {}
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": str(mib)}), runs_by_blocks() as seen:
        data = pyg_dist.DistributedData(graph(), partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
        torch.manual_seed(0)
        conv = pyg_dist.conv.DistributedConv(Own(0.4).double())
        x = data.x.detach().clone().requires_grad_()
        conv(x, data.edge_index, data.edge_attr).square().sum().backward()
        found |= {**gradients(conv, x=x), "next draw": float(torch.rand(()))}
        assert seen.call_count == (mib < 1)
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in found.items()}


def test_masks_depend_neither_on_blocks_nor_on_ranks(workers: Pools) -> None:
    expected = workers(1).run(with_dropout, 512)[0]
    for world_size, mib in ((1, 0.0001), (3, 0.01)):
        assert_same(workers(world_size).run(with_dropout, mib)[0], expected)


def of_bits(mib: float) -> Results:
    data = random_graph(40, 300, 32, seed=5)
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": str(mib)}), runs_by_blocks() as seen:
        ours = pyg_dist.DistributedData(data, partition=uneven_parts(40, 2), bits=4)
        torch.manual_seed(0)
        conv = pyg_dist.conv.DistributedConv(gnn.EdgeConv(mlp(64, G), aggr="mean").double())
        x = ours.x.detach().clone().requires_grad_()
        out = conv(x, ours.edge_index)
        out.square().sum().backward()
        assert seen.call_count == (mib < 1)
        found = {"out": out.detach(), "next draw": float(torch.rand(())), **gradients(conv, x=x)}
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in found.items()}


def test_bits_do_not_depend_on_blocks(workers: Pools) -> None:
    expected = workers(2).run(of_bits, 512)[0]
    for mib in (0.1, 0.001):
        assert_same(workers(2).run(of_bits, mib)[0], expected)


@on_ranks(1, 3)
def test_second_derivatives() -> None:
    data = graph()
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": "0.01"}), runs_by_blocks() as seen:
        for case in (Case(Own, "XEA"), Case(lambda: gnn.EdgeConv(mlp(2 * F, G), aggr="sum"))):
            found: list[Results] = []
            for given in (data, ours):
                torch.manual_seed(0)
                conv = case.make().double()
                conv = conv if given is data else pyg_dist.conv.DistributedConv(conv)
                x = given.x.detach().clone().requires_grad_()
                out = conv(x, given.edge_index, *([given.edge_attr] if case.inputs == "XEA" else []))
                (slope,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
                slope.square().sum().backward()
                found.append(gradients(conv, x=x))
            assert_same(found[1], found[0])
        assert seen.call_count == 2


def checkpointed(**layout: Any) -> None:
    data = graph()
    ours = pyg_dist.DistributedData(data, **layout)
    makes = {
        "EdgeConv": lambda: gnn.EdgeConv(mlp(2 * F, G), aggr="mean"),
        "GINEConv": lambda: gnn.GINEConv(mlp(F, G), edge_dim=3),
        "own": lambda: Own(),
    }
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": "0.002"}), runs_by_blocks() as seen:
        for name, make in makes.items():
            found: list[Results] = []
            for given, use_reentrant in ((data, False), (ours, False), (ours, True)):
                torch.manual_seed(0)
                conv = make().double()
                conv = conv if given is data else pyg_dist.conv.DistributedConv(conv)
                x = given.x.detach().clone().requires_grad_()
                attr = [] if name == "EdgeConv" else [given.edge_attr]
                out = checkpoint(conv, x, given.edge_index, *attr, use_reentrant=use_reentrant)
                out.square().sum().backward()
                found.append({"out": out.detach(), **gradients(conv, x=x)})
            assert_same(found[1], found[0], name)
            assert_same(found[2], found[0], f"{name}, reentrant")
        assert seen.call_count == 4 * len(makes)


@pytest.mark.parametrize("layout", [{}, {"layout": "grid", "mesh": {"x": 2}}], ids=str)
def test_in_a_checkpoint(workers: Pools, layout: dict[str, Any]) -> None:
    workers(2).run(checkpointed, **layout)


class Draws(Own):
    """A number of each generator of the CPU in each call, which all messages share."""

    def message(self, x_j: Tensor, x_i: Any) -> Tensor:
        drawn = random.random() + np.random.rand() + float(torch.rand(()))
        return (x_j - x_i).tanh() * self.gate * drawn


def of_generators() -> None:
    data = graph()
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    found: list[Results] = []
    before = random.getstate(), np.random.get_state()
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": "0.002"}), runs_by_blocks() as seen:
        for given in (data, ours):
            torch.manual_seed(0)
            conv = Draws().double()
            conv = conv if given is data else pyg_dist.conv.DistributedConv(conv)
            x = given.x.detach().clone().requires_grad_()
            np.random.seed(1)
            random.seed(2)
            outs = [conv(x, given.edge_index, given.edge_attr) for _ in range(2)]
            following = random.random() + np.random.rand()
            (outs[0] * outs[1]).sum().backward()
            after = random.random() + np.random.rand(), float(torch.rand(()))
            found.append({"outs": torch.stack([outs[0], outs[1]], 2), "next": following, "after": after,
                          **gradients(conv, x=x)})  # fmt: skip
        assert seen.call_count == 2
    random.setstate(before[0])
    np.random.set_state(before[1])
    assert_same(found[1], found[0])


def test_all_generators_of_the_cpu_are_restored(workers: Pools) -> None:
    """Each block draws what a call draws, the backward draws it again, and what comes next is as if drawn once."""
    workers(1).run(of_generators)
    workers(2).run(of_generators)


class Keeps(Own):
    def message(self, x_j: Tensor) -> Tensor:
        self.seen = x_j.detach()
        return x_j * self.gate


class Appends(Own):
    """Keeps messages where no attribute changes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def message(self, x_j: Tensor) -> Tensor:
        self.seen.append(x_j)
        return x_j * self.gate


class Reaches(Own):
    """Its messages have a tensor that learns and is no parameter."""

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        self.made = self.gate.exp()
        return super().forward(x, edge_index, edge_attr)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.made


class Largest(Own):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j / x_j.detach().abs().max() * self.gate


class Hooked(Own):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(F, F)
        self.inner.register_forward_hook(lambda module, inputs, out: 2 * out)

    def message(self, x_j: Tensor) -> Tensor:
        return self.inner(x_j) * self.gate  # type: ignore[no-any-return]


class WithBatchNorm(Own):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(F)

    def message(self, x_j: Tensor) -> Tensor:
        return self.norm(x_j) * self.gate  # type: ignore[no-any-return]


@on_ranks(3)
def test_what_needs_all_edges_keeps_the_steps() -> None:
    data = graph()
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": "0.001"}), runs_by_blocks() as seen:
        for make in (Keeps, Appends, Reaches, Largest, Hooked, WithBatchNorm):
            case = Case(make, "XEA")
            assert_same(step(ours, case, True), step(data, case, False), make.__name__)
        conv = pyg_dist.conv.DistributedConv(WithBatchNorm().double())
        conv(ours.x, ours.edge_index, ours.edge_attr)
        assert conv.norm.num_batches_tracked == 1
        looked_at = pyg_dist.conv.DistributedConv(Own().double())
        looked_at.register_message_forward_hook(lambda conv, inputs, out: None)
        looked_at(ours.x, ours.edge_index, ours.edge_attr)
        assert seen.call_count == 0


@on_ranks(2)
def test_the_backward_has_the_state_of_its_call() -> None:
    """The backward makes messages as the forward did, whatever the conv has become since."""
    data = graph()
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    found: list[Results] = []
    for given in (data, ours):
        with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": "0.01"}):
            torch.manual_seed(0)
            conv = Own().double()
            conv = conv if given is data else pyg_dist.conv.DistributedConv(conv)
            x = given.x.detach().clone().requires_grad_()
            once = conv(x, given.edge_index, given.edge_attr)
            conv.aggr_module, before = gnn.aggr.SumAggregation(), conv.aggr_module
            twice = conv(once, given.edge_index, given.edge_attr)
            conv.aggr_module = before
            twice.square().mean().backward()
            found.append(gradients(conv, x=x))
    assert_same(found[1], found[0])


def largest_per_edge(mib: float) -> list[int]:
    data = random_graph(20, 4000, F, seed=5)
    ours = pyg_dist.DistributedData(data)
    found = []
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": str(mib)}):
        for make in (lambda: gnn.EdgeConv(mlp(2 * F, 16)), lambda: gnn.GINEConv(mlp(F, 16), edge_dim=3)):
            conv = pyg_dist.conv.DistributedConv(make().double())
            x = ours.x.detach().clone().requires_grad_()
            attr = [ours.edge_attr] if isinstance(conv, gnn.GINEConv) else []
            with LargestPerEdge(4000) as seen:
                conv(x, ours.edge_index, *attr).square().sum().backward()
            found.append(seen.largest)
    return found


def test_no_tensor_of_edges_and_columns_is_made(workers: Pools) -> None:
    """The ends of edges and what orders them have two numbers an edge, the features of edges that are given three."""
    assert max(workers(1).run(largest_per_edge, 0.1)[0]) <= 3
    assert min(workers(1).run(largest_per_edge, 512)[0]) >= F


def phases_of_a_step() -> tuple[list[str], list[str]]:
    """What a rank does in the forward pass, and in the backward pass, as far as edges are concerned."""
    data = pyg_dist.DistributedData(random_graph(40, 60, F, seed=5), partition=uneven_parts(40, 2))
    found = []
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": "0.0001"}):
        conv = pyg_dist.conv.DistributedConv(gnn.EdgeConv(mlp(2 * F, G)).double())
        x = data.x.clone().requires_grad_()
        with pyg_dist.profile() as forward:
            loss = conv(x, data.edge_index).square().sum()
        with pyg_dist.profile() as backward:
            loss.backward()
        for profile in (forward, backward):
            named = [PHASES[span.phase] for span in profile.spans[pyg_dist.rank()]]
            found.append([name for name in named if name in ("pack", "exchange", "aggregate", "unpack")])
    return found[0], found[1]


def test_inner_targets_are_worked_on_while_rows_fly(workers: Pools) -> None:
    """Rows leave, inner targets, then those of what has arrived; gradients of the halo leave first."""
    for forward, backward in workers(2).run(phases_of_a_step):
        assert forward[0] == "pack"
        assert forward[-1] == "aggregate"
        inner = forward.index("aggregate")
        assert "exchange" in forward[inner:-1]
        boundary, *_ = (k for k, name in enumerate(backward) if name == "aggregate")
        last = len(backward) - 1 - backward[::-1].index("aggregate")
        assert "exchange" in backward[boundary:last]
        assert backward[-1] == "unpack"
