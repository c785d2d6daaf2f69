"""An allocation that fails, in one line: how many bytes, at which line and layer, and what the plan expects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pyg_dist import errors
from pyg_dist.backend.comm.calls import users_line
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.errors import OutOfMemoryError

# Of torch on the CPU ("you tried to allocate 80 bytes"), on a GPU and of NumPy ("Unable to allocate 1.50 GiB").
_ASKED = re.compile(r"(?:tried|unable) to allocate ([\d.]+) (bytes|[KMGTPE]iB)", re.IGNORECASE)
# What is left of torch's message behind its stable ABI, and what C++ says of itself.
_NO_NUMBER = re.compile(r"aten::(?:new_)?(?:empty|zeros).*API call failed|bad_alloc", re.DOTALL)

_BACKWARD = " (in a backward pass)"

_phases: list[str] = []
_autograd: Any = torch.autograd
_run_backward = _autograd._engine_run_backward


def _nothing() -> str:
    return ""


_estimate: Callable[[], str] = _nothing


def set_estimate(estimate: Callable[[], str]) -> None:
    """Let ``estimate()`` say what the plan expects, a clause, or nothing. Not collective."""
    global _estimate
    _estimate = estimate


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Explain what fails in this part of a set-up, for which there is no layer. Not collective."""
    _phases.append(name)
    try:
        with explained():
            yield
    finally:
        _phases.pop()


@contextmanager
def explained() -> Iterator[None]:
    """:func:`explain` what fails in this block. Not collective."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        explain(error)
        raise


def watch_backward(is_watched: bool) -> None:
    """Explain what fails in the engine's own functions, too, or no longer: no Python runs there. Not collective.

    What fails in a graph that has no function of this package is somebody else's.
    """
    _autograd._engine_run_backward = _explained_backward if is_watched else _run_backward


def _explained_backward(outputs: Any, *args: Any, **options: Any) -> Any:
    try:
        return _run_backward(outputs, *args, **options)
    except (RuntimeError, MemoryError) as error:
        if _has_own_function(outputs):
            explain(error, _BACKWARD)
        raise


def _has_own_function(outputs: Any) -> bool:
    """Whether a function of this package is in the graph behind ``outputs``, tensors or edges of the graph."""
    nodes = [getattr(output, "node", None) or output.grad_fn for output in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if issubclass(getattr(node, "_forward_cls", object), LocalFunction):
            return True
        following = {inner for inner, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        nodes += following
    return False


def explain(error: RuntimeError | MemoryError, where: str = "") -> None:
    """Nothing, unless ``error`` says that an allocation has failed. Not collective.

    Args:
        error: any.
        where: it came from, a clause; empty: what runs.

    Raises:
        OutOfMemoryError: It does.
    """
    text = str(error)
    asked = _ASKED.search(text)
    if isinstance(error, OutOfMemoryError) or not (asked or _NO_NUMBER.search(text) or type(error) is MemoryError):
        return
    size = f"{_num_bytes(*asked.groups()) / 2**20:,.1f} MiB" if asked else "a block of memory"
    line = users_line()
    expected, remedy = _estimate(), "take more ranks, narrower layers or mini-batches (pyg_dist.loader)"
    if _phases:  # there is no plan yet
        expected = ""
        remedy = "write a store (python -m pyg_dist partition), of which each rank reads its own part"
    raise OutOfMemoryError(
        f"Out of memory: {size} asked for{f' at {line}' if line else ''}{where or _where()}"
        f"{f', {expected}' if expected else ''}: {remedy}"
    ) from None


def _num_bytes(number: str, unit: str) -> float:
    return float(number.rstrip(".")) * (1 if unit == "bytes" else 1024 ** (" KMGTPE".index(unit[0].upper())))


def _where() -> str:
    if _phases:
        return f" (in the set-up: {_phases[-1]})"
    if torch._C._current_graph_task_id() != -1:
        return _BACKWARD
    return errors.where()
