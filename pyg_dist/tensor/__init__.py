"""The global view: tensors whose rows lie on several ranks, and the table of what torch's functions do to them."""

# Importing a module of the table registers its functions.
from pyg_dist.tensor import (
    autograd,
    batch_norm,
    columns,
    extremes,
    gathers,
    layers,
    losses,
    norms,
    pointwise,
    products,
    random,
    reductions,
    refusals,
    selection,
    shapes,
    tile_functions,
    tile_norms,
    transposed,
)
from pyg_dist.tensor.edge_index import DistributedEdgeIndex
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.rows import Rows

__all__ = [
    "DistributedEdgeIndex",
    "EdgeTensor",
    "NodeTensor",
    "RowTensor",
    "Rows",
    "autograd",
    "batch_norm",
    "columns",
    "extremes",
    "gathers",
    "layers",
    "losses",
    "norms",
    "pointwise",
    "products",
    "random",
    "reductions",
    "refusals",
    "selection",
    "shapes",
    "tile_functions",
    "tile_norms",
    "transposed",
]
