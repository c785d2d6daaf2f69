"""A store of a graph with types: this rank's part of each type and relation, and its plan on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.topology import DataGroups
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import digest, raised_on_all_ranks, require_equal
from pyg_dist.data.hetero import known_options
from pyg_dist.data.layout_choice import gathered_plan
from pyg_dist.data.stored_graph import (
    RelationRows,
    StoreOnRanks,
    block_numbers,
    rank_of_part,
    rows_of,
    stored_others,
    stored_rows,
    warn_of_stored_nan,
)
from pyg_dist.data.typed_layout import LocalTypes, TypedGraph
from pyg_dist.halo.plan.cover import ExchangeKind
from pyg_dist.halo.plan.levels import Hierarchy
from pyg_dist.halo.plan.plan import Plan, pairs_of
from pyg_dist.halo.plan.relations import HeteroPlan, Relation, hash_of_relation
from pyg_dist.halo.plan.share import HaloShare, LocalRows
from pyg_dist.pricing.machine import Machine
from pyg_dist.store.halo_reader import HaloStore
from pyg_dist.store.manifest import LoopRule
from pyg_dist.store.typed_store import TypedStores, TypesManifest
from pyg_dist.tensor import RowTensor


def open_types(folder: str | Path, allow_nan: bool, **given: Any) -> LocalTypes:
    """Read this rank's part (collective). See :meth:`pyg_dist.DistributedData.open`."""
    path = Path(folder)
    with raised_on_all_ranks():
        options = known_options({"partition": "random", **given})
        manifest = TypesManifest.load(path)
        stores = manifest.halo_stores(path)
    require_equal(
        {"the store's manifest": manifest.digest, **options.identity()}, "give every rank the same store and options"
    )
    if not allow_nan and session.is_main():
        for store in stores.all():
            warn_of_stored_nan(store.manifest)
    group = DataGroups.of(None).part
    with raised_on_all_ranks():
        ranks = rank_of_part(path, _with_traffic(stores), group.size)
        parts = stores.whole.parts_of(group.rank, ranks)
        rows = _rows_of_types(manifest, stores, group.rank, ranks)

    def shares() -> Iterator[tuple[Relation, HaloShare, LoopRule, Plan]]:
        for relation, store in stores.edges.items():
            with raised_on_all_ranks():
                placed = _placed(manifest, relation, store, ranks, options.exchange, lambda rank: rows)
                share = placed.share(group.rank)
            identity = _hash(manifest, relation, ranks, options.exchange)
            plan = gathered_plan(share, group, options, manifest.partition, None, identity)
            share, plan = placed.in_levels(share, plan, options, group)
            yield relation, share, store.manifest.graph.loop_rule, plan

    graph = TypedGraph.of(rows, manifest.types, options, group, shares())
    with raised_on_all_ranks():
        nodes = {}
        for kind, store in stores.nodes.items():
            found = {n: rows_of(store, "node", n, parts, rows[kind]) for n in store.manifest.node_attributes}
            local = {name: RowTensor.from_local(own, graph.nodes[kind]) for name, own in found.items()}
            nodes[kind] = local | stored_others(store)
        edges = {}
        for relation, store in stores.edges.items():
            own = graph.edges[relation]
            edges[relation] = stored_rows(store, parts, own, graph.plan.relations[relation], own.share)
        others = stored_others(stores.whole)
    for store in stores.all():
        store.close()
    return LocalTypes(graph, torch.device("cpu"), others, nodes, edges)


def stored_types_plan(
    path: Path, num_ranks: int, exchange: ExchangeKind, ranks_per_node: int | None = None,
    hierarchy: Hierarchy = "auto", machine: Machine | None = None,
) -> HeteroPlan:  # fmt: skip
    """The plan of a store on some number of ranks; if they are fewer than parts, each rank's part is read in turn.

    Where ranks share machines, the edges between these are read, too, and ``machine`` decides about levels.
    """
    manifest = TypesManifest.load(path)
    stores = manifest.halo_stores(path)
    ranks, plans = rank_of_part(path, _with_traffic(stores), num_ranks), {}
    rows = cache(lambda rank: _rows_of_types(manifest, stores, rank, ranks))
    nodes_of = {
        kind: host.zeros(num_ranks, dtype=torch.int64).index_add_(0, ranks, host.tensor(store.nodes_of)).tolist()
        for kind, store in stores.nodes.items()
    }
    for relation, store in stores.edges.items():
        placed = _placed(manifest, relation, store, ranks, exchange, rows)
        identity = _hash(manifest, relation, ranks, exchange)
        plan = Plan("halo", manifest.partition, exchange, (), (), identity, ranks_per_node=ranks_per_node)
        if num_ranks == manifest.num_parts:
            sizes, sent = block_numbers(store, nodes_of[relation[-1]]).sizes(exchange)
            plan = replace(plan, sizes=sizes, pairs=pairs_of(sent))
        else:
            plan = placed.counted(plan)
        plans[relation] = placed.in_cheaper_levels(plan, hierarchy, machine)
    return HeteroPlan(nodes_of, plans)


def _with_traffic(stores: TypedStores) -> Sequence[HaloStore]:
    return list(stores.edges.values()) or [stores.whole]


def _hash(manifest: TypesManifest, relation: Relation, ranks: Tensor, exchange: ExchangeKind) -> str:
    """The hash of a relation's plan; with a part on each rank the same as of the graph in memory."""
    num_ranks, place = int(ranks.max()) + 1, manifest.relations.index(relation)
    owners = [manifest.parts[kind] for kind in (relation[0], relation[-1])]
    found = hash_of_relation(manifest.edges[place], owners, num_ranks, exchange)
    return found if num_ranks == manifest.num_parts else digest(repr((found, ranks.tolist())))


def _rows_of_types(manifest: TypesManifest, stores: TypedStores, rank: int, ranks: Tensor) -> dict[str, Tensor]:
    """The nodes of each type on a rank, in the order of its rows: first those without sources on other ranks."""
    parts = stores.whole.parts_of(rank, ranks)
    ids = {kind: store.node_id(parts) for kind, store in stores.nodes.items()}
    late = {kind: host.zeros(own.numel(), dtype=torch.bool) for kind, own in ids.items()}
    for relation, store in stores.edges.items():
        target = relation[-1]
        every_id = store.node_id(parts)
        late[target] |= store.on_boundary(rank, ranks, every_id)[every_id.numel() - ids[target].numel() :]
    return {kind: torch.cat([own[~late[kind]], own[late[kind]]]) for kind, own in ids.items()}


def _placed(
    manifest: TypesManifest, relation: Relation, store: HaloStore, ranks: Tensor, exchange: ExchangeKind,
    rows: Callable[[int], Mapping[str, Tensor]],
) -> StoreOnRanks:  # fmt: skip
    """A relation's store; ``rows`` gives a rank's rows of all types."""
    source, _, target = relation

    def ends(rank: int) -> RelationRows:
        own = rows(rank)
        return RelationRows(own[target], None if source == target else LocalRows.of(own[source]))

    return StoreOnRanks(store, ranks, exchange, ends, 0 if source == target else manifest.types[source])
