"""The cost model's bytes are those that reach the process groups, mesh by mesh; bfloat16 halves those of the sums."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from against_stock import meshes
from bits import assert_same_bits
from random_graphs import random_graph
from torch import nn
from torch_geometric.data import Data
from wire import Wire
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import conv as ours
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
from pyg_dist.grid.plan.cost import graph_bytes
from pyg_dist.grid.plan.mesh_shape import MeshShape
from pyg_dist.grid.plan.work import work_of
from pyg_dist.pricing.model import Model

WIDTHS = (11, 7, 13, 13, 5)  # narrower, wider, as wide, narrower


def one_step(data: Any, conv: Any) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(conv(a, b) for a, b in pairwise(WIDTHS))
    x = data.x
    for layer in layers:
        x = layer(x, data.edge_index).relu()
    F.cross_entropy(x[data.train_mask], data.y[data.train_mask]).backward()


def counted_step(data: Any, conv: Any) -> dict[tuple[str, ...], int]:
    """Bytes along each axis, and of changes of layout along all, as they reached the process groups."""
    for traffic in data.graph.grid.mesh.traffic.values():
        traffic.num_bytes = 0
    with Wire() as counter:
        one_step(data, conv)
    assert counter.num_bytes == data.traffic.num_bytes
    return {a: t.num_bytes for a, t in data.graph.grid.mesh.traffic.items() if t.num_bytes}


Bytes = dict[tuple[str, ...], int]


@patch.dict(os.environ)  # what is set ends with the body
def count(
    shapes: list[dict[str, int]],
    cases: list[tuple[str, bool]],
    stride: int,
    complete: bool = False,
    comm_dtype: torch.dtype | None = None,
) -> list[tuple[Bytes, Bytes]]:
    """Compare counted and modelled bytes, step by step; every ``stride``-th case on each mesh and form.

    Args:
        shapes: to train on.
        cases: kind of conv, and whether the input learns.
        stride: another first case each time.
        complete: whether the graph is a complete one, whose nodes keep their order.
        comm_dtype: of the sums' messages.

    Returns:
        Bytes of each last step, counted and modelled.
    """
    graph = random_graph(97, 600, WIDTHS[0], WIDTHS[-1], seed=1, dtype=torch.float32)
    if complete:
        graph = Data(graph.x, torch.cartesian_prod(*[torch.arange(97)] * 2).t(), y=graph.y, train_mask=graph.train_mask)
    last = []
    for turn, mesh in enumerate(shapes):
        for form, sums in enumerate(("reduce_scatter", "all_reduce")):
            if not (chosen := cases[(2 * turn + form) % stride :: stride]):
                continue
            os.environ["PYG_DIST_GRID_SUMS"] = sums
            data: Any = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh, comm_dtype=comm_dtype)
            orders = len(data.graph.grid.orders)
            assert orders == 1 or not complete
            for kind, learns in chosen:
                conv = ours.DistributedGCNConv if kind == "gcn" else ours.DistributedSAGEConv
                data.x.requires_grad_(learns)
                one_step(data, conv)  # builds the tiles
                with torch.no_grad():
                    data.x.mul_(1.0)  # what is remembered is not right any more: the next step is a first epoch
                size = 4 if comm_dtype is None else 2
                for step in ("learns",) if learns else ("new", "remembered", "remembered"):
                    counted = counted_step(data, conv)
                    model = Model(97, 697, WIDTHS, kind, 4, size, step, orders)  # type: ignore[arg-type]
                    work = work_of(model, MeshShape(**mesh), sums, pyg_dist.rank())  # type: ignore[arg-type]
                    modelled = {axes: n for axes, n in work.sent.items() if n}
                    exact = (lambda axes: True) if orders == 1 else (lambda axes: len(axes) == 1)
                    seen, said = ({a: n for a, n in sent.items() if exact(a)} for sent in (counted, modelled))
                    assert seen == said, (mesh, sums, kind, step, counted, modelled)
                last.append((counted, modelled))
    return last


CASES = [(kind, learns) for kind in ("gcn", "sage") for learns in (False, True)]


@pytest.mark.parametrize(("num_ranks", "stride"), [(4, 7), pytest.param(6, 11, marks=pytest.mark.slow)])
def test_counted_bytes_are_the_models(workers: Pools, num_ranks: int, stride: int) -> None:
    """Those of sums and gathers to the byte; those of changes between two random orders as they are to be expected."""
    by_rank = workers(num_ranks).run(count, meshes(num_ranks), CASES, stride)
    seen, said = (sum(step[side].get(("x", "y", "z"), 0) for steps in by_rank for step in steps) for side in range(2))
    assert abs(seen - said) <= 0.1 * said, (seen, said)


def test_counted_bytes_are_the_models_in_one_order(workers: Pools) -> None:
    """All of them to the byte."""
    workers(4).run(count, meshes(4)[1::2], CASES, 7, True)


@on_ranks(2)
@patch.dict(os.environ, PYG_DIST_PROJECT_FIRST="1")
def test_the_model_takes_the_order_that_is_set() -> None:
    count(meshes(2), [("gcn", True), ("sage", True)], 1)


def test_narrow_messages(workers: Pools) -> None:
    """The two big sums are halved, and the gather of an input that learns is not, nor are changes of layout."""
    mesh = [{"x": 2, "y": 2, "z": 1}, {"x": 1, "y": 2, "z": 2}]
    wide, narrow = (
        workers(4).run(count, mesh, [("gcn", True)], 1, False, dtype)[0] for dtype in (None, torch.bfloat16)
    )  # which compares the modelled bytes of narrow messages, too
    for (before, _), (after, _) in zip(wide, narrow, strict=True):
        assert {2 * after[axes] / n for axes, n in before.items() if axes in (("x",), ("y",))} == {1.0}
        assert before["x", "y", "z"] == after["x", "y", "z"]
    # Along z, to all: the gather of the first layer's input beside sums. Scattered: a map's output comes first.
    assert [2 * after["z",] / before["z",] for (before, _), (after, _) in zip(wide[2:], narrow[2:], strict=True)] == [
        1.0, pytest.approx(1.2, abs=0.15)
    ]  # fmt: skip


def narrow_gradients() -> list[float]:
    graph = random_graph(97, 600, 16, 4, seed=1, dtype=torch.float32)
    errors = []
    results = []
    for dtype in (None, torch.bfloat16):
        data = pyg_dist.DistributedData(graph, layout="grid", mesh={"x": 2, "y": 2}, comm_dtype=dtype)
        torch.manual_seed(0)
        conv = DistributedGCNConv(16, 16)
        out = conv(data.x, data.edge_index)
        out.square().mean().backward()
        results.append((out.detach().full_tensor(), conv.lin.weight.grad))
    for exact, near in zip(*results, strict=True):
        assert not torch.equal(exact, near)
        errors.append(float((exact - near).norm() / exact.norm()))
    return errors


def test_narrow_messages_are_near(workers: Pools) -> None:
    for errors in workers(4).run(narrow_gradients):
        assert max(errors) < 0.01


@on_ranks(4)
@patch.dict(os.environ)  # what is set ends with the body
def test_inputs_and_kept_sums_are_not_narrow() -> None:
    """An input that learns is gathered, and its gradient is summed, in full; so is a sum that is kept."""
    graph = random_graph(97, 600, 16, 4, seed=1, dtype=torch.float32)
    for sums in ("reduce_scatter", "all_reduce"):
        os.environ["PYG_DIST_GRID_SUMS"] = sums
        # The sum over neighbours is over x, the gather over z; there is none over columns.
        for mesh, learns, kind in (
            ({"z": 4}, True, DistributedGCNConv),
            ({"x": 2, "z": 2}, False, DistributedSAGEConv),
        ):
            results = []
            for dtype in (None, torch.bfloat16):
                data: Any = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh, comm_dtype=dtype)
                data.x.requires_grad_(learns)
                torch.manual_seed(0)
                conv = kind(16, 32)
                conv(data.x, data.edge_index).square().sum().backward()
                results.append([p.grad for p in conv.parameters()] + ([data.x.grad.full_tensor()] if learns else []))
            for exact, near in zip(*results, strict=True):
                assert_same_bits(exact, near, f"{sums} {mesh}")


def stored_bytes(value: Any, seen: set[int]) -> int:
    """Of all tensors that hang on a graph, but for its groups', which the process keeps; storages count once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        known, _ = storage.data_ptr() in seen, seen.add(storage.data_ptr())
        return 0 if known else storage.nbytes()
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return sum(stored_bytes(part, seen) for part in value)
    module = type(value).__module__
    ours = module.startswith("pyg_dist.") and not module.startswith("pyg_dist.backend.comm.")
    ours = ours and not module.endswith("mesh") and hasattr(value, "__dict__")
    return stored_bytes(vars(value), seen) if ours else 0


