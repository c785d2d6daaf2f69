"""Batches of neighbours go on after a restart, and from a store, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_cases import laid_out
from neighbor_cases import N, graph_of, loader_of, model, step, whole_of
from random_graphs import uneven_parts
from workers import Pools

import pyg_dist
from pyg_dist import save_graph
from pyg_dist.cli.conversion import StoreOptions, write_grid_store, write_halo_store
from pyg_dist.store.sources import open_source


def continued(mesh: dict[str, int] | None, state: Any, num_steps: int, path: str | None = None) -> Any:
    """Facts and losses of some steps after a state, and the state then."""
    data: Any = laid_out(graph_of("directional"), mesh) if path is None else pyg_dist.DistributedData.open(path)
    loader, convs = loader_of(data, "directional"), pyg_dist.distribute(model())
    optimizer = torch.optim.SGD(convs.parameters(), lr=0.1)
    if state is not None:
        loader.load_state_dict(state[0])
        convs.load_state_dict(state[1])
    found: list[tuple[Any, ...]] = []
    while len(found) < num_steps:
        for batch in loader:
            optimizer.zero_grad()
            loss = step(convs, batch)
            loss.backward()
            optimizer.step()
            found.append((*(whole_of(batch[key]).tolist() for key in ("n_id", "e_id", "edge_index")), loss.item()))
            if len(found) == num_steps:
                break
    return found, (loader.state_dict(), {key: value.detach().clone() for key, value in convs.state_dict().items()})


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert [batch[:-1] for batch in found] == [batch[:-1] for batch in expected]
    torch.testing.assert_close([b[-1] for b in found], [b[-1] for b in expected], rtol=0, atol=1e-10)


def test_a_state_continues_on_any_number_of_ranks(workers: Pools) -> None:
    """At each step of an epoch and after it."""
    whole, _ = workers(1).run(continued, None, None, 5)[0]
    state, done = None, 0
    for size, mesh in ((1, None), (2, None), (3, None), (2, {"x": 2}), (4, None)):
        results = workers(size).run(continued, mesh, state, 1)
        for found, _ in results:
            assert_same(found, whole[done : done + 1])
        state, done = results[0][1], done + 1


@pytest.mark.parametrize("world_size", [1, 3])
def test_batches_of_a_store(world_size: int, workers: Pools, tmp_path: Path) -> None:
    whole, _ = workers(1).run(continued, None, None, 3)[0]
    save_graph(graph_of("directional"), tmp_path / "graph.safetensors")
    np.save(tmp_path / "parts.npy", uneven_parts(N, world_size).numpy())
    options = StoreOptions(parts=world_size, method=str(tmp_path / "parts.npy"))
    write_halo_store(open_source(str(tmp_path / "graph.safetensors")), tmp_path / "store", options)
    for found, _ in workers(world_size).run(continued, None, None, 3, str(tmp_path / "store")):
        assert_same(found, whole)


def test_batches_of_a_grid_store(workers: Pools, tmp_path: Path) -> None:
    whole, _ = workers(1).run(continued, None, None, 3)[0]
    save_graph(graph_of("directional"), tmp_path / "graph.safetensors")
    source, options = open_source(str(tmp_path / "graph.safetensors")), StoreOptions(parts=2)
    write_grid_store(source, tmp_path / "store", options, (2, 2), {"x": 2})
    for found, _ in workers(2).run(continued, None, None, 3, str(tmp_path / "store")):
        assert_same(found, whole)
