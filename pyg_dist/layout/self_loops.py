"""The one rule for self loops that a norm adds: both layouts' patterns have a loop for each node through here."""

from __future__ import annotations

from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.tensor.sharding import lasting

LoopRule = Literal["remaining", "add", "replace"]
"""What adding self loops means for loops that exist: kept in place of the new one (PyG on ``edge_index``), kept
beside it (PyG on sparse tensors), or replaced by it (``SparseTensor``)."""


def put_loop_values(filled: Tensor, node: Tensor, values: Tensor, rule: LoopRule) -> Tensor:
    """The values of the added loops, given those of loops that exist; differentiable.

    Of several loops of a node the last one counts, and the gradient goes to all: ``index_put`` in PyG does both.

    Shapes:
        - filled: ``[n, ...]``, the values of new loops
        - node: int64 ``[l]``, whose loop each of ``values`` is, in PyG's order of edges
        - values: ``[l, ...]``
    """
    return filled if rule == "replace" else filled.index_put((node,), values, accumulate=rule == "add")


class SelfLoops:
    """A pattern with and without its self loops. Patterns are made when first used, and kept. Not collective.

    Args:
        pattern: edges by target, ``[n, m]``.
        loop_row: rows that have their own node among the columns, int64 ``[k]``.
        loop_col: those columns, int64 ``[k]``.
        rule: what becomes of loops that exist.
        num_edges: of the edge storage; the values of added loops lie behind it, in the order of ``loop_row``.
    """

    def __init__(self, pattern: CSR, loop_row: Tensor, loop_col: Tensor, rule: LoopRule, num_edges: int) -> None:
        self._pattern = pattern
        self._loop_row = loop_row
        self._loop_col = loop_col
        self._rule: LoopRule = rule
        self._num_edges = num_edges

    def _is_loop(self) -> Tensor:
        """Which entries of the pattern are loops, bool."""
        own_col = torch.full((self._pattern.num_rows,), -1, dtype=torch.int64, device=self._loop_row.device)
        own_col[self._loop_row] = self._loop_col
        return own_col[self._pattern.row()] == self._pattern.col

    @cached_property
    @lasting
    def _present(self) -> tuple[Tensor, Tensor]:
        """Of every loop that exists: its number among the added ones, and its place in edge storage."""
        number = torch.full((self._pattern.num_rows,), -1, dtype=torch.int64, device=self._loop_row.device)
        number[self._loop_row] = torch.arange(self._loop_row.numel(), device=number.device)
        entry = self._is_loop().nonzero().view(-1)
        return number[self._pattern.row()[entry]], self._pattern.edge[entry]

    def _entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Row, column and edge of the entries beside which loops are added."""
        pattern = self._pattern
        entries = pattern.row(), pattern.col, pattern.edge
        if self._rule == "add":
            return entries
        kept = (~self._is_loop()).nonzero().view(-1)
        return entries[0][kept], entries[1][kept], entries[2][kept]

    @cached_property
    @lasting
    def others(self) -> CSR:
        """The edges beside which one loop a node is added."""
        if self._rule == "add":
            return self._pattern
        return CSR.from_edges(*self._entries(), self._pattern.num_rows, self._pattern.num_cols)

    @cached_property
    @lasting
    def added(self) -> CSR:
        """The same edges with the added loops."""
        number = torch.arange(self._loop_row.numel(), device=self._loop_row.device)
        row, col, edge = self._entries()
        return CSR.from_edges(
            torch.cat([row, self._loop_row]),
            torch.cat([col, self._loop_col.to(torch.int32)]),
            torch.cat([edge, number + self._num_edges]),
            self._pattern.num_rows,
            self._pattern.num_cols,
        )

    def weight(self, values: Tensor, loop_value: float) -> Tensor:
        """The weight of each added loop: its node's own where the rule keeps one, else ``loop_value``; differentiable.

        Shapes:
            - values: ``[e]``, of the edges
            - output: ``[k]``
        """
        filled = values.new_full((self._loop_row.numel(),), loop_value)
        if self._rule != "remaining":
            return filled
        number, edge = self._present
        return put_loop_values(filled, number, values[edge], self._rule)