@patch.dict(os.environ)  # what is set ends with the body
def kept(sizes: list[tuple[int, int]], mesh: dict[str, int]) -> list[tuple[int, int, Any]]:
    """Bytes of a graph as they are stored and by the model."""
    found = []
    for nodes, edges in sizes:
        graph = random_graph(nodes, edges, WIDTHS[0], WIDTHS[-1], seed=1, dtype=torch.float32)
        source = torch.arange(edges) % nodes  # tiles are to be even, and GCN replaces self loops
        step = torch.randint(1, nodes, (edges,), generator=torch.Generator().manual_seed(0))
        graph.edge_index = torch.stack([source, (source + step) % nodes])
        for sums in ("reduce_scatter", "all_reduce"):
            os.environ["PYG_DIST_GRID_SUMS"] = sums
            for kind, conv in (("gcn", ours.DistributedGCNConv), ("sage", ours.DistributedSAGEConv)):
                data: Any = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh)
                data.x.requires_grad_()
                one_step(data, conv)
                grid = data.graph.grid
                model = Model(nodes, nodes + edges, WIDTHS, kind, input="learns", num_orders=len(grid.orders))  # type: ignore[arg-type]
                modelled = graph_bytes(model, MeshShape(**mesh), sums, pyg_dist.rank())  # type: ignore[arg-type]
                found.append((stored_bytes(data.graph, set()), modelled, (nodes, edges, sums, kind)))
    return found


@pytest.mark.slow
def test_stored_bytes_of_a_graph(workers: Pools) -> None:
    """Where edges outnumber nodes, and the other way round."""
    for results in workers(4).run(kept, [(97, 3000), (600, 700)], {"x": 2, "y": 2}):
        for stored, modelled, case in results:
            assert 0.8 * stored <= modelled <= 1.2 * stored, (stored, modelled, case)
