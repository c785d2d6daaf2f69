"""What a rank hands to a wire, counted where it does; independent of the library's own counters."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any
from unittest import mock

from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.comm.wires.gloo import GlooWire
from pyg_dist.backend.comm.wires.mpi import MpiWire

# What hands messages to a library, and the bytes of such a call.
_SENDS: tuple[tuple[type, str, Any], ...] = (
    (GlooWire, "send", lambda x, *_: x.nbytes),
    (MpiWire, "send", lambda x, *_: x.nbytes),
    (MpiWire, "send_rows", lambda x, low, high, *_: x[low:high].nbytes),
)


class Wire:
    """Counts, within it, what goes to other ranks through transports; sums and gathers of groups are apart.

    Attributes:
        num_bytes: of the messages.
        num_collectives: all-to-alls, gathers and scattered sums.
        num_others: messages of groups.
    """

    def __init__(self) -> None:
        self.num_bytes = self.num_collectives = self.num_others = 0
        self._is_inside = False

    def __enter__(self) -> Wire:
        def counted(send: Any, num_bytes: Any) -> Any:
            def call(wire: Any, x: Any, *args: Any) -> Any:
                if self._is_inside:
                    self.num_bytes += num_bytes(x, *args)
                else:
                    self.num_others += 1
                return send(wire, x, *args)

            return call

        def inside(function: Any, is_collective: int) -> Any:
            def call(*args: Any, **options: Any) -> Any:
                self.num_collectives += is_collective
                self._is_inside = True
                try:
                    return function(*args, **options)
                finally:
                    self._is_inside = False

            return call

        with ExitStack() as stack:
            for kind, name, num_bytes in _SENDS:
                stack.enter_context(mock.patch.object(kind, name, counted(getattr(kind, name), num_bytes)))
            for name in ("all_to_all", "all_gather", "reduce_scatter", "to_neighbours"):
                counted_call = inside(getattr(Transport, name), int(name != "to_neighbours"))
                stack.enter_context(mock.patch.object(Transport, name, counted_call))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
