"""A matrix over a grid graph's edges: a tile of it for each layout of what it multiplies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pyg_dist.graph.gcn_norm import LearnedScales
from pyg_dist.graph.protocol import Norm
from pyg_dist.grid.aggregate import GridOperator
from pyg_dist.grid.plan.tiling import TileLayout


@dataclass(eq=False, frozen=True)
class TiledOperator:
    """A distributed matrix.

    Attributes:
        norm: how it scales. A GCN norm of weights that learn is a product of products
            (:func:`~pyg_dist.graph.gcn_norm.gcn_product`): the tiles then are those of ``A_w``, loops included.
        learns: whether its weights require a gradient.
        tile: this rank's tile for a layout of x (collective when built).
        scales: of GCN's norm, for weights that learn.
    """

    norm: Norm
    learns: bool
    tile: Callable[[TileLayout], GridOperator]
    scales: LearnedScales = field(default_factory=LearnedScales)
