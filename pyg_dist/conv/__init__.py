"""Drop-in convolutions: subclasses of PyG's, with the same constructor and ``state_dict``."""

from pyg_dist.conv.gcn import DistributedGCNConv
from pyg_dist.conv.sage import DistributedSAGEConv

__all__ = ["DistributedGCNConv", "DistributedSAGEConv"]
