"""Modules and functions for models on distributed or plain tensors."""

from pyg_dist.nn.graph_norms import DistributedGraphNorm, DistributedInstanceNorm
from pyg_dist.nn.label_propagation import MaskedLabelPropagation
from pyg_dist.nn.node_embedding import NodeEmbedding
from pyg_dist.nn.norm_relu_dropout import NormReLUDropout, norm_relu_dropout

__all__ = [
    "DistributedGraphNorm",
    "DistributedInstanceNorm",
    "MaskedLabelPropagation",
    "NodeEmbedding",
    "NormReLUDropout",
    "norm_relu_dropout",
]
