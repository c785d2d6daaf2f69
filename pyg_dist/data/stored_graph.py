"""Opening a store: check it, compare it between ranks, and read this rank's part."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.comm.topology import DataGroups
from pyg_dist.backend.ops.memory import release_after, release_free_memory
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import digest, on_main, raised_on_all_ranks, require_equal
from pyg_dist.data.grid_data import on_stored_grid
from pyg_dist.data.layout_choice import gathered_plan, halo_graph, known_ranks_per_node, machines_to_share
from pyg_dist.data.local_graph import LocalGraph
from pyg_dist.data.options import Options
from pyg_dist.errors import StoreError
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.halo.plan.cover import Cover, Ends, ExchangeKind, OneWay, RemoteEdges
from pyg_dist.halo.plan.levels import Hierarchy, shares_machines
from pyg_dist.halo.plan.plan import Plan, hash_of_digests, pairs_of
from pyg_dist.halo.plan.share import HaloShare, LocalEdges, LocalRows, kinds_of, share_of
from pyg_dist.halo.plan.sizes import BlockNumbers, ShareSizes, merged_parts, rows_across
from pyg_dist.halo.plan.two_level import MachineEdges, Routes, Task, exchanged
from pyg_dist.pricing.machine import Machine
from pyg_dist.store.grid_store import GridStore
from pyg_dist.store.halo_reader import CrossEdges, HaloStore
from pyg_dist.store.manifest import ADJ_VALUES, Manifest
from pyg_dist.tensor import RowTensor


def open_store(folder: object, allow_nan: bool, **given: Any) -> LocalGraph:
    """Read this rank's part (collective). See :meth:`pyg_dist.DistributedData.open`."""
    with raised_on_all_ranks():
        if not isinstance(folder, (str, Path)):
            got = type(folder).__name__
            raise StoreError(f"Expected the path of a store's folder (got {got}): pass a str or a Path")
        path = Path(folder)
        manifest = Manifest.load(path)
        options = Options(manifest.layout, "random", **given)
    require_equal(
        {"the store's manifest": manifest.digest, **options.identity()}, "give every rank the same store and options"
    )
    if not allow_nan and session.is_main():
        warn_of_stored_nan(manifest)
    if manifest.layout == "halo":
        return _open_halo(HaloStore(path, manifest), options)
    store = GridStore(path, manifest)
    graph, plan, rows = on_stored_grid(store, options)
    with raised_on_all_ranks():
        others = stored_others(store)
    weight: Any = rows.pop(ADJ_VALUES, None)
    return LocalGraph(graph, plan, manifest.graph.key, weight, rows | others)


def warn_of_stored_nan(manifest: Manifest) -> None:
    """Warn of attributes that had NaN when the store was written."""
    for name, found in manifest.nan.items():
        kind, size = ("node", manifest.num_nodes) if name in manifest.node_attributes else ("edge", manifest.num_edges)
        warnings.warn(found.warning(name, kind, size), stacklevel=4)


def _open_halo(store: HaloStore, options: Options) -> LocalGraph:
    groups = DataGroups.of(options.mesh)
    manifest, group = store.manifest, groups.part
    with raised_on_all_ranks():
        ranks = rank_of_part(store.path, [store], group.size)
        parts = store.parts_of(group.rank, ranks)
        placed = StoreOnRanks(store, ranks, options.exchange)
        share = placed.share(group.rank)
    if group.size == store.num_parts:
        plan = stored_plan(store, options.exchange, options.bits_by_direction, known_ranks_per_node(group))
    else:
        plan = gathered_plan(share, group, options, manifest.planned("partition", str), None, placed.hash)
    share, plan = placed.in_levels(share, plan, options, group)
    graph = halo_graph(share, groups, options, manifest.graph.loop_rule, plan)
    with raised_on_all_ranks():
        local = stored_rows(store, parts, graph, plan, share)
    store.close()
    return local


def stored_rows(
    store: HaloStore, parts: list[int], graph: DistributedGraph, plan: Plan, share: HaloShare
) -> LocalGraph:
    """A graph, or a relation's, with this rank's rows of all attributes. Not collective."""
    manifest, rows = store.manifest, dict[str, object]()
    for name in manifest.node_attributes:
        rows[name] = RowTensor.from_local(rows_of(store, "node", name, parts, share.node_id), graph.node_sharding)
    for name in manifest.edge_attributes:
        rows[name] = RowTensor.from_local(rows_of(store, "edge", name, parts, share.edge_id), graph.edge_sharding)
    weight: Any = rows.pop(ADJ_VALUES, None)
    return LocalGraph(graph, plan, manifest.graph.key, weight, rows | stored_others(store))


def stored_others(store: HaloStore | GridStore) -> dict[str, object]:
    """Attributes without rows, the same on every rank."""
    tensors = store.manifest.shards["other"].tensors if "other" in store.manifest.shards else {}
    return {name: store.tensor("other", name) for name in tensors} | store.manifest.other


