"""Attention over in-edges, with autograd, on one rank's pattern: nothing that has a row per edge is kept or made."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.timing import phase

Gradients = list[Tensor | None]


class _Attention(LocalFunction):
    """The output and a number per target and head are kept; logits are computed again, by target and by source.

    What is differentiated again is made edge by edge.
    """

    @staticmethod
    def forward(
        ctx: Any, csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, *inputs: Any
    ) -> tuple[Tensor, Tensor]:
        y, z, lse = attend(csr, AttentionInputs(*inputs), edge_key, spec)
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            # Transposed now: sorting in the backward pass would come on top of all activations.
            ctx.csr, ctx.transposed, ctx.spec = csr, csr.transposed, spec
            ctx.save_for_backward(*inputs, edge_key, y, z, lse)
        return y, z

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, edge_key, y, z, lse = ctx.saved_tensors
        inputs, needs, spec = AttentionInputs(*given), ctx.needs_input_grad[3:], ctx.spec
        grads = of_outputs(grad, grad_z, y)
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            run = partial(attention_by_edge, ctx.csr, edge_key, spec)
            return None, None, None, *differentiable_gradients(run, inputs, needs, grads)
        known = lse, dots(*grads, y, z, spec.heads), *grads
        found: Gradients = [None] * len(inputs)
        if any(needs[:2]):
            found[:2] = by_source(ctx.transposed, inputs, edge_key, spec, known)
        if any(needs[2:]):
            found[2:] = by_target(ctx.csr, inputs, edge_key, spec, known, needs[3])
        return None, None, None, *as_inputs(found, inputs, needs)


def attend(
    csr: CSR, inputs: AttentionInputs, edge_key: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`pyg_dist.backend.ops.attention_csr` of a pattern."""
    with phase("aggregate"):
        return ops.attention_csr(csr.rowptr, csr.col, csr.edge, inputs, edge_key, spec)


def of_outputs(grad: Tensor | None, grad_z: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients by both outputs as the ops take them."""
    grad = torch.zeros_like(y) if grad is None else grad.contiguous()
    return grad, None if grad_z is None or grad_z.shape[0] == 0 else grad_z.contiguous()


def dots(grad: Tensor, grad_z: Tensor | None, y: Tensor, z: Tensor, heads: int) -> Tensor:
    """``delta`` of the ops: the dot products of rows of gradients and outputs, head by head."""
    diagonal = CSR.identity(y.shape[0] * heads, y.device)

    def of_heads(a: Tensor, b: Tensor) -> Tensor:
        return ops.sddmm_csr(diagonal.rowptr, diagonal.col, *(by_head(x, heads).flatten(0, 1) for x in (a, b)))

    found = of_heads(grad, y) if grad_z is None else of_heads(grad, y) + of_heads(grad_z, z)
    return found.view(-1, heads)


def by_head(rows: Tensor, heads: int) -> Tensor:
    """Rows as ``[N, H, C]``."""
    return rows.view(rows.shape[0], heads, rows.shape[1:].numel() // heads)


def by_source(
    transposed: CSR, inputs: AttentionInputs, edge_key: Tensor | None, spec: AttentionSpec, known: Any
) -> Gradients:
    """The gradients by value and key."""
    with phase("aggregate"):
        csr = transposed
        return list(ops.attention_csr_by_source(csr.rowptr, csr.col, csr.edge, inputs, edge_key, spec, *known))


def by_target(
    csr: CSR, inputs: AttentionInputs, edge_key: Tensor | None, spec: AttentionSpec, known: Any, by_edge_attr: bool
) -> Gradients:
    """The gradients by query, edge_attr, edge_weight and att; one by edge_weight that all rows share is added up."""
    with phase("aggregate"):
        by_query, by_weight, by_attr, by_parameters = ops.attention_csr_by_target(
            csr.rowptr,
            csr.col,
            csr.edge,
            inputs,
            edge_key,
            spec,
            *known,
            by_edge_attr,  # type: ignore[call-arg]
        )
    by_att = None
    if spec.form == "dynamic":
        by_att, by_weight = by_parameters[0], by_parameters[1:]
    elif is_shared(inputs.edge_weight):
        by_weight = by_weight.sum(0, keepdim=True, dtype=ops.sum_dtype(by_weight))
    return [by_query, by_attr, by_weight, by_att]


def is_shared(edge_weight: Tensor | None) -> bool:
    """Whether one row of weights is for all targets."""
    return edge_weight is not None and edge_weight.shape[0] == 1


def as_inputs(gradients: Gradients, inputs: AttentionInputs, needs: tuple[bool, ...]) -> Gradients:
    """The gradients that are wanted, in the shapes and dtypes of the inputs."""
    return [
        g.to(x.dtype).view(x.shape) if needed and g is not None and x is not None else None
        for g, x, needed in zip(gradients, inputs, needs, strict=True)
    ]


def differentiable_gradients(
    run: Callable[[AttentionInputs], tuple[Tensor, Tensor]],
    inputs: AttentionInputs,
    needs: tuple[bool, ...],
    gradients: tuple[Tensor, Tensor | None],
) -> Gradients:
    """The gradients by the inputs of ``run``, of torch's functions, as these are differentiated."""
    # Views: of a tensor that is given twice, as value and as query, each place has its own gradient.
    own = AttentionInputs(*(None if x is None else x.view_as(x) for x in inputs))  # type: ignore[arg-type]
    wanted = [x for x, needed in zip(own, needs, strict=True) if needed and x is not None]
    pairs = [(out, g) for out, g in zip(run(own), gradients, strict=True) if g is not None]
    outputs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if needed and x is not None else None for x, needed in zip(own, needs, strict=True)]


