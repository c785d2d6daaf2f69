"""Attention over the halo layout: local edges are worked on while messages are in flight.

Its second part are the edges from halo slots; see :mod:`pyg_dist.backend.sparse.attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.attention import Attended, Part, PartedAttention, attention_in_parts
from pyg_dist.backend.sparse.attention_by_edge import attention_by_edge
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.halo.transfer import HaloTransfer


@dataclass(frozen=True)
class _HaloAttention(PartedAttention):
    def by_edge(self, inputs: AttentionInputs) -> Attended:
        """See :class:`PartedAttention`: local sources, with the halo's behind them."""
        local, halo = (part.csr for part in self.parts)
        both = [
            x if x is None or m is None else torch.cat([x.flatten(1), apply(m, x.flatten(1))])
            for x, m in zip(inputs[:2], self.parts[1].maps, strict=False)
        ]
        edges = CSR.from_edges(
            torch.cat([local.row(), halo.row() + self.parts[1].low]),
            torch.cat([local.col, halo.col + local.num_cols]),
            torch.cat([local.edge, halo.edge]),
            local.num_rows,
            local.num_cols + halo.num_cols,
        )
        assert both[0] is not None
        inputs = inputs._replace(value=both[0], key=both[1])
        return attention_by_edge(edges, self.edge_key, self.spec, inputs, self.num_weights)


def halo_attention(
    local: CSR,
    halo: CSR,
    value: HaloTransfer,
    key: HaloTransfer,
    edge_key: Tensor | None,
    spec: AttentionSpec,
    inputs: AttentionInputs,
    num_weights: int = 0,
) -> Attended:
    """Attention over local and remote sources; exact but for coded messages, collective both ways.

    Differentiable by all inputs; twice by a pass that makes values for each edge and column.

    Args:
        local: ``[n, m]``, the edges with a local source.
        halo: ``[b, h]``, the others, from halo slots to the last b local rows.
        value: sends the sources' values to halo slots.
        key: sends their keys, or part of the logits.
        edge_key: of the dropout, by edge storage.
        spec: how logits are made.
        inputs: see below.
        num_weights: this rank's edges, if their weights are requested.

    Shapes:
        - inputs: of :func:`pyg_dist.backend.ops.attention_csr`, value and key of the m local rows
        - output: ``[n, H C]``; ``[n, H D]``, or empty; the weights of ``num_weights`` edges, by edge storage, and H
          heads, before dropout
    """
    num_shared = halo.num_rows
    remote = Part(halo, local.num_rows - num_shared, num_shared, (value, key, *[None] * 4))
    a = _HaloAttention((Part(local, num_shared=num_shared), remote), edge_key, spec, num_weights)
    return attention_in_parts(a, inputs)
