"""The cost model's bytes are those that reach the process groups, mesh by mesh; bfloat16 halves those of the sums."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from random_graphs import random_graph
from torch import nn
from workers import Workers

Pools = Callable[[int], Workers]

WIDTHS = (11, 7, 13, 5)  # narrower, wider, narrower


class Counter:
    """Counts what ``all_to_all_single`` is given for other ranks; independent of the library's own counters."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._send = dist.all_to_all_single

    def __enter__(self) -> Counter:
        def counted(out: Any, given: Any, received: Any, sent: Any, group: Any = None, async_op: bool = False) -> Any:
            own = sent[dist.get_rank(group)]
            self.num_bytes += (given.numel() - own) * given.element_size()
            return self._send(out, given, received, sent, group=group, async_op=async_op)

        dist.all_to_all_single = counted  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_to_all_single = self._send  # type: ignore[assignment]


def one_step(data: Any, conv: Any) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(conv(a, b) for a, b in pairwise(WIDTHS))
    x = data.x
    for layer in layers:
        x = layer(x, data.edge_index).relu()
    F.cross_entropy(x[data.train_mask], data.y[data.train_mask]).backward()


def counted_step(data: Any, conv: Any) -> dict[tuple[str, ...], int]:
    """Bytes of the sums along each axis, as they reached the process groups."""
    for traffic in data.graph.grid.mesh.traffic.values():
        traffic.num_bytes = 0
    with Counter() as counter:
        one_step(data, conv)
    assert counter.num_bytes == data.traffic.num_bytes
    return {a: t.num_bytes for a, t in data.graph.grid.mesh.traffic.items() if len(a) == 1 and t.num_bytes}


def count(
    meshes: list[dict[str, int]], cases: list[tuple[str, bool]], stride: int, comm_dtype: torch.dtype | None = None
) -> list[int]:
    """Compare counted and modelled bytes of the sums, step by step; every ``stride``-th case on each mesh and form.

    Args:
        meshes: to train on.
        cases: kind of conv, and whether the input learns.
        stride: another first case each time.
        comm_dtype: of the sums' messages.

    Returns:
        Bytes of the sums in each last step.
    """
    import pyg_dist
    from pyg_dist import conv as ours
    from pyg_dist.backend.mesh import MeshShape
    from pyg_dist.plan.grid_work import work_of
    from pyg_dist.plan.model import Model

    graph = random_graph(97, 600, WIDTHS[0], WIDTHS[-1], seed=1, dtype=torch.float32)
    totals = []
    for turn, mesh in enumerate(meshes):
        for form, sums in enumerate(("reduce_scatter", "all_reduce")):
            os.environ["PYG_DIST_GRID_SUMS"] = sums
            data: Any = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh, comm_dtype=comm_dtype)
            for kind, learns in cases[(2 * turn + form) % stride :: stride]:
                conv = ours.DistributedGCNConv if kind == "gcn" else ours.DistributedSAGEConv
                data.x.requires_grad_(learns)
                one_step(data, conv)  # builds the tiles
                with torch.no_grad():
                    data.x.mul_(1.0)  # what is remembered is not right any more: the next step is a first epoch
                size = 4 if comm_dtype is None else 2
                for step in ("learns",) if learns else ("new", "remembered", "remembered"):
                    counted = counted_step(data, conv)
                    orders = len(data.graph.grid.orders)
                    model = Model(97, 697, WIDTHS, kind, 4, size, step, orders)  # type: ignore[arg-type]
                    work = work_of(model, MeshShape(**mesh), sums, pyg_dist.rank())  # type: ignore[arg-type]
                    modelled = {axes: n for axes, n in work.sent.items() if len(axes) == 1 and n}
                    assert counted == modelled, (mesh, sums, kind, step, counted, modelled)
                totals.append(sum(counted.values()))
    return totals


def shapes(num_ranks: int) -> list[dict[str, int]]:
    from pyg_dist.backend.mesh import meshes

    return [{"x": m.x, "y": m.y, "z": m.z} for m in meshes(num_ranks)]


CASES = [(kind, learns) for kind in ("gcn", "sage") for learns in (False, True)]


@pytest.mark.parametrize(("num_ranks", "stride"), [(4, 1), (6, 3)])
def test_counted_bytes_are_the_models(workers: Pools, num_ranks: int, stride: int) -> None:
    workers(num_ranks).run(count, shapes(num_ranks), CASES, stride, timeout=115)


def test_narrow_messages(workers: Pools) -> None:
    mesh = [{"x": 2, "y": 2, "z": 1}]
    wide, narrow = (workers(4).run(count, mesh, [("gcn", True)], 1, dtype) for dtype in (None, torch.bfloat16))
    assert [[2 * n for n in totals] for totals in narrow] == wide


def narrow_gradients() -> list[float]:
    import pyg_dist
    from pyg_dist.conv import DistributedGCNConv

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