def attention_by_edge(
    csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, inputs: AttentionInputs
) -> tuple[Tensor, Tensor]:
    """:func:`attention` in torch's functions, with values for each edge and column; differentiable to any order."""
    return divided(*sums_by_edge(csr, edge_key, spec, inputs))


def sums_by_edge(
    csr: CSR,
    edge_key: Tensor | None,
    spec: AttentionSpec,
    inputs: AttentionInputs,
    largest: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums that :func:`divided` takes, each edge weighed by the exponential of its logit, less the largest one.

    Args:
        csr: the pattern.
        edge_key: of the dropout.
        spec: how logits are made.
        inputs: what they are made of.
        largest: makes each target's largest logit of that of these edges, ``[N, H]``.

    Shapes:
        - output: of values ``[N, H C]``; of edge_attr ``[N, H D]``, or empty; of ones, without dropout, ``[N, H]``
    """
    row, col, edge, heads = csr.row(), csr.col.long(), csr.edge, spec.heads
    value, key, query, attr, weight, att = inputs
    values = by_head(value, heads)[col]
    features = values.new_zeros(col.numel(), 0) if attr is None else attr[edge]
    if spec.form == "dynamic":
        assert query is not None
        assert att is not None
        ends = values + by_head(query, heads)[row]
        ends = ends if weight is None else ends + (features @ weight.to(features.dtype)).view_as(values)
        logits = (F.leaky_relu(ends, spec.slope) * att.view(heads, values.shape[2])).sum(2)
    else:
        assert key is not None
        keys = by_head(key, heads)[col]
        queries = keys.new_zeros(()) if query is None else by_head(query, heads)[row]
        logits = (keys + queries if spec.form == "additive" else keys * queries).sum(2)
        if weight is not None:
            per_row = by_head(weight, heads).expand(csr.num_rows, -1, -1)
            logits = logits + (per_row[row] * features.unsqueeze(1)).sum(2)
        logits = F.leaky_relu(logits, spec.slope) if spec.form == "additive" else logits * spec.scale
    index, constant = row.view(-1, 1).expand_as(logits), logits.detach()
    top = largest(constant.new_full((csr.num_rows, heads), -torch.inf).scatter_reduce(0, index, constant, "amax"))
    powers = (logits - top[row]).exp()
    kept = powers
    if spec.p > 0:
        assert edge_key is not None
        kept = ops.keyed_dropout(powers, edge_key[edge], spec.p, spec.seed)

    def sums(rows: Tensor) -> Tensor:
        weighed = (kept.unsqueeze(2) * rows).flatten(1)
        return weighed.new_zeros(csr.num_rows, weighed.shape[1]).index_add(0, row, weighed)

    has_sums = spec.form == "dot" and attr is not None
    total = powers.new_zeros(csr.num_rows, heads).index_add(0, row, powers)
    return sums(values), sums(features.unsqueeze(1)) if has_sums else values.new_zeros(0, 0), total


def divided(y: Tensor, z: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
    """The weighed sums of values and edge_attr: those of :func:`sums_by_edge`, over all parts of the edges."""
    divisor = powers.masked_fill(powers == 0, 1.0).unsqueeze(2)  # of targets without edges, whose sums are zero

    def quotients(sums: Tensor) -> Tensor:
        return (by_head(sums, powers.shape[1]) / divisor).flatten(1) if sums.shape[0] else sums

    return quotients(y), quotients(z)


def attention(csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """:func:`pyg_dist.backend.ops.attention_csr`'s sums of value, and of edge_attr for ``dot``; not collective.

    Differentiable by all inputs; twice by a pass that makes values for each edge and column.

    Shapes:
        - inputs: of the op
        - output: ``[csr.num_rows, H C]``; ``[csr.num_rows, H D]``, or empty
    """
    return _Attention.apply(csr, edge_key, spec, *inputs)  # type: ignore[no-any-return, no-untyped-call]
