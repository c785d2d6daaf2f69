"""All in-edges of some targets, and functions of their messages: what is run by blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from torch import Tensor

Place = Literal["source", "neighbour", "target", "edge", "all"]
"""What an input has rows of: local nodes, which go to edges from them; these with halo slots behind them; local nodes,
which go to edges to them; edges. Or it is the same for all edges."""


class Block(NamedTuple):
    """All in-edges of some targets, those of one target together, targets ascending.

    Attributes:
        low: the first target.
        high: the last one, exclusive.
        source: of each edge: local row, or halo slot behind these, int64 ``[e]``.
        target: of each edge, less ``low``, int64 ``[e]``.
        place: position of each edge's value in the edge storage, int64 ``[e]``.
    """

    low: int
    high: int
    source: Tensor
    target: Tensor
    place: Tensor


Run = Callable[[Block, list[Tensor]], Tensor]
"""Makes the targets' outputs ``[high - low, ...]`` of a block and of its piece of each input."""
