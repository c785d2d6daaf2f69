"""Messages by a backend of ``torch.distributed``, nccl above all: calls match by their order, and have no tags."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.comm.wires.point_to_point import Then, summed
from pyg_dist.backend.comm.wires.wire import Flight, Message, Piece, Work
from pyg_dist.errors import UnsupportedError

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 has new names for these, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class C10dWire:
    """A :class:`~pyg_dist.backend.comm.wires.wire.Wire` of a process group, for tensors of one type of device."""

    has_tags = False

    def __init__(self, process_group: dist.ProcessGroup, device: str) -> None:
        self._group = process_group
        self.devices = frozenset({device})
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.rank, self.size = process_group.rank(), len(self.ranks)
        self._is_connected = False

    def among(self, ranks: Sequence[int]) -> C10dWire:
        raise UnsupportedError(
            "Expected CPU tensors to travel by gloo or MPI (got another backend, whose messages have no tags): open "
            "the group with pyg_dist.init()"
        )

    def all_reduce(self, x: Tensor, op: str, tag: int, number: int | None = None) -> tuple[Tensor, bool]:
        """See ``Wire``; in place."""
        dist.all_reduce(x, op=_REDUCE[op], group=self._group)
        return x, True

    def broadcast(self, x: Tensor, source: int, tag: int) -> None:
        dist.broadcast(x, src=self.ranks[source], group=self._group)

    def all_gather(self, out: Tensor, rows: Tensor, counts: Sequence[int], tag: int) -> Flight:
        """See ``Wire``; parts are padded to the longest."""
        if not (longest := max(counts)) or not rows.shape[1:].numel():
            return Flight()
        arriving = _buffer_like(out, counts, longest)
        sent = _padded(rows, rows.shape[:1], longest)
        work = _all_gather(arriving, sent, group=self._group, async_op=True)
        return _unpadded(work, arriving, out, counts, sent)

    def reduce_scatter(self, out: Tensor, rows: Tensor, counts: Sequence[int], tag: int) -> Flight:
        """See ``Wire``; parts are padded to the longest.

        The backend adds in the dtype of the messages, in an order of its own. Where sums are to be wider, this rank
        adds what arrives.
        """
        if out.dtype != rows.dtype:
            return summed(self, out, rows, counts, tag)
        if not (longest := max(counts)) or not rows.shape[1:].numel():
            return Flight()
        total = _buffer_like(out, out.shape[:1], longest)
        sent = _padded(rows, counts, longest)
        work = _reduce_scatter(total, sent, group=self._group, async_op=True)
        return _unpadded(work, total, out, out.shape[:1], sent)

    def all_to_all(self, out: Tensor, rows: Tensor, sent: Sequence[int], received: Sequence[int], tag: int) -> Flight:
        work = dist.all_to_all_single(out, rows, list(received), list(sent), group=self._group, async_op=True)
        return Flight(others=[Message(work, None)])

    def exchange(
        self, out: Tensor, rows: Tensor, receivers: Sequence[Piece], senders: Sequence[Piece], tag: int
    ) -> Flight:
        if not self._is_connected:
            # nccl opens a group's connections in its first call and waits there for all ranks, also for one that has
            # no neighbours.
            dist.all_reduce(rows.new_zeros(1), group=self._group)
            self._is_connected = True
        messages = [dist.P2POp(dist.irecv, out[low:high], self.ranks[r], self._group) for r, low, high in senders]
        messages += [dist.P2POp(dist.isend, rows[low:high], self.ranks[r], self._group) for r, low, high in receivers]
        works = dist.batch_isend_irecv(messages) if messages else ()
        return Flight(others=[Message(work, None) for work in works])


def _buffer_like(out: Tensor, counts: Sequence[int], longest: int) -> Tensor:
    """Where parts arrive that are padded to the longest: ``out`` where none is."""
    if all(count == longest for count in counts):
        return out
    return out.new_empty(len(counts) * longest, *out.shape[1:])


def _padded(rows: Tensor, counts: Sequence[int], longest: int) -> Tensor:
    """Parts of so many rows, each with zeros behind it."""
    padded = _buffer_like(rows, counts, longest)
    if padded is not rows:
        for part, to in zip(torch.split(rows, list(counts)), torch.split(padded.zero_(), longest), strict=True):
            to[: part.shape[0]] = part
    return padded


def _unpadded(work: Work, arriving: Tensor, out: Tensor, counts: Sequence[int], sent: Tensor) -> Flight:
    """Padded parts under way, which are copied to where they belong."""

    def copy() -> None:
        if arriving is not out:
            parts = torch.split(arriving, arriving.shape[0] // len(counts))
            torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)], out=out)

    return Flight(others=[Message(Then([Message(work, None)], copy, sent), None)])
