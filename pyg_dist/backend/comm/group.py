"""One mesh axis: the ranks that hold distinct rows, and the plain collectives among them.

Nothing here knows of autograd; :mod:`pyg_dist.backend.autograd.replicated` builds on it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import cache
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.comm.checks import replicas
from pyg_dist.backend.comm.checks.calls import Calls, Standing
from pyg_dist.backend.comm.connection import InCall, wait
from pyg_dist.backend.comm.wires import factory
from pyg_dist.backend.comm.wires.wire import Wire
from pyg_dist.backend.local_function import with_memory
from pyg_dist.backend.pickling import OfThisRun
from pyg_dist.backend.session.state import current, is_group_open
from pyg_dist.backend.timing import phase
from pyg_dist.errors import LaunchError

# Bytes up to which a sum also compares the ranks' notes (:mod:`~pyg_dist.backend.comm.checks.replicas`).
_SMALL = 1 << 12

# What no wire carries, as what all do. Of bytes, "max" is `any` and "min" is `all`.
_WIRE_DTYPE = {torch.bool: torch.uint8, torch.int16: torch.int32}


def to_wire(tensor: Tensor) -> Tensor:
    """The tensor as a wire carries it (back: :func:`from_wire`); a complex one has a dimension more."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return with_memory(tensor).to(_WIRE_DTYPE.get(tensor.dtype, tensor.dtype)).contiguous()


def from_wire(carried: Tensor, dtype: torch.dtype) -> Tensor:
    """See :func:`to_wire`."""
    return torch.view_as_complex(carried) if dtype.is_complex else carried.to(dtype)


