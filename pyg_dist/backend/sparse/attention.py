"""Attention over in-edges, with autograd, without tensors that have a row per edge: on one rank's pattern, or several.

The exception are attention weights, a number for each edge and head, if the caller requests them.

A softmax over several *parts* of a target's edges is put together of theirs: each part counts by the sum of its
exponentials. The gradients need the logarithm of the whole sum alone, so they too are made part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.autograd.linear_map import LinearMap, apply
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.local_function import Context, LocalFunction
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

Maps = tuple[LinearMap | None, ...]
"""How the rows of each input come to a part; ``None``: they are here."""


@dataclass(frozen=True)
class Part:
    """Some of a rank's edges."""

    csr: CSR  # the edges, from sources to the last targets
    low: int = 0  # the first of these targets
    num_shared: int = 0  # how many of its targets, the last ones, have in-edges in other parts, too
    maps: Maps = (None,) * 6  # of the inputs

    def start(self, inputs: AttentionInputs) -> list[Pending[Tensor] | None]:
        """Begin to bring the inputs here (collective)."""
        pairs = zip(inputs, self.maps, strict=True)
        return [None if x is None or m is None else m.start(x.flatten(1)) for x, m in pairs]

    def held(
        self, inputs: AttentionInputs, arriving: list[Pending[Tensor] | None], spec: AttentionSpec
    ) -> AttentionInputs:
        """The inputs as they meet these edges."""
        given: list[Any] = [x if p is None else p.wait() for x, p in zip(inputs, arriving, strict=True)]
        if self.low:
            weight_is_by_row = spec.form != "dynamic" and not is_shared(inputs.edge_weight)
            for k, is_by_row in ((2, True), (4, weight_is_by_row)):
                if is_by_row and given[k] is not None:
                    given[k] = given[k][self.low :]
        return AttentionInputs(*given)


