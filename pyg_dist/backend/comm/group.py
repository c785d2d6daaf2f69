"""One mesh axis: the ranks that hold distinct rows, and the plain collectives among them.

Nothing here knows of autograd; :mod:`pyg_dist.backend.autograd.replicated` builds on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend import metrics, staging
from pyg_dist.backend.comm.checks import replicas
from pyg_dist.backend.comm.checks.calls import Calls, here
from pyg_dist.backend.comm.connection import InCall
from pyg_dist.backend.comm.tagged import TaggedMessages
from pyg_dist.backend.pickling import OfThisRun
from pyg_dist.backend.timing import phase
from pyg_dist.errors import LaunchError

# Bytes up to which a sum also compares what plain tensors the ranks have met.
_SMALL = 1 << 12

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# What gloo and nccl do not carry, as what they do. Of bytes, "max" is `any` and "min" is `all`.
_WIRE_DTYPE = {torch.bool: torch.uint8, torch.int16: torch.int32}
# torch 2.13 has a new name for the collective, and warns of the old one.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def to_wire(tensor: Tensor) -> Tensor:
    """The tensor as the transport carries it (back: :func:`from_wire`); a complex one has a dimension more."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.to(_WIRE_DTYPE.get(tensor.dtype, tensor.dtype)).contiguous()


