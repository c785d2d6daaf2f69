"""The halo layout: which rows and edges a rank owns, and which rows it sends and receives (pure functions).

Each node belongs to one part, each edge to the owner of its target, which keeps its values. A rank's *halo* is the set
of sources that its edges need and other ranks own. Sources and targets may be two sets of nodes, with parts and rows of
their own; in a square graph they are one. Legend: *global id* is the node's number in the input, *local
id* its row on its rank, *slot* a halo row's place in the receive buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.ops.memory import release_after
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.halo.plan.cover import EXCHANGES, BothEnds, Cover, ExchangeKind, OneWay, both_ends
from pyg_dist.halo.plan.transfer import Places, Slots, Transfer, receive_lists, send_lists, transfer
from pyg_dist.halo.plan.two_level import MachineEdges, Routes, Send, Task, exchanged

Halo = tuple[Tensor, Tensor]
"""Global ids of a rank's halo rows and their owners."""


@dataclass(frozen=True)
class HaloShare:
    """One rank's share of a graph in the halo layout, and what it sends."""

    rank: int  # this rank
    num_ranks: int  # number of ranks P
    num_nodes: int  # targets of the whole graph, N
    num_edges: int  # edges of the whole graph, E
    # global ids of the local targets' rows, int64 ``[n]``: first the *inner* nodes, all of whose sources are local,
    # then the *boundary* nodes, each in ascending order of global id (input order is often local)
    node_id: Tensor
    num_inner: int  # local rows before the first boundary node. They are finished before any message arrives.
    # global ids of the edges of this rank, int64 ``[e]``: local edges by target, then halo edges by target and owner of
    # the source, each in input order. This is the order of edge storage.
    edge_id: Tensor
    local: CSR  # rows are local ids of targets, columns those of sources; entries are ``edge_id[:local.num_entries]``
    rows: Transfer | Callable[[], Transfer]  # ``row_transfer``, or what makes it
    sum_transfer: Transfer  # rows and sums, by the chosen exchange; ``"post"``: ``row_transfer`` itself
    halo: Halo | Callable[[], Halo]  # by receive slot of ``row_transfer``, or what makes it
    exchange: ExchangeKind  # the chosen exchange
    rows_sent: dict[ExchangeKind, int]  # rows that this rank sends in one aggregation, by exchange, in one level
    # in two levels, so many consecutive ranks share what crosses to another machine
    ranks_per_machine: int | None = None

    @cached_property
    def _halo(self) -> Halo:
        return self.halo() if callable(self.halo) else self.halo

    @property
    def halo_id(self) -> Tensor:
        """Global id by receive slot of :attr:`row_transfer`, int64 ``[h]``; of a batch made at the first use."""
        return self._halo[0]

    @property
    def halo_owner(self) -> Tensor:
        """The rank that has this node, int32 ``[h]``."""
        return self._halo[1]

    @cached_property
    def row_transfer(self) -> Transfer:
        """Rows of sources, for whatever cannot be summed by the sender; of a batch made at the first use."""
        return self.rows() if callable(self.rows) else self.rows

    def selected(self, picked: Tensor) -> HaloShare:
        """The share of some of the edges, in another order, over the same rows (not collective).

        The halo's rows are sent as before, for sums, too, though no edge may need them. ``picked``: places in edge
        storage, int64 ``[k]``.
        """
        local, incoming = (
            _picked(csr, picked, self.edge_id.numel()) for csr in (self.local, self.row_transfer.incoming)
        )
        row_transfer = replace(self.row_transfer, incoming=incoming)
        return replace(
            self,
            edge_id=self.edge_id[picked],
            local=local,
            rows=row_transfer,
            sum_transfer=row_transfer,
            exchange="post",
        )


