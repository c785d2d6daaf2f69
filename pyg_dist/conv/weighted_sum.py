"""Convs whose messages are the sources' rows, or these times a weight: one product with a sparse matrix.

``message`` is called once for each class, with stand-ins for rows and weights. If it returns one of ::

    x_j                       edge_weight.view(-1, 1) * x_j

and the aggregation is a sum or a mean, :func:`native_sum` replaces ``propagate``'s steps: no tensor has a row per edge,
and rows are sent by the chosen exchange.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.dense import Linear

from pyg_dist.backend import ops
from pyg_dist.backend.dense import large_tensors
from pyg_dist.backend.session.settings import PROJECT_FIRST
from pyg_dist.conv.fast_paths import NORMS, fast_path, is_hooked
from pyg_dist.conv.inputs import flat_weight, require_all_at
from pyg_dist.conv.lazy_norm import NormedEdges, NormWeight, made
from pyg_dist.graph import caches
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import DistributedGraph, Norm, Operator
from pyg_dist.tensor import EdgeTensor, NodeTensor
from pyg_dist.tensor.functions.layers import sparse_rows
from pyg_dist.tensor.functions.moved_rows import MovedRows
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors
from pyg_dist.tensor.sparse_form import DENSEST


def commutes(lin: torch.nn.Module) -> bool:
    """Whether ``lin`` is a plain ``Linear``: no subclass (adapted, parametrized), no hooks, and the usual forward."""
    return (
        type(lin) is Linear
        and "forward" not in vars(lin)
        and not isinstance(lin.weight, UninitializedParameter)
        and not is_hooked(lin)
    )


def can_project_last(lin: torch.nn.Module, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the map may come after a normalised sum in ``dtype``: if PyG's order has x's dtype throughout."""
    return commutes(lin) and dtype == x.dtype and not torch.is_autocast_enabled(x.device.type)


def project_first(
    lin: Linear, graph: DistributedGraph, x: NodeTensor, operator: Operator, on_tie: bool = False
) -> bool:
    """Whether ``A (x W)`` costs less than ``(A x) W``.

    The cost is the number of columns that are aggregated, forward and backward, whatever the plan or the mesh.
    ``(A x) W`` aggregates F_in columns, and as many backward if x needs a gradient; ``A (x W)`` aggregates F_out, and
    as many backward if x or W needs one. A cached ``A x`` is free. (On a grid with all-reduces the two orders may send
    different amounts at equal widths; this is not counted.) On one rank, where nothing is sent, sparse rows
    (:mod:`~pyg_dist.tensor.sparse_form`) are projected first, since ``A x`` has more entries.

    On a tie the sum comes first, as in PyG's SAGE, so that one rank has PyG's bits. But the gradient of ``W`` needs
    ``A x``, which then is kept beside the root's x. With ``PYG_DIST_PROJECT_FIRST=1`` the linear map comes first on a
    tie: ``dW = x^T (A^T G)`` needs only x, and ``A^T G`` is computed for x's gradient anyway (hypergraph-gcn, eq. 4).
    It comes first, too, at up to twice the columns, where ``A x`` is larger than ``PYG_DIST_REMEMBER_MIB``.
    """
    if x._sharding.is_on_one_rank:
        sparse = sparse_rows(x, lin.weight)
        if sparse is not None:  # A x may have many more elements that are not zero than x
            return sparse.pattern.num_entries + graph.edge_sharding.size <= x.numel() * DENSEST
    if graph.is_cached(x, operator):
        return False
    backward = torch.is_grad_enabled()
    with local_tensors():
        learns = x.requires_grad
    first = lin.in_channels * (1 + (backward and learns))
    second = lin.out_channels * (1 + (backward and (learns or lin.weight.requires_grad)))
    if second >= first and not (second == first and (on_tie or PROJECT_FIRST.value())):
        keeps_sums = backward and lin.weight.requires_grad
        if second > 2 * first or not keeps_sums or caches.fits(x, graph.targets):
            return False
    x._is_reused = True  # in a second call its sums are worth keeping
    return True


def add_into_(out: Tensor, addend: Tensor, alpha: float = 1) -> Tensor:
    """:func:`~pyg_dist.backend.dense.large_tensors.add_into_` of rows and other rows, or a row for all."""
    if type(out) is not NodeTensor:  # tiles prepare operands themselves
        return torch.add(out, addend, alpha=alpha)
    rows = out._sharding
    if not isinstance(addend, RowTensor):
        addend = rows.copy_to_ranks(addend)
    elif addend._sharding is not rows:
        return torch.add(out, addend, alpha=alpha)
    with local_tensors():
        return as_row_tensor_(large_tensors.add_into_(out, addend, alpha), rows)


