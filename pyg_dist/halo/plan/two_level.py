"""The hierarchical exchange: what goes from one machine to another crosses once, and ranks of a machine share it.

Edges between two machines are covered like those between two ranks (:mod:`pyg_dist.halo.plan.cover`), with machines in
the place of ranks: an *item* is a row, which all ranks of the receiving machine share, or a sum, to which all ranks of
the sending machine add. For each item one rank at the shared end is its *agent*::

    row   owner of the source --link--> agent --spread--> the other ranks that need it
    sum   the other ranks with addends --gather--> agent --link--> owner of the target

An agent is among those that need the row, or have an addend: no message crosses that one level would not send.

The ways from one machine to another depend on the edges from the one to the other alone. A rank that plans by itself
finds all that begin or end on its machine. Ranks that plan together share this work: each finds those from its machine
to some of the others (:meth:`Task.shared`), and sends every rank the hops that begin or end there (:func:`exchanged`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.halo.plan.agents import Options, choose_agents
from pyg_dist.halo.plan.cover import Candidates, Cover, ExchangeKind, OneWay, RemoteEdges
from pyg_dist.halo.plan.transfer import Counts, RelayLists, Slots

Send = Callable[[Tensor, Sequence[int]], Tensor]
"""Sends each rank its rows of numbers, int64 ``[k, columns]``, so many each, and returns those that arrive."""


class Task(NamedTuple):
    """From which machines to which a rank finds the ways, bool ``[machines]`` each: between all pairs of one way."""

    ranks_per_machine: int  # consecutive ranks share a machine
    machine: int  # the rank's
    targets: Tensor  # to which it finds those from its machine
    sources: Tensor  # from which it finds those to its machine

    @staticmethod
    def alone(rank: int, num_ranks: int, ranks_per_machine: int) -> Task:
        """All that begin or end on the rank's machine."""
        others = host.ones(num_machines(num_ranks, ranks_per_machine), dtype=torch.bool)
        others[rank // ranks_per_machine] = False
        return Task(ranks_per_machine, rank // ranks_per_machine, others, others)

    @staticmethod
    def shared(rank: int, num_ranks: int, ranks_per_machine: int) -> Task:
        """A part of what begins on the rank's machine: the ranks there take the other machines in turn."""
        machine, number = divmod(rank, ranks_per_machine)
        machines = host.arange(num_machines(num_ranks, ranks_per_machine))
        on_machine = min(ranks_per_machine, num_ranks - machine * ranks_per_machine)
        turn = (machines - machine - 1) % len(machines)
        targets = (turn % on_machine == number) & (machines != machine)
        return Task(ranks_per_machine, machine, targets, torch.zeros_like(targets))


_LEVELS = 3  # of hops: by link, to agents, from agents


class Hops(NamedTuple):
    """Items on their way from rank to rank, in any order: int64 ``[k]`` each."""

    sender: Tensor
    receiver: Tensor
    item: Tensor

    def rows(self, num_ranks: int) -> Tensor:
        """How many go from each rank to each, int64 ``[P, P]``."""
        pairs = self.sender * num_ranks + self.receiver
        return torch.bincount(pairs, minlength=num_ranks**2).view(num_ranks, num_ranks)


@dataclass(frozen=True)
class Routes:
    """The ways of all items between some machines, or between one and the others."""

    num_ranks: int  # P
    ranks_per_machine: int  # consecutive ranks share a machine
    node: Tensor  # of each item: a row's source, a sum's target; int64 ``[k]``
    owner: Tensor  # the rank of that node, int64 ``[k]``
    is_sum: Tensor  # bool ``[k]``
    link: Hops  # each item once, between machines
    gather: Hops  # addends of sums, to the agents
    spread: Hops  # rows, from the agents

    @property
    def hops(self) -> tuple[Hops, Hops, Hops]:
        """By link, to agents, from agents."""
        return self.link, self.gather, self.spread

    @property
    def kinds(self) -> tuple[Hops, Hops, Hops, Hops]:
        """By what goes in one message: rows and sums by link, addends to agents, rows from agents."""
        is_sum = self.is_sum[self.link.item]
        rows, sums = (Hops(*(column[chosen] for column in self.link)) for chosen in (~is_sum, is_sum))
        return rows, sums, self.gather, self.spread

    def leaving(self, hops: Hops, rank: int) -> Hops:
        """The hops that leave a rank, in the order of its buffer: rows before sums, by receiver and node."""
        return self._sorted(hops, hops.sender == rank, self.is_sum)

    def arriving(self, hops: Hops, rank: int) -> Hops:
        """The hops that arrive at a rank, in the order of its buffer: sums before rows, by sender and node."""
        return self._sorted(hops, hops.receiver == rank, ~self.is_sum)

    def _sorted(self, hops: Hops, chosen: Tensor, is_later: Tensor) -> Hops:
        sender, receiver, item = (column[chosen] for column in hops)
        keys = self.node[item], sender * self.num_ranks + receiver, is_later[item]
        order = torch.from_numpy(np.lexsort(tuple(key.numpy() for key in keys)))
        return Hops(sender[order], receiver[order], item[order])

    def slots(self, edges: OneWay, cover: Cover) -> Slots:
        """Where one rank's rows and sums are in its buffer; ``cover`` is that of one level, by pairs of ranks.

        Pieces: what goes between ranks of a machine, as in one level; rows and sums that leave by the link, or sums and
        rows that arrive so; addends to agents, or rows from them. Each is by peer and node.
        """
        rank, on_each = edges.rank, self.ranks_per_machine
        row_peer, sum_peer = edges.rows.peers(), edges.sums.peers()
        row_inside, sum_inside = (peer // on_each == rank // on_each for peer in (row_peer, sum_peer))
        direct = Slots.of(edges, Cover(cover.left & row_inside, cover.right & sum_inside))
        of_rank = self.leaving if edges.leaves else self.arriving
        link, other = of_rank(self.link, rank), of_rank(self.gather if edges.leaves else self.spread, rank)
        item = torch.cat([link.item, other.item])
        peer = torch.cat([link.receiver if edges.leaves else link.sender, self.owner[other.item]])
        slot = sum(direct.counts) + host.arange(item.numel())
        is_sum, node = self.is_sum[item], self.node[item]
        rows, sums = (
            torch.searchsorted(_keys(of, kind.node), _keys(peer[some], node[some]))
            for of, kind, some in ((row_peer, edges.rows, ~is_sum), (sum_peer, edges.sums, is_sum))
        )
        # A row goes once to all ranks of a machine, and carries the edges to all of them.
        carried = _keys(peer[~is_sum] // on_each, node[~is_sum])
        is_carried = ops.find_sorted(carried.sort().values, _keys(row_peer // on_each, edges.rows.node)) >= 0
        left = direct.left | ~row_inside & is_carried
        return Slots(
            left,
            torch.cat([direct.rows, rows]),
            torch.cat([direct.sums, sums]),
            torch.cat([direct.row_slot, slot[~is_sum]]),
            torch.cat([direct.sum_slot, slot[is_sum]]),
            direct.counts,
        )

    def relay_lists(self, rank: int) -> RelayLists:
        """The rows and sums that one rank passes on."""

        def counts(hops: Hops) -> tuple[Counts, Counts]:
            ends = (hops.receiver[hops.sender == rank], hops.sender[hops.receiver == rank])
            sent, received = (tuple(torch.bincount(end, minlength=self.num_ranks).tolist()) for end in ends)
            return sent, received

        def number(crossing: Hops, passed: Hops) -> Tensor:
            of_item = host.full((self.node.numel(),), -1)
            of_item[crossing.item] = host.arange(crossing.item.numel())
            return of_item[passed.item]

        rows, sums, gather, spread = self.kinds
        return RelayLists(
            counts(rows), counts(sums), counts(gather), counts(spread),
            number(self.leaving(sums, rank), self.arriving(gather, rank)),
            number(self.arriving(rows, rank), self.leaving(spread, rank)),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class MachineEdges:
    """Edges between machines, which take the place of ranks, and the ranks of their ends."""

    edges: RemoteEdges  # in any order
    row_owner: Tensor  # the ranks of the rows' nodes, int64
    sum_owner: Tensor  # of the sums' nodes
    ranks_per_machine: int  # consecutive ranks share a machine
    num_ranks: int  # P

    @staticmethod
    def of(remote: RemoteEdges, ranks_per_machine: int) -> MachineEdges:
        """The edges between all machines, from those between all ranks. Not collective, O(m) time."""
        on_each, load = ranks_per_machine, _by_machine(remote.load, ranks_per_machine)
        rows, row_number, row_owner = _between_machines(remote.rows, remote.rows.sender, on_each, load.numel())
        sums, sum_number, sum_owner = _between_machines(remote.sums, remote.sums.receiver, on_each, load.numel())
        row = row_number.index_select(0, remote.row)
        crossing = host.flatnonzero(row >= 0)
        edges = RemoteEdges(
            load.numel(), remote.edge.index_select(0, crossing), row.index_select(0, crossing),
            sum_number.index_select(0, remote.sum.index_select(0, crossing)), rows, sums, load,
        )  # fmt: skip
        return MachineEdges(edges, row_owner, sum_owner, on_each, remote.num_ranks)

    @staticmethod
    def of_list(
        source: Tensor, target: Tensor, sender: Tensor, receiver: Tensor, num_nodes: int, load: Tensor,
        ranks_per_machine: int, rank: int,
    ) -> MachineEdges:  # fmt: skip
        """The edges between the machine of ``rank`` and others, from a list in input order, with their ends' ranks.

        Not collective, O(m log m) time. The result has the order of :class:`~pyg_dist.halo.plan.cover.RemoteEdges`.
        """
        of_sender, of_receiver = sender // ranks_per_machine, receiver // ranks_per_machine
        machine, by_machine = rank // ranks_per_machine, _by_machine(load, ranks_per_machine)
        edge = host.arange(source.numel())
        ends = source, target, of_sender, of_receiver
        ways = OneWay.both(edge, *ends, num_nodes, by_machine.numel(), machine)
        edges = RemoteEdges.of_ways(*ways, by_machine)
        row_owner, sum_owner = (host.empty(len(kind), dtype=torch.int64) for kind in (edges.rows, edges.sums))
        listed = torch.cat([way.edge for way in ways if way.edge is not None])
        row_owner[edges.row.long()] = sender[listed].long()
        sum_owner[edges.sum.long()] = receiver[listed].long()
        return MachineEdges(edges, row_owner, sum_owner, ranks_per_machine, load.numel())

    @cached_property
    def hybrid(self) -> Cover:
        """The fewest rows and sums."""
        return self.edges.cover("hybrid")

    def routes(self, exchange: ExchangeKind) -> Routes:
        """The ways of what ``exchange`` sends, the same on both machines of a pair. Not collective, O(m log m) time."""
        edges, on_each, num_ranks = self.edges, self.ranks_per_machine, self.num_ranks
        cover = self.hybrid if exchange == "hybrid" else edges.cover(exchange)
        is_post = cover.left.index_select(0, edges.row)
        (rows, row_item), (sums, sum_item) = ((host.flatnonzero(some), some.cumsum(0) - 1) for some in cover)
        owner_of_row, owner_of_sum = self.row_owner[rows], self.sum_owner[sums]
        (row_from, row_to), (sum_from, sum_to) = (
            (kind.sender[some].long(), kind.receiver[some].long())
            for kind, some in ((edges.rows, rows), (edges.sums, sums))
        )
        row, receiver = _picked(is_post, edges.row, row_item, edges.sum, self.sum_owner)
        total, sender = _picked(~is_post, edges.sum, sum_item, edges.row, self.row_owner)
        needs, adds = Options.of(row, receiver, row_to, on_each), Options.of(total, sender, sum_from, on_each)
        of_rows, of_sums = (f * edges.num_ranks + t for f, t in ((row_from, row_to), (sum_from, sum_to)))
        of_row = choose_agents(of_rows, needs, of_sums, owner_of_sum)
        of_sum = choose_agents(of_sums, adds, of_rows, owner_of_row)

        (row, needer), (total, adder) = needs.others(of_row), adds.others(of_sum)
        node = torch.cat([edges.rows.node[rows], edges.sums.node[sums]])
        every = host.arange(node.numel())
        return Routes(
            num_ranks, on_each, node, torch.cat([owner_of_row, owner_of_sum]), every >= rows.numel(),
            Hops(torch.cat([owner_of_row, of_sum]), torch.cat([of_row, owner_of_sum]), every),
            Hops(adder, of_sum[total], total + rows.numel()),
            Hops(of_row[row], needer, row),
        )  # fmt: skip

    def multiplied(self, exchange: ExchangeKind) -> Tensor:
        """How many edges each rank multiplies, int64 ``[P]``: of a row its target's owner, of a sum its source's."""
        edges, num_ranks = self.edges, self.num_ranks
        is_post = (self.hybrid if exchange == "hybrid" else edges.cover(exchange)).left.index_select(0, edges.row)
        owner = torch.where(is_post, self.sum_owner[edges.sum], self.row_owner[edges.row])
        return torch.bincount(owner, minlength=num_ranks)


def exchanged(
    ways: Mapping[ExchangeKind, Routes], num_ranks: int, ranks_per_machine: int, send: Send
) -> dict[ExchangeKind, Routes]:
    """The routes that begin or end on this rank, of those that all ranks have found, a part each (collective).

    Shapes of what is sent: a row ``(node, its owner, sender, receiver, which)`` for each hop, to both of its ends.
    """
    kinds, found = list(ways), []
    for number, routes in enumerate(ways.values()):
        for level, (sender, receiver, item) in enumerate(routes.hops):
            which = routes.is_sum[item] + 2 * (level + _LEVELS * number)
            found.append(torch.stack([routes.node[item], routes.owner[item], sender, receiver, which], 1))
    hops = torch.cat(found)
    found.clear()
    to, order = torch.cat([hops[:, 2], hops[:, 3]]).sort(stable=True)
    counts = torch.bincount(to, minlength=num_ranks).tolist()
    del to
    hops = hops[order % len(hops)] if len(hops) else hops
    del order
    arrived = send(hops, counts)
    del hops
    node, owner, sender, receiver, which = arrived.unbind(1)
    is_sum = which % 2
    # The end that ranks share: with the node it tells the items of a kind apart.
    machine = torch.where(is_sum == 1, sender, receiver) // ranks_per_machine
    key = (node * num_machines(num_ranks, ranks_per_machine) + machine) * 2 + is_sum
    own = {}
    for number, kind in enumerate(kinds):
        of_kind = host.flatnonzero(which // (2 * _LEVELS) == number)
        first, item = ops.distinct(key[:0], key[of_kind])
        first, level_of = of_kind[first], which[of_kind] // 2 % _LEVELS
        hops_of = (
            Hops(sender[of_kind[some]], receiver[of_kind[some]], item[some])
            for some in (level_of == k for k in range(_LEVELS))
        )
        own[kind] = Routes(num_ranks, ranks_per_machine, node[first], owner[first], is_sum[first] == 1, *hops_of)
    return own


def _by_machine(load: Tensor, ranks_per_machine: int) -> Tensor:
    number = host.arange(load.numel()) // ranks_per_machine
    return load.new_zeros(num_machines(load.numel(), ranks_per_machine)).index_add_(0, number, load)


def _between_machines(
    candidates: Candidates, owner: Tensor, ranks_per_machine: int, num_machines: int
) -> tuple[Candidates, Tensor, Tensor]:
    """Candidates of pairs of machines, made of ``candidates`` of pairs of ranks.

    Returns:
        The new candidates; for each old one, the number of its new one, int32, or -1 where it stays in a machine; and
        the owners of the new ones' nodes, int64.
    """
    sender, receiver = (end // ranks_per_machine for end in (candidates.sender, candidates.receiver))
    crossing = host.flatnonzero(sender != receiver)
    pair = (sender.long() * num_machines + receiver).index_select(0, crossing)
    node = candidates.node.index_select(0, crossing)
    key = pair * (int(node.max()) + 1 if node.numel() else 1) + node
    first, of_crossing = ops.distinct(key[:0], key)
    number = host.full((len(candidates),), -1, dtype=torch.int32)
    number[crossing] = of_crossing.to(torch.int32)
    kept = crossing.index_select(0, first)
    found = Candidates(*(column.index_select(0, kept) for column in (sender, receiver, candidates.node)))
    return found, number, owner.index_select(0, kept).long()


def _picked(chosen: Tensor, item: Tensor, number: Tensor, other: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """For the chosen edges, the numbers of their items, and the owners of their other ends."""
    edges = host.flatnonzero(chosen)
    return number.index_select(0, item.index_select(0, edges)), owner.index_select(0, other.index_select(0, edges))


def num_machines(num_ranks: int, ranks_per_machine: int) -> int:
    """The number of machines: consecutive ranks share one, ``ranks_per_machine`` on each and the rest on the last."""
    return -(-num_ranks // ranks_per_machine)


def _keys(rank: Tensor, node: Tensor) -> Tensor:
    return (rank << 40) + node
