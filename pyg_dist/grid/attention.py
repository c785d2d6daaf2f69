"""Attention over the grid, with autograd: each rank works on its tile's edges, a part of its targets' in-edges.

A softmax over parts is put together of them: each counts by the sum of its exponentials. The gradients of all parts
need the logarithm of the whole sum alone, so every rank makes those of its tile, and they are summed where the inputs
came from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
    EdgeSums,
    Gradients,
    by_head,
    divided,
    gradients_of_logits,
    sums_by_edge,
    sums_of_edges,
    weights_by_edge,
    write_weights,
)
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.grid.collectives import AllGather, all_gather, reduce_scatter, sum_all


@dataclass(frozen=True)
class GridAttention:
    """The edges of one rank, and how the rows of their ends reach them.

    Attributes:
        csr: ``[t, s]``, the tile's edges.
        sources: gathers the rows of s sources, of which this rank has n.
        targets: gathers the rows of t targets, of which this rank has m. Its ranks share their in-edges.
        edge_key: of the dropout, by edge storage of the tile.
        spec: how logits are made.
        num_weights: the tile's edges, if their weights are requested. Each rank has those of its own; others are zero.
    """

    csr: CSR
    sources: AllGather
    targets: AllGather
    edge_key: Tensor | None
    spec: AttentionSpec
    num_weights: int = 0

    def gathers(self, inputs: AttentionInputs) -> list[AllGather | None]:
        """The gather of each input; ``None`` for inputs that need none."""
        by_row = [
            self.sources,
            self.sources,
            self.targets,
            None,
            self.targets if self.spec.form == "dot" else None,
            None,
        ]
        return [None if x is None else gather for x, gather in zip(inputs, by_row, strict=True)]

    def has_edge_sums(self, inputs: AttentionInputs) -> bool:
        """Whether edge_attr is summed, too: on all ranks or on none."""
        return self.spec.form == "dot" and inputs.edge_attr is not None

    def combine(self, y: Tensor, z: Tensor, lse: Tensor, has_edge_sums: bool) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's rows of the sums over all parts, and the logarithms of the whole sums, of t rows (collective).

        Shapes:
            - y: ``[t, H C]``; z: ``[t, H D]``, or empty; lse: ``[t, H]``, of this rank's edges
            - output: ``[m, H C]``; ``[m, H D]``, or empty; ``[t, H]``
        """
        transport = self.targets.transport
        num_parts = transport.group.size
        if num_parts == 1:
            return y, z, lse
        # As many bytes as a maximum and a sum to all on four ranks, in one message instead of four.
        parts = AllGather(transport, [lse.shape[0]] * num_parts).start(lse).wait().view(num_parts, *lse.shape)
        whole = parts.logsumexp(0)
        share = share_of_part(self.csr.rowptr, lse, whole)
        scatter, heads = self.targets.transposed, self.spec.heads
        outputs = [y, z] if has_edge_sums else [y]
        flying = [scatter.start((by_head(out, heads) * share).to(out.dtype).flatten(1)) for out in outputs]
        found = [pending.wait() for pending in flying]
        return found[0], found[1] if has_edge_sums else z, whole

    def by_edge(self, inputs: AttentionInputs) -> Attended:
        """In torch's functions, differentiable to any order (collective)."""
        held = [
            x if gather is None or x is None else all_gather(x, gather.transport, gather.sizes)
            for x, gather in zip(inputs, self.gathers(inputs), strict=True)
        ]
        group = self.targets.transport.group
        largest = lambda logits: group.all_reduce_(logits, "max")  # noqa: E731
        part = sums_by_edge(self.csr, self.edge_key, self.spec, AttentionInputs(*held), largest)  # type: ignore[arg-type]

        def total(sums: Tensor) -> Tensor:
            return reduce_scatter(sums, self.targets.transport, self.targets.sizes)

        z = total(part.of_edge_attr) if self.has_edge_sums(inputs) else part.of_edge_attr
        of_ones = total(part.of_ones)
        y, z = divided(EdgeSums(total(part.of_values), z, of_ones, part.powers))
        of_ones = all_gather(of_ones, self.targets.transport, self.targets.sizes)
        return y, z, weights_by_edge(self.csr, part.powers, of_ones, self.num_weights)