def halo_share(
    edge_index: Tensor,
    parts: BothEnds,
    rank: int,
    num_ranks: int,
    exchange: ExchangeKind = "hybrid",
    node_id: BothEnds | None = None,
    ranks_per_machine: int | None = None,
    send: Send | None = None,
) -> HaloShare:
    """The share of ``rank``: its nodes, edges and transfers. O(E) time, O(own edges + N) extra memory.

    Not collective, but in two levels with ``send``.

    Args:
        edge_index: int64 ``[2, E]``, source and target, any order, duplicates and self loops allowed.
        parts: ``[N]`` integers, the owner of each node; of two sets, those of the sources and those of the targets.
        rank: whose share.
        num_ranks: number of ranks.
        exchange: what to send for sums, see :meth:`~pyg_dist.halo.plan.cover.RemoteEdges.cover`.
        node_id: the order of the rank's rows, where they have one; boundary nodes may then be anywhere. As ``parts``:
            without it sources that are no targets are in ascending order.
        ranks_per_machine: for two levels (:mod:`pyg_dist.halo.plan.two_level`).
        send: in two levels, shares the work and memory with the ranks of the machine, which plan at the same time;
            without it they are those of all edges of the machine.

    Example:
        >>> share = halo_share(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1]), rank=0, num_ranks=2)
        >>> share.halo_id, share.sum_transfer.send_counts
        (tensor([1]), (0, 1))
    """
    of_sources, of_targets = both_ends(parts)
    num_nodes, num_edges = of_targets.numel(), edge_index.size(1)
    ascending = host.flatnonzero(of_targets == rank)
    in_degree = torch.bincount(edge_index[1], minlength=num_nodes)
    load = in_degree.new_zeros(num_ranks).index_add_(0, of_targets, in_degree)
    del in_degree
    all_nodes = max(of_sources.numel(), num_nodes)
    task = None
    if ranks_per_machine is not None:
        task = (Task.alone if send is None else Task.shared)(rank, num_ranks, ranks_per_machine)
    local_edge, own, between = _edges_of(edge_index, (of_sources, of_targets), rank, task)
    arriving, leaving = OneWay.both(*own, all_nodes, num_ranks, rank)
    of_arriving, of_leaving = (way.cover("hybrid", load) for way in (arriving, leaving))
    on_boundary = host.zeros(ascending.numel(), dtype=torch.bool)
    on_boundary[torch.searchsorted(ascending, arriving.sums.node)] = True

    rows_of_sources, target_id = None, node_id
    if isinstance(parts, tuple):
        source_id, target_id = (None, None) if node_id is None else both_ends(node_id)
        rows_of_sources = LocalRows.of(host.flatnonzero(of_sources == rank) if source_id is None else source_id)
    assert not isinstance(target_id, tuple)

    def inside() -> LocalEdges:
        sources = ascending if rows_of_sources is None else rows_of_sources.ascending
        ends = zip((sources, ascending), edge_index[:, local_edge], strict=True)
        return LocalEdges(local_edge, *(torch.searchsorted(nodes, end, out_int32=True) for nodes, end in ends))

    ways = None
    if ranks_per_machine is not None and between is not None:
        machines = MachineEdges.of_list(*between[1:], all_nodes, load, ranks_per_machine, rank)
        ways = {kind: machines.routes(kind) for kind in kinds_of(exchange)}
        del machines
        between = None  # not held while the ways are exchanged
        if send is not None:
            ways = exchanged(ways, num_ranks, ranks_per_machine, send)
    del own, between
    return share_of(
        rank, num_ranks, num_nodes, num_edges, ascending, on_boundary, inside,
        lambda: (arriving, of_arriving), lambda: (leaving, of_leaving), exchange, target_id, rows_of_sources, ways,
    )  # fmt: skip