def from_wire(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """See :func:`to_wire`."""
    return torch.view_as_complex(wire) if dtype.is_complex else wire.to(dtype)


class _Closed:
    """What stands for a process group once its session has ended."""

    def __getattr__(self, name: str) -> NoReturn:
        raise LaunchError(
            "Expected connections to the other ranks (got data of a session that has ended): make it anew after init()"
        )


class Group(OfThisRun):
    """The ranks among which rows are distinct; every method is collective unless it says otherwise.

    Args:
        process_group: the ``torch.distributed`` group, or ``None`` for an axis of one rank.
        name: distinguishes the calls of two groups of the same ranks.

    An axis of one rank communicates nothing and works without ``torch.distributed``.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, name: str = "") -> None:
        self.process_group = process_group
        _open.add(self)
        self.size: int = 1 if process_group is None else process_group.size()
        self.rank: int = 0 if process_group is None else process_group.rank()
        self._messages: TaggedMessages | None = None
        self._is_connected = False
        self.calls = Calls((0,))
        if process_group is not None:
            self.stage = staging.Stage(process_group)
            self.calls = here.sequence(tuple(dist.get_process_group_ranks(process_group)), name)
            if "cpu:gloo" in str(dist.get_backend_config(process_group)):
                self._messages = TaggedMessages(process_group)
                replicas.noted.is_on |= self.size > 1

    def __repr__(self) -> str:
        return f"Axis(rank={self.rank}, size={self.size})"

    def __deepcopy__(self, memo: object) -> Group:
        return self  # a process group is a connection, not a value

    def tagged(self, tensor: Tensor) -> TaggedMessages | None:
        """What carries messages like ``tensor`` by tags, if they go that way (not collective)."""
        return self._messages if tensor.device.type == "cpu" else None

    def global_rank(self, rank: int) -> int:
        """The default group's number of this axis' ``rank`` (not collective)."""
        return rank if self.process_group is None else dist.get_global_rank(self.process_group, rank)

    def connect(self, tensor: Tensor) -> None:
        """Join the connections for messages like ``tensor``, once, before messages that only some ranks have.

        nccl opens a group's connections in its first call, and waits there for all ranks: one that has no neighbours
        would not come. gloo's are open from the start.
        """
        if self._is_connected or self.size == 1 or self.tagged(tensor) is not None:
            return
        with InCall(self.calls):
            dist.all_reduce(tensor.new_zeros(1), group=self.process_group)
        self._is_connected = True

    def all_reduce_(self, tensor: Tensor, op: str = "sum", kind: str = "") -> Tensor:
        """Reduce ``tensor`` over the ranks, and maybe overwrite it; every rank gets the result, with the same bits.

        ``kind`` is what the call is to be named, if it is not ``op``.
        """
        if self.size == 1 or not tensor.numel():
            return tensor
        with phase("sums"):
            wire = self._reduced(self.stage.lift(to_wire(tensor.detach())), op, kind or op)
        return from_wire(self.stage.land(wire, tensor.device), tensor.dtype)

    def _reduced(self, wire: Tensor, op: str, kind: str) -> Tensor:
        metrics.keep_counts()
        tag = self.calls.next(kind, wire.dtype, wire.numel())
        messages = self.tagged(wire)
        if messages is not None and wire.nbytes <= _SMALL:
            return self._compared(messages, wire, op, tag)
        with InCall(self.calls):
            if messages is not None:
                return messages.all_reduce(wire, op, tag)
            dist.all_reduce(wire, op=_REDUCE[op], group=self.process_group)
        return wire

    def _compared(self, messages: TaggedMessages, wire: Tensor, op: str, tag: int) -> Tensor:
        """A small sum. Before it is returned, the plain tensors that the ranks have met are compared."""
        with InCall(self.calls):
            total, are_equal = messages.all_reduce_with(wire, replicas.noted.digest(), op, tag)
        if not are_equal:
            replicas.compare(self)
        elif self.size == world_group().size:
            replicas.noted.agree()
        return total

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor, on every rank; what it is given stays as it was."""
        return self.all_reduce_(tensor.clone())

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite ``tensor`` on every rank with the one of axis rank ``source``."""
        if self.size > 1 and tensor.numel():
            wire = self.stage.lift(to_wire(tensor.detach()))
            tag = self.calls.next("broadcast", wire.dtype, wire.numel())
            with InCall(self.calls):
                messages = self.tagged(wire)
                if messages is not None:
                    messages.broadcast(wire, source, tag)
                else:
                    dist.broadcast(wire, src=self.global_rank(source), group=self.process_group)
            if wire.device != tensor.device or wire.data_ptr() != tensor.data_ptr():
                tensor.copy_(from_wire(wire, tensor.dtype))
        return tensor

    def gather_counts(self, count: int) -> list[int]:
        """Every rank's ``count``, by rank."""
        if self.size == 1:
            return [count]
        mine = torch.zeros(self.size, dtype=torch.int64, device="cpu")
        mine[self.rank] = count
        return [int(c) for c in self.all_reduce_(mine, kind="gather").tolist()]

    def all_true(self, truth: bool) -> bool:
        """Whether ``truth`` holds on every rank."""
        return all(self.gather_counts(int(truth)))

    def gather_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Concatenate every rank's rows, by rank.

        Shapes:
            - rows: ``[counts[rank], ...]``
            - output: ``[sum(counts), ...]``
        """
        if self.size == 1:
            return rows
        wire = self.stage.lift(to_wire(rows.detach()))
        tag = self.calls.next("gather", wire.dtype, wire.shape[1:].numel())
        messages = self.tagged(wire)
        with InCall(self.calls):
            if messages is not None:
                gathered = messages.gather(wire, counts, tag)
                return from_wire(self.stage.land(gathered, rows.device), rows.dtype)
            # nccl has no uneven all-gather: pad to the longest part.
            longest = max(counts)
            padded = wire.new_zeros((longest, *wire.shape[1:]))
            padded[: wire.shape[0]] = wire
            gathered = wire.new_empty((self.size * longest, *wire.shape[1:]))
            _all_gather(gathered, padded, group=self.process_group)
        pieces = [gathered[r * longest : r * longest + c] for r, c in enumerate(counts)]
        return from_wire(self.stage.land(torch.cat(pieces), rows.device), rows.dtype)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        if self.size == 1:
            return [content]
        counts = self.gather_counts(len(content))
        mine = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        gathered = self.gather_rows(mine, counts)
        return [piece.numpy().tobytes() for piece in torch.split(gathered, counts)]

    def meet(self, kind: str = "meeting") -> None:
        """Wait until every rank is here; ``kind`` is what the call is to be named."""
        if self.size > 1:
            self._reduced(self.stage.lift(torch.zeros(1, dtype=torch.uint8, device="cpu")), "sum", kind)


_open: weakref.WeakSet[Group] = weakref.WeakSet()


def close_groups() -> None:
    """Let go of all process groups (not collective), so that torch ends their threads with them.

    Such a thread may be the last to hold a tensor of a message that has arrived, and needs Python to free it. If Python
    has ended meanwhile, it aborts the process.
    """
    for group in tuple(_open):
        if group.process_group is not None:
            group.process_group = _Closed()  # type: ignore[assignment]
            group._messages = None
    _axes.clear()
    _world.clear()
    here.sequences.clear()
    replicas.noted.is_on = False
    replicas.noted.restart()
    staging.restart()


_Groups = tuple[tuple[int, ...], ...]
_axes: dict[_Groups, Group] = {}
_world: list[Group] = []


def world_group() -> Group:
    """The axis of all ranks: one object per process group, so that gradients of several graphs share a bucket."""
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None
    if not _world or _world[0].process_group is not group:
        _axes.clear()
        _world[:] = [Group(group)]
    return _world[0]


def group_within(groups: Sequence[Sequence[int]]) -> Group:
    """The axis of this rank's group (collective over all ranks at the first use of ``groups``).

    The same groups give the same object: torch never frees a process group's connections and threads.

    Args:
        groups: ranks in disjoint groups, alike on every rank; a rank in none of them has an axis for itself.
    """
    world = world_group()
    if len(groups) == 1 and len(groups[0]) == world.size:
        return world
    key = tuple(tuple(ranks) for ranks in groups)
    if key not in _axes:
        # Torch wants every rank to open every group, in one order.
        world.meet()
        opened = [dist.new_group(list(ranks)) for ranks in key]
        mine = (Group(group) for group, ranks in zip(opened, key, strict=True) if world.rank in ranks)
        _axes[key] = next(mine, Group())
    return _axes[key]
