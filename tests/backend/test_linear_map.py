"""Every linear map of the package is its dense matrix, its transpose is that one's transpose, and so to any order.

A map takes this rank's piece of one vector of *coordinates* to this rank's piece of another. A coordinate may have
copies on several ranks (replicas). Two kinds of gradients meet there: each copy of a *shared* value has a part of its
own, and ``<x, A^T y>`` sums over all copies; the copies of a *replicated* value have one gradient, and count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data
from workers import Workers

Pools = Callable[[int], Workers]
WIDTH = 3
DOUBLE = torch.float64


@dataclass
class Case:
    """A map on this rank.

    Attributes:
        name: of the class and the variant.
        linear_map: the map.
        x, y: shapes of this rank's pieces.
        weigh_x, weigh_y: 1 where this rank's copy of a replicated coordinate is the one that counts, else 0.
        dense: makes the pieces of y, of all ranks, from those of x; independent of the map.
    """

    name: str
    linear_map: Any
    x: tuple[int, ...]
    y: tuple[int, ...]
    dense: Callable[[list[Tensor]], list[Tensor]]
    x_is_replicated: bool = False
    y_is_replicated: bool = False


def cases(rank: int, size: int) -> Iterator[Case]:
    yield from of_replicas(rank, size)
    yield from of_redistribution(rank, size)
    yield from of_collectives(rank, size)
    yield from of_halo(rank, size)
    yield from of_grid(rank, size)
