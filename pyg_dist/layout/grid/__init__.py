"""The adjacency matrix and the features in tiles on a three-dimensional mesh."""

# Importing these fills the table of functions of tiles.
from pyg_dist.layout.grid import functions, norms

__all__ = ["functions", "norms"]
