"""Matrices over a halo graph's edges: constant ones, whose products are cached, and those whose weights learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyg_dist.backend.halo.operator import LinearOperator
from pyg_dist.backend.halo.transfer import HaloTransfer
from pyg_dist.layout.gcn_norm import LearnedScales
from pyg_dist.layout.graph import Norm


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
    """A matrix whose weights require a gradient. Their derivatives need the sources' rows: the exchange is post.

    Attributes:
        norm: how it scales.
        weight: this rank's edge storage, ``[e]``.
        multiply: weighted sums of local rows, loops of the norm included: rows, weights, exchange.
        in_degree: of the local nodes, in a dtype.
        scales: of GCN's norm.
    """

    norm: Norm
    weight: Tensor
    multiply: Callable[[Tensor, Tensor, HaloTransfer], Tensor]
    in_degree: Callable[[torch.dtype], Tensor]
    scales: LearnedScales = field(default_factory=LearnedScales)
    learns = True


HaloOperator = ConstantOperator | LearningOperator
