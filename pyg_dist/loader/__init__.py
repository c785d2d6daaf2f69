"""Mini-batches: subgraphs that every rank cuts from its own part."""

from pyg_dist.loader.batches import BatchLoader
from pyg_dist.loader.neighbor_loader import LinkNeighborLoader, NeighborLoader
from pyg_dist.loader.uniform import UniformVertexLoader

__all__ = ["BatchLoader", "LinkNeighborLoader", "NeighborLoader", "UniformVertexLoader"]
