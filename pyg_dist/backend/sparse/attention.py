"""Attention over in-edges, with autograd, without tensors that have a row per edge: on one rank's pattern, or several.

The exception are attention weights, a number for each edge and head, if the caller requests them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.autograd.linear_map import LinearMap, apply
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.local_function import Context, LocalFunction, differentiable_gradients
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.session.settings import REMEMBER_MIB
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


class AddingMap(LinearMap, Protocol):
    """A linear map that may add to what there is, as :class:`~pyg_dist.halo.transfer.HaloTransfer`."""

    @property
    def transposed(self) -> AddingMap: ...

    def send(self, x: Tensor) -> Any:
        """Begin to apply it (collective, does not wait)."""

    def add(self, in_flight: Any, out: Tensor) -> Tensor:
        """Add what arrives to the last rows of ``out`` (waits)."""


@dataclass(frozen=True)
class RankAttention:
    """Attention over the edges of this rank, and what it shares with others: nothing, unless a layout says more."""

    csr: CSR  # targets by sources: rows of value and key, then what is far
    edge_key: Tensor | None  # of the dropout, by edge storage
    spec: AttentionSpec  # how logits are made
    num_weights: int = 0  # number of stored edges, if their weights are requested: those of the softmax, before dropout
    # how far rows of value and of key arrive (the halo's); the first targets, num_inner, have no far sources, and run
    # meanwhile: none with ``maps``, which bring what they read
    far: tuple[AddingMap | None, AddingMap | None] = (None, None)
    num_inner: int = 0
    maps: tuple[LinearMap | None, ...] = (None,) * 6  # how rows of each input come here (the grid's); None: they are
    is_part: bool = False  # whether ranks share their targets' in-edges
    # whether ranks send sums of edge_attr to each other: each takes part, whatever rows it has
    has_edge_sums: bool = False

    def start(self, inputs: AttentionInputs) -> tuple[list[Pending[Tensor] | None], list[Pending[Tensor] | None]]:
        """Begin to bring the inputs here, and what is far of value and key (collective)."""

        def begun(maps: Sequence[LinearMap | None]) -> list[Pending[Tensor] | None]:
            pairs = zip(inputs, maps, strict=False)
            return [None if x is None or m is None else m.start(x.flatten(1)) for x, m in pairs]

        return begun(self.maps), begun(self.far)

    def by_edge(self, inputs: AttentionInputs) -> Attended:
        """In torch's functions, differentiable to any order (collective)."""
        pairs = zip(inputs[:2], self.far, strict=True)
        far = [None if x is None or m is None else apply(m, x.flatten(1)) for x, m in pairs]
        return attention_by_edge(self.csr, self.edge_key, self.spec, _with_far(inputs, far), self.num_weights)

    def keeps(self, y: Tensor) -> bool:
        """Whether the output waits for the derivative, which reads it, or is made again there, with the same bits."""
        return y.numel() * y.element_size() <= REMEMBER_MIB.value() * 2**20

    def over_ranks(self, y: Tensor, z: Tensor, lse: Tensor) -> ops.Sums:
        """This rank's rows of the sums over all ranks' edges, and the logarithms of the whole sums (collective)."""
        return y, z, lse

    def at_targets(self, rows: Gradients) -> Gradients:
        """The rows of all targets of this rank's edges (collective)."""
        return rows

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        """The sum over all ranks that have in-edges of the same targets (collective)."""
        return sums


