"""Modules and functions for models on distributed or plain tensors."""

from pyg_dist.nn.label_propagation import MaskedLabelPropagation
from pyg_dist.nn.node_embedding import NodeEmbedding
from pyg_dist.nn.norms import DistributedGraphNorm, DistributedInstanceNorm, NormReLUDropout, norm_relu_dropout

__all__ = [
    "DistributedGraphNorm",
    "DistributedInstanceNorm",
    "MaskedLabelPropagation",
    "NodeEmbedding",
    "NormReLUDropout",
    "norm_relu_dropout",
]
