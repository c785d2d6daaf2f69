"""``DistributedData`` and what it reads and keeps."""

from pyg_dist.data.distributed_data import DistributedData

__all__ = ["DistributedData"]
