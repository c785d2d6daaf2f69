"""The hierarchical exchange: what goes from one machine to another crosses once, and ranks of a machine share it.

Edges between two machines are covered like those between two ranks (:mod:`pyg_dist.halo.plan.cover`), with machines in
the place of ranks: an *item* is a row, which all ranks of the receiving machine share, or a sum, to which all ranks of
the sending machine add. For each item one rank at the shared end is its *agent*::

    row   owner of the source --link--> agent --spread--> the other ranks that need it
    sum   the other ranks with addends --gather--> agent --link--> owner of the target

An agent is among those that need the row, or have an addend: no message crosses that one level would not send.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.halo.plan.cover import Array, BothEnds, Cover, Ends, ExchangeKind, OneWay, RemoteEdges, both_ends
from pyg_dist.halo.plan.transfer import Counts, RelayLists, Slots

_ROUNDS = 16
"""Of balancing: loads of agents that can be equal then differ by a percent or two."""

_MASK_BITS = 40
"""Of 63, which leave room for the pairs of 2,800 machines."""


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
    multiplied: Tensor  # edges from other machines that each rank multiplies, int64 ``[P]``

    @staticmethod
    def of(
        edges: RemoteEdges,
        exchange: ExchangeKind,
        row_owner: Tensor,
        sum_owner: Tensor,
        ranks_per_machine: int,
        num_ranks: int,
    ) -> Routes:
        """The ways of what ``exchange`` sends. Both machines of a pair find the same. Not collective, O(m log m) time.

        ``edges`` are between machines, in the place of ranks; ``row_owner`` and ``sum_owner`` the ranks of the nodes,
        int64.
        """
        cover, num_machines = edges.cover(exchange), edges.load.numel()
        is_post = cover.left[edges.row]
        (rows, row_item), (sums, sum_item) = (_numbered(chosen) for chosen in cover)
        owner_of_row, owner_of_sum = row_owner[rows], sum_owner[sums]
        pair_of_row, pair_of_sum = (
            kind.sender.long()[some] * num_machines + kind.receiver.long()[some]
            for kind, some in ((edges.rows, rows), (edges.sums, sums))
        )
        needs = _options(
            row_item[edges.row[is_post]], sum_owner[edges.sum[is_post]], pair_of_row % num_machines, ranks_per_machine
        )
        adds = _options(
            sum_item[edges.sum[~is_post]], row_owner[edges.row[~is_post]], pair_of_sum // num_machines,
            ranks_per_machine,
        )  # fmt: skip
        of_row = _agents(pair_of_row, needs, pair_of_sum * num_ranks + owner_of_sum, ranks_per_machine, num_ranks)
        of_sum = _agents(pair_of_sum, adds, pair_of_row * num_ranks + owner_of_row, ranks_per_machine, num_ranks)

        need, add = (item_rank[1] != agent[item_rank[0]] for item_rank, agent in ((needs, of_row), (adds, of_sum)))
        item, needer = (column[need] for column in needs)
        total, adder = (column[add] for column in adds)
        node = torch.cat([edges.rows.node[rows], edges.sums.node[sums]])
        every = torch.arange(node.numel())
        return Routes(
            num_ranks, ranks_per_machine, node, torch.cat([owner_of_row, owner_of_sum]), every >= rows.numel(),
            Hops(torch.cat([owner_of_row, of_sum]), torch.cat([of_row, owner_of_sum]), every),
            Hops(adder, of_sum[total], total + rows.numel()),
            Hops(of_row[item], needer, item),
            torch.bincount(torch.where(is_post, sum_owner[edges.sum], row_owner[edges.row]), minlength=num_ranks),
        )  # fmt: skip

    def leaving(self, hops: Hops, rank: int) -> Hops:
        """Those that leave a rank, in the order of its buffer: by receiver, kind and node."""
        return self._sorted(hops, hops.sender == rank)

    def arriving(self, hops: Hops, rank: int) -> Hops:
        """Those that arrive at a rank, in the order of its buffer: by sender, kind and node."""
        return self._sorted(hops, hops.receiver == rank)

    def _sorted(self, hops: Hops, chosen: Tensor) -> Hops:
        sender, receiver, item = (column[chosen] for column in hops)
        keys = _keys(self.is_sum[item].long(), self.node[item]), sender * self.num_ranks + receiver
        order = torch.from_numpy(np.lexsort(tuple(key.numpy() for key in keys)))
        return Hops(sender[order], receiver[order], item[order])

    def slots(self, edges: OneWay, cover: Cover) -> Slots:
        """Where one rank's rows and sums are in its buffer; ``cover`` is that of one level, by pairs of ranks.

        Pieces: what goes between ranks of a machine, as in one level; what goes by the link; addends to agents, or rows
        from them. Each is by peer; for each peer rows come before sums, by node.
        """
        rank, on_each = edges.rank, self.ranks_per_machine
        row_peer, sum_peer = _peers(edges.rows), _peers(edges.sums)
        row_inside, sum_inside = (peer // on_each == rank // on_each for peer in (row_peer, sum_peer))
        direct = Slots.of(edges, Cover(cover.left & row_inside, cover.right & sum_inside))
        of_rank = self.leaving if edges.leaves else self.arriving
        link, other = of_rank(self.link, rank), of_rank(self.gather if edges.leaves else self.spread, rank)
        item = torch.cat([link.item, other.item])
        peer = torch.cat([link.receiver if edges.leaves else link.sender, self.owner[other.item]])
        slot = sum(direct.counts) + torch.arange(item.numel())
        is_sum, node = self.is_sum[item], self.node[item]
        rows, sums = (
            torch.searchsorted(_keys(of, kind.node), _keys(peer[some], node[some]))
            for of, kind, some in ((row_peer, edges.rows, ~is_sum), (sum_peer, edges.sums, is_sum))
        )
        # A row goes once to all ranks of a machine, and carries the edges to all of them.
        carried = _keys(peer[~is_sum] // on_each, node[~is_sum])
        left = direct.left | ~row_inside & torch.isin(_keys(row_peer // on_each, edges.rows.node), carried)
        return Slots(
            left,
            torch.cat([direct.rows, rows]),
            torch.cat([direct.sums, sums]),
            torch.cat([direct.row_slot, slot[~is_sum]]),
            torch.cat([direct.sum_slot, slot[is_sum]]),
            direct.counts,
        )

    def relay_lists(self, rank: int) -> RelayLists:
        """What one rank passes on."""

        def counts(hops: Hops) -> tuple[Counts, Counts]:
            ends = (hops.receiver[hops.sender == rank], hops.sender[hops.receiver == rank])
            sent, received = (tuple(torch.bincount(end, minlength=self.num_ranks).tolist()) for end in ends)
            return sent, received

        def number(crossing: Hops, passed: Hops) -> Tensor:
            of_item = torch.full((self.node.numel(),), -1)
            of_item[crossing.item] = torch.arange(crossing.item.numel())
            return of_item[passed.item]

        return RelayLists(
            counts(self.gather), counts(self.link), counts(self.spread),
            number(self.leaving(self.link, rank), self.arriving(self.gather, rank)),
            number(self.arriving(self.link, rank), self.leaving(self.spread, rank)),
        )  # fmt: skip


def routes(
    edge_index: Tensor,
    parts: BothEnds,
    num_ranks: int,
    ranks_per_machine: int,
    exchange: ExchangeKind,
    machine: int | None = None,
) -> Routes:
    """The ways between all machines, or between one and the others. Not collective, O(E log E) time.

    Shapes: edge_index int64 ``[2, E]``; parts ``[N]`` integers, the rank of each node, or those of the sources and
    those of the targets.
    """
    of_sources, of_targets = both_ends(parts)
    machines = of_sources // ranks_per_machine, of_targets // ranks_per_machine
    edges = RemoteEdges.of(edge_index, machines, num_machines(num_ranks, ranks_per_machine), machine)
    row_owner, sum_owner = of_sources[edges.rows.node].long(), of_targets[edges.sums.node].long()
    return Routes.of(edges, exchange, row_owner, sum_owner, ranks_per_machine, num_ranks)


def num_machines(num_ranks: int, ranks_per_machine: int) -> int:
    """Of consecutive ranks, ``ranks_per_machine`` on each and the rest on the last."""
    return -(-num_ranks // ranks_per_machine)


def rows_across(
    edge_index: Tensor,
    parts: Tensor,
    num_ranks: int,
    ranks_per_machine: int,
    exchange: ExchangeKind = "hybrid",
    two_levels: bool = True,
) -> int:
    """Rows that cross machines in one aggregation: of covers by pairs of machines, or by pairs of ranks.

    Not collective, O(E log E) time; shapes as :func:`routes`.
    """
    machine = parts // ranks_per_machine
    crossing = edge_index[:, machine[edge_index[0]] != machine[edge_index[1]]]
    owner, count = (machine, num_machines(num_ranks, ranks_per_machine)) if two_levels else (parts, num_ranks)
    cover = RemoteEdges.of(crossing, owner, count).cover(exchange)
    return int(cover.left.sum() + cover.right.sum())


def _peers(ends: Ends) -> Tensor:
    """The other rank of each, int64."""
    return torch.repeat_interleave(torch.arange(len(ends.counts)), torch.tensor(ends.counts))


def _keys(rank: Tensor, node: Tensor) -> Tensor:
    """One number for both, in their order."""
    return (rank << 40) + node


def _numbered(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Which are chosen, and the number of each among these, int64."""
    return chosen.nonzero().view(-1), chosen.cumsum(0) - 1


