"""GCN norm ``D^-1/2 (A + loops) D^-1/2``, for every layout: ``D_ii = sum_j (A + loops)_ij`` (Kipf and Welling, 2017).

Constant weights make two scales for each node, :func:`gcn_scales`. Weights that learn make a product of products,
:func:`gcn_product`, since the degree depends on them, too. A conv that needs the weight of each edge gets
``scale[source] * weight * scale[target]`` (``pyg_dist/conv/graph_functions.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.ops.memory import trim_after
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.sharding import lasting


def inverse_sqrt_degree(degree: Tensor) -> Tensor:
    """``degree^-1/2``, zero where the degree is zero, as PyG's ``gcn_norm`` has it."""
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0.0)


def mask_non_sources(scale: Tensor, is_source: Tensor) -> Tensor:
    """``scale``, zero for nodes that are no source: no sum needs theirs, and NaN there would be their gradient.

    Degrees are negative where weights are, and their roots NaN.

    Shapes: scale ``[n, ...]``; is_source bool ``[n]``.
    """
    return scale.masked_fill(~is_source.view(-1, *[1] * (scale.dim() - 1)), 0.0)


def gcn_scales(
    degree: Tensor, at_columns: Callable[[Tensor], Tensor], is_source: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The scales of a tile's rows and columns.

    ``degree`` is that of the rows' nodes, loops included; ``at_columns`` brings values to where the columns need them;
    ``is_source``: whether a column has an entry, bool; ``None``: every one has.
    """
    scale = inverse_sqrt_degree(degree)
    of_columns = at_columns(scale)
    return scale, of_columns if is_source is None else mask_non_sources(of_columns, is_source)


class LearnedScales:
    """``s = (A_w 1)^-1/2`` for weights that learn, differentiable by them.

    One for all products of an operator, which holds for one forward pass.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[torch.dtype, bool], tuple[object, object]] = {}

    def get(self, dtype: torch.dtype, degree: Callable[[], Any], is_source: Tensor | None) -> tuple[Any, Any]:
        """The scales of rows and of columns (collective at the first use, if ``degree`` is).

        ``degree`` gives ``A_w 1``, loops included, ``[N, 1]``; ``is_source``: whether a node has an out-edge; ``None``:
        every one has.
        """
        key = dtype, torch.is_grad_enabled()
        if key not in self._known:
            scale = inverse_sqrt_degree(degree())
            self._known[key] = scale, scale if is_source is None else mask_non_sources(scale, is_source)
        return self._known[key]


def gcn_product(x: Any, scales: tuple[Any, Any], multiply: Callable[[Any], object]) -> Any:
    """``y = s * A_w (s * x)``; differentiable by x and by the weights (collective).

    ``scales`` are s of rows and of columns; ``multiply`` is ``A_w``, loops included, times a node tensor (collective).
    """
    of_rows, of_columns = scales
    return multiply(x * of_columns.to(x.dtype)) * of_rows.to(x.dtype)


def put_loop_values(filled: Tensor, node: Tensor, values: Tensor, rule: LoopRule) -> Tensor:
    """The values of the added loops, given those of loops that exist; differentiable.

    Of several loops of a node the last one counts, and the gradient goes to all, as by PyG's ``index_put`` on a CPU. On
    a GPU that takes any of them, so all are given the last one's value.

    Shapes: filled ``[n, ...]``, the values of new loops; node int64 ``[l]``, whose loop each of ``values`` is, in PyG's
    order of edges; values ``[l, ...]``.
    """
    if rule == "replace":
        return filled
    if rule == "add":
        return filled.index_put((node,), values, accumulate=True)
    order = torch.arange(node.numel(), device=node.device)
    last = order.new_zeros(filled.shape[0]).scatter_reduce(0, node, order, "amax").index_select(0, node)
    return filled.index_put((node,), values.detach().index_select(0, last) + (values - values.detach()))


