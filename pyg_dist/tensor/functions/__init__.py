"""What torch's functions do to row tensors, one file for each subject. Importing a file fills its part of the table."""

from pyg_dist.tensor.functions import (
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

__all__ = [
    "along", "attention", "autograd", "distributions", "full_tensor", "indexing", "layers", "losses", "moved_rows",
    "pointwise", "products", "random", "reductions", "scatter", "scripts", "shapes",
]  # fmt: skip
