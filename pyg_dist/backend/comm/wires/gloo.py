"""Messages of CPU tensors by gloo, which matches the point-to-point messages of two ranks by tag.

Its own collectives match by order alone: ranks that diverge would read one call's numbers as those of another. They
also take longer: 53 against 16 ms for a sum of 8 MB on four processes of one machine.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.comm.checks.calls import message_tag
from pyg_dist.backend.comm.connection import raise_with_peer
from pyg_dist.backend.comm.wires.point_to_point import PointToPoint
from pyg_dist.backend.comm.wires.wire import Message


class GlooWire(PointToPoint):
    """The messages among the ranks of a process group whose CPU tensors gloo carries.

    The group's own object sends without the detour through torch's dispatcher.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        super().__init__(process_group.rank(), dist.get_process_group_ranks(process_group))
        self._number = {rank: number for number, rank in enumerate(self.ranks)}  # in the process group
        self._gloo: Any = process_group._get_backend(torch.device("cpu"))
        _let_senders_finish()

    def send(self, x: Tensor, peer: int, tag: int) -> Message:
        return self._begin(self._gloo.send, x, peer, tag)

    def receive(self, x: Tensor, peer: int, tag: int) -> Message:
        return self._begin(self._gloo.recv, x, peer, tag)

    def _begin(self, start: Any, x: Tensor, peer: int, tag: int) -> Message:
        rank = self.ranks[peer]
        try:
            return Message(start([x], self._number[rank], message_tag(tag, x.nbytes)), rank)
        except RuntimeError as error:  # the connection is known to be gone
            raise_with_peer(error, rank)


def _let_senders_finish() -> None:
    """Keep gloo's threads from interrupting a thread that sends on the same core.

    A thread of gloo's that wakes then finds the pair locked, and asks again until its slice of time is over. One that
    the system schedules as a batch waits for its turn instead (Linux). Threads of gloo groups that the script has made
    are among them. Beside other programs on the same cores messages take longer that way (docs/performance.md).
    """
    threads = Path("/proc/self/task").glob("*/comm") if hasattr(os, "SCHED_BATCH") else ()
    for name in threads:
        thread = int(name.parent.name)
        with suppress(OSError):  # it has ended, or the system does not allow it
            if name.read_text() == "gloo_tcp_loop\n" and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
