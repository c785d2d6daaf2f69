"""Convs whose messages are the sources' rows, or these times a weight: one product with a sparse matrix.

``message`` is called once for each class, with stand-ins for rows and weights; where it returns one of ::

    x_j                       edge_weight.view(-1, 1) * x_j

and the aggregation is a sum or a mean, :func:`native_sum` takes the place of ``propagate``'s steps: no tensor has a row
per edge, and rows travel by the chosen exchange.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import MessagePassing

from pyg_dist.backend import ops
from pyg_dist.conv.inputs import changed_step, flat_weight, require_all_nodes
from pyg_dist.conv.lazy_norm import NormedEdges, NormWeight, made
from pyg_dist.conv.linear_order import NORMS
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import Norm, Operator
from pyg_dist.tensor import EdgeTensor, NodeTensor
from pyg_dist.tensor.functions.reductions import accumulation_dtype


class SumForm(NamedTuple):
    """What messages are.

    Attributes:
        rows: the argument of ``propagate`` that has the sources' rows.
        weight: the one that has the weights of edges; ``None``: there are none.
        needs_weight: whether ``message`` does not take ``None`` for it.
        flattens: whether weights may be ``[E, 1]``.
    """

    rows: str
    weight: str | None = None
    needs_weight: bool = False
    flattens: bool = False


class _Column(NamedTuple):
    """Stands for weights of edges as a column."""

    flattens: bool


class _Weights:
    """Stands for weights of edges."""

    def view(self, *shape: Any) -> _Column:
        if shape not in ((-1, 1), ((-1, 1),), ([-1, 1],)):
            raise NotImplementedError
        return _Column(True)

    reshape = view

    def unsqueeze(self, dim: int) -> _Column:
        if dim not in (-1, 1):
            raise NotImplementedError
        return _Column(False)


@dataclass(frozen=True)
class _Rows:
    """Stands for the sources' rows at edges, times a weight or not."""

    column: _Column | None = None

    def __mul__(self, other: Any) -> Any:
        return _Rows(other) if isinstance(other, _Column) and self.column is None else NotImplemented

    __rmul__ = __mul__


@cache
def sum_form(stock: type[MessagePassing]) -> SumForm | None:
    """What the messages of a class are; ``None`` where they are something else, or not summed as they are."""
    if stock.update is not MessagePassing.update or stock.aggregate is not MessagePassing.aggregate:
        return None
    _, *names = signature(stock.message).parameters
    rows = [name for name in names if name.endswith("_j")]
    others = [name for name in names if not name.endswith(("_i", "_j"))]
    if len(rows) != 1 or len(others) > 1 or len(names) != 1 + len(others):
        return None
    name = rows[0].removesuffix("_j")
    if not others:
        return SumForm(name) if _message(stock, {rows[0]: _Rows()}) == _Rows() else None
    weighted = _message(stock, {rows[0]: _Rows(), others[0]: _Weights()})
    if not isinstance(weighted, _Rows) or weighted.column is None:
        return None
    plain = _message(stock, {rows[0]: _Rows(), others[0]: None})
    return SumForm(name, others[0], plain != _Rows(), weighted.column.flattens)


def _message(stock: Any, given: dict[str, Any]) -> Any:
    """The message of stand-ins; ``None`` where it does anything with them, or with the conv, that these cannot."""
    try:
        return stock.message(None, **given)
    except Exception:  # whatever a function may raise that is called with something else than it was made for
        return None


def is_native(conv: Any, aggregations: Iterable[type] = NORMS) -> bool:
    """Whether the steps of ``conv`` are a sum or mean of weighted rows, neither changed nor hooked.

    Args:
        conv: the conv.
        aggregations: others than sum and mean.
    """
    is_one = type(conv.aggr_module) in aggregations
    known = sum_form(conv.stock) is not None and is_one and conv.decomposed_layers == 1
    return known and changed_step(conv) is None


def needs_operators_only(conv: Any) -> bool:
    """Whether the steps of ``conv`` look at no single edge."""
    return is_native(conv) and conv.stock.edge_update is MessagePassing.edge_update


def native_sum(conv: Any, edges: Edges, given: dict[str, Any]) -> NodeTensor | None:
    """The result of ``propagate``; ``None`` where the conv's own steps have to run (collective).

    Exact, but for a training ``conv`` with ``bits``.
    """
    form = sum_form(conv.stock)
    if form is None or not is_native(conv):
        return None
    x = given.get(form.rows)
    weight = None if form.weight is None else given.get(form.weight)
    if weight is None and form.needs_weight:
        return None
    if isinstance(x, (tuple, list)):
        x, target = x
        if isinstance(target, Tensor) and target is not x:  # which PyG asks for the number of targets
            require_all_nodes(conv.stock.__name__, edges.graph, target.size(0))
    return sum_by(conv, edges, x, weight, NORMS[type(conv.aggr_module)], form.flattens)


def sum_by(conv: Any, edges: Edges, x: Any, weight: Any, norm: Norm, flattens: bool = False) -> NodeTensor | None:
    """Sum or mean of weighted rows; ``None`` where there is no operator for it (collective).

    Args:
        conv: whose sum it is.
        edges: over which.
        x: ``[N, F]``.
        weight: an edge tensor, or the norm's, or ``None`` for ones.
        norm: sum or mean.
        flattens: whether weights may be ``[E, 1]``.
    """
    operator, dtype = operator_of(edges, x, weight, norm, flattens)
    if operator is None:
        return None
    rows: Any = x if x.dtype == dtype else x.to(dtype)
    return edges.graph.aggregate(edges.graph.place(rows), operator, layer=conv)


def operator_of(
    edges: Edges, x: Any, weight: Any, norm: Norm, flattens: bool = False
) -> tuple[Operator | None, torch.dtype]:
    """The matrix of :func:`sum_by` and the dtype of its products; ``None`` where there is none (collective)."""
    if not isinstance(x, NodeTensor) or not edges.graph.owns(x) or x.dim() != 2 or x.dtype not in ops.FLOATS:
        return None, torch.get_default_dtype()
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, _dtype(weight))
    return _operator(edges, norm, weight, flattens, dtype), dtype


def _dtype(weight: Any) -> torch.dtype:
    return weight.lazy.dtype if isinstance(weight, NormWeight) else weight.dtype


def _operator(edges: Edges, norm: Norm, weight: Any, flattens: bool, dtype: torch.dtype) -> Operator | None:
    """The matrix of the sums; ``None`` where weights or edges are others than the graph's (collective)."""
    dtype = accumulation_dtype(dtype)
    if isinstance(weight, NormWeight):
        is_exact = accumulation_dtype(weight.lazy.dtype) == dtype  # else its weights are rounded first
        is_known = is_exact and norm is Norm.SUM and weight.lazy.is_of(edges)
        return weight.lazy.operator(dtype) if is_known else None
    is_normed = isinstance(edges, NormedEdges)  # weights of a batch that were derived from its own norm
    edges = made(edges)
    graph = edges.graph
    if weight is not None:
        is_column = weight.dim() == 1 or (flattens and weight.shape[1:].numel() == 1)
        if not isinstance(weight, EdgeTensor) or weight._sharding is not edges.rows or not is_column:
            return None
        weight = flat_weight(weight)
    if edges.rows is graph.edge_sharding and not is_normed:
        return graph.operator(norm, weight, dtype)
    return graph.operator_over(edges, norm, weight, dtype)
