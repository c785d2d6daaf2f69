"""An allocation that fails, in one line: how many bytes, at which line and layer, and what the plan expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from pyg_dist import errors
from pyg_dist.backend.comm.checks.calls import users_line
from pyg_dist.backend.session.state import current
from pyg_dist.errors import OutOfMemoryError

# Of torch on the CPU ("you tried to allocate 80 bytes"), on a GPU and of NumPy ("Unable to allocate 1.50 GiB").
_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (bytes|[KMGTPE]iB)", re.IGNORECASE)
# What is left of torch's message behind its stable ABI, and what C++ says of itself.
_NO_NUMBER = re.compile(r"aten::(?:new_)?(?:empty|zeros).*API call failed|bad_alloc", re.DOTALL)

IN_BACKWARD = " (in a backward pass)"

_estimate: Callable[[], str] = str


def set_estimate(estimate: Callable[[], str]) -> None:
    """Let ``estimate()`` say what the plan expects, a clause, or nothing. Not collective."""
    global _estimate
    _estimate = estimate


@contextmanager
def explained() -> Iterator[None]:
    """:func:`explain` what fails in this block. Not collective."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        explain(error)
        raise


def explain(error: RuntimeError | MemoryError, where: str = "") -> None:
    """Raise an OutOfMemoryError if ``error`` says that an allocation has failed. Not collective.

    ``where`` it came from is a clause; empty: what runs.
    """
    text = str(error)
    asked = _ASKED.search(text)
    if isinstance(error, OutOfMemoryError) or not (asked or _NO_NUMBER.search(text) or type(error) is MemoryError):
        return
    size = f"{_num_bytes(*asked.groups()) / 2**20:,.1f} MiB" if asked else "a block of memory"
    line = users_line()
    expected, remedy = _estimate(), "take more ranks, narrower layers or mini-batches (pyg_dist.loader)"
    if current().steps:  # there is no plan yet
        expected = ""
        remedy = "write a store (python -m pyg_dist partition), of which each rank reads its own part"
    raise OutOfMemoryError(
        f"Out of memory: {size} asked for{f' at {line}' if line else ''}{where or _where()}"
        f"{f', {expected}' if expected else ''}: {remedy}"
    ) from None


def _num_bytes(number: str, unit: str) -> float:
    return float(number.rstrip(".")) * (1 if unit == "bytes" else 1024 ** (" KMGTPE".index(unit[0].upper())))


def _where() -> str:
    if current().steps:
        return f" (in the set-up: {current().steps[-1]})"
    if torch._C._current_graph_task_id() != -1:
        return IN_BACKWARD
    return errors.where()
