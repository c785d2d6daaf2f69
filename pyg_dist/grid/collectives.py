"""The mesh of ranks, and sums and gathers along its axes, with messages in a dtype of the caller's choice.

=========================  ==========================  ==========================
function                   forward                     backward
=========================  ==========================  ==========================
``all_gather``             all-gather                  sum, each rank its piece
``reduce_scatter``         sum, each rank its piece    all-gather
``copy_to_replicas``       identity                    sum over the ranks
``reduce_from_replicas``   sum over ranks              identity
=========================  ==========================  ==========================

The first two are the *reduce-scatter* form of the grid's sums, the other two the *all-reduce* form (Plexus, Alg. 1); an
all-reduce is a reduce-scatter and an all-gather. Each sum is made on one rank (the same bits everywhere) and in full
precision, whatever the dtype of the messages; in the order of the ranks, unless nccl makes it.

Where a group has several ranks on each of several machines
(:class:`~pyg_dist.backend.comm.transport.Levels`), a piece crosses machines once for all ranks of a machine: a gather
goes between machines, then within each; a scattered sum within, then between. Only messages between machines are
rounded to the chosen dtype.

Legend: a tensor's *pieces* are ranges of its rows (dim 0) or columns (dim 1), one for each rank of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise

import torch
from torch import Tensor

from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.autograd.replicated import CopyToRanks, SumOverRanks
from pyg_dist.backend.comm.group import Group, group_within, world_group
from pyg_dist.backend.comm.topology import machines
from pyg_dist.backend.comm.transport import Levels, Pending, Traffic, Transport
from pyg_dist.grid.plan.mesh_shape import GRID_AXES, RANK_ORDER, MeshShape, in_order, split


class Mesh:
    """The mesh of all ranks, with a group for each product of axes, and the traffic along it.

    ``rank`` is this rank's number in its data group's grid, ``coordinates`` its place by axis.
    """

    def __init__(self, shape: MeshShape) -> None:
        self.shape = shape
        self.coordinates = shape.coordinates(world_group().rank)
        self.grid_shape = MeshShape(shape.x, shape.y, shape.z)
        self.rank = self.grid_shape.rank(self.coordinates | {"data": 0})
        self.traffic: dict[tuple[str, ...], Traffic] = {}
        self._groups: dict[frozenset[str], Group] = {}
        self._levels: dict[frozenset[str], tuple[Group, Group] | None] = {}

    def __deepcopy__(self, memo: object) -> Mesh:
        return self  # it holds connections

    def group(self, *names: str) -> Group:
        """The ranks that differ from this one in the axes ``names`` only (collective over all ranks at the first use).

        One object per set of ranks, so that gradients share buckets. Its ranks are numbered in rank order.
        """
        key = frozenset(name for name in names if self.shape[name] > 1)
        if key not in self._groups:
            lists = self.rank_lists(*key)
            self._groups[key] = group_within(lists) if key else Group()
            self._levels[key] = _groups_by_machine(lists) if key else None
        return self._groups[key]

    def transport(self, *names: str, dtype: torch.dtype | None = None) -> Transport:
        """The messages along a product of axes (collective as :meth:`group`); in ``dtype`` where that is narrower.

        With levels, messages within a machine keep their dtype.
        """
        group, traffic = self.group(*names), self.traffic_of(*names)
        groups = self._levels.get(frozenset(name for name in names if self.shape[name] > 1))
        if groups is None:
            return Transport(group, traffic, dtype)
        inner, outer = groups
        return Transport(group, traffic, dtype, Levels(Transport(inner, traffic), Transport(outer, traffic, dtype)))

    def connect_data_groups(self) -> None:
        """Make the groups of all products with the axis ``data``, if it has several ranks (collective)."""
        for count in range(len(GRID_AXES) + 1 if self.shape.data > 1 else 0):
            for names in combinations(GRID_AXES, count):
                self.group(*names, "data")

    def traffic_of(self, *names: str) -> Traffic:
        """The counter of messages that this rank sends along a product of axes."""
        return self.traffic.setdefault(tuple(sorted(names)), Traffic())

    def rank_lists(self, *names: str) -> list[list[int]]:
        """The ranks of every group along a product of axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        fixed = [axis for axis in RANK_ORDER if axis not in names]
        for rank in range(self.shape.size):
            place = self.shape.coordinates(rank)
            groups.setdefault(tuple(place[axis] for axis in fixed), []).append(rank)
        return list(groups.values())


def _groups_by_machine(lists: list[list[int]]) -> tuple[Group, Group] | None:
    """Groups within and between machines, if each list has as many ranks on each of several machines; else ``None``.

    Collective.
    """
    of_rank, inner, outer = machines(), list[list[int]](), list[list[int]]()
    for ranks in lists:
        found = in_order(ranks, of_rank)
        if not found:
            return None
        inner += found
        outer += [list(numbered) for numbered in zip(*found, strict=True)]
    return group_within(inner), group_within(outer)


