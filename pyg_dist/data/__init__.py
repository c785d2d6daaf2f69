"""``DistributedData`` and what it reads and keeps."""

from pyg_dist.data.distributed_data import DistributedData
from pyg_dist.data.saved_graph import save_graph

__all__ = ["DistributedData", "save_graph"]
