"""A solver that fails, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyg_dist.errors import OptionError


@contextmanager
def explained_failure(solver: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise what a solver raises as one line with its name. Not collective.

    Args:
        solver: its name.
        kinds: of exceptions that it has beside RuntimeError and MemoryError.

    Raises:
        OptionError: It fails.
    """
    caught: tuple[type[Exception], ...] = (RuntimeError, MemoryError, *kinds)
    try:
        yield
    except caught as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OptionError(f"Expected {solver} to find parts (got: {reason}): choose another partition") from error
