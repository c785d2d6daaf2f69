"""A grid store opened by ranks equals ``DistributedData(layout="grid")`` on the same mesh, to the bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_graphs import same, skewed_graph
from test_halo_store import training
from workers import Workers

Pools = Callable[[int], Workers]


def write(
    folder: Path, num_ranks: int, mesh: dict[str, int] | None, tiles: tuple[int, int], memory: int = 1 << 30
) -> Path:
    from pyg_dist import save_graph
    from pyg_dist.report.conversion import StoreOptions
    from pyg_dist.report.grid_conversion import write_grid_store
    from pyg_dist.store.sources import open_source

    save_graph(skewed_graph(), folder / "g.safetensors")
    options = StoreOptions(num_ranks, memory=memory, force=True)
    write_grid_store(open_source(str(folder / "g.safetensors")), folder / "store", options, tiles, mesh)
    return folder / "store"


def opened_as_made(path: str, mesh: dict[str, int] | None) -> None:
    from pyg_dist import DistributedData, EdgeTensor, NodeTensor

    made: Any = DistributedData(skewed_graph(), layout="grid", mesh=mesh)
    opened: Any = DistributedData.open(path, mesh=mesh)
    assert set(made.keys()) == set(opened.keys())
    for key in made.keys():  # noqa: SIM118
        if isinstance(made[key], (NodeTensor, EdgeTensor)):
            assert type(made[key]) is type(opened[key]), key
            assert same(made[key].to_local(), opened[key].to_local()), key
        elif key != "edge_index":
            assert same(made[key], opened[key]), key
    assert torch.equal(made.edge_index.full_tensor(), opened.edge_index.full_tensor())
    for conv in ("gcn", "sage"):
        one, other = training(made, conv), training(opened, conv)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    a, b = made.plan.to_dict(), opened.plan.to_dict()
    assert {k: v for k, v in a.items() if k != "hash"} == {k: v for k, v in b.items() if k != "hash"}


MESHES = [
    (1, None),
    (2, {"x": 2}),
    (2, {"z": 2}),
    (3, {"x": 3}),
    (4, {"x": 2, "z": 2}),
    (4, {"y": 2, "x": 2}),
    (4, None),
]


@pytest.mark.parametrize(("num_ranks", "mesh"), MESHES)
@pytest.mark.parametrize("tiles", [(4, 4), (3, 5)])
def test_equal_to_the_whole_graph(
    workers: Pools, tmp_path: Path, num_ranks: int, mesh: dict[str, int] | None, tiles: tuple[int, int]
) -> None:
    path = write(tmp_path, num_ranks, mesh, tiles, memory=1 << (20 if tiles == (3, 5) else 30))
    workers(num_ranks).run(opened_as_made, str(path), mesh)


def on_another_mesh(path: str) -> None:
    from pyg_dist import DistributedData

    made = training(DistributedData(skewed_graph()), "sage")
    opened: Any = DistributedData.open(path, mesh={"z": 2})
    assert sum(opened.plan.edges) == 1500
    for a, b in zip(made, training(opened, "sage"), strict=True):
        assert torch.allclose(a, b, rtol=1e-2, atol=1e-3)


def test_another_mesh(workers: Pools, tmp_path: Path) -> None:
    workers(2).run(on_another_mesh, str(write(tmp_path, 4, {"x": 2, "z": 2}, (4, 4))))
