"""Mini-batches without a message."""

from pyg_dist.loader.uniform import UniformVertexLoader

__all__ = ["UniformVertexLoader"]
