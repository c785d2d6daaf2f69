"""Attention in torch's functions, edge by edge: attention weights, and second derivatives of the fused pass.

Sums that are differentiated twice take all edges at once. Attention weights that the caller requests, and their
gradients, take some edges at a time: no tensor with a row for each edge of the graph has more columns than heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.timing import phase

Gradients = list[Tensor | None]

_NUMBERS_AT_A_TIME = 1 << 18
"""Of the widest tensor of some edges: a MiB of float32, which second-level caches hold."""


class EdgeSums(NamedTuple):
    """Sums over the edges of each row, each edge weighted by the exponential of its logit, less the largest one.

    With dropout ``of_values`` ``[N, H C]`` and ``of_edge_attr`` ``[N, H D]``, or empty; without it ``of_ones`` ``[N,
    H]``. ``powers`` are the exponentials, in the order of the pattern, ``[nnz, H]``.
    """

    of_values: Tensor
    of_edge_attr: Tensor
    of_ones: Tensor
    powers: Tensor


def by_head(rows: Tensor, heads: int) -> Tensor:
    """Rows as ``[N, H, C]``."""
    return rows.view(rows.shape[0], heads, rows.shape[1:].numel() // heads)


def is_shared(edge_weight: Tensor | None) -> bool:
    """Whether one row of weights is for all targets."""
    return edge_weight is not None and edge_weight.shape[0] == 1


def attention_by_edge(
    csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, inputs: AttentionInputs, num_weights: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`~.attention.attend` with values for each edge and column; differentiable to any order."""
    sums = sums_by_edge(csr, edge_key, spec, inputs)
    return *divided(sums), weights_by_edge(csr, sums.powers, sums.of_ones, num_weights)