def _options(item: Tensor, rank: Tensor, machine: Tensor, ranks_per_machine: int) -> tuple[Tensor, Tensor]:
    """The distinct (item, rank), ascending: int64 ``[o]`` each. All ranks of an item are on its ``machine``."""
    is_there = torch.zeros(machine.numel(), ranks_per_machine, dtype=torch.bool)
    is_there.view(-1)[item * ranks_per_machine + rank % ranks_per_machine] = True
    item, local_rank = is_there.nonzero().unbind(1)
    return item, machine[item] * ranks_per_machine + local_rank


def _agents(
    pair: Tensor, options: tuple[Tensor, Tensor], fixed: Tensor, ranks_per_machine: int, num_ranks: int
) -> Tensor:
    """One of its options for each item, such that the ranks of a machine have equal loads: int64 ``[k]``.

    Items of one pair of machines with the same options are a group. A group's items are shared out by weights of the
    ranks, which are lowered and raised by their loads (iterative proportional fitting). Both machines find the same: a
    pair's numbers depend on the pair alone, and are made by sums in one order, products and quotients, which round
    alike everywhere.

    ``pair`` is that of machines, of each item, int64 ``[k]``; ``options`` are (item, rank), by item and ascending, some
    for every item; ``fixed`` is pair times P plus rank of what a rank has in any case.
    """
    if pair.numel() == 0:
        return pair
    of_item, of_rank = (column.numpy() for column in options)
    start = np.concatenate([[0], np.bincount(of_item, minlength=pair.numel()).cumsum()])
    order, count = _groups(pair, start[:-1], of_rank % ranks_per_machine, ranks_per_machine)
    before = np.concatenate([[0], np.cumsum(count)])
    first = order[before[:-1]]
    size = np.diff(start)[first]
    begin = np.concatenate([[0], np.cumsum(size)])
    # The options of each group: those of its first item.
    of_group = np.repeat(np.arange(len(first)), size)
    rank = of_rank[start[first][of_group] + np.arange(begin[-1]) - begin[of_group]]
    cells, cell = np.unique(pair.numpy()[first][of_group] * num_ranks + rank, return_inverse=True)
    known, times = np.unique(fixed.numpy(), return_counts=True)
    base, at = np.zeros(len(cells)), np.searchsorted(cells, known)
    is_there = np.append(cells, -1)[at] == known
    base[at[is_there]] = times[is_there]
    pairs, of_cell = np.unique(cells // num_ranks, return_inverse=True)
    load, weight = base, np.ones(len(cells))
    for _ in range(_ROUNDS):
        share = count[of_group] * weight[cell] / np.bincount(of_group, weight[cell])[of_group]
        load = base + np.bincount(cell, share, len(cells))
        mean = np.bincount(of_cell, load, len(pairs)) / np.bincount(of_cell, minlength=len(pairs))
        weight = weight * (mean[of_cell] / np.maximum(load, 1e-9))
    # The items of a group, in order, to its options in order: up to the rounded sum of the shares so far.
    last, so_far = np.empty(begin[-1], np.int64), np.zeros(len(first))
    for turn in range(int(size.max())):
        there = np.flatnonzero(size > turn)
        so_far[there] += share[begin[there] + turn]
        last[begin[there] + turn] = np.rint(so_far[there])
    last[begin[1:] - 1] = count
    chosen = np.searchsorted(last + before[of_group], np.arange(pair.numel()), side="right")
    agent = np.empty(pair.numel(), np.int64)
    agent[order] = rank[chosen]
    return torch.from_numpy(agent)


def _groups(pair: Tensor, start: Array, local_rank: Array, ranks_per_machine: int) -> tuple[Array, Array]:
    """Items group by group, by pair of machines and options, in their order within each; and the sizes of the groups.

    The options of an item begin at its ``start``: ranks, numbered within their machine.
    """
    if ranks_per_machine > _MASK_BITS:  # each item for itself
        return np.arange(pair.numel()), np.ones(pair.numel(), np.int64)
    mask = torch.from_numpy(np.bitwise_or.reduceat(np.int64(1) << local_rank, start))
    group, order = ((pair << ranks_per_machine) + mask).sort(stable=True)
    return order.numpy(), torch.unique_consecutive(group, return_counts=True)[1].numpy()
