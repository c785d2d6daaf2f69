"""Ranks that must agree: compare what they were given, run a step on one of them, and fail together.

Everything here is collective: every rank calls it, in the same order. At world size 1 nothing is sent.
"""

from __future__ import annotations

import builtins
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from numpy.typing import ArrayLike
from torch import Tensor

from pyg_dist import errors
from pyg_dist.backend import host, out_of_memory, plain_json
from pyg_dist.backend.comm.connection import InCall
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.session.state import current
from pyg_dist.errors import AgreementError, PygDistError, RankFailedError, describe_values

T = TypeVar("T")

# poll() counts milliseconds in 32 bits, which ends at 24 days. Short waits in a loop are no choice: each one that runs
# out makes torch log two warnings.
LONGEST_WAIT = timedelta(days=20)

# Room for any message made for people; torch appends C++ stacks to some of its own.
_MAX_CHARACTERS = 1000


class Control:
    """The group of all ranks that carries CPU tensors and small objects."""

    def __init__(self) -> None:
        self.group = Group()
        self.num_apart = itertools.count()


def group_of_thread(ranks: Sequence[int] | None) -> Group:
    """A new group of some ranks, ``None``: all, for the messages of a thread (:meth:`Group.apart`).

    Not collective; all ranks make such groups in one order.
    """
    control = current().of(Control)
    ranks = control.group.calls.ranks if ranks is None else ranks
    return control.group.apart(ranks, f"thread {next(control.num_apart)}")


def require_equal(what: Mapping[str, str], remedy: str) -> None:
    """Check that every rank passes the same names and values (versions, options, digests). Collective.

    Args:
        what: Short strings by name; for large things a :func:`digest`.
        remedy: What to do about a difference, the end of the error's line.

    Raises:
        AgreementError: On every rank, naming the entries that differ, their values and the ranks that have them.
    """
    found = differences(what)
    if found:
        described = ", ".join(f"{name} (got {describe_values(ranks)})" for name, ranks in found.items())
        raise AgreementError(f"Expected the same on every rank: {described}; {remedy}")


