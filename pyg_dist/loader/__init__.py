"""Mini-batches that are drawn without communication."""

from pyg_dist.loader.uniform import UniformVertexLoader

__all__ = ["UniformVertexLoader"]
