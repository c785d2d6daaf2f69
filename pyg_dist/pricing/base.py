"""The interface of both layouts' plans, their printed forms, and text no wider than a terminal."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price, memory_range


class DistributionPlan(ABC):
    """The plan of one :class:`~pyg_dist.DistributedData`, equal on every rank. Nothing here is collective.

    A ``model`` of None is the one that the plan was made for, or assumes; a ``machine`` of None is the one that it was
    priced with, or the constants measured here.

    Attributes:
        layout: ``"halo"`` or ``"grid"``.
        hash: digest of all that the plan depends on; equal plans have equal hashes.
        parts: the owner of each node, ``[N]`` integers, where there are parts: in ``data.plan`` on rank 0 only.
    """

    layout: str
    hash: str
    parts: Tensor | None = None

    @property
    @abstractmethod
    def ranks(self) -> int:
        """Number of ranks."""

    @property
    @abstractmethod
    def nodes(self) -> list[int]:
        """Rows of x by rank."""

    @property
    @abstractmethod
    def messages(self) -> int:
        """Messages, all ranks together: of one aggregation (halo) or of a training step (grid)."""

    @abstractmethod
    def halo_bytes(self, width: int) -> int:
        """Bytes sent in one aggregation of ``width`` columns, forward, all ranks together."""

    @abstractmethod
    def memory_bytes(self, model: Model | None = None) -> list[int]:
        """An estimate of the memory for training, by rank."""

    @abstractmethod
    def price(self, model: Model | None = None, machine: Machine | None = None) -> Price:
        """The predicted time of a training step on the slowest rank."""

    @abstractmethod
    def assumed_model(self) -> Model:
        """The model that is priced where none is named."""

    @abstractmethod
    def plot(self, path: str | Path, width: int = 256) -> None:
        """Draw the plan (needs matplotlib); the suffix (.png, .svg, .pdf) chooses the format."""

    def describe_memory(self) -> str:
        """:meth:`memory_bytes` of the assumed model, a clause."""
        return f"{memory_range(self.memory_bytes())} a rank for a {self.assumed_model()}"

    def to_dict(
        self, widths: Sequence[int] = (), machine: Machine | None = None, model: Model | None = None
    ) -> dict[str, object]:
        """Plain numbers for programs; ``bytes`` is by width, of one aggregation. Seconds and memory are ``model``'s."""
        machine = self._machine(machine)
        return {
            "ranks": self.ranks,
            "layout": self.layout,
            "hash": self.hash,
            "nodes": self.nodes,
            "messages": self.messages,
            "bytes": {str(width): self.halo_bytes(width) for width in widths},
            "memory_bytes": self.memory_bytes(model),
            "predicted_seconds": self.price(model, machine).seconds,
            **self._numbers(widths, machine),
        }

    def __str__(self) -> str:
        """:meth:`describe`, for ``print(data.plan)``."""
        return self.describe()

    def describe(self, widths: Sequence[int] = (), machine: Machine | None = None, model: Model | None = None) -> str:
        """Tables of nodes, edges and messages by rank, and the predicted time of a training step of ``model``."""
        machine, priced = self._machine(machine), self._described_model(model)
        lines = [self._title(), *self._table(machine)]
        if priced is not None:
            lines.append(f"predicted for a {priced}: {self.price(model, machine)} a step; constants: {machine.source}")
            lines.append(f"memory of a rank, about: {memory_range(self.memory_bytes(model))}")
        return fold("\n".join([*lines, *(f"width {w}: {self._traffic(w, machine)}" for w in widths)]))

    @abstractmethod
    def _machine(self, machine: Machine | None) -> Machine:
        """``machine``, or the default for None."""

    def _described_model(self, model: Model | None) -> Model | None:
        """The model whose price is printed; None: none."""
        return model

    @abstractmethod
    def _numbers(self, widths: Sequence[int], machine: Machine) -> dict[str, object]:
        """Entries of :meth:`to_dict` that only this layout has."""

    @abstractmethod
    def _title(self) -> str:
        """The first line."""

    @abstractmethod
    def _table(self, machine: Machine) -> list[str]:
        """Lines about ranks and their messages."""

    def _traffic(self, width: int, machine: Machine) -> str:
        """Bytes of ``width`` columns, in words."""
        return f"{self.halo_bytes(width):,} bytes per aggregation"


def imbalance(values: Sequence[int]) -> float:
    """Largest over mean: 1.0 is even, or there is nothing."""
    return max(values) * len(values) / sum(values) if sum(values) else 1.0


T = TypeVar("T")
WIDTH = 120


def fold(text: str) -> str:
    """Break lines that are too wide between words; continued lines are indented."""
    return "\n".join(
        line if len(line) <= WIDTH else textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False)
        for line in text.split("\n")
    )


def columns(rows: Sequence[T], *columns: tuple[str, Callable[[T], str]], left: Sequence[int] = ()) -> list[str]:
    """A table with a line for each of ``rows``; a column is a header and a function that gives the cell of a row."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    return aligned([[header for header, _ in columns], *cells], left)


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int] = (), elastic: int | None = None) -> list[str]:
    """A table with aligned columns, those of ``left`` to the left; the ``elastic`` one is cut if lines are too wide."""
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    if elastic is not None:
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths[elastic] = max(widths[elastic] - max(excess, 0), 8)
        lines = [[_cut(c, widths[k]) if k == elastic else c for k, c in enumerate(line)] for line in lines]
    return [
        "  ".join(c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True)))
        .rstrip()
        for line in lines
    ]  # fmt: skip


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