Entries = tuple[Tensor, Tensor, Tensor]
"""Row, column and place in edge storage of each entry of a pattern; those of a row in PyG's order of edges."""


@dataclass(eq=False)
class SelfLoops:
    """A pattern with and without its self loops. Patterns are made when first used, and kept. Not collective."""

    entries: Callable[[], Entries]  # of the pattern, which need not be kept
    shape: tuple[int, int]  # of the pattern, ``(n, m)``
    loop_row: Tensor  # rows that have their own node among the columns, int64 ``[k]``
    loop_col: Tensor  # those columns
    rule: LoopRule  # what becomes of loops that exist
    num_edges: int  # of the edge storage; the values of added loops lie behind it, in the order of ``loop_row``
    device: torch.device  # where patterns and values are wanted; all else is on the host

    def _is_loop(self, row: Tensor, col: Tensor) -> Tensor:
        own_col = host.full((self.shape[0],), -1, dtype=torch.int32)
        own_col[self.loop_row] = self.loop_col.to(torch.int32)
        return own_col.index_select(0, row) == col

    def _others(self) -> Entries:
        """The entries beside which loops are added."""
        row, col, edge = self.entries()
        if self.rule == "add":
            return row, col, edge
        is_loop = self._is_loop(row, col)
        if not is_loop.any():
            return row, col, edge
        kept = (~is_loop).nonzero().view(-1)
        return row.index_select(0, kept), col.index_select(0, kept), edge.index_select(0, kept)

    def _with_loops(self) -> Entries:
        row, col, edge = self._others()
        # One after another: where a rank has most of the graph, this is the most memory that it ever needs.
        row = torch.cat([row, self.loop_row.to(row.dtype)])
        col = torch.cat([col, self.loop_col.to(col.dtype)])
        last = self.num_edges + self.loop_row.numel()
        return row, col, torch.cat([edge, host.arange(self.num_edges, last, dtype=host.integers_to(last))])

    @cached_property
    @lasting
    def _present(self) -> tuple[Tensor, Tensor]:
        """For every loop that exists, its number among the added ones, and its place in edge storage."""
        row, col, edge = self.entries()
        number = host.full((self.shape[0],), -1, dtype=torch.int64)
        number[self.loop_row] = host.arange(self.loop_row.numel())
        entry = self._is_loop(row, col).nonzero().view(-1)
        return number[row[entry].long()].to(self.device), edge[entry].long().to(self.device)

    @cached_property
    @lasting
    def others(self) -> CSR:
        """The edges beside which one loop a node is added."""
        return self._made(self._others)

    @cached_property
    @lasting
    def added(self) -> CSR:
        """The same edges with the added loops."""
        return self._made(self._with_loops)

    def _made(self, entries: Callable[[], Entries]) -> CSR:
        csr = CSR.from_edges(*entries(), *self.shape).to(self.device)
        trim_after(csr.num_entries)
        return csr

    def weight(self, values: Tensor, loop_value: float) -> Tensor:
        """The weight of each added loop: its node's own where the rule keeps one, else ``loop_value``; differentiable.

        Shapes: values ``[e]``, of the edges; output ``[k]``.
        """
        filled = values.new_full((self.loop_row.numel(),), loop_value)
        if self.rule != "remaining":
            return filled
        number, edge = self._present
        return put_loop_values(filled, number, values[edge], self.rule)

    def with_loops(self, values: Tensor | None, loop_value: float, dtype: torch.dtype) -> Tensor | None:
        """The values of :attr:`added`'s edges and loops; ``None`` where all are one.

        Shapes: values ``[e]``, or ``None``: ones; output ``[e + k]``.
        """
        if values is None and loop_value == 1.0:
            return None
        of_edges = torch.ones(self.num_edges, dtype=dtype, device=self.device) if values is None else values
        return torch.cat([of_edges, self.weight(of_edges, loop_value)])
