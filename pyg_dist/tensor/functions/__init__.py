"""Torch's functions of row tensors, one file for each subject. Importing a file fills its part of the table."""

from pyg_dist.tensor.functions import (  # noqa: F401
    along,
    attention,
    autograd,
    distributions,
    full_tensor,
    indexing,
    layers,
    losses,
    moved_rows,
    pointwise,
    products,
    random,
    reductions,
    scatter,
    scripts,
    shapes,
)
