"""Attention over the halo layout, with autograd: local edges are worked on while messages are in flight.

A softmax over two parts of a target's edges is put together of its parts: each counts by the sum of its exponentials.
The gradients of both parts need the logarithm of the whole sum alone, so they too are made part by part, and those that
go to other ranks come first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.attention import (
    Attended,
    added,
    as_inputs,
    attend,
    by_source,
    by_target,
    differentiable_gradients,
    dots,
    new_weights,
    of_outputs,
    share_of_part,
    slopes_of_weights,
)
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
from pyg_dist.halo.aggregate import HaloRows
from pyg_dist.halo.transfer import HaloTransfer


@dataclass(frozen=True)
class HaloAttention:
    """The edges of one rank, and how sources' rows reach them.

    Attributes:
        local: ``[n, n]``, the edges with a local source.
        halo: ``[b, h]``, the others, from halo slots to the last b local rows.
        value: sends the sources' values.
        key: sends their keys, or part of the logits.
        edge_key: of the dropout, by edge storage.
        spec: how logits are made.
        num_weights: this rank's edges, if their weights are requested.
    """

    local: CSR
    halo: CSR
    value: HaloTransfer
    key: HaloTransfer
    edge_key: Tensor | None
    spec: AttentionSpec
    num_weights: int = 0

    def maps(self, inputs: AttentionInputs) -> list[HaloRows | None]:
        """Sends values and keys to the halo."""
        return [HaloRows(self.value), None if inputs.key is None else HaloRows(self.key)]

    def of_halo(self, inputs: AttentionInputs, rows: list[Tensor | None]) -> AttentionInputs:
        """The inputs of the part with remote sources, whose values and keys are ``rows``."""
        value, key = rows
        assert value is not None
        weight = inputs.edge_weight
        if weight is not None and not is_shared(weight) and self.spec.form != "dynamic":
            weight = self.boundary(weight)
        query = None if inputs.query is None else self.boundary(inputs.query)
        return inputs._replace(value=value, key=key, query=query, edge_weight=weight)

    def boundary(self, rows: Tensor) -> Tensor:
        """The last b rows."""
        return rows.narrow(0, rows.shape[0] - self.halo.num_rows, self.halo.num_rows)

    def by_edge(self, inputs: AttentionInputs) -> Attended:
        """In torch's functions, differentiable to any order (collective)."""
        both = [
            x if x is None or m is None else torch.cat([x.flatten(1), apply(m, x.flatten(1))])
            for x, m in zip(inputs[:2], self.maps(inputs), strict=True)
        ]
        local, halo, n = self.local, self.halo, self.local.num_rows
        edges = CSR.from_edges(
            torch.cat([local.row(), halo.row() + n - halo.num_rows]),
            torch.cat([local.col, halo.col + n]),
            torch.cat([local.edge, halo.edge]),
            n,
            n + halo.num_cols,
        )
        assert both[0] is not None
        inputs = inputs._replace(value=both[0], key=both[1])
        return attention_by_edge(edges, self.edge_key, self.spec, inputs, self.num_weights)