_Listed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Edges in input order: which; sources, targets, the ranks of both."""


def _edges_of(
    edge_index: Tensor, owners: tuple[Tensor, Tensor], rank: int, task: Task | None
) -> tuple[Tensor, _Listed, _Listed | None]:
    """The edges within a rank, those between it and others, and those whose ways it finds, in one pass over all."""
    # Of each node whether the rank has it (1), and its machine as an end of what leaves (2) or enters (4) a machine.
    of_nodes = [(owner == rank).to(torch.uint8) for owner in owners]
    if task is not None:
        is_own = host.arange(len(task.targets)) == task.machine
        for bits, owner, (leaves, enters) in zip(
            of_nodes, owners, ((is_own, task.sources), (task.targets, is_own)), strict=True
        ):
            of_machine = leaves.to(torch.uint8) * 2 + enters.to(torch.uint8) * 4
            bits |= of_machine[owner.long() // task.ranks_per_machine]
    begins, ends = (bits.index_select(0, end) for bits, end in zip(of_nodes, edge_index, strict=True))
    both = (begins & ends) << 3
    bits = (
        begins.bitwise_or_(ends).bitwise_and_(1).bitwise_or_(both)
    )  # 1: touches the rank; 8, 16, 32: both ends have it
    del begins, ends, both
    some = host.flatnonzero(bits)
    bits = bits.index_select(0, some)

    def chosen(is_chosen: Tensor) -> Tensor:
        return some.index_select(0, host.flatnonzero(is_chosen))

    def listed(edge: Tensor) -> _Listed:
        source, target = (end.index_select(0, edge) for end in edge_index)
        return edge, source, target, owners[0].index_select(0, source), owners[1].index_select(0, target)

    between = None if task is None else listed(chosen(bits >= 16))
    return chosen(bits & 8), listed(chosen(bits & 9 == 1)), between


def kinds_of(exchange: ExchangeKind) -> tuple[ExchangeKind, ...]:
    """The kinds of exchange that a share has lists for: rows alone, and the chosen one."""
    return ("post",) if exchange == "post" else ("post", exchange)


@dataclass(frozen=True, eq=False)
class LocalRows:
    """A rank's nodes."""

    ascending: Tensor  # their global ids, int64 ``[n]``
    row: Tensor  # the row of each, int32 ``[n]``
    row_of: Tensor | None = None  # by id, int32; ``None``: searched for

    @staticmethod
    def of(node_id: Tensor) -> LocalRows:
        """The local rows whose nodes are ``node_id``, in this order."""
        ascending, row = node_id.sort()
        return LocalRows(ascending, row.to(torch.int32))

    @cached_property
    def _first(self) -> int | None:
        """The first node, where they are a run of ids, as those of one rank."""
        size = self.ascending.numel()
        if size == 0:
            return None
        first, last = (int(self.ascending[k]) for k in (0, -1))
        return first if last - first + 1 == size else None

    def find(self, node: Tensor) -> Tensor:
        """Where each of some nodes stands in :attr:`ascending`, or -1."""
        if self._first is None:
            return ops.find_sorted(self.ascending, node)
        place = node - self._first
        return place.masked_fill_((place < 0) | (place >= self.ascending.numel()), -1)

    def local_id(self, node: Tensor) -> Tensor:
        """The rows of some of them, int32, given by their global ids."""
        if self.row_of is not None:
            return self.row_of.index_select(0, node)
        if self._first is None:
            place = torch.searchsorted(self.ascending, node, out_int32=True)
        else:
            place = node - self._first if self._first else node
        return self.row.index_select(0, place)


@dataclass(frozen=True)
class LocalEdges:
    """The edges between a rank's own nodes, those of one target in input order.

    ``edge_id`` are global ids, int64; ends are numbers of the rank's sources or targets by ascending id, int32.
    """

    edge_id: Tensor
    source: Tensor
    target: Tensor


CoveredEdges = tuple[OneWay, Cover]  # in one direction, with the cover of "hybrid"