def block_numbers(store: HaloStore, nodes_of: Sequence[int] | None = None) -> BlockNumbers:
    """Numbers of all blocks, from the manifest; ``nodes_of``: targets of each part, of a relation between two types."""
    names = ("edges", "rows", "sums", "post_edges", "post_rows", "pre_sums")
    return BlockNumbers(
        **{name: store.between(name) for name in names},
        nodes=host.tensor(store.nodes_of if nodes_of is None else nodes_of),
        boundary=host.tensor(store.boundary()),
    )


def stored_plan(store: HaloStore, exchange: ExchangeKind, bits: tuple[int, int], ranks_per_node: int | None) -> Plan:
    """The plan for as many ranks as parts, from the manifest alone (not collective)."""
    sizes, rows = block_numbers(store).sizes(exchange)
    partition, edges, parts = (store.manifest.planned(name, str) for name in ("partition", "edges", "parts"))
    identity = hash_of_digests(edges, parts, store.num_parts, exchange)
    return Plan("halo", partition, exchange, sizes, pairs_of(rows), identity, None, bits, ranks_per_node)


def rank_of_part(path: Path, stores: Sequence[HaloStore], num_ranks: int) -> Tensor:
    """The rank of each part, int64 ``[P]``: parts with much traffic between them are merged where ranks are fewer.

    ``stores``: those in the folder ``path``, several of a graph with types; their traffic is added.
    """
    num_parts = stores[0].num_parts
    if num_ranks > num_parts:
        raise StoreError(
            f"Expected at most {num_parts} ranks for the parts in {path} (got {num_ranks}): python -m pyg_dist "
            f"partition GRAPH {path} --parts {num_ranks} --force"
        )
    if num_ranks == num_parts:
        return host.arange(num_ranks)
    numbers = [block_numbers(store) for store in stores]
    return merged_parts(torch.stack([one.post_rows + one.pre_sums for one in numbers]).sum(0), num_ranks)


class RelationRows(NamedTuple):
    """A rank's rows of both ends of a relation."""

    node_id: Tensor  # global ids of targets in the order of their rows, int64 ``[n]``
    sources: LocalRows | None  # of another type