def differences(what: Mapping[str, str]) -> dict[str, dict[str, list[int]]]:
    """Return, for the names whose values are not the same on every rank, the ranks by value. Collective."""
    found = {}
    gathered = _all_gather(dict(what))
    for name in dict.fromkeys(name for given in gathered for name in given):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, given in enumerate(gathered):
            ranks_by_value.setdefault(given.get(name, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            found[name] = ranks_by_value
    return found


def digest(value: Tensor | ArrayLike) -> str:
    """Return the XXH3-128 digest of a tensor, an array, bytes or a string in hexadecimal. Not collective.

    Dtype and shape count for tensors and arrays; contiguous ones in CPU memory are hashed in place, without a copy.
    """
    if isinstance(value, str):
        return str(xxhash.xxh3_128_hexdigest(value.encode()))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return str(xxhash.xxh3_128_hexdigest(value))
    if isinstance(value, Tensor):
        kind = f"{value.dtype}{tuple(value.shape)}"
        content = _bytes_of(value.detach().cpu().contiguous()).numpy()
    else:
        array = np.asarray(value)
        kind = f"{array.dtype}{array.shape}"
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    hasher = xxhash.xxh3_128(kind.encode())
    hasher.update(content.data)
    return str(hasher.hexdigest())


def on_main(function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and return its result on every rank: a tensor, on the CPU, or what JSON says of plain
    values (:mod:`~pyg_dist.backend.plain_json`). Collective.

    The others wait for rank 0 asleep and for as long as it takes; the collective timeout starts when it is done. An
    exception of ``function`` is raised on every rank with its message, and with its type if it is one of Python's or of
    this package's (else a RankFailedError).
    """
    session = current()
    if session.store is None:
        return _on_host(function())  # type: ignore[no-any-return]
    group = session.of(Control).group
    tag = group.calls.next("a result of rank 0")
    key = f"on_main/{next(session.num_results)}/{tag}"
    if session.rank == 0:
        try:
            with out_of_memory.explained():
                result = _on_host(function())
            told = [result.dtype, tuple(result.shape)] if isinstance(result, Tensor) else (result,)
        except BaseException as error:
            session.store.set(key, plain_json.to_bytes(_described(error, session.rank)).decode())
            raise
        session.store.set(key, plain_json.to_bytes(told).decode())
    else:
        with InCall(group.calls, (0,)):
            session.store.wait([key], LONGEST_WAIT)
        told = plain_json.from_bytes(session.store.get(key))
        if isinstance(told, dict):
            raise _rebuilt(**told)
        result = told[0] if isinstance(told, tuple) else host.empty(told[1], dtype=told[0])
    if isinstance(result, Tensor):
        group.broadcast_(_bytes_of(result))
    return result  # type: ignore[no-any-return]


def _on_host(result: Any) -> Any:
    return result.detach().cpu().contiguous() if isinstance(result, Tensor) else result


def raise_together(error: Exception | None) -> None:
    """Raise on every rank if any rank passes an error, so that none is left waiting for one that stopped. Collective.

    Costs one small all-reduce when all is well.

    Raises:
        Exception: This rank's own ``error``.
        RankFailedError: On a rank without an error of its own, naming the first rank that has one and its message.
    """
    session = current()
    if session.store is None:
        if error is not None:
            raise error
        return
    if session.of(Control).group.all_true(error is None):
        return
    lines = _all_gather(None if error is None else one_line(error))
    if error is not None:
        raise error
    failed = [rank for rank, line in enumerate(lines) if line is not None]
    raise RankFailedError(f"Rank {failed[0]} failed: {lines[failed[0]]}")


@contextmanager
def raised_on_all_ranks(kinds: tuple[type[Exception], ...] = (ValueError, OSError, ImportError)) -> Iterator[None]:
    """Raise on all ranks the error that one of them finds in an input, an option or a file. Collective."""
    error: Exception | None = None
    try:
        yield
    except kinds as caught:
        error = caught
    raise_together(error)


def one_line(error: BaseException) -> str:
    """Return ``error`` as ``Type: message`` without line breaks, cut where it is very long. Not collective."""
    words = " ".join(str(error).split())
    message = words if len(words) <= _MAX_CHARACTERS else f"{words[:_MAX_CHARACTERS]} ..."
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _described(error: BaseException, rank: int) -> dict[str, Any]:
    """The arguments by which :func:`_rebuilt` makes ``error``, one of Python's or ours; else a RankFailedError."""
    suffix = error.suffix if isinstance(error, PygDistError) else ""
    args = [error.message] if isinstance(error, PygDistError) else list(error.args)
    told = {"kind": type(error).__name__, "args": args, "suffix": suffix}
    try:
        rebuilt = _rebuilt(**plain_json.from_bytes(plain_json.to_bytes(told)))
        if isinstance(error, Exception) and type(rebuilt) is type(error) and str(rebuilt) == str(error):
            return told
    except Exception:  # whatever a foreign exception's __init__ raises
        pass
    failed = RankFailedError(f"Rank {rank} failed: {one_line(error)}")
    return {"kind": "RankFailedError", "args": [failed.message], "suffix": failed.suffix}


def _rebuilt(kind: str, args: list[object], suffix: str) -> Exception:
    known = getattr(errors, kind, None) or getattr(builtins, kind)
    if not issubclass(known, Exception):
        raise TypeError(f"{kind} is no exception")
    error: Exception = known(*args)
    if isinstance(error, PygDistError):
        error.suffix = suffix
    return error


def _all_gather(value: object) -> list[Any]:
    session = current()
    if session.store is None:
        return [value]
    return [json.loads(content) for content in session.of(Control).group.gather_bytes(json.dumps(value).encode())]


def _bytes_of(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)  # empty: any strides
