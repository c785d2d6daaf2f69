"""The one factory of wires (:class:`~pyg_dist.backend.comm.wires.wire.Wire`), which alone names their classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from pyg_dist.backend.comm.wires.c10d import C10dWire
from pyg_dist.backend.comm.wires.gloo import GlooWire
from pyg_dist.backend.comm.wires.mpi import MpiWire
from pyg_dist.backend.comm.wires.staged import StagedWire
from pyg_dist.backend.comm.wires.wire import Carriers, Wire
from pyg_dist.backend.session.settings import STAGE
from pyg_dist.backend.session.state import current


def wires_of(process_group: dist.ProcessGroup) -> tuple[Wire, ...]:
    """The wires among the ranks of a group of torch's, one for each device that its backends carry (not collective)."""
    carriers, found = current().of(Carriers), list[Wire]()
    for entry in str(dist.get_backend_config(process_group)).split(","):
        device, backend = entry.split(":")
        if device in carriers.refused:
            continue
        if device == "cpu" and carriers.mpi is not None:
            found.append(MpiWire(dist.get_process_group_ranks(process_group), carriers.mpi))
        elif backend != "gloo":
            found.append(C10dWire(process_group, device))
        elif device == "cpu":  # gloo lacks an uneven all-to-all of GPU tensors
            found.append(GlooWire(process_group))
    return _staged_if_asked(found)


def _staged_if_asked(found: Sequence[Wire]) -> tuple[Wire, ...]:
    if not STAGE.value():
        return tuple(found)
    return tuple(staged_wire(wire, device) for wire in found for device in wire.devices)


def staged_wire(wire: Wire, device: str) -> Wire:
    """A wire for tensors of another device, which are copied to where ``wire`` sends from (not collective)."""
    return StagedWire(wire, device)


def wires_within(groups: Sequence[Sequence[int]]) -> tuple[Wire, ...]:
    """The wires among the ranks of this rank's group, none where it has none (collective over all ranks).

    Torch never frees a process group's connections and threads. MPI needs none.
    """
    timeout = current().of(Carriers).mpi
    if timeout is not None and "nccl" not in str(dist.get_backend_config()):
        return _staged_if_asked([MpiWire(ranks, timeout) for ranks in groups if dist.get_rank() in ranks])
    opened = [dist.new_group(list(ranks)) for ranks in groups]  # each rank opens each group, in one order
    mine = (group for group, ranks in zip(opened, groups, strict=True) if dist.get_rank() in ranks)
    return next((wires_of(group) for group in mine), ())
