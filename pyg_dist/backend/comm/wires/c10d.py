"""Messages by a backend of ``torch.distributed``, nccl above all: calls match by their order, and have no tags."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.comm.wires import Flight, Message, Piece
from pyg_dist.errors import UnsupportedError

LOST = ("closed by remote peer", "remote process exited", "ncclRemoteError", "NCCL communicator was aborted")
"""What nccl's errors about a closed connection have in them, as torch words them. It also quotes its sockets' last."""

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 has a new name for the collective, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class C10dWire:
    """A :class:`~pyg_dist.backend.comm.wires.Wire` of a process group, for tensors of one type of device."""

    has_tags = False

    def __init__(self, process_group: dist.ProcessGroup, device: str) -> None:
        self._group = process_group
        self.devices = frozenset({device})
        self.ranks = tuple(dist.get_process_group_ranks(process_group))
        self.rank, self.size = process_group.rank(), len(self.ranks)
        self._is_connected = False

    def among(self, ranks: Sequence[int]) -> C10dWire:
        """See :class:`~pyg_dist.backend.comm.wires.Wire`."""
        raise UnsupportedError(
            "Expected CPU tensors to travel by gloo or MPI (got another backend, whose messages have no tags): open "
            "the group with pyg_dist.init()"
        )

    def all_reduce(self, x: Tensor, op: str, tag: int, number: int | None = None) -> tuple[Tensor, bool]:
        """See :class:`~pyg_dist.backend.comm.wires.Wire`; in place."""
        dist.all_reduce(x, op=_REDUCE[op], group=self._group)
        return x, True

    def broadcast(self, x: Tensor, source: int, tag: int) -> None:
        """See :class:`~pyg_dist.backend.comm.wires.Wire`."""
        dist.broadcast(x, src=self.ranks[source], group=self._group)

    def gather(self, rows: Tensor, counts: Sequence[int], tag: int) -> Tensor:
        """See :class:`~pyg_dist.backend.comm.wires.Wire`; parts are padded to the longest."""
        longest = max(counts)
        padded = rows.new_zeros((longest, *rows.shape[1:]))
        padded[: rows.shape[0]] = rows
        gathered = rows.new_empty((self.size * longest, *rows.shape[1:]))
        _all_gather(gathered, padded, group=self._group)
        return torch.cat([gathered[r * longest : r * longest + count] for r, count in enumerate(counts)])

    def all_to_all(self, out: Tensor, rows: Tensor, sent: Sequence[int], received: Sequence[int], tag: int) -> Flight:
        """See :class:`~pyg_dist.backend.comm.wires.Wire`."""
        work = dist.all_to_all_single(out, rows, list(received), list(sent), group=self._group, async_op=True)
        return Flight(others=[Message(work, None)])

    def exchange(
        self, out: Tensor, rows: Tensor, receivers: Sequence[Piece], senders: Sequence[Piece], tag: int
    ) -> Flight:
        """See :class:`~pyg_dist.backend.comm.wires.Wire`."""
        if not self._is_connected:
            # nccl opens a group's connections in its first call and waits there for all ranks, also for one that has
            # no neighbours.
            dist.all_reduce(rows.new_zeros(1), group=self._group)
            self._is_connected = True
        messages = [dist.P2POp(dist.irecv, out[low:high], self.ranks[r], self._group) for r, low, high in senders]
        messages += [dist.P2POp(dist.isend, rows[low:high], self.ranks[r], self._group) for r, low, high in receivers]
        works = dist.batch_isend_irecv(messages) if messages else ()
        return Flight(others=[Message(work, None) for work in works])
