"""The self loops of a graph in the halo layout: both of their ends are local, so nothing here is collective."""

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


class SelfLoops:
    """A rank's edges with and without their self loops. Patterns are made when first used, and kept.

    Args:
        local: the edges with local sources, ``[n, n]``.
        rule: what becomes of loops that exist.
        num_edges: edges of this rank; the values of added loops lie behind theirs, at ``num_edges + node``.
    """

    def __init__(self, local: CSR, rule: LoopRule, num_edges: int) -> None:
        self._local = local
        self._rule: LoopRule = rule
        self._num_edges = num_edges

    @cached_property
    @lasting
    def _present(self) -> tuple[Tensor, Tensor]:
        """Node and place in edge storage of every self loop; one node's loops in input order."""
        row = self._local.row()
        entry = (row == self._local.col).nonzero().view(-1)
        return row[entry], self._local.edge[entry]

    @cached_property
    @lasting
    def _without(self) -> CSR:
        local, row = self._local, self._local.row()
        kept = (row != local.col).nonzero().view(-1)
        return CSR.from_edges(row[kept], local.col[kept], local.edge[kept], local.num_rows, local.num_cols)

    @property
    def others(self) -> CSR:
        """The edges beside which one loop a node is added."""
        return self._local if self._rule == "add" else self._without

    @cached_property
    @lasting
    def added(self) -> CSR:
        """The same edges with the added loops."""
        others, node = self.others, torch.arange(self._local.num_rows, device=self._local.col.device)
        return CSR.from_edges(
            torch.cat([others.row(), node]),
            torch.cat([others.col, node.to(torch.int32)]),
            torch.cat([others.edge, node + self._num_edges]),
            others.num_rows,
            others.num_cols,
        )

    def weight(self, values: Tensor, loop_value: float) -> Tensor:
        """The weight of each node's added loop: its own where the rule keeps one, else ``loop_value``; differentiable.

        Shapes:
            - values: ``[e]``, of the edges
            - output: ``[n]``
        """
        filled = values.new_full((self._local.num_rows,), loop_value)
        if self._rule != "remaining":
            return filled
        # Of several loops the last one counts, and the gradient goes to all: index_put in PyG does both.
        node, edge = self._present
        return filled.index_put((node,), values[edge])