@dataclass(frozen=True)
class StoreOnRanks:
    """A halo store, or that of a relation in a graph with types, whose parts are on as many ranks or fewer.

    Nothing here is collective, but :meth:`in_levels`.
    """

    store: HaloStore
    ranks: Tensor  # the rank of each part, int64 ``[P]``: :func:`rank_of_part`
    exchange: ExchangeKind
    ends: Callable[[int], RelationRows] | None = None  # a rank's rows of a relation
    first_target: int = 0  # of a relation between two types, whose store numbers the nodes of both in a row

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return int(self.ranks.max()) + 1

    @property
    def hash(self) -> str:
        """The hash of a plan of merged parts."""
        return digest(repr((self.store.manifest.digest, self.ranks.tolist(), self.exchange)))

    def share(self, rank: int, ways: Mapping[ExchangeKind, Routes] | None = None) -> HaloShare:
        """The share of ``rank``, as ``halo_share`` makes it of the whole graph.

        Reads the files of the rank's parts, and its blocks of other parts' files. With a part on each rank the stored
        cover is used; for merged parts it is found anew, from the edges between ranks. ``ways``: the routes of
        :meth:`ways`, for two levels.
        """
        store, ranks, first_target = self.store, self.ranks, self.first_target
        parts, num_ranks = store.parts_of(rank, ranks), self.num_ranks
        load = host.zeros(num_ranks, dtype=torch.int64).index_add_(0, ranks, store.edges_between.sum(0))
        every_id = store.node_id(parts)
        num_sources = int(torch.searchsorted(every_id, first_target))
        node_id = every_id[num_sources:] - first_target
        on_boundary = store.on_boundary(rank, ranks, every_id)[num_sources:]
        del every_id

        def inside() -> LocalEdges:
            edge_id, source, target = store.inside(parts)
            return LocalEdges(edge_id, source, target.sub_(num_sources))

        def cross(leaves: bool) -> tuple[OneWay, Cover]:
            found = store.cross(rank, ranks, leaves)
            edges, left, right = self._one_way(rank, leaves, found), found.rows.is_sent, found.sums.is_sent
            hybrid = edges.cover("hybrid", load) if left is None or right is None else Cover(left, right)
            release_after(edges.row.numel())  # temporaries of matching
            return edges, hybrid

        rows, sources = (None, None) if self.ends is None else self.ends(rank)
        share = share_of(
            rank, num_ranks, store.manifest.num_nodes - first_target, store.manifest.num_edges, node_id, on_boundary,
            inside, lambda: cross(False), lambda: cross(True), self.exchange,
            rows, sources, ways,
        )  # fmt: skip
        del node_id
        release_free_memory()
        return share

    def _one_way(self, rank: int, leaves: bool, found: CrossEdges) -> OneWay:
        rows, sums = found.rows, found.sums
        return OneWay(
            rank, leaves, found.edge_id, found.row, found.sum, Ends(rows.node, rows.counts),
            Ends(sums.node - self.first_target, sums.counts),
        )  # fmt: skip

    def ways(self, task: Task) -> dict[ExchangeKind, Routes]:
        """The routes of a task, by the exchange of rows and of sums. Reads the edges between its machines."""
        store, machine, of_part = self.store, task.machine, self.ranks // task.ranks_per_machine
        num_machines = int(of_part.max()) + 1
        load = host.zeros(num_machines, dtype=torch.int64).index_add_(0, of_part, store.edges_between.sum(0))
        ways_in_and_out = (False, task.sources), (True, task.targets)
        both = [(way, store.cross(machine, of_part, *way)) for way in ways_in_and_out]
        row_owner, sum_owner = (
            self.ranks[torch.cat([
                store.part_of(getattr(found, kind).node, machine, of_part, kind, *way) for way, found in both
            ])]
            for kind in ("rows", "sums")
        )  # fmt: skip
        arriving, leaving = (self._one_way(machine, way[0], found) for way, found in both)
        edges = RemoteEdges.of_ways(arriving, leaving, load)
        of_machine = MachineEdges(edges, row_owner, sum_owner, task.ranks_per_machine, self.num_ranks)
        return {kind: of_machine.routes(kind) for kind in kinds_of(self.exchange)}

    def rows_across(self, ranks_per_machine: int) -> int:
        """Rows of the hybrid exchange that cross machines in two levels. Reads the edges between machines."""
        hybrid, num_ranks = replace(self, exchange="hybrid"), self.num_ranks
        tasks = (Task.alone(first, num_ranks, ranks_per_machine) for first in range(0, num_ranks, ranks_per_machine))
        leaving = (task._replace(sources=torch.zeros_like(task.sources)) for task in tasks)
        return sum(hybrid.ways(task)["hybrid"].node.numel() for task in leaving)

    def counted(self, like: Plan, two_levels: bool = False) -> Plan:
        """``like`` with the sizes of each rank's share, which are read one after another."""
        sizes, num_ranks, on_each = [], self.num_ranks, like.ranks_per_node if two_levels else None
        rows = host.zeros(num_ranks, num_ranks, dtype=torch.int64)
        placed = replace(self, exchange=like.exchange)
        for rank in range(num_ranks):
            ways = None if on_each is None else placed.ways(Task.alone(rank, num_ranks, on_each))
            share = placed.share(rank, ways)
            sizes.append(ShareSizes.of(share))
            rows[rank] = host.tensor(share.sum_transfer.sent).sum(0)
        return replace(like, sizes=tuple(sizes), pairs=pairs_of(rows), two_levels=two_levels)

    def in_cheaper_levels(self, plan: Plan, hierarchy: Hierarchy, machine: Machine | None) -> Plan:
        """The plan in one level or in two, where its ranks share machines. Reads the edges between machines."""
        on_each = plan.ranks_per_node
        if on_each is None or not shares_machines(plan.ranks, on_each):
            return plan
        hybrid = plan if plan.exchange == "hybrid" else self.counted(replace(plan, exchange="hybrid"))
        one = rows_across(hybrid.rows_between(), on_each)
        plan = replace(plan, across=(one, self.rows_across(on_each)))
        if hierarchy == "off":
            return plan
        both = self.counted(plan, two_levels=True)
        return both if hierarchy == "on" else min(plan, both, key=lambda plan: plan.price(machine=machine).seconds)

    def in_levels(self, share: HaloShare, plan: Plan, options: Options, group: Group) -> tuple[HaloShare, Plan]:
        """A share in one level and its plan, or those in two, which ranks of a machine plan together (collective).

        By the options, or whichever a step is cheaper with by the constants of rank 0.
        """
        on_each = machines_to_share(options, group)
        if on_each is None:
            return share, plan
        with raised_on_all_ranks():
            ways = self.ways(Task.shared(group.rank, group.size, on_each))
        ways = exchanged(ways, group.size, on_each, IdLists(group).send)
        with raised_on_all_ranks():
            shared = self.share(group.rank, ways)
        both = gathered_plan(shared, group, options, plan.partition, None, plan.hash)
        is_cheaper = options.hierarchy == "on" or on_main(lambda: both.price().seconds < plan.price().seconds)
        return (shared, both) if is_cheaper else (share, plan)


def rows_of(store: HaloStore, kind: Literal["node", "edge"], name: str, parts: list[int], ids: Tensor) -> Tensor:
    """The rows of an attribute of the nodes or edges with these global ids, which are all of some parts."""
    ascending, order = ids.sort()
    of_part = [store.tensor(f"{kind}s-{part:05d}", f"{kind}_id") for part in parts]
    return store.rows(f"{kind}s", name, parts, [order[torch.searchsorted(ascending, own)] for own in of_part])