class _HaloAttention(LocalFunction[Attended]):
    @staticmethod
    def forward(ctx: Any, a: HaloAttention, *given: Any) -> Attended:
        inputs = AttentionInputs(*given)
        flying = [m.start(x.flatten(1)) if m is not None else None for m, x in zip(a.maps(inputs), given, strict=False)]
        y, z, lse = attend(a.local, inputs, a.edge_key, a.spec, a.halo.num_rows)
        rows = _landed(flying)
        if a.halo.num_rows:
            _join(a, (y, z, lse), attend(a.halo, a.of_halo(inputs, rows), a.edge_key, a.spec, a.halo.num_rows))
        weights = new_weights(inputs, a.spec, a.num_weights)
        if a.num_weights:
            write_weights(weights, a.local, a.spec, inputs, lse)
            write_weights(weights, a.halo, a.spec, a.of_halo(inputs, rows), a.boundary(lse))
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            a.local.transposed, a.halo.transposed  # noqa: B018  # now: sorting takes room
            ctx.a = a
            ctx.save_for_backward(*given, *rows, y, z, weights, lse)
        return y, z, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, halo_value, halo_key, y, z, weights, lse = ctx.saved_tensors
        a: HaloAttention = ctx.a
        inputs, needs, key, spec = AttentionInputs(*given), ctx.needs_input_grad[1:], a.edge_key, a.spec
        grad, grad_z = of_outputs(grads[0], grads[1], y)
        if torch.is_grad_enabled():
            return None, *differentiable_gradients(a.by_edge, inputs, needs, (grad, grad_z, grads[2]))
        delta, slopes = dots(grad, grad_z, y, z, spec.heads), slopes_of_weights(weights, grads[2], lse)
        if slopes is not None:
            delta = delta + sums_of_edges(a.local, slopes)
            a.boundary(delta).add_(sums_of_edges(a.halo, slopes))
        known = lse, delta, grad, grad_z
        of_halo = a.of_halo(inputs, [halo_value, halo_key])
        known_halo = tuple(None if x is None else a.boundary(x) for x in known)
        by_weights: list[Gradients] = [[None] * len(inputs)] * 2  # of the two parts' logits alone
        if slopes is not None:
            parts = (a.local, inputs), (a.halo, of_halo)
            by_weights = [gradients_of_logits(csr, spec, part, slopes, needs) for csr, part in parts]
        flying: list[Pending[Tensor] | None] = [None, None]
        if any(needs[:2]):
            sent = added(by_source(a.halo.transposed, of_halo, key, spec, known_halo), by_weights[1][:2])
            flying = [
                m.transposed.start(rows) if needed and m is not None and rows is not None else None
                for m, rows, needed in zip(a.maps(inputs), sent, needs, strict=False)
            ]
        found: Gradients = [None] * len(inputs)
        if any(needs[2:]):
            found[2:] = added(by_target(a.local, inputs, key, spec, known, needs[3]), by_weights[0][2:])
            if a.halo.num_rows:
                others = by_target(a.halo, of_halo, key, spec, known_halo, needs[3])
                _add_targets(a, found[2:], added(others, by_weights[1][2:]))
        if any(needs[:2]):
            found[:2] = added(by_source(a.local.transposed, inputs, key, spec, known), by_weights[0][:2])
        for own, home in zip(found[:2], _landed(flying), strict=True):
            if own is not None and home is not None:
                own += home
        return None, *as_inputs(found, inputs, needs)


def _landed(flying: list[Pending[Tensor] | None]) -> list[Tensor | None]:
    return [None if messages is None else messages.wait() for messages in flying]


def _join(a: HaloAttention, local: tuple[Tensor, Tensor, Tensor], halo: tuple[Tensor, Tensor, Tensor]) -> None:
    """Put the halo's part of a softmax to that of local edges, in place."""
    *outputs, lse = (a.boundary(x) if x.shape[0] else x for x in local)
    whole = torch.logaddexp(lse, halo[2])
    own = share_of_part(a.local.rowptr[-1 - a.halo.num_rows :], lse, whole)
    its = share_of_part(a.halo.rowptr, halo[2], whole)
    for out, other in zip(outputs, halo, strict=False):
        if out.numel():
            out.copy_((by_head(out, a.spec.heads) * own + by_head(other, a.spec.heads) * its).flatten(1))
    lse.copy_(whole)


def _add_targets(a: HaloAttention, local: Gradients, halo: Gradients) -> None:
    """Add the gradients of the halo's part by query, edge_attr, edge_weight and att to those of the local one."""
    for own, other in zip(local, halo, strict=True):
        if own is None or other is None or not other.numel():
            continue
        is_by_row = own.shape[0] != other.shape[0]
        (a.boundary(own) if is_by_row else own).add_(other)


def halo_attention(a: HaloAttention, inputs: AttentionInputs) -> Attended:
    """Attention over local and remote sources; exact but for coded messages, collective both ways.

    Differentiable by all inputs; twice by a pass that makes values for each edge and column.

    Shapes:
        - inputs: of :func:`pyg_dist.backend.ops.attention_csr`, value and key of the n local rows
        - output: ``[n, H C]``; ``[n, H D]``, or empty; the weights of ``num_weights`` edges, by edge storage, and H
          heads, before dropout
    """
    return _HaloAttention.apply(a, *inputs)
