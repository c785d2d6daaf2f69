"""Attention over in-edges, with autograd, on one rank's pattern: nothing that has a row per edge is kept or made."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.timing import phase

_Gradients = list[Tensor | None]


class _Attention(LocalFunction):
    """The output and two numbers per target and head are kept; logits are computed again, by target and by source.

    What is differentiated again is made edge by edge.
    """

    @staticmethod
    def forward(
        ctx: Any, csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, *inputs: Any
    ) -> tuple[Tensor, Tensor]:
        with phase("aggregate"):
            args = AttentionInputs(*inputs), edge_key, spec
            y, z, largest, total = ops.attention_csr(csr.rowptr, csr.col, csr.edge, *args)
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            # Transposed now: sorting in the backward pass would come on top of all activations.
            ctx.csr, ctx.transposed, ctx.spec, ctx.num_inputs = csr, csr.transposed, spec, len(inputs)
            ctx.save_for_backward(*inputs, edge_key, y, z, largest, total)
        return y, z

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, edge_key, y, z, largest, total = ctx.saved_tensors
        inputs, needs = AttentionInputs(*given), ctx.needs_input_grad[3:]
        grad = torch.zeros_like(y) if grad is None else grad.contiguous()
        grad_z = None if grad_z is None or grad_z.shape[0] == 0 else grad_z.contiguous()
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            return None, None, None, *_by_edge_grad(ctx.csr, edge_key, ctx.spec, inputs, needs, (grad, grad_z))
        delta = _dots(grad, y, ctx.spec.heads)
        if grad_z is not None:
            delta += _dots(grad_z, z, ctx.spec.heads)
        known = largest, total, delta, grad, grad_z
        gradients: _Gradients = [None] * len(inputs)
        with phase("aggregate"):
            if any(needs[2:]):
                csr = ctx.csr
                gradients[2:] = _by_target(
                    inputs,
                    ctx.spec,
                    ops.attention_csr_by_target(
                        csr.rowptr, csr.col, csr.edge, inputs, edge_key, ctx.spec, *known, by_edge_attr=needs[3]
                    ),
                )
            if any(needs[:2]):
                csr = ctx.transposed
                gradients[:2] = ops.attention_csr_by_source(
                    csr.rowptr, csr.col, csr.edge, inputs, edge_key, ctx.spec, *known
                )
        return None, None, None, *_as_inputs(gradients, inputs, needs)


def _dots(a: Tensor, b: Tensor, heads: int) -> Tensor:
    """The dot products of rows, head by head, in the sum dtype."""
    wide = ops.sum_dtype(a)
    return _by_head(a.to(wide) * b.to(wide), heads).sum(2)


def _by_head(rows: Tensor, heads: int) -> Tensor:
    return rows.view(rows.shape[0], heads, rows.shape[1:].numel() // heads)


def _by_target(inputs: AttentionInputs, spec: AttentionSpec, found: tuple[Tensor, ...]) -> _Gradients:
    """The gradients by query, edge_attr, edge_weight and att in the op's outputs."""
    by_query, by_weight, by_attr, by_parameters = found
    by_att = None
    if spec.form == "dynamic":
        by_att, by_weight = by_parameters[0], by_parameters[1:]
    elif inputs.edge_weight is not None and inputs.edge_weight.shape[0] == 1:
        by_weight = by_weight.sum(0, keepdim=True, dtype=ops.sum_dtype(by_weight))
    return [by_query, by_attr, by_weight, by_att]


def _as_inputs(gradients: _Gradients, inputs: AttentionInputs, needs: tuple[bool, ...]) -> _Gradients:
    return [
        g.to(x.dtype).view(x.shape) if needed and g is not None and x is not None else None
        for g, x, needed in zip(gradients, inputs, needs, strict=True)
    ]


def _by_edge_grad(
    csr: CSR,
    edge_key: Tensor | None,
    spec: AttentionSpec,
    inputs: AttentionInputs,
    needs: tuple[bool, ...],
    gradients: tuple[Tensor, Tensor | None],
) -> _Gradients:
    """The backward pass in torch's functions, differentiable."""
    # Views: of a tensor that is given twice, as value and as query, each place has its own gradient.
    own = AttentionInputs(*(None if x is None else x.view_as(x) for x in inputs))  # type: ignore[arg-type]
    wanted = [x for x, needed in zip(own, needs, strict=True) if needed and x is not None]
    y, z = attention_by_edge(csr, edge_key, spec, own)
    pairs = [(out, g) for out, g in zip((y, z), gradients, strict=True) if g is not None]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in pairs], wanted, [g for _, g in pairs], create_graph=True, allow_unused=True
        )
    )
    return [next(found) if needed and x is not None else None for x, needed in zip(own, needs, strict=True)]


def attention_by_edge(
    csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, inputs: AttentionInputs
) -> tuple[Tensor, Tensor]:
    """:func:`attention` in torch's functions, with values for each edge and column; differentiable to any order."""
    row, col, edge, heads = csr.row(), csr.col.long(), csr.edge, spec.heads
    value, key, query, attr, weight, att = inputs
    values = _by_head(value, heads)[col]
    features = values.new_zeros(col.numel(), 0) if attr is None else attr[edge]
    if spec.form == "dynamic":
        assert query is not None
        assert att is not None
        ends = values + _by_head(query, heads)[row]
        ends = ends if weight is None else ends + (features @ weight.to(features.dtype)).view_as(values)
        logits = (F.leaky_relu(ends, spec.slope) * att.view(heads, values.shape[2])).sum(2)
    else:
        assert key is not None
        keys = _by_head(key, heads)[col]
        queries = keys.new_zeros(()) if query is None else _by_head(query, heads)[row]
        logits = (keys + queries if spec.form == "additive" else keys * queries).sum(2)
        if weight is not None:
            per_row = _by_head(weight, heads).expand(csr.num_rows, -1, -1)
            logits = logits + (per_row[row] * features.unsqueeze(1)).sum(2)
        logits = F.leaky_relu(logits, spec.slope) if spec.form == "additive" else logits * spec.scale
    index = row.view(-1, 1).expand_as(logits)
    largest = (
        logits.detach()
        .new_zeros(csr.num_rows, heads)
        .scatter_reduce(0, index, logits.detach(), "amax", include_self=False)
    )
    powers = (logits - largest[row]).exp()
    alpha = powers / powers.new_zeros(csr.num_rows, heads).index_add(0, row, powers)[row]
    if spec.p > 0:
        assert edge_key is not None
        alpha = ops.keyed_dropout(alpha, edge_key[edge], spec.p, spec.seed)

    def sums(rows: Tensor) -> Tensor:
        weighed = (alpha.unsqueeze(2) * rows).flatten(1)
        return weighed.new_zeros(csr.num_rows, weighed.shape[1]).index_add(0, row, weighed)

    has_sums = spec.form == "dot" and attr is not None
    return sums(values), sums(features.unsqueeze(1)) if has_sums else values.new_zeros(0, 0)


def attention(csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """:func:`pyg_dist.backend.ops.attention_csr`'s sums of value, and of edge_attr for ``dot``; not collective.

    Differentiable by all inputs; twice by a pass that makes values for each edge and column.

    Shapes:
        - inputs: of the op
        - output: ``[csr.num_rows, H C]``; ``[csr.num_rows, H D]``, or empty
    """
    return _Attention.apply(csr, edge_key, spec, *inputs)  # type: ignore[no-any-return, no-untyped-call]