class _GridAttention(LocalFunction[Attended]):
    @staticmethod
    def forward(ctx: Any, a: GridAttention, *given: Any) -> Attended:
        inputs = AttentionInputs(*given)
        flying = [None if g is None else g.start(x) for x, g in zip(given, a.gathers(inputs), strict=True)]
        held = AttentionInputs(*_moved(flying, given))  # type: ignore[arg-type]
        num_parts = a.csr.num_rows if a.targets.transport.group.size > 1 else 0
        y, z, lse = a.combine(*attend(a.csr, held, a.edge_key, a.spec, num_parts), a.has_edge_sums(inputs))
        weights = new_weights(inputs, a.spec, a.num_weights)
        if a.num_weights:
            write_weights(weights, a.csr, a.spec, held, lse)
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            a.csr.transposed  # noqa: B018  # now: sorting takes room
            ctx.a = a
            ctx.save_for_backward(*given, *held, y, z, weights, lse)
        return y, z, weights

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        *both, y, z, weights, lse = ctx.saved_tensors
        inputs, held = AttentionInputs(*both[:6]), AttentionInputs(*both[6:])
        a: GridAttention = ctx.a
        needs, key, spec = ctx.needs_input_grad[1:], a.edge_key, a.spec
        grad, grad_z = of_outputs(grads[0], grads[1], y)
        if a.has_edge_sums(inputs):  # also where this rank has no row of them
            grad_z = torch.zeros_like(z) if grad_z is None else grad_z
        if torch.is_grad_enabled():
            return None, *differentiable_gradients(a.by_edge, inputs, needs, (grad, grad_z, grads[2]))
        of_rows = [grad, grad_z]
        shared = a.targets.start(dots(grad, grad_z, y, z, spec.heads))
        flying = [None if x is None else a.targets.start(x) for x in of_rows]
        delta, arrived = shared.wait(), _moved(flying, of_rows)
        slopes = slopes_of_weights(weights, grads[2], lse)
        by_weights: Gradients = [None] * len(inputs)
        if slopes is not None:
            delta = delta + sum_all(sums_of_edges(a.csr, slopes), a.targets.transport)
            by_weights = gradients_of_logits(a.csr, spec, held, slopes, needs)
        known = lse, delta, *arrived
        found: Gradients = [None] * len(inputs)
        if any(needs[:2]):
            found[:2] = added(by_source(a.csr.transposed, held, key, spec, known), by_weights[:2])
        gathers = a.gathers(inputs)
        flying = [
            gather.transposed.start(x) if gather is not None and x is not None and needed else None
            for x, gather, needed in zip(found[:2], gathers, needs, strict=False)
        ]
        if any(needs[2:]):
            found[2:] = added(by_target(a.csr, held, key, spec, known, needs[3]), by_weights[2:])
        flying += [
            gather.transposed.start(x) if gather is not None and x is not None and needed else None
            for x, gather, needed in zip(found[2:], gathers[2:], needs[2:], strict=True)
        ]
        return None, *as_inputs(_moved(flying, found), inputs, needs)


def _moved(flying: list[Pending[Tensor] | None], here: Any) -> Gradients:
    """What arrives, and what stays where it is."""
    return [x if pending is None else pending.wait() for pending, x in zip(flying, here, strict=True)]


def grid_attention(a: GridAttention, inputs: AttentionInputs) -> Attended:
    """Attention over tiles; exact, collective both ways.

    Differentiable by all inputs; twice by a pass that makes values for each edge and column.

    Shapes:
        - inputs: of :func:`pyg_dist.backend.ops.attention_csr`, value and key of this rank's n sources, query, and
          edge_weight for ``dot``, of its m targets, edge_attr of the tile's edges
        - output: ``[m, H C]``; ``[m, H D]``, or empty; the weights of the tile's edges before dropout,
          ``[num_weights, H]``, zero for those to targets of other ranks
    """
    value, key, query, *others = inputs
    rows = [None if x is None else x.flatten(1) for x in (value, key, query)]
    return _GridAttention.apply(a, *rows, *others)
