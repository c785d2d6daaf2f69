"""``DistributedData``: its options, layouts, attributes and stores."""

from pyg_dist.data.distributed_data import DistributedData
from pyg_dist.store.saved import save_graph

__all__ = ["DistributedData", "save_graph"]
