"""Drop-in convolutions: subclasses of PyG's, with the same constructor and ``state_dict``, and any other conv."""

from pyg_dist.conv.any_conv import DistributedConv
from pyg_dist.conv.gcn import DistributedGCNConv
from pyg_dist.conv.sage import DistributedSAGEConv

__all__ = ["DistributedConv", "DistributedGCNConv", "DistributedSAGEConv"]
