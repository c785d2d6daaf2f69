"""Connections to other ranks that are gone: what the transport says of them names no rank, so it is said anew here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from pyg_dist.errors import ConnectionLostError


def wait(work: dist.Work, peer: int | None = None) -> None:
    """``work.wait()``; ``peer`` is the only other rank that takes part in it, if there is one.

    Raises:
        ConnectionLostError: The connection to a rank is gone.
    """
    with connected(peer):
        work.wait()


@contextlib.contextmanager
def connected(peer: int | None = None) -> Iterator[None]:
    """Within it, the transport's errors about closed connections become ours. See :func:`wait`."""
    try:
        yield
    except RuntimeError as error:
        if not is_lost(error):
            raise
        raise ConnectionLostError(loss_of(dist.get_rank(), peer)) from error


def is_lost(error: BaseException) -> bool:
    """Whether this is the transport's error about a closed connection."""
    return any(words in str(error) for words in ("closed by peer", "reset by peer", "Broken pipe"))


def loss_of(rank: int, peer: int | None) -> str:
    """What ``rank`` says of it; ``peer`` is the other rank, if it is known."""
    other, its = ("another rank", "the others' logs") if peer is None else (f"rank {peer}", "that rank's log")
    return f"rank {rank} lost its connection to {other}, which was killed or has crashed: see {its}"