def sums_by_edge(
    csr: CSR,
    edge_key: Tensor | None,
    spec: AttentionSpec,
    inputs: AttentionInputs,
    largest: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> EdgeSums:
    """The sums that :func:`divided` takes.

    ``largest`` gives each target's largest logit over all of its edges, ``[N, H]``, from the largest over those of
    ``csr``.
    """
    row, col, edge, heads = csr.row(), csr.col.long(), csr.edge, spec.heads
    values = by_head(inputs.value.index_select(0, col), heads)
    logits = _logits(spec, _at_edges(spec, inputs, row, col, edge))
    index, constant = row.view(-1, 1).expand_as(logits), logits.detach()
    top = largest(constant.new_full((csr.num_rows, heads), -torch.inf).scatter_reduce(0, index, constant, "amax"))
    powers = (logits - top[row]).exp()
    kept = powers
    if spec.p > 0:
        assert edge_key is not None
        kept = ops.keyed_dropout(powers, edge_key[edge], spec.p, spec.seed)

    def sums(rows: Tensor) -> Tensor:
        weighted = (kept.unsqueeze(2) * rows).flatten(1)
        return weighted.new_zeros(csr.num_rows, weighted.shape[1]).index_add(0, row, weighted)

    of_edge_attr = values.new_zeros(0, 0)
    if spec.form == "dot" and inputs.edge_attr is not None:
        of_edge_attr = sums(inputs.edge_attr[edge].unsqueeze(1))
    of_ones = powers.new_zeros(csr.num_rows, heads).index_add(0, row, powers)
    return EdgeSums(sums(values), of_edge_attr, of_ones, powers)


def divided(sums: EdgeSums) -> tuple[Tensor, Tensor]:
    """The weighted means of values and of edge_attr, from sums over all parts of the edges."""
    divisor = sums.of_ones.masked_fill(sums.of_ones == 0, 1.0).unsqueeze(2)  # zero: of no edges, whose sums are zero

    def quotients(rows: Tensor) -> Tensor:
        return (by_head(rows, divisor.shape[1]) / divisor).flatten(1) if rows.shape[0] else rows

    return quotients(sums.of_values), quotients(sums.of_edge_attr)


def weights_by_edge(csr: CSR, powers: Tensor, of_ones: Tensor, num_weights: int) -> Tensor:
    """The weights of edges by edge storage, ``[num_weights, H]``, differentiable; zero for edges that ``csr`` lacks.

    ``of_ones`` are the sums of ``powers`` over all parts of the edges. Without ``num_weights``, none are requested.
    """
    if num_weights == 0:
        return powers.new_zeros(0, powers.shape[1])
    weights = powers / of_ones[csr.row()]
    return weights.new_zeros(num_weights, weights.shape[1]).index_copy(0, csr.edge.long(), weights)


# ---- Some edges at a time --------------------------------------------------------------------------------------------


@torch.no_grad()
def write_weights(out: Tensor, csr: CSR, spec: AttentionSpec, inputs: AttentionInputs, lse: Tensor) -> None:
    """The weights of the pattern's edges, without dropout, into their places in ``out``, ``[S, H]``.

    ``lse`` is the op's, over all parts of the edges, ``[N, H]``.
    """
    wide = _flat(inputs, lse.dtype)
    with phase("aggregate"):
        for row, col, edge in _some_edges(csr, spec, inputs):
            logits = _logits(spec, _at_edges(spec, wide, row, col, edge))
            out[edge] = (logits - lse[row]).exp().to(out.dtype)


def sums_of_edges(csr: CSR, values: Tensor) -> Tensor:
    """The sum of the values of each row's edges. Shapes: ``[S, H] -> [N, H]``."""
    return ops.spmm_csr(csr.rowptr, csr.edge.int(), values)


def gradients_of_logits(
    csr: CSR, spec: AttentionSpec, inputs: AttentionInputs, slopes: Tensor, needs: tuple[bool, ...]
) -> Gradients:
    """The gradients of the inputs, given those of the logits: ``slopes``, by edge storage, ``[S, H]``."""
    wide = _flat(inputs, slopes.dtype)
    is_by_row = inputs.edge_weight is not None and spec.form != "dynamic" and not is_shared(inputs.edge_weight)
    matters = spec.form == "dynamic", *[True] * 5  # else value is in no logit
    sums: Gradients = [
        torch.zeros_like(x, memory_format=torch.contiguous_format) if x is not None and needed and is_part else None
        for x, needed, is_part in zip(wide, needs, matters, strict=True)
    ]
    with phase("aggregate"):
        for row, col, edge in _some_edges(csr, spec, inputs):
            places = col, col, row, edge, row if is_by_row else None, None
            pieces = [None if x is None else x.detach() for x in _at_edges(spec, wide, row, col, edge)]
            learning = [
                (piece.requires_grad_(), total, place)
                for piece, total, place in zip(pieces, sums, places, strict=True)
                if piece is not None and total is not None
            ]
            with torch.enable_grad():
                logits = _logits(spec, AttentionInputs._make(pieces))
            found: Any = (None,) * len(learning)
            if logits.requires_grad:
                found = torch.autograd.grad(logits, [x for x, *_ in learning], slopes[edge], allow_unused=True)
            for slope, (_, total, place) in zip(found, learning, strict=True):
                if slope is not None:
                    total.add_(slope) if place is None else ops.scatter_add_rows(total, place, slope)
    return sums


def _some_edges(csr: CSR, spec: AttentionSpec, inputs: AttentionInputs) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows, columns and places in edge storage of the pattern's edges, int64, in pieces; not of no edges."""
    columns = inputs.value.shape[1:].numel()
    features = 0 if inputs.edge_attr is None else spec.heads * inputs.edge_attr.shape[1]
    step = max(_NUMBERS_AT_A_TIME // max(columns, features, 1), 1)
    row, edge = csr.row(), csr.edge
    for low in range(0, csr.num_entries, step):
        some = slice(low, low + step)
        yield row[some].long(), csr.col[some].long(), edge[some].long()


def _flat(inputs: AttentionInputs, dtype: torch.dtype) -> AttentionInputs:
    """Matrices in ``dtype``; but ``att`` has no rows."""
    wide = AttentionInputs._make(None if x is None else x.detach().to(dtype) for x in inputs)
    flat = {name: x.flatten(1) for name, x in wide._asdict().items() if x is not None and name != "att"}
    return wide._replace(**flat, att=None if wide.att is None else wide.att.reshape(-1))


def _at_edges(spec: AttentionSpec, inputs: AttentionInputs, row: Tensor, col: Tensor, edge: Tensor) -> AttentionInputs:
    """The inputs of some edges' logits, with a row for each edge."""
    value, key, query, attr, weight, att = inputs

    def at(rows: Tensor | None, index: Tensor) -> Tensor | None:
        return None if rows is None else rows.flatten(1).index_select(0, index)

    if spec.form == "dynamic":
        return AttentionInputs._make((at(value, col), None, at(query, row), at(attr, edge), weight, att))
    weight = weight if is_shared(weight) else at(weight, row)
    return AttentionInputs(value[:0], at(key, col), at(query, row), at(attr, edge), weight, None)


def _logits(spec: AttentionSpec, at: AttentionInputs) -> Tensor:
    """:func:`pyg_dist.backend.ops.attention_csr`'s, ``[k, H]``, of what :func:`_at_edges` gives."""
    value, key, query, attr, weight, att = at
    heads = spec.heads
    if spec.form == "dynamic":
        assert query is not None
        assert att is not None
        ends = value + query
        if weight is not None and attr is not None:
            ends = ends + attr @ weight.to(attr.dtype)
        return by_head(F.leaky_relu(ends, spec.slope) * att.reshape(-1), heads).sum(2)
    assert key is not None
    keys = by_head(key, heads)
    queries = keys.new_zeros(()) if query is None else by_head(query, heads)
    logits = (keys + queries if spec.form == "additive" else keys * queries).sum(2)
    if weight is not None and attr is not None:
        logits = logits + (by_head(weight.flatten(1), heads) * attr.unsqueeze(1)).sum(2)
    return F.leaky_relu(logits, spec.slope) if spec.form == "additive" else logits * spec.scale