class Group(OfThisRun):
    """The ranks among which rows are distinct; every method is collective unless it says otherwise.

    An axis of one rank communicates nothing and works without ``torch.distributed``.

    ``wires`` carry the messages; ``name`` tells two groups of the same ranks apart; ``standing`` is where waits are
    noted.
    """

    def __init__(self, wires: Sequence[Wire] = (), name: str = "", standing: Standing | None = None) -> None:
        current().of(Groups).all.add(self)
        self._wires = {device: wire for wire in wires for device in wire.devices}
        self.size, self.rank, self.calls = 1, 0, Calls((0,))
        if wires:
            self.size, self.rank = wires[0].size, wires[0].rank
            self.calls = (standing or current().of(Standing)).sequence(wires[0].ranks, name)
            replicas.noted().is_on |= self.size > 1 and any(wire.has_tags for wire in wires)

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size})"

    def __deepcopy__(self, memo: object) -> Group:
        return self  # it is a connection, not a value

    def wire(self, tensor: Tensor) -> Wire:
        """The wire for messages like ``tensor`` (not collective)."""
        device = tensor.device.type
        wire = self._wires.get(device)
        if wire is None:
            if not self._wires:
                raise LaunchError(
                    "Expected connections to the other ranks (got data of a session that has ended): make it anew "
                    "after init()"
                )
            carrier = self._wires.get("cpu") or next(iter(self._wires.values()))
            wire = self._wires[device] = factory.staged_wire(carrier, device)
        return wire

    def begin(
        self, kind: str, tensor: Tensor, size: int, peers: Sequence[int] | None = None
    ) -> tuple[Wire, int, InCall]:
        """Note a call for messages like ``tensor``: its wire, its tag and what it is done within (not collective).

        ``size``: elements, or those of a row where numbers of rows differ between ranks; ``peers``: the ranks that this
        one waits for, by default the whole group.
        """
        wire = self.wire(tensor)
        tag = self.calls.next(kind, tensor.dtype, size, has_tag=wire.has_tags)
        of_run = None if peers is None else tuple([self.calls.ranks[peer] for peer in peers])
        return wire, tag, InCall(self.calls, of_run)

    def apart(self, ranks: Sequence[int], name: str) -> Group:
        """Some of these ranks (global numbers), for CPU tensors of another thread (not collective).

        Its messages never meet those of other groups, and the main thread's waits are noted without it. Sums that are
        compared (:mod:`~pyg_dist.backend.comm.checks.replicas`) belong to the main thread: this is for all others.

        Raises:
            UnsupportedError: CPU tensors go by a wire whose messages have no tags.
        """
        if len(ranks) == 1:
            return Group()
        return Group([self.wire(torch.empty(0, device="cpu")).among(ranks)], name, Standing())

    def all_reduce_(self, tensor: Tensor, op: str = "sum", kind: str = "") -> Tensor:
        """Reduce ``tensor`` over the ranks, and maybe overwrite it; every rank gets the result, with the same bits.

        ``kind`` is what the call is to be named, if it is not ``op``.
        """
        if self.size == 1 or not tensor.numel():
            return tensor
        with phase("sums"):
            return from_wire(self._reduced(to_wire(tensor.detach()), op, kind or op), tensor.dtype)

    def _reduced(self, x: Tensor, op: str, kind: str) -> Tensor:
        """Before a small sum is returned, the ranks' notes are compared."""
        _keep_counts()
        wire, tag, call = self.begin(kind, x, x.numel())
        compares = wire.has_tags and x.nbytes <= _SMALL
        with call:
            total, are_equal = wire.all_reduce(x, op, tag, replicas.noted().digest() if compares else None)
        if not are_equal:
            replicas.compare(self)
        elif compares and self.size == world_group().size:
            replicas.noted().agree()
        return total

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of every rank's tensor, on every rank; what it is given stays as it was."""
        return self.all_reduce_(tensor.clone())

    def broadcast_(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Overwrite ``tensor`` on every rank with the one of axis rank ``source``."""
        if self.size > 1 and tensor.numel():
            x = to_wire(tensor.detach())
            wire, tag, call = self.begin("broadcast", x, x.numel())
            with call:
                wire.broadcast(x, source, tag)
            if x.data_ptr() != tensor.data_ptr():
                tensor.copy_(from_wire(x, tensor.dtype))
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

        Shapes: rows ``[counts[rank], ...]``; output ``[sum(counts), ...]``.
        """
        if self.size == 1:
            return rows
        x = to_wire(rows.detach())
        wire, tag, call = self.begin("gather", x, x.shape[1:].numel())
        out = x.new_empty(sum(counts), *x.shape[1:])
        with call:
            for message in wire.all_gather(out, x, counts, tag).others:
                wait(message)
        return from_wire(out, rows.dtype)

    def stack(self, tensor: Tensor) -> Tensor:
        """Every rank's tensor, by rank. Shapes: ``[...] -> [size, ...]``, alike on all ranks."""
        return self.gather_rows(tensor.unsqueeze(0), [1] * self.size)

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's bytes, by rank."""
        if self.size == 1:
            return [content]
        counts = self.gather_counts(len(content))
        mine = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        return [piece.numpy().tobytes() for piece in torch.split(self.gather_rows(mine, counts), counts)]

    def barrier(self, kind: str = "meeting") -> None:
        """Wait until every rank is here; ``kind`` is what the call is to be named."""
        if self.size > 1:
            self._reduced(torch.zeros(1, dtype=torch.uint8, device="cpu"), "sum", kind)


class Groups:
    """All groups of a session.

    Attributes:
        is_own: whether ``init`` has opened torch's default group.
        all: which have connections.
        within: those of :func:`group_within`, by their ranks.
        world: that of all ranks, by torch's default group: one entry.
    """

    def __init__(self) -> None:
        self.is_own = False
        self.all: weakref.WeakSet[Group] = weakref.WeakSet()
        self.within: dict[tuple[tuple[int, ...], ...], Group] = {}
        self.world: dict[dist.ProcessGroup | None, Group] = {}

    def close(self) -> None:
        """Let go of all wires, so that torch ends their threads with the process groups, of which it ends its own.

        Such a thread may be the last to hold a tensor of a message that has arrived, and needs Python to free it. If
        Python has ended meanwhile, it aborts the process.
        """
        for group in tuple(self.all):
            group._wires.clear()
        self.within.clear()
        self.world.clear()
        if self.is_own and is_group_open():  # the script may have destroyed it
            dist.destroy_process_group()


def world_group() -> Group:
    """The axis of all ranks: one object per process group, so that gradients of several graphs share a bucket."""
    group = dist.group.WORLD if is_group_open() and dist.get_world_size() > 1 else None
    groups = current().of(Groups)
    if group not in groups.world:
        groups.within.clear()
        groups.world.clear()
        groups.world[group] = Group() if group is None else Group(factory.wires_of(group))
    return groups.world[group]


def group_within(groups: Sequence[Sequence[int]]) -> Group:
    """The axis of this rank's group (collective over all ranks at the first use of ``groups``).

    The same groups give the same object.

    ``groups`` are disjoint, alike on every rank; a rank in none of them has an axis for itself.
    """
    world, within = world_group(), current().of(Groups).within
    if len(groups) == 1 and len(groups[0]) == world.size:
        return world
    key = tuple(tuple(ranks) for ranks in groups)
    if key not in within:
        world.barrier()
        within[key] = Group(factory.wires_within(key))
    return within[key]


def _keep_counts() -> None:
    """Tell torchmetrics' metrics whose ``update`` leads here that each process has the counts of all rows.

    A metric sums its counts over all processes before it computes. No other metric changes, nor torchmetrics itself.
    """
    torchmetrics = sys.modules.get("torchmetrics.metric")
    if torchmetrics is None:
        return
    update = _code_around_update(torchmetrics.Metric)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is update:
            metric = frame.f_locals["self"]
            metric.sync_on_compute = metric.dist_sync_on_step = metric._to_sync = False
        frame = frame.f_back


@cache
def _code_around_update(metric: Any) -> CodeType | None:
    """The code that torchmetrics wraps around each metric's ``update``."""
    return next((part for part in metric._wrap_update.__code__.co_consts if isinstance(part, CodeType)), None)
