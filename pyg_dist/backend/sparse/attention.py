"""Attention over in-edges, with autograd, on one rank's pattern, without tensors that have a row per edge.

The exception are attention weights, a number for each edge and head, if the caller requests them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.attention_by_edge import (
    Gradients,
    attention_by_edge,
    by_head,
    gradients_of_logits,
    is_shared,
    sums_of_edges,
    write_weights,
)
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.timing import phase

Attended = tuple[Tensor, Tensor, Tensor]
"""The sums of values, of edge_attr, and the weights of edges, which are empty unless requested."""


class _Attention(LocalFunction[Attended]):
    """The output and a number per target and head are kept; logits are computed again, by target and by source.

    What is differentiated again is made edge by edge.
    """

    @staticmethod
    def forward(
        ctx: Any, csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, num_weights: int, *given: Any
    ) -> Attended:
        inputs = AttentionInputs(*given)
        y, z, lse = attend(csr, inputs, edge_key, spec)
        weights = new_weights(inputs, spec, num_weights)
        if num_weights:
            write_weights(weights, csr, spec, inputs, lse)
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            # Transposed now: sorting in the backward pass would come on top of all activations.
            ctx.csr, ctx.transposed, ctx.spec = csr, csr.transposed, spec
            ctx.save_for_backward(*given, edge_key, y, z, weights, lse)
        return y, z, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, edge_key, y, z, weights, lse = ctx.saved_tensors
        inputs, needs, csr, spec = AttentionInputs(*given), ctx.needs_input_grad[4:], ctx.csr, ctx.spec
        grad, grad_z = of_outputs(grads[0], grads[1], y)
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            run = partial(attention_by_edge, csr, edge_key, spec, num_weights=weights.shape[0])
            return *[None] * 4, *differentiable_gradients(run, inputs, needs, (grad, grad_z, grads[2]))
        delta, slopes = dots(grad, grad_z, y, z, spec.heads), slopes_of_weights(weights, grads[2], lse)
        if slopes is not None:
            delta = delta + sums_of_edges(csr, slopes)
        known = lse, delta, grad, grad_z
        found: Gradients = [None] * len(inputs)
        if any(needs[:2]):
            found[:2] = by_source(ctx.transposed, inputs, edge_key, spec, known)
        if any(needs[2:]):
            found[2:] = by_target(csr, inputs, edge_key, spec, known, needs[3])
        if slopes is not None:
            found = added(found, gradients_of_logits(csr, spec, inputs, slopes, needs))
        return *[None] * 4, *as_inputs(found, inputs, needs)


def new_weights(inputs: AttentionInputs, spec: AttentionSpec, num_weights: int) -> Tensor:
    """Room for the weights of the edges that are stored here."""
    return inputs.value.new_zeros(num_weights, spec.heads)


def slopes_of_weights(weights: Tensor, grad: Tensor | None, lse: Tensor) -> Tensor | None:
    """Each weight times its gradient: its logit's gradient, but for what all edges of its target have in common.

    That is the sum of these over the target's edges, of which each takes off a part by its weight; added to ``delta``
    it goes with the fused gradients.

    Shapes:
        - weights, grad: by edge storage, ``[S, H]``
        - output: the same, in the sum dtype
    """
    return None if grad is None else weights.to(lse.dtype) * grad.to(lse.dtype)


def added(one: Gradients, other: Gradients) -> Gradients:
    """The sum of two gradients by the same inputs, in the dtypes of the first."""
    pairs = zip(one, other, strict=True)
    return [x if y is None or x is None else x + y.view(x.shape).to(x.dtype) for x, y in pairs]


def attend(
    csr: CSR, inputs: AttentionInputs, edge_key: Tensor | None, spec: AttentionSpec, num_parts: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`pyg_dist.backend.ops.attention_csr` of a pattern."""
    with phase("aggregate"):
        return ops.attention_csr(csr.rowptr, csr.col, csr.edge, inputs, edge_key, spec, num_parts)


def share_of_part(rowptr: Tensor, lse: Tensor, whole: Tensor) -> Tensor:
    """What a part of each row's edges counts in its softmax: NaN if there are edges, and all logits are -infinity.

    Shapes:
        - rowptr: of the part's pattern, ``[N + 1]``
        - lse: of the op on it, whole: the logarithm of the sum over all parts, ``[N, H]``
        - output: ``[N, H, 1]``
    """
    is_empty = (rowptr.diff() == 0).unsqueeze(1)
    finite = whole.masked_fill(is_empty & (whole == -torch.inf), 0.0)  # a part without edges has sums of zero
    return (lse - finite).exp().unsqueeze(2)


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


def as_inputs(gradients: Gradients, inputs: AttentionInputs, needs: tuple[bool, ...]) -> Gradients:
    """The gradients that are wanted, in the shapes and dtypes of the inputs."""
    return [
        g.to(x.dtype).view(x.shape) if needed and g is not None and x is not None else None
        for g, x, needed in zip(gradients, inputs, needs, strict=True)
    ]


def differentiable_gradients(
    run: Callable[[AttentionInputs], Attended],
    inputs: AttentionInputs,
    needs: tuple[bool, ...],
    gradients: tuple[Tensor | None, ...],
) -> Gradients:
    """The gradients by the inputs of ``run``, of torch's functions, as these are differentiated."""
    # Views: of a tensor that is given twice, as value and as query, each place has its own gradient.
    own = AttentionInputs(*(None if x is None else x.view_as(x) for x in inputs))  # type: ignore[arg-type]
    wanted = [x for x, needed in zip(own, needs, strict=True) if needed and x is not None]
    # A rank without edges has weights of none, which follow from nothing.
    pairs = [(out, g) for out, g in zip(run(own), gradients, strict=True) if g is not None and out.requires_grad]
    outputs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if needed and x is not None else None for x, needed in zip(own, needs, strict=True)]


def attention(
    csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, inputs: AttentionInputs, num_weights: int = 0
) -> Attended:
    """:func:`pyg_dist.backend.ops.attention_csr`'s sums of value, and of edge_attr for ``dot``; not collective.

    Differentiable by all inputs; twice by a pass that makes values for each edge and column.

    Args:
        csr: the pattern.
        edge_key: of the dropout.
        spec: how logits are made.
        inputs: of the op.
        num_weights: number of stored edges, if their weights are requested: those of the softmax, before dropout.

    Shapes:
        - inputs: of the op
        - output: ``[csr.num_rows, H C]``; ``[csr.num_rows, H D]``, or empty; ``[num_weights, H]``
    """
    return _Attention.apply(csr, edge_key, spec, num_weights, *inputs)
