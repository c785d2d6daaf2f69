"""Lost connections: a wire's errors name no rank, so they are raised again with the rank."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist

from pyg_dist.backend.comm.checks.calls import Calls, Wait
from pyg_dist.backend.comm.wires.wire import Message
from pyg_dist.backend.session.state import current
from pyg_dist.errors import ConnectionLostError, DivergenceError, PygDistError

_LOST = (
    *("closed by peer", "reset by peer", "Broken pipe"),  # gloo
    *("closed by remote peer", "remote process exited", "ncclRemoteError", "NCCL communicator was aborted"),
    *("MPI_ERR_PROC_FAILED", "MPI_ERR_REVOKED", "MPIX_ERR_PROC_FAILED", "MPIX_ERR_REVOKED"),
)
"""Words of the wires' errors about a closed connection; nccl also quotes its sockets' last error."""


def is_lost(error: BaseException) -> bool:
    """Whether this is a wire's error about a closed connection."""
    return any(words in str(error) for words in _LOST)


def wait(message: Message) -> None:
    """Wait until a message has left or arrived.

    Raises:
        ConnectionLostError: The connection to a rank is gone.
        DivergenceError: It is gone because that rank has ended.
    """
    try:
        message.work.wait()
    except RuntimeError as error:
        raise_with_peer(error, message.peer)


def raise_with_peer(error: RuntimeError, peer: int | None) -> NoReturn:
    """Raise it again; a wire's error about a closed connection as :func:`wait` does."""
    if not is_lost(error):
        raise error
    raise _lost(peer) from error


class InCall:
    """The context of waiting for a call, within which a wire's errors become this package's (:func:`wait`).

    The call is the last of ``calls``; ``peers`` are global numbers of the ranks that it waits for, by default the whole
    group.
    """

    def __init__(self, calls: Calls, peers: tuple[int, ...] | None = None) -> None:
        self._wait = Wait(calls, calls.number, peers)

    def __enter__(self) -> None:
        self._wait.calls.standing.wait = self._wait

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        lost = _lost(None) if isinstance(error, RuntimeError) and is_lost(error) else None
        self._wait.calls.standing.wait = None
        if lost is not None:
            raise lost from error


class LossReason:
    """The reason why a connection to a rank is gone, if that rank has ended well."""

    def __init__(self, of_peer: Callable[[int | None], str | None] = lambda peer: None) -> None:
        self.of_peer = of_peer


def _lost(peer: int | None) -> PygDistError:
    reason = current().of(LossReason).of_peer(peer)
    return ConnectionLostError(loss_of(dist.get_rank(), peer)) if reason is None else DivergenceError(reason)


def loss_of(rank: int, peer: int | None) -> str:
    """The message of ``rank`` about a lost connection; ``peer`` is the other rank, if it is known."""
    other, its = ("another rank", "the others' logs") if peer is None else (f"rank {peer}", "that rank's log")
    return f"rank {rank} lost its connection to {other}, which was killed or has crashed: see {its}"