class _Attention(LocalFunction[Attended]):
    """A number per target and head is kept, and the output unless it is too large; logits are computed again, by target
    and by source.

    What is differentiated again is made edge by edge.
    """

    @staticmethod
    def forward(ctx: Context, a: RankAttention, *given: Any) -> Attended:
        inputs = AttentionInputs(*given)
        here, far = a.start(inputs)
        sums = ops.empty_sums(a.csr.num_rows, inputs, a.spec)
        _attend_inner(a, inputs, sums)
        given_here: Any = (x if p is None else p.wait() for x, p in zip(inputs, here, strict=True))
        held = AttentionInputs(*given_here)
        arrived: Any = tuple(None if p is None else p.wait() for p in far)
        _attend_others(a, held, arrived, sums)
        y, z, lse = a.over_ranks(*sums)
        weights = inputs.value.new_zeros(a.num_weights, a.spec.heads)
        if a.num_weights:
            write_weights(weights, a.csr, a.spec, _with_far(held, arrived), lse)
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            a.csr.transposed  # noqa: B018  # sorting in the backward would come on top of all activations
            ctx.a = a
            outputs = (y, z) if a.keeps(y) else (None, None)
            ctx.save_for_backward(*outputs, weights, lse, *given, *held, *arrived)
        return y, z, weights

    @staticmethod
    def backward(ctx: Context, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        y, z, weights, lse, *saved = ctx.saved_tensors
        a: RankAttention = ctx.a
        inputs, held, far = AttentionInputs(*saved[:6]), AttentionInputs(*saved[6:12]), tuple(saved[12:])
        needs, spec, slope = ctx.needs_input_grad[1:], a.spec, grads[2]
        if y is None:
            y, z, _ = sums = ops.empty_sums(a.csr.num_rows, held, spec)
            _attend_inner(a, held, sums)
            _attend_others(a, held, far, sums)
        grad = torch.zeros_like(y) if grads[0] is None else grads[0].contiguous()
        grad_z = None if grads[1] is None or grads[1].shape[0] == 0 else grads[1].contiguous()
        if grad_z is None and a.has_edge_sums:
            grad_z = torch.zeros_like(z)
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            run = lambda own: a.by_edge(AttentionInputs._make(own))  # noqa: E731
            return None, *differentiable_gradients(run, inputs, needs, (grad, grad_z, slope))
        delta, *of_outputs = a.at_targets([_dots(grad, grad_z, y, z, spec.heads), grad, grad_z])
        del y, z
        by_logits: Gradients = [None] * 6  # of the requested weights
        if slope is not None:
            # A weight times its gradient is its logit's gradient, but for a term that all edges of its target have in
            # common: the sum of these products over the target's edges, which goes with delta.
            slopes = weights.to(lse.dtype) * slope.to(lse.dtype)
            assert delta is not None
            delta = delta + a.sum_over_ranks(sums_of_edges(a.csr, slopes))
            by_logits = gradients_of_logits(a.csr, spec, _with_far(held, far), slopes, needs)
        known: Gradients = [lse, delta, *of_outputs]
        found = _Found(a, inputs, needs)
        if any(needs[:2]):
            num_near = held.value.shape[0]
            near_rows, far_rows = a.csr.transposed.split(num_near)
            if far[0] is not None:  # first what goes to other ranks
                arrived = AttentionInputs(far[0], far[1], *held[2:])
                more = [x if x is None else x[num_near:] for x in by_logits[:2]]
                found.send(_added(_by_source(a, far_rows, arrived, known), more))
            more = [x if x is None else x[:num_near] for x in by_logits[:2]]
            found.add(0, _added(_by_source(a, near_rows, held, known), more))
        if any(needs[2:]):
            found.add(2, _added(_by_target(a, held, far, known, needs[3]), by_logits[2:]))
        return None, *found.as_inputs()


class _Found:
    """The gradients of the inputs; some are on their way from other ranks."""

    def __init__(self, a: RankAttention, inputs: AttentionInputs, needs: tuple[bool, ...]) -> None:
        self._a, self._inputs = a, inputs
        self._is_wanted = [x is not None and needed for x, needed in zip(inputs, needs, strict=True)]
        self._found: list[Tensor | Pending[Tensor] | None] = [None] * len(inputs)
        self._addends: list[tuple[int, AddingMap, Any]] = []

    def send(self, of_far: Gradients) -> None:
        """Send the gradients of far rows of value and of key back to their ranks (collective)."""
        for k, (gradient, way) in enumerate(zip(of_far, self._a.far, strict=True)):
            if self._is_wanted[k] and gradient is not None and way is not None:
                self._addends.append((k, way.transposed, way.transposed.send(gradient)))

    def add(self, first: int, gradients: Gradients) -> None:
        """Add this rank's gradients of the inputs from number ``first`` on (collective)."""
        for k, gradient in enumerate(gradients, first):
            way = self._a.maps[k]
            if self._is_wanted[k] and gradient is not None:
                self._found[k] = gradient if way is None else way.transposed.start(gradient)

    def as_inputs(self) -> Gradients:
        """All of them, in the shapes and dtypes of the inputs (waits)."""
        found = [x.wait() if isinstance(x, Pending) else x for x in self._found]
        for k, way, in_flight in self._addends:
            own = found[k]
            assert own is not None
            way.add(in_flight, own)
        pairs = zip(found, self._inputs, strict=True)
        return [None if g is None or x is None else g.to(x.dtype).view(x.shape) for g, x in pairs]


def _attend_inner(a: RankAttention, inputs: AttentionInputs, sums: ops.Sums) -> None:
    """The sums of the targets without far sources."""
    if a.num_inner:
        _attend(a, a.csr.split(a.num_inner)[0], 0, inputs, (None, None), sums)


def _attend_others(a: RankAttention, inputs: AttentionInputs, far: ops.Far, sums: ops.Sums) -> None:
    """The sums of all other targets, given what is far."""
    _attend(a, a.csr.split(a.num_inner)[1], a.num_inner, inputs, far, sums)


def _attend(a: RankAttention, csr: CSR, low: int, inputs: AttentionInputs, far: ops.Far, sums: ops.Sums) -> None:
    """The sums of the rows of ``csr``, which are targets from ``low`` on."""

    def own(rows: Any) -> Any:
        return rows if rows is None or rows.shape[0] == 0 else rows[low : low + csr.num_rows]

    weight, spec = inputs.edge_weight, a.spec
    inputs = inputs._replace(
        query=own(inputs.query), edge_weight=weight if spec.form == "dynamic" or is_shared(weight) else own(weight)
    )
    out: Any = tuple(own(rows) for rows in sums)
    with phase("aggregate"):
        ops.attention_csr(csr.rowptr, csr.col, csr.edge, inputs, a.edge_key, spec, far, out, a.is_part)


def _with_far(inputs: AttentionInputs, far: Sequence[Tensor | None]) -> AttentionInputs:
    """With rows of value and key for all columns of the pattern."""
    value, key = (
        x if x is None or other is None else torch.cat([x.flatten(1), other])
        for x, other in zip(inputs[:2], far, strict=True)
    )
    assert value is not None
    return inputs._replace(value=value, key=key)


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


def _by_source(a: RankAttention, csr: CSR, inputs: AttentionInputs, known: Any) -> Gradients:
    """The gradients by value and key, of the sources that are the rows of ``csr``."""
    with phase("aggregate"):
        return list(ops.attention_csr_by_source(csr.rowptr, csr.col, csr.edge, inputs, a.edge_key, a.spec, *known))


def _by_target(a: RankAttention, inputs: AttentionInputs, far: Any, known: Any, by_edge_attr: bool) -> Gradients:
    """The gradients by query, edge_attr, edge_weight and att; one by edge_weight that all rows share is added up."""
    csr, spec = a.csr, a.spec
    lse, delta, grad, grad_z = known
    with phase("aggregate"):
        by_query, by_weight, by_attr, by_parameters = ops.attention_csr_by_target(
            csr.rowptr, csr.col, csr.edge, inputs, a.edge_key, spec, lse, delta, grad, grad_z, by_edge_attr, far
        )
    by_att = None
    if spec.form == "dynamic":
        by_att, by_weight = by_parameters[0], by_parameters[1:]
    elif is_shared(inputs.edge_weight):
        by_weight = by_weight.sum(0, keepdim=True, dtype=ops.sum_dtype(by_weight))
    return [by_query, by_attr, by_weight, by_att]


def attend(a: RankAttention, inputs: AttentionInputs) -> Attended:
    """The sums of :func:`~pyg_dist.backend.ops.attention_csr`, and the weights of edges.

    Differentiable by all inputs; twice by a pass that makes values for each edge and column. Collective both ways where
    ``a`` is of several ranks.

    Shapes: inputs of the op; output ``[N, H C]``; ``[N, H D]``, or empty; ``[num_weights, H]``.
    """
    return _Attention.apply(a, *inputs)