class SumForm(NamedTuple):
    """The form of a class's messages."""

    rows: str  # the argument of ``propagate`` with the sources' rows
    weight: str | None = None  # the argument with the weights of edges, if there is one
    needs_weight: bool = False  # whether ``message`` does not accept ``None`` for it
    flattens: bool = False  # whether weights may be ``[E, 1]``


class _Column(NamedTuple):
    """Stands for weights of edges as a column."""

    flattens: bool


class _Weights:
    def view(self, *shape: object) -> _Column:
        if shape not in ((-1, 1), ((-1, 1),), ([-1, 1],)):
            raise NotImplementedError  # not the form looked for
        return _Column(True)

    reshape = view

    def unsqueeze(self, dim: int) -> _Column:
        if dim not in (-1, 1):
            raise NotImplementedError  # not the form looked for
        return _Column(False)


@dataclass(frozen=True)
class _Rows:
    """Stands for the sources' rows at edges, times a weight or not."""

    column: _Column | None = None

    def __mul__(self, other: object) -> object:
        return _Rows(other) if isinstance(other, _Column) and self.column is None else NotImplemented

    __rmul__ = __mul__


@cache
def sum_form(stock: type[MessagePassing]) -> SumForm | None:
    """The form of a class's messages; ``None`` for other messages, and with its own ``aggregate`` or ``update``."""
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


def _message(stock: type[MessagePassing], given: dict[str, object]) -> object:
    """The message computed from stand-ins; ``None`` if it does something that they cannot."""
    try:
        return stock.message(None, **given)
    except Exception:  # any, since ``message`` is called with objects that it does not expect
        return None


@fast_path(MessagePassing, step="propagate", code=("edge_update",), of_class=sum_form, takes_batches=True)
@fast_path(MessagePassing, step="propagate", code=(), of_class=sum_form, needs_edges=True, takes_batches=True)
def native_sum(conv: MessagePassing, edges: Edges, given: dict[str, object]) -> object:
    """The sum or mean of weighted rows (collective). Exact, except with ``bits`` in training."""
    form: Any = sum_form(conv.stock)
    x = given.get(form.rows)
    weight = None if form.weight is None else given.get(form.weight)
    if weight is None and form.needs_weight:
        return None
    if isinstance(x, (tuple, list)):
        x, target = x
        if isinstance(target, Tensor) and target is not x:  # PyG takes the number of targets from it
            require_all_at(conv.stock.__name__, edges.graph, 1, target.size(conv.node_dim))
    return sum_by(conv, edges, x, weight, NORMS[type(conv.aggr_module)], form.flattens)


def sum_by(conv: MessagePassing, edges: Edges, x: Any, weight: object, norm: Norm, flattens: bool = False) -> Any:
    """Sum or mean of weighted rows (collective); ``None`` if there is no operator for it.

    ``weight`` is an edge tensor, a norm's or ``None`` (ones); with ``flattens`` it may be ``[E, 1]``. The batches of
    ``[B, N, F]`` become columns, so there is one exchange.
    """
    if type(x) is MovedRows:
        out = sum_by(conv, edges, x.of.flatten(1), weight, norm, flattens)
        return None if out is None else MovedRows.make(out.to_rows().view(out.shape[0], *x.of.shape[1:]), x.place)
    operator, dtype = operator_of(edges, x, weight, norm, flattens)
    if operator is None:
        return None
    rows = x if x.dtype == dtype else x.to(dtype)
    return edges.graph.aggregate(edges.graph.place(rows), operator, layer=conv)


def operator_of(
    edges: Edges, x: object, weight: object, norm: Norm, flattens: bool = False
) -> tuple[Operator | None, torch.dtype]:
    """The matrix of :func:`sum_by`, or ``None``, and the dtype of the products (collective)."""
    if not isinstance(x, NodeTensor) or not edges.graph.owns(x, 0) or x.dim() != 2 or x.dtype not in ops.FLOATS:
        return None, torch.get_default_dtype()
    of_weight: Any = weight.lazy if isinstance(weight, NormWeight) else weight
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, of_weight.dtype)
    return _operator(edges, norm, weight, flattens, dtype), dtype


def _operator(edges: Edges, norm: Norm, weight: Any, flattens: bool, dtype: torch.dtype) -> Operator | None:
    """The matrix of the sums; ``None`` if weights or edges are not the graph's (collective)."""
    dtype = accumulation_dtype(dtype)
    if isinstance(weight, NormWeight):
        is_exact = accumulation_dtype(weight.lazy.dtype) == dtype  # otherwise PyG rounds the weights first
        is_known = is_exact and norm is Norm.SUM and weight.lazy.is_of(edges)
        return weight.lazy.operator(dtype) if is_known else None
    is_normed = isinstance(edges, NormedEdges)  # of a mini-batch: weights derived from its own norm
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