@dataclass(frozen=True)
class PartedAttention:
    """Attention over the edges of this rank, and what it shares with others: nothing, unless a layout says more."""

    parts: Sequence[Part]  # the edges; the first part has all targets, and runs while messages of others are in flight
    edge_key: Tensor | None  # of the dropout, by edge storage
    spec: AttentionSpec  # how logits are made
    num_weights: int = 0  # number of stored edges, if their weights are requested: those of the softmax, before dropout
    # whether ranks send sums of edge_attr to each other: each takes part, whatever rows it has
    has_edge_sums: bool = False

    def by_edge(self, inputs: AttentionInputs) -> Attended:
        """In torch's functions, differentiable to any order (collective).

        The parts' edges are put together, and the sources that come to a later part behind those of the first one.
        """
        first, *others = self.parts
        edges = first.csr
        for part in others:
            values, keys = (
                x if x is None or m is None else torch.cat([x.flatten(1), apply(m, x.flatten(1))])
                for x, m in zip(inputs[:2], part.maps, strict=False)
            )
            assert values is not None
            inputs = inputs._replace(value=values, key=keys)
            edges = CSR.from_edges(
                torch.cat([edges.row(), part.csr.row() + part.low]),
                torch.cat([edges.col, part.csr.col + edges.num_cols]),
                torch.cat([edges.edge, part.csr.edge]),
                edges.num_rows,
                edges.num_cols + part.csr.num_cols,
            )
        return attention_by_edge(edges, self.edge_key, self.spec, inputs, self.num_weights)

    def over_ranks(self, y: Tensor, z: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's rows of the sums over all ranks' edges, and the logarithms of the whole sums (collective)."""
        return y, z, lse

    def at_targets(self, rows: Gradients) -> Gradients:
        """The rows of all targets of this rank's edges (collective)."""
        return rows

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """The sum over all ranks that have in-edges of the same targets (collective)."""
        return sums


class _Attention(LocalFunction[Attended]):
    """The output and a number per target and head are kept; logits are computed again, by target and by source.

    What is differentiated again is made edge by edge.
    """

    @staticmethod
    def forward(ctx: Context, a: PartedAttention, *given: Any) -> Attended:
        inputs, held = AttentionInputs(*given), list[AttentionInputs]()
        for part, arrived in zip(a.parts, _arriving(a, inputs), strict=True):
            held.append(arrived)
            if part is a.parts[0]:
                sums = _attend(a, part, arrived)
            elif part.csr.num_rows:
                _join(a, sums, part, _attend(a, part, arrived))
        y, z, lse = a.over_ranks(*sums)
        weights = inputs.value.new_zeros(a.num_weights, a.spec.heads)
        if a.num_weights:
            for part, arrived in zip(a.parts, held, strict=True):
                write_weights(weights, part.csr, a.spec, arrived, lse[part.low :])
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            for part in a.parts:
                part.csr.transposed  # noqa: B018  # sorting in the backward would come on top of all activations
            ctx.a = a
            ctx.save_for_backward(y, z, weights, lse, *given, *(x for arrived in held for x in arrived))
        return y, z, weights

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        y, z, weights, lse, *saved = ctx.saved_tensors
        a: PartedAttention = ctx.a
        inputs, *held = (AttentionInputs(*saved[k : k + 6]) for k in range(0, len(saved), 6))
        needs, spec, slope = ctx.needs_input_grad[1:], a.spec, grads[2]
        grad = torch.zeros_like(y) if grads[0] is None else grads[0].contiguous()
        grad_z = None if grads[1] is None or grads[1].shape[0] == 0 else grads[1].contiguous()
        if grad_z is None and a.has_edge_sums:
            grad_z = torch.zeros_like(z)
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            return None, *_differentiable_gradients(a.by_edge, inputs, needs, (grad, grad_z, slope))
        delta, *of_outputs = a.at_targets([_dots(grad, grad_z, y, z, spec.heads), grad, grad_z])
        by_weights: list[Gradients] = [[None] * 6] * len(held)  # of the requested weights' logits
        if slope is not None:
            # A weight times its gradient is its logit's gradient, but for a term that all edges of its target have in
            # common: the sum of these products over the target's edges, which goes with delta.
            slopes = weights.to(lse.dtype) * slope.to(lse.dtype)
            assert delta is not None
            delta = delta + a.sum_over_ranks(sums_of_edges(a.parts[0].csr, slopes))
            for part in a.parts[1:]:
                delta[part.low :].add_(sums_of_edges(part.csr, slopes))
            pairs = zip(a.parts, held, strict=True)
            by_weights = [gradients_of_logits(part.csr, spec, x, slopes, needs) for part, x in pairs]
        known: Gradients = [lse, delta, *of_outputs]
        parts = list(zip(a.parts, held, by_weights, strict=True))
        found = _Found(inputs, needs)
        for part, arrived, more in reversed(parts) if any(needs[:2]) else ():  # first what goes to other ranks
            found.add(part, 0, _added(_by_source(a, part, arrived, _last_rows(known, part)), more[:2]))
        for part, arrived, more in parts if any(needs[2:]) else ():
            if part.csr.num_rows or part is a.parts[0]:
                found.add(part, 2, _added(_by_target(a, part, arrived, _last_rows(known, part), needs[3]), more[2:]))
        return None, *found.as_inputs()


class _Found:
    """The gradients of the inputs, made part by part; some come from other ranks."""

    def __init__(self, inputs: AttentionInputs, needs: tuple[bool, ...]) -> None:
        self._inputs, self._needs = inputs, needs
        self._here: Gradients = [None] * len(inputs)
        self._arriving: list[tuple[int, Pending[Tensor]]] = []

    def add(self, part: Part, first: int, gradients: Gradients) -> None:
        """Those that a part makes of the inputs from number ``first`` on (collective)."""
        for k, gradient in enumerate(gradients, first):
            if gradient is None or self._inputs[k] is None or not self._needs[k]:
                continue
            own, linear_map = self._here[k], part.maps[k]
            if linear_map is not None:
                self._arriving.append((k, linear_map.transposed.start(gradient)))
            elif own is None:
                self._here[k] = gradient
            elif gradient.numel():
                (own if own.shape == gradient.shape else own[part.low :]).add_(gradient)

    def as_inputs(self) -> Gradients:
        """All of them, in the shapes and dtypes of the inputs."""
        for k, pending in self._arriving:
            own, arrived = self._here[k], pending.wait()
            self._here[k] = arrived if own is None else own.add_(arrived)
        pairs = zip(self._here, self._inputs, strict=True)
        return [None if g is None or x is None else g.to(x.dtype).view(x.shape) for g, x in pairs]


def _arriving(a: PartedAttention, inputs: AttentionInputs) -> Iterator[AttentionInputs]:
    """Each part's inputs; all messages are under way before the first (collective)."""
    started = [part.start(inputs) for part in a.parts]
    for part, arriving in zip(a.parts, started, strict=True):
        yield part.held(inputs, arriving, a.spec)


def _attend(a: PartedAttention, part: Part, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    csr = part.csr
    with phase("aggregate"):
        return ops.attention_csr(csr.rowptr, csr.col, csr.edge, inputs, a.edge_key, a.spec, part.num_shared)


def share_of_part(rowptr: Tensor, lse: Tensor, whole: Tensor) -> Tensor:
    """What a part of each row's edges counts in its softmax: NaN if there are edges, and all logits are -infinity.

    ``lse`` is the op's on the part, ``whole`` the logarithm of the sum over all parts. Shapes: ``[N, H] -> [N, H, 1]``.
    """
    is_empty = (rowptr.diff() == 0).unsqueeze(1)
    finite = whole.masked_fill(is_empty & (whole == -torch.inf), 0.0)  # a part without edges has sums of zero
    return (lse - finite).exp().unsqueeze(2)


def _join(
    a: PartedAttention, sums: tuple[Tensor, Tensor, Tensor], part: Part, others: tuple[Tensor, Tensor, Tensor]
) -> None:
    """Put a part's share of a softmax to the first one's, in place."""
    *outputs, lse = (x[part.low :] if x.shape[0] else x for x in sums)
    whole = torch.logaddexp(lse, others[2])
    own = share_of_part(a.parts[0].csr.rowptr[part.low :], lse, whole)
    its = share_of_part(part.csr.rowptr, others[2], whole)
    for out, other in zip(outputs, others, strict=False):
        if out.numel():
            by_head(out, a.spec.heads).mul_(own).addcmul_(by_head(other, a.spec.heads), its)
    lse.copy_(whole)


def _last_rows(known: Gradients, part: Part) -> Gradients:
    return [x[part.low :] if x is not None and part.low else x for x in known]


def _added(one: Gradients, other: Gradients) -> Gradients:
    """The sum of two gradients by the same inputs, in the dtypes of the first."""
    pairs = zip(one, other, strict=True)
    return [x if y is None or x is None else x + y.view(x.shape).to(x.dtype) for x, y in pairs]


def _dots(grad: Tensor, grad_z: Tensor | None, y: Tensor, z: Tensor, heads: int) -> Tensor:
    """``delta`` of the ops: the dot products of rows of gradients and outputs, head by head."""
    diagonal = CSR.identity(y.shape[0] * heads, y.device)

    def of_heads(a: Tensor, b: Tensor) -> Tensor:
        return ops.sddmm_csr(diagonal.rowptr, diagonal.col, *(by_head(x, heads).flatten(0, 1) for x in (a, b)))

    found = of_heads(grad, y) if grad_z is None else of_heads(grad, y) + of_heads(grad_z, z)
    return found.view(-1, heads)


def _by_source(a: PartedAttention, part: Part, inputs: AttentionInputs, known: Any) -> Gradients:
    """The gradients by value and key."""
    csr = part.csr.transposed
    with phase("aggregate"):
        return list(ops.attention_csr_by_source(csr.rowptr, csr.col, csr.edge, inputs, a.edge_key, a.spec, *known))


def _by_target(a: PartedAttention, part: Part, inputs: AttentionInputs, known: Any, by_edge_attr: bool) -> Gradients:
    """The gradients by query, edge_attr, edge_weight and att; one by edge_weight that all rows share is added up."""
    csr, spec = part.csr, a.spec
    lse, delta, grad, grad_z = known
    with phase("aggregate"):
        by_query, by_weight, by_attr, by_parameters = ops.attention_csr_by_target(
            csr.rowptr, csr.col, csr.edge, inputs, a.edge_key, spec, lse, delta, grad, grad_z, by_edge_attr
        )
    by_att = None
    if spec.form == "dynamic":
        by_att, by_weight = by_parameters[0], by_parameters[1:]
    elif is_shared(inputs.edge_weight):
        by_weight = by_weight.sum(0, keepdim=True, dtype=ops.sum_dtype(by_weight))
    return [by_query, by_attr, by_weight, by_att]


def _differentiable_gradients(
    run: Callable[[AttentionInputs], Attended],
    inputs: AttentionInputs,
    needs: tuple[bool, ...],
    gradients: tuple[Tensor | None, ...],
) -> Gradients:
    """The gradients by the inputs of ``run``, of torch's functions, as these are differentiated."""
    # Views: of a tensor that is given twice, as value and as query, each place has its own gradient.
    own = AttentionInputs._make(None if x is None else x.view_as(x) for x in inputs)
    wanted = [x for x, needed in zip(own, needs, strict=True) if needed and x is not None]
    # A rank without edges has weights of none, which follow from nothing.
    pairs = [(out, g) for out, g in zip(run(own), gradients, strict=True) if g is not None and out.requires_grad]
    outputs, grads = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, grads, create_graph=True, allow_unused=True))
    return [next(found) if needed and x is not None else None for x, needed in zip(own, needs, strict=True)]


def attention_in_parts(a: PartedAttention, inputs: AttentionInputs) -> Attended:
    """:func:`attention` over the edges of ``a`` (collective both ways where it is of several ranks)."""
    return _Attention.apply(a, *inputs)


def attention(
    csr: CSR, edge_key: Tensor | None, spec: AttentionSpec, inputs: AttentionInputs, num_weights: int = 0
) -> Attended:
    """:func:`pyg_dist.backend.ops.attention_csr`'s sums of value, and of edge_attr for ``dot``; not collective.

    Differentiable by all inputs; twice by a pass that makes values for each edge and column. See
    :class:`PartedAttention` for the arguments.

    Shapes: inputs of the op; output ``[csr.num_rows, H C]``; ``[csr.num_rows, H D]``, or empty; ``[num_weights, H]``.
    """
    return attention_in_parts(PartedAttention((Part(csr),), edge_key, spec, num_weights), inputs)
