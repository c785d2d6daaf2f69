"""A grid store opened by ranks equals ``DistributedData(layout="grid")`` on the same mesh, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_all_same_bits
from stored_graphs import same, skewed_graph
from test_halo_store import training
from torch_geometric.data import Data
from workers import Pools

from pyg_dist import DistributedData, EdgeTensor, NodeTensor, save_graph, world_size
from pyg_dist.cli.conversion import StoreOptions, write_grid_store
from pyg_dist.cli.stored_plan import plan_of_store
from pyg_dist.data.grid_data import StoredOrder
from pyg_dist.grid.plan.node_order import ListedOrder
from pyg_dist.store.grid_store import GridStore
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.sources import open_source


def write(
    folder: Path,
    num_ranks: int,
    mesh: dict[str, int] | None,
    tiles: tuple[int, int],
    memory: int = 1 << 30,
    data: Data | None = None,
) -> Path:
    folder.mkdir(exist_ok=True)
    save_graph(skewed_graph() if data is None else data, folder / "g.safetensors")
    options = StoreOptions(num_ranks, memory=memory, force=True)
    write_grid_store(open_source(str(folder / "g.safetensors")), folder / "store", options, tiles, mesh)
    return folder / "store"


def opened_as_made(path: str, mesh: dict[str, int] | None) -> None:
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
        assert_all_same_bits(one, other)
    a, b = made.plan.to_dict(), opened.plan.to_dict()
    assert {k: v for k, v in a.items() if k != "hash"} == {k: v for k, v in b.items() if k != "hash"}


@pytest.mark.parametrize(
    ("num_ranks", "mesh", "tiles"),
    [
        *[(1, None, (3, 5)), (2, {"z": 2}, (3, 5)), (3, {"x": 3}, (3, 5)), (4, {"x": 2, "z": 2}, (3, 5))],
        pytest.param(2, {"x": 2}, (4, 4), marks=pytest.mark.slow),
        pytest.param(4, {"y": 2, "x": 2}, (4, 4), marks=pytest.mark.slow),
        pytest.param(4, None, (3, 5), marks=pytest.mark.slow),
    ],
)
def test_equal_to_the_whole_graph(
    workers: Pools, tmp_path: Path, num_ranks: int, mesh: dict[str, int] | None, tiles: tuple[int, int]
) -> None:
    path = write(tmp_path, num_ranks, mesh, tiles, memory=1 << (20 if tiles == (3, 5) else 30))
    workers(num_ranks).run(opened_as_made, str(path), mesh)


def test_orders_stay_in_their_file(tmp_path: Path) -> None:
    path = write(tmp_path, 4, {"x": 2, "z": 2}, (2, 2))
    store = GridStore(path, Manifest.load(path))
    found = [StoredOrder(*store.order(number)) for number in range(store.num_orders)]
    store.close()
    size, kinds = store.manifest.num_nodes, {spec.dtype for spec in store.manifest.shards["orders"].tensors.values()}
    assert kinds == {"I32"}
    for order in found:
        listed = ListedOrder.of(order.nodes(0, size))
        some = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:50]
        assert torch.equal(order.positions(some), listed.positions(some))
        assert torch.equal(order.nodes(7, 30), listed.nodes(7, 30))
        assert order.num_nodes == size
        assert order.positions(some).dtype == order.nodes(7, 30).dtype == torch.int64


def on_another_mesh(path: str) -> None:
    made = training(DistributedData(skewed_graph()), "sage")
    opened: Any = DistributedData.open(path, mesh={"z": 2})
    assert sum(opened.plan.edges) == 1500
    for a, b in zip(made, training(opened, "sage"), strict=True):
        assert torch.allclose(a, b, rtol=1e-2, atol=1e-3)


def test_another_mesh(workers: Pools, tmp_path: Path) -> None:
    workers(2).run(on_another_mesh, str(write(tmp_path, 4, {"x": 2, "z": 2}, (4, 4))))


def on_fewer_ranks(path: str) -> None:
    opened: Any = DistributedData.open(path)
    planned: Any = plan_of_store(Path(path), world_size(), "hybrid", machine=opened.plan.machine)
    assert opened.plan == planned
    assert sum(planned.edges) == planned.shape.y * 1500
    assert opened.plan.hash != plan_of_store(Path(path), 4, "hybrid").hash


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_plan_of_fewer_ranks(workers: Pools, tmp_path: Path, num_ranks: int) -> None:
    workers(num_ranks).run(on_fewer_ranks, str(write(tmp_path, 4, {"x": 2, "z": 2}, (4, 4))))
