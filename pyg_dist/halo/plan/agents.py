"""Agents: for each row or sum that crosses machines, the one rank of the shared end that the link's message is of.

Among the ranks that need the row, or have an addend (its *options*), such that the ranks of a machine have equal loads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.halo.plan.cover import Array

_ROUNDS = 16
"""Of balancing: loads of agents that can be equal then differ by a percent or two."""

_MASK_BITS = 40
"""Of 63, which leave room for the pairs of 2,800 machines."""


class Options(NamedTuple):
    """The ranks at the shared end of each item that need the row, or have an addend."""

    is_there: Tensor  # by their numbers on their machine, bool ``[k, ranks per machine]``
    first: Tensor  # rank of the machine, int64 ``[k]``

    @staticmethod
    def of(item: Tensor, rank: Tensor, machine: Tensor, ranks_per_machine: int) -> Options:
        """The options of items, from pairs of an item and a rank; all ranks of an item are on its ``machine``."""
        is_there = host.zeros(machine.numel(), ranks_per_machine, dtype=torch.bool)
        is_there.view(-1)[item * ranks_per_machine + rank % ranks_per_machine] = True
        return Options(is_there, machine * ranks_per_machine)

    def others(self, agent: Tensor) -> tuple[Tensor, Tensor]:
        """Items and ranks, by item and ascending, without the items' agents: int64 ``[o]`` each."""
        item, number = self.is_there.nonzero().unbind(1)
        rank = self.first.index_select(0, item) + number
        is_other = host.flatnonzero(rank != agent.index_select(0, item))
        return item.index_select(0, is_other), rank.index_select(0, is_other)


def choose_agents(pair: Tensor, options: Options, other_pair: Tensor, other_rank: Tensor) -> Tensor:
    """Choose one of its options for each item, such that the ranks of a machine have equal loads: int64 ``[k]``.

    ``pair`` is each item's pair of machines, ``[k]``. The choice for a pair depends on that pair alone: both machines
    find the same. ``other_pair`` and ``other_rank``: pairs and ranks of loads that are fixed.
    """
    if pair.numel() == 0:
        return pair
    is_there, on_each = options.is_there.numpy(), options.is_there.shape[1]
    agent, count = is_there.argmax(1), is_there.sum(1)
    one, several = np.flatnonzero(count == 1), np.flatnonzero(count > 1)
    if several.size:
        pairs = np.concatenate([other_pair.numpy(), pair.numpy()[one]])
        numbers = np.concatenate([other_rank.numpy() % on_each, agent[one]])
        agent[several] = _balanced(pair.numpy()[several], is_there[several], pairs, numbers)
    return options.first + torch.from_numpy(agent)


def _balanced(pair: Array, is_there: Array, other_pair: Array, other_number: Array) -> Array:
    """The choice of :func:`choose_agents` for items with several options, beside fixed loads: numbers on machines.

    Items of one pair of machines with the same options are a group. A group's items are shared out by weights of the
    ranks, and a rank's weight falls with its load (iterative proportional fitting). Sums have one order, and products
    and quotients round alike everywhere, so all ranks find the same.
    """
    on_each = is_there.shape[1]
    order, count = _groups(pair, is_there)
    before = np.concatenate([[0], np.cumsum(count)])
    first = order[before[:-1]]
    of_group, number = is_there[first].nonzero()  # the options of each group: those of its first item
    begin = np.searchsorted(of_group, np.arange(len(first) + 1))
    pairs, of_pair = np.unique(pair[first], return_inverse=True)
    cell = of_pair[of_group] * on_each + number
    known = np.minimum(np.searchsorted(pairs, other_pair), len(pairs) - 1)
    is_known = pairs[known] == other_pair
    base = np.bincount((known * on_each + other_number)[is_known], minlength=len(pairs) * on_each).astype(float)
    weight = np.ones(len(base))
    for _ in range(_ROUNDS):
        drawn = weight[cell]
        share = drawn * (count / np.bincount(of_group, drawn))[of_group]
        weight /= np.maximum(base + np.bincount(cell, share, len(base)), 1e-9)
    # The items of a group, in order, to its options in order: up to the rounded sum of the shares so far.
    last, so_far = np.empty(len(cell), np.int64), np.zeros(len(first))
    for turn in range(int(np.diff(begin).max())):
        there = np.flatnonzero(np.diff(begin) > turn)
        so_far[there] += share[begin[there] + turn]
        last[begin[there] + turn] = np.rint(so_far[there])
    last[begin[1:] - 1] = count
    agent = np.empty(len(pair), np.int64)
    agent[order] = np.repeat(number, np.diff(last + before[of_group], prepend=0))
    return agent


def _groups(pair: Array, is_there: Array) -> tuple[Array, Array]:
    """Items by pair of machines and options, in their order within each such group; and the sizes of the groups."""
    num_bits = is_there.shape[1]
    if num_bits > _MASK_BITS:  # each item for itself
        return np.arange(len(pair)), np.ones(len(pair), np.int64)
    key = (pair << num_bits) + is_there @ (np.int64(1) << np.arange(num_bits))
    group, order = torch.from_numpy(key).sort(stable=True)
    return order.numpy(), torch.unique_consecutive(group, return_counts=True)[1].numpy()
