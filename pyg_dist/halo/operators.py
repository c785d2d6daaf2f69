"""Matrices over a halo graph's edges: constant ones, whose products are cached, and those whose weights learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyg_dist.backend.comm.codec import Codec
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.gcn_norm import LearnedScales
from pyg_dist.graph.protocol import Norm
from pyg_dist.halo.aggregate import (
    LentSums,
    LinearOperator,
    aggregate_edges,
    aggregate_lent,
    weight_sums,
)
from pyg_dist.halo.transfer import HaloTransfer


@dataclass(eq=False, frozen=True)
class ConstantOperator:
    """A matrix of constant values.

    Attributes:
        matrix: it.
    """

    matrix: LinearOperator
    learns = False


@dataclass(eq=False, frozen=True)
class LearningOperator:
    """A matrix whose weights require a gradient.

    Attributes:
        norm: how it scales.
        weight: by edge storage, ``[e]``.
        local: local nodes by local sources.
        halo: boundary nodes by halo slots.
        sums: what sends partial sums as well as rows.
        in_degree: of the local nodes, in a dtype.
        loops: weights of the loops that the norm adds, ``[e] -> [n]``; ``None``: it adds none.
        scales: of GCN's norm.
    """

    norm: Norm
    weight: Tensor
    local: CSR
    halo: CSR
    sums: Callable[[], LentSums]
    in_degree: Callable[[torch.dtype], Tensor]
    loops: Callable[[Tensor], Tensor] | None = None
    scales: LearnedScales = field(default_factory=LearnedScales)
    _lent: dict[tuple[torch.dtype, bool], Tensor] = field(default_factory=dict)
    learns = True

    def by_rows(self, x: Tensor, post: HaloTransfer) -> Tensor:
        """Weighted sums, loops included; rows of sources are sent (collective). Shapes: ``[n, F] -> [n, F]``."""
        weight = self.weight.to(x.dtype)
        return self._with_loops(aggregate_edges(x, weight, self.local, self.halo, post), weight, x)

    def by_sums(self, x: Tensor, codecs: tuple[Codec, Codec]) -> Tensor:
        """The same; partial sums are sent as well. Weights are lent for all products of the operator (collective)."""
        weight, sums, key = self.weight.to(x.dtype), self.sums(), (x.dtype, torch.is_grad_enabled())
        if key not in self._lent:
            self._lent[key] = sums.lent(weight)
        out = aggregate_lent(x, weight, self._lent[key], self.local, sums, codecs)
        return self._with_loops(out, weight, x)

    def degree(self, dtype: torch.dtype) -> Tensor:
        """The sum of the weights of each node's in-edges and loop; not collective. Shapes: ``[n, 1]``."""
        weight = self.weight.to(dtype)
        out = weight_sums(weight, self.local, self.halo)
        return self._with_loops(out, weight, out.new_ones(out.shape))

    def _with_loops(self, out: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return out if self.loops is None else out + self.loops(weight).view(-1, 1) * x


HaloOperator = ConstantOperator | LearningOperator
