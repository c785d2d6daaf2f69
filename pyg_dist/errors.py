"""Typed errors. Each is one line: what was expected, what came, on which rank, and what to do.

All are :class:`ValueError`, so that a script can catch all with one clause. This module imports nothing of the package;
:mod:`pyg_dist.backend.session.state` tells it the rank of this process (:func:`set_rank`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

# How many different values an error lists: it must stay readable if each of 512 ranks has another one.
_MAX_VALUES = 4

_rank: Callable[[], str] = str
_where: Callable[[], str] = str
_whole_graph: Callable[[], str] = str


def set_rank(rank: Callable[[], str]) -> None:
    """Let errors end with the result of ``rank()`` at their creation: the rank, or nothing."""
    global _rank
    _rank = rank


def set_locator(where: Callable[[], str], whole_graph: Callable[[], str]) -> None:
    """Let errors about row tensors name the layer that runs.

    ``where()`` is a clause that names the layer, or nothing. ``whole_graph()`` is a message that replaces the error's
    while PyG code runs that needs a whole graph, or nothing.
    """
    global _where, _whole_graph
    _where, _whole_graph = where, whole_graph


def where() -> str:
    """A clause for the end of a message that names the layer that runs, or nothing."""
    return _where()


class PygDistError(ValueError):
    """Base of every error that pyg_dist raises on purpose.

    ``str(error)`` ends with ``[rank r of w]`` when there is more than one rank. The rank is the one that *created* the
    error, and stays so when the error travels to another process; ``error.message`` is the bare line.

    Example:
        >>> try:
        ...     DistributedData(KarateClub()[0], layout="rows")
        ... except errors.PygDistError as error:
        ...     print(type(error).__name__, isinstance(error, ValueError))
        OptionError True
    """

    def __init__(self, message: str) -> None:
        """Take the one-line ``message``, without the rank."""
        super().__init__(message)
        self.message = message
        self.suffix = _rank()

    def __str__(self) -> str:
        return self.message + self.suffix


class LaunchError(PygDistError):
    """The launcher's environment contradicts itself or lacks what is needed, or ``init`` was called in two ways.

    Example:
        >>> from datetime import timedelta
        >>> pyg_dist.init(timeout=timedelta(minutes=1))  # after a call with another timeout
        Traceback (most recent call last):
        pyg_dist.errors.LaunchError: Expected ...
    """


class OptionError(PygDistError):
    """An argument or a ``PYG_DIST_*`` setting is not one of the values allowed.

    Example:
        >>> DistributedData(KarateClub()[0], bits=3)
        Traceback (most recent call last):
        pyg_dist.errors.OptionError: Expected ...
    """


class DataError(PygDistError):
    """The input graph, its attributes, a mask, an index or a partition vector is not valid.

    Example:
        >>> from torch_geometric.data import Data
        >>> DistributedData(Data(x=torch.ones(2, 1), edge_index=torch.tensor([[0], [5]])))
        Traceback (most recent call last):
        pyg_dist.errors.DataError: Expected ...
    """


class StoreError(DataError):
    """A store or a checkpoint on disk is missing, damaged, incomplete, of another version, or in the way of a new one.

    Example:
        >>> DistributedData.open("no-such-folder")
        Traceback (most recent call last):
        pyg_dist.errors.StoreError: Expected ...
    """


class NotFiniteError(DataError):
    """A row that was to be packed has NaN, an infinity or a range of values that is too large for the format.

    Attributes:
        row: its number among the rows to pack.
        got: its contents, in words.
        is_finite: whether all values are finite, so that their range is too large.
    """

    def __init__(self, message: str, row: int = -1, got: str = "", is_finite: bool = False) -> None:
        """Take the one-line ``message`` and the attributes."""
        super().__init__(message)
        self.row, self.got, self.is_finite = row, got, is_finite


class AgreementError(PygDistError):
    """The ranks were given different data, options, versions or values of a tensor; raised on every rank.

    Also raised for a saved plan that was made for another graph, number of ranks or exchange.

    Example:
        >>> plan = Plan.of(KarateClub()[0].edge_index, torch.arange(34) % 4, 4)
        >>> DistributedData(KarateClub()[0], partition=plan)  # one rank
        Traceback (most recent call last):
        pyg_dist.errors.AgreementError: Expected ...
    """


class _LayerError(PygDistError):
    """An error in the code of a layer; the message ends with the layer's name."""

    def __init__(self, message: str) -> None:
        """Take the one-line ``message``, without the layer and the rank."""
        super().__init__(_whole_graph() or message + _where())


class MixedRowsError(_LayerError):
    """A function would have mixed rows of a tensor whose rows are spread over several ranks.

    Example:
        >>> data.x.reshape(2, -1)
        Traceback (most recent call last):
        pyg_dist.errors.MixedRowsError: ...
    """


class LayoutMismatchError(_LayerError):
    """Two distributed tensors have different shardings where one is needed: another graph, selection or layout.

    Example:
        >>> data.x[data.y == 0] + data.x[data.y == 1]
        Traceback (most recent call last):
        pyg_dist.errors.LayoutMismatchError: ...
    """


class UnsupportedError(PygDistError):
    """The request is meaningful, but this version does not do it; the message says what to do instead.

    Example:
        >>> from torch_geometric.nn import WLConv
        >>> pyg_dist.distribute(WLConv())
        Traceback (most recent call last):
        pyg_dist.errors.UnsupportedError: ...
    """


class OutOfMemoryError(PygDistError, MemoryError, RuntimeError):
    """An allocation has failed; the message has its size, the line, the layer and the plan's estimate."""


class RankFailedError(PygDistError):
    """Another rank failed; the message names that rank and carries its error."""


class ConnectionLostError(RankFailedError):
    """The connection to another rank is lost: it was killed or has crashed. The message names it where known."""


class DivergenceError(PygDistError):
    """The ranks make different calls, or one has ended while others wait for it; the message names their lines."""


class MissingPackageError(PygDistError, ImportError):
    """An optional package is needed and not installed; the message has the pip command."""


class LibraryNotBuiltError(PygDistError, ImportError):
    """The native library is missing or cannot be loaded; the message says how to build it."""


DAMAGED = (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError)
"""The errors that code raises when it reads a damaged file."""


@contextmanager
def refusing(raised: type[PygDistError], expected: str, remedy: str, *kinds: type[Exception]) -> Iterator[None]:
    """Context that turns errors of ``kinds`` into ``raised``, as one line: "Expected {expected} (got ...): {remedy}".

    Errors of the package stay as they are.
    """
    try:
        yield
    except kinds as error:
        if isinstance(error, PygDistError):
            raise
        got = "no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise raised(f"Expected {expected} (got {got}): {remedy}") from error


def describe_ranks(ranks: list[int]) -> str:
    """Describe ascending ranks: [0, 1, 2, 5] is "ranks 0-2, 5"."""
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def describe_values(ranks_by_value: Mapping[str, list[int]]) -> str:
    """Describe the ranks of each value: "2.10.0 on ranks 0-2, 2.13.0 on rank 3"; long lists are cut."""
    shown = [f"{value} on {describe_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
    if len(shown) > _MAX_VALUES:
        shown[_MAX_VALUES:] = [f"{len(shown) - _MAX_VALUES} other values elsewhere"]
    return ", ".join(shown)