@dataclass(frozen=True)
class AllGather:
    """Every rank's piece, of ``sizes`` by rank along ``dim`` (0 or 1), concatenated."""

    transport: Transport
    sizes: Sequence[int]
    dim: int = 0

    @property
    def transposed(self) -> ReduceScatter:
        """A sum: each rank has used the whole for another part of the result."""
        return ReduceScatter(self.transport, self.sizes, self.dim)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Send this rank's piece (collective, no autograd)."""
        levels = self.transport.levels
        if self.transport.group.size == 1:
            return Pending(lambda: x)
        if levels is not None:
            of_inner, of_outer = _sizes_of_levels(levels, self.sizes)
            crossing = AllGather(levels.outer, of_outer, self.dim).start(x)

            def spread() -> Tensor:
                whole = AllGather(levels.inner, of_inner, self.dim).start(crossing.wait()).wait()
                return _by_machine(whole, levels, self.sizes, self.dim)

            return Pending(spread)
        dtype, flat = x.dtype, x.to(self.transport.narrow(x.dtype)).contiguous().view(-1)
        shape = x.shape
        shapes = [(n, *shape[1:]) if self.dim == 0 else (shape[0], n, *shape[2:]) for n in self.sizes]
        received = [math.prod(s) for s in shapes]
        messages = self.transport.all_gather(flat, received)

        def finish() -> Tensor:
            arrived = messages.wait().to(dtype)
            if self.dim == 0:
                return arrived.resize_(sum(self.sizes), *shape[1:])  # a view could not be changed in place
            pieces = torch.split(arrived, received)
            return torch.cat([piece.view(s) for piece, s in zip(pieces, shapes, strict=True)], self.dim)

        return Pending(finish)


@dataclass(frozen=True)
class ReduceScatter:
    """This rank's piece of the sum of every rank's whole. See :class:`AllGather`."""

    transport: Transport
    sizes: Sequence[int]
    dim: int = 0

    @property
    def transposed(self) -> AllGather:
        """A gather: the summand of every rank has the gradient of the whole."""
        return AllGather(self.transport, self.sizes, self.dim)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Send each rank its piece; ``wait`` adds up the received pieces (collective, no autograd)."""
        group, levels, dtype = self.transport.group, self.transport.levels, x.dtype
        if group.size == 1:
            return Pending(lambda: x)
        if levels is not None:
            of_inner, of_outer = _sizes_of_levels(levels, self.sizes)
            summed = ReduceScatter(levels.inner, of_inner, self.dim).start(_by_number(x, levels, self.sizes, self.dim))
            return Pending(lambda: ReduceScatter(levels.outer, of_outer, self.dim).start(summed.wait()).wait())
        x = x.to(self.transport.narrow(dtype))
        pieces = torch.split(x, list(self.sizes), self.dim)
        shape, sent = pieces[group.rank].shape, [piece.numel() for piece in pieces]
        flat = x.contiguous().view(-1) if self.dim == 0 else torch.cat([piece.reshape(-1) for piece in pieces])
        # Added up in the wide dtype: messages in bfloat16 are rounded only once.
        messages = self.transport.reduce_scatter(flat, sent, dtype)
        return Pending(lambda: messages.wait().resize_(shape))  # a view could not be changed in place


def _sizes_of_levels(levels: Levels, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Sizes of pieces within the machine, each for all machines, and between machines, for this rank's number there."""
    count, own = levels.inner.group.size, levels.inner.group.rank
    return [sum(sizes[k::count]) for k in range(count)], list(sizes[own::count])


def _by_number(whole: Tensor, levels: Levels, sizes: Sequence[int], dim: int) -> Tensor:
    """Reorder pieces from machine by machine to number by number of the ranks on their machines."""
    count, pieces = levels.inner.group.size, torch.split(whole, list(sizes), dim)
    return torch.cat([piece for k in range(count) for piece in pieces[k::count]], dim)


def _by_machine(whole: Tensor, levels: Levels, sizes: Sequence[int], dim: int) -> Tensor:
    """The inverse of :func:`_by_number`."""
    count, num_machines = levels.inner.group.size, levels.outer.group.size
    pieces = torch.split(whole, [size for k in range(count) for size in sizes[k::count]], dim)
    return torch.cat([piece for m in range(num_machines) for piece in pieces[m::num_machines]], dim)


def sum_all(tensor: Tensor, transport: Transport) -> Tensor:
    """The sum of every rank's ``tensor``, the same bits on every rank (collective, no autograd)."""
    if transport.group.size == 1:
        return tensor
    sizes = near_equal(tensor.numel(), transport.group.size)
    own = ReduceScatter(transport, sizes).start(tensor.reshape(-1)).wait()
    return AllGather(transport, sizes).start(own).wait().view(tensor.shape)


def near_equal(size: int, num_parts: int) -> list[int]:
    """Sizes of ``num_parts`` near-equal ranges."""
    return [high - low for low, high in pairwise(split(size, num_parts))]


def all_gather(piece: Tensor, transport: Transport, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """Every rank's piece, for a product of which each rank computes another part (collective; backward: a sum)."""
    return piece if transport.group.size == 1 else apply(AllGather(transport, sizes, dim), piece)


def reduce_scatter(whole: Tensor, transport: Transport, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """This rank's piece of the sum of every rank's ``whole`` (collective; backward: an all-gather)."""
    return whole if transport.group.size == 1 else apply(ReduceScatter(transport, sizes, dim), whole)


def copy_to_replicas(tensor: Tensor, transport: Transport) -> Tensor:
    """A replica, for a product of which each rank computes another part (backward: a sum, collective)."""
    if transport.group.size == 1 or not tensor.requires_grad:
        return tensor
    return apply(CopyToRanks(partial(sum_all, transport=transport)), tensor)


def reduce_from_replicas(tensor: Tensor, transport: Transport) -> Tensor:
    """The sum over the ranks, on every rank (collective; backward: identity)."""
    if transport.group.size == 1:
        return tensor
    return apply(SumOverRanks(partial(sum_all, transport=transport), is_of_rows=False), tensor)
