"""Modules for models on distributed graphs."""

from pyg_dist.nn.node_embedding import NodeEmbedding

__all__ = ["NodeEmbedding"]
