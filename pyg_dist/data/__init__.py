"""``DistributedData`` and what it reads and keeps."""

from pyg_dist.data.distributed_data import DistributedData
from pyg_dist.store.saved import save_graph

__all__ = ["DistributedData", "save_graph"]