def share_of(
    rank: int,
    num_ranks: int,
    num_nodes: int,
    num_edges: int,
    ascending: Tensor,
    on_boundary: Tensor,
    inside: Callable[[], LocalEdges],
    arriving: Callable[[], CoveredEdges],
    leaving: Callable[[], CoveredEdges],
    exchange: ExchangeKind,
    node_id: Tensor | None = None,
    sources: LocalRows | None = None,
    ways: Mapping[ExchangeKind, Routes] | None = None,
) -> HaloShare:
    """The share of ``rank`` from the edges that touch its nodes alone. Not collective, O(k log k) time in these.

    ``ascending`` are global ids of the rank's targets, some ``on_boundary``: with a source elsewhere; ``sources`` are
    other nodes than these, or ``None``. ``inside``, ``arriving`` and ``leaving`` give the edges within the rank, those
    that end there, with their ids, and those that begin there. They are called in turn, and nothing is kept: of a graph
    on disk a third is in memory at a time. ``ways``: of what crosses between the rank's machine and others, in two
    levels.
    """
    num_local = ascending.numel()
    if node_id is None:
        order = torch.cat([host.flatnonzero(~on_boundary), host.flatnonzero(on_boundary)])
        node_id = ascending[order]
    else:
        order = torch.searchsorted(ascending, node_id)
    row = host.empty(num_local, dtype=torch.int32).scatter_(0, order, host.arange(num_local, dtype=torch.int32))
    targets = LocalRows(ascending, row)
    sources = targets if sources is None else sources
    boundary = on_boundary[order].nonzero()
    num_inner = int(boundary[0]) if boundary.numel() else num_local
    del order, boundary

    kinds = kinds_of(exchange)

    def slots(edges: OneWay, hybrid: Cover, kind: ExchangeKind) -> Slots:
        cover = _cover(edges, hybrid, kind)
        return Slots.of(edges, cover) if ways is None else ways[kind].slots(edges, cover)

    local, local_edge = _laid_out(inside, sources.row, targets.row)
    release_after(local.num_entries)
    edges, hybrid = arriving()
    assert edges.edge is not None
    places = Places.of(edges, targets.local_id, num_local, num_inner, local.num_entries)
    edge_id = host.empty(local.num_entries + edges.edge.numel(), dtype=torch.int64)
    edge_id[: local.num_entries] = local_edge
    places.stored(edges.edge, out=edge_id[local.num_entries :])
    del local_edge
    edges = replace(edges, edge=None)
    release_after(edge_id.numel())
    buffers = {kind: slots(edges, hybrid, kind) for kind in kinds}
    received = {kind: receive_lists(edges, buffer, places) for kind, buffer in buffers.items()}
    halo = halo_of(edges, buffers["post"])
    del edges, hybrid, places, buffers
    release_after(edge_id.numel())
    edges, hybrid = leaving()
    num_sources = sources.row.numel()
    sent = {kind: send_lists(edges, slots(edges, hybrid, kind), sources.local_id, num_sources) for kind in kinds}
    relay = {kind: None if ways is None else ways[kind].relay_lists(rank) for kind in kinds}
    lists = {kind: transfer(received[kind], sent[kind], relay[kind]) for kind in kinds}
    return HaloShare(
        rank=rank,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        num_edges=num_edges,
        node_id=node_id,
        num_inner=num_inner,
        edge_id=edge_id,
        local=local,
        rows=lists["post"],
        sum_transfer=lists[exchange],
        halo=halo,
        exchange=exchange,
        rows_sent={
            kind: int(cover.left.sum() + cover.right.sum())
            for kind, cover in ((kind, _cover(edges, hybrid, kind)) for kind in EXCHANGES)
        },
        ranks_per_machine=None if ways is None else ways[exchange].ranks_per_machine,
    )


def halo_of(arriving: OneWay, slots: Slots) -> Halo:
    """The node of each halo slot, and its owner; ``slots`` are those of rows alone."""
    owner = torch.repeat_interleave(host.tensor(arriving.rows.counts))
    none = host.empty(0, dtype=torch.int64)
    halo_id, halo_owner = (slots.mixed(values[slots.rows], none) for values in (arriving.rows.node, owner))
    return halo_id, halo_owner.to(torch.int32)


def _cover(edges: OneWay, hybrid: Cover, exchange: ExchangeKind) -> Cover:
    return hybrid if exchange == "hybrid" else edges.uniform_cover(exchange)


def _laid_out(inside: Callable[[], LocalEdges], of_sources: Tensor, of_targets: Tensor) -> tuple[CSR, Tensor]:
    """The pattern of local edges by the rows of both ends, and their global ids in the order of its entries."""
    edges = inside()
    edge_id, target, source = edges.edge_id, of_targets.index_select(0, edges.target), edges.source
    del edges  # each of them takes as much as the pattern
    source = of_sources.index_select(0, source)
    csr = CSR.from_edges(target, source, None, of_targets.numel(), of_sources.numel())
    del source, target
    release_after(csr.num_entries)
    return replace(csr, place=None), edge_id if csr.place is None else edge_id.index_select(0, csr.place)


def _picked(csr: CSR, picked: Tensor, num_edges: int) -> CSR:
    """The entries of some edges, whose values are in the order of ``picked``."""
    entry = host.full((num_edges,), -1).scatter_(0, csr.edge.long(), host.arange(csr.num_entries))[picked]
    place = host.flatnonzero(entry >= 0)
    entry = entry[place]
    return CSR.from_edges(csr.row()[entry], csr.col[entry], place, csr.num_rows, csr.num_cols)
