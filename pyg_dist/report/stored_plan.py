"""Plans of stores, from their manifests alone; and checking all of a store."""

from __future__ import annotations

from pathlib import Path

from pyg_dist.data.stored_grid import stored_grid_plan
from pyg_dist.data.stored_halo import stored_plan
from pyg_dist.errors import StoreError
from pyg_dist.plan import Plan
from pyg_dist.plan.base import DistributionPlan
from pyg_dist.plan.halo.remote_edges import Exchange
from pyg_dist.store.folder import check_shard
from pyg_dist.store.grid_store import GridStore
from pyg_dist.store.halo_reader import HaloStore
from pyg_dist.store.manifest import FILE, Manifest


def halo_plan(path: Path, manifest: Manifest, exchange: Exchange, ranks_per_node: int | None = None) -> Plan:
    """The plan of as many ranks as the store has parts."""
    return stored_plan(HaloStore(path, manifest), exchange, (32, 32), ranks_per_node)


def is_store(graph: str) -> bool:
    """Whether a name is that of a store."""
    return (Path(graph) / FILE).is_file()


def plan_of_store(path: Path, ranks: int, exchange: Exchange, ranks_per_node: int | None = None) -> DistributionPlan:
    """The plan that a store was written with.

    Raises:
        StoreError: It was written for another number of ranks.
    """
    manifest = Manifest.load(path)
    if manifest.num_parts != ranks:
        raise StoreError(
            f"Expected --ranks {manifest.num_parts}, as many as {path} has parts (got {ranks}): the plan of another "
            f"number needs the graph, not the store"
        )
    if manifest.layout == "grid":
        return stored_grid_plan(GridStore(path, manifest))
    return halo_plan(path, manifest, exchange, ranks_per_node)


def check_store(path: Path) -> Manifest:
    """Check every file of a store by its digests.

    Raises:
        StoreError: The first that is missing or damaged.
    """
    manifest = Manifest.load(path)
    for shard in manifest.shards.values():
        check_shard(path, shard)
    return manifest
