"""What ``BatchLoader`` promises of every sampler, and asks of it. A new sampler is a line of ``SAMPLERS``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from batch_cases import laid_out, quiet
from every_second import EverySecond
from random_graphs import random_graph
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import subgraph
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.backend.comm.checks.calls import Calls
from pyg_dist.loader import BatchLoader, LinkNeighborLoader, NeighborLoader, UniformVertexLoader, batches

LAYOUTS: list[list[tuple[int, Any]]] = [
    [(3, None), (2, {"y": 2})],
    [(1, None), (3, {"z": 3})],
    [(3, None), (1, {"x": 1})],
]  # in turn: two world sizes and both layouts for each sampler


def uniform(data: Any, **options: Any) -> Any:
    return quiet(lambda: UniformVertexLoader(data, 9, **options))


def every_second(data: Any) -> Any:
    return BatchLoader(data, EverySecond(data.num_nodes))


def neighbours(data: Any, **options: Any) -> Any:
    return NeighborLoader(data, [3, 2], batch_size=8, **options)


def links(data: Any, **options: Any) -> Any:
    return LinkNeighborLoader(data, [2, 2], batch_size=40, neg_sampling="triplet", shuffle=True, **options)


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "every second": every_second,
    "uniform": uniform,
    "uniform, rescaled": lambda data: uniform(data, rescale=True, input_nodes=data.train_mask),
    "uniform, covering": lambda data: uniform(data, cover=True),
    "neighbours": lambda data: neighbours(data, input_nodes=data.train_mask),
    "neighbours, induced, shuffled": lambda data: neighbours(data, subgraph_type="induced", shuffle=True),
    "neighbours, disjoint, with replacement": lambda data: neighbours(
        data, disjoint=True, replace=True, drop_last=True
    ),
    "neighbours, weighted, with replacement": lambda data: neighbours(data, replace=True, weight_attr="edge_weight"),
    "links": lambda data: links(data),
    "links, disjoint": lambda data: links(data, disjoint=True),
}


def is_same(one: Any, other: Any) -> bool:
    """Of tensors, and of what has tensors as attributes."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    if hasattr(one, "__dict__") or isinstance(one, dict):
        both = [thing if isinstance(thing, dict) else vars(thing) for thing in (one, other)]
        return both[0].keys() == both[1].keys() and all(is_same(both[0][k], both[1][k]) for k in both[0])
    return bool(one == other)


def check_batch(graph: Data, batch: Any, subset: Any) -> None:
    """Compare a batch with what PyG makes of its nodes, or with what the rank's subset says of its edges."""
    n_id, e_id, edge_index = (batch[name].full_tensor() for name in ("n_id", "e_id", "edge_index"))
    kept = subset.kept
    if kept is None:
        expected, _, keep = subgraph(
            subset.node_id, graph.edge_index, relabel_nodes=True, num_nodes=graph.num_nodes, return_edge_mask=True
        )
        assert torch.equal(n_id, subset.node_id)
        assert torch.equal(e_id, keep.nonzero().view(-1))
        assert torch.equal(edge_index, expected)
    else:
        assert n_id.numel() == subset.num_nodes
        assert torch.equal(n_id[subset.number], subset.node_id)
        assert torch.equal(n_id[edge_index], graph.edge_index[:, e_id])
        edges = set(zip(e_id.tolist(), *edge_index.tolist(), strict=True))
        assert edges >= set(zip(kept.edge_id.tolist(), kept.source.tolist(), kept.target.tolist(), strict=True))
    assert torch.equal(batch.x.full_tensor(), graph.x[n_id])
    assert torch.equal(batch.edge_attr.full_tensor(), graph.edge_attr[e_id])


def drawn(name: str, mesh: dict[str, int] | None) -> list[tuple[list[int], list[int]]]:
    """Nodes and edges of two epochs, after the checks."""
    graph = random_graph(41, 150)
    data = laid_out(graph, mesh)
    loader = SAMPLERS[name](data)
    sampler, num_steps = loader.sampler, len(loader)
    fails = AssertionError("sample sends")
    with mock.patch.object(Calls, "next", autospec=True, side_effect=Calls.next if sampler.sends else fails):
        subsets = [sampler.sample(step) for step in range(2 * num_steps)]
        again = [sampler.sample(step) for step in reversed(range(2 * num_steps))]
    assert all(is_same(a, b) for a, b in zip(subsets, reversed(again), strict=True))  # in any order, as in a restart
    found, states = [], [loader.state_dict()]
    for _ in range(2):
        for batch in loader:
            check_batch(graph, batch, subsets[len(found)])
            assert all(is_same(batch[key], value) for key, value in subsets[len(found)].attributes.items())
            found.append((batch.n_id.tolist(), batch.e_id.tolist()))
            states.append(loader.state_dict())
    assert len(found) == 2 * num_steps
    other = SAMPLERS[name](data)
    other.load_state_dict(states[num_steps + 1])
    assert [(b.n_id.tolist(), b.e_id.tolist()) for b in other] == found[num_steps + 1 :]
    return found


SLOW = (
    "neighbours, weighted, with replacement",
    "neighbours, disjoint, with replacement",
    "neighbours, induced, shuffled",
    "links, disjoint",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SAMPLERS])
def test_subsets_and_batches(name: str, workers: Pools) -> None:
    """Pure functions of the step: alike on all ranks, world sizes and layouts, and after a restart."""
    layouts = LAYOUTS[list(SAMPLERS).index(name) % 3]
    runs = [found for size, mesh in layouts for found in workers(size).run(drawn, name, mesh)]
    assert all(found == runs[0] for found in runs)


@on_ranks(2)
def test_ranks_have_one_sampler() -> None:
    data = laid_out(random_graph(20, 60), None)
    with pytest.raises(ValueError, match="Expected the same on every rank: option num_nodes"):
        BatchLoader(data, EverySecond(20 - pyg_dist.rank()))


@on_ranks(2)
def test_where_mpi_is_for_one_thread_no_other_sends() -> None:
    from types import SimpleNamespace

    data = laid_out(random_graph(41, 150), None)
    for level, is_asked, expected in ((0, True, False), (3, True, True), (3, False, False)):
        mpi = SimpleNamespace(Query_thread=lambda level=level: level, THREAD_MULTIPLE=3)
        with mock.patch.object(batches, "running_mpi", return_value=mpi):
            assert neighbours(data, prefetch=is_asked).prefetch is expected
            assert uniform(data, prefetch=is_asked).prefetch is is_asked  # it sends nothing
