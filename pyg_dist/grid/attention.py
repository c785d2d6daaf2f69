"""Attention over the grid: each rank works on its tile's edges, a part of its targets' in-edges.

See :mod:`pyg_dist.backend.sparse.attention`. Gradients are summed where the inputs came from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend.ops import AttentionInputs
from pyg_dist.backend.sparse.attention import Attended, RankAttention
from pyg_dist.backend.sparse.attention_by_edge import (
    EdgeSums,
    Gradients,
    by_head,
    divided,
    sums_by_edge,
    weights_by_edge,
)
from pyg_dist.grid.collectives import AllGather, all_gather, reduce_scatter, sum_all


@dataclass(frozen=True, kw_only=True)
class GridAttention(RankAttention):
    """Over the tile's edges; exact, collective both ways.

    Value and key are rows of this rank's sources, query, and edge_weight for ``dot``, those of its targets. Weights of
    edges to targets of other ranks are zero.
    """

    targets: AllGather  # gathers the rows of targets; its ranks share their in-edges

    def keeps(self, y: Tensor) -> bool:
        """See :class:`RankAttention`: a rank's share is small, and making it again would send messages."""
        return True

    def over_ranks(self, y: Tensor, z: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`RankAttention`: of m of the t targets, the logarithms of all."""
        transport = self.targets.transport
        num_parts = transport.group.size
        if num_parts == 1:
            return y, z, lse
        # As many bytes as a maximum and a sum to all on four ranks, in one message instead of four.
        parts = AllGather(transport, [lse.shape[0]] * num_parts).start(lse).wait().view(num_parts, *lse.shape)
        whole = parts.logsumexp(0)
        share = _share_of_part(self.csr.rowptr, lse, whole)
        scatter, heads = self.targets.transposed, self.spec.heads
        outputs = [y, z] if self.has_edge_sums else [y]
        flying = [scatter.start((by_head(out, heads) * share).to(out.dtype).flatten(1)) for out in outputs]
        found = [pending.wait() for pending in flying]
        return found[0], found[1] if self.has_edge_sums else z, whole

    def at_targets(self, rows: Gradients) -> Gradients:
        flying = [None if x is None else self.targets.start(x) for x in rows]
        return [None if pending is None else pending.wait() for pending in flying]

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        return sum_all(sums, self.targets.transport)

    def by_edge(self, inputs: AttentionInputs) -> Attended:
        targets = self.targets
        held = [
            all_gather(x, m.transport, m.sizes) if isinstance(m, AllGather) and x is not None else x
            for x, m in zip(inputs, self.maps, strict=True)
        ]
        group = targets.transport.group
        largest = lambda logits: group.all_reduce_(logits, "max")  # noqa: E731
        sums = sums_by_edge(self.csr, self.edge_key, self.spec, AttentionInputs._make(held), largest)

        def total(sums: Tensor) -> Tensor:
            return reduce_scatter(sums, targets.transport, targets.sizes)

        z = total(sums.of_edge_attr) if self.has_edge_sums else sums.of_edge_attr
        of_ones = total(sums.of_ones)
        y, z = divided(EdgeSums(total(sums.of_values), z, of_ones, sums.powers))
        of_ones = all_gather(of_ones, targets.transport, targets.sizes)
        return y, z, weights_by_edge(self.csr, sums.powers, of_ones, self.num_weights)


def _share_of_part(rowptr: Tensor, lse: Tensor, whole: Tensor) -> Tensor:
    """What a part of each row's edges counts in its softmax: NaN if there are edges, and all logits are -infinity.

    ``lse`` is the op's on the part, ``whole`` the logarithm of the sum over all parts. Shapes: ``[N, H] -> [N, H, 1]``.
    """
    is_empty = (rowptr.diff() == 0).unsqueeze(1)
    finite = whole.masked_fill(is_empty & (whole == -torch.inf), 0.0)  # a part without edges has sums of zero
    return (lse - finite).exp().unsqueeze(2)
