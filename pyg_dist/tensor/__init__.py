"""The global view: tensors whose rows are spread over ranks, and the table of what torch's functions do to them."""

from pyg_dist.tensor import functions
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.sharding import RowSharding

__all__ = ["EdgeTensor", "NodeTensor", "RowSharding", "RowTensor", "functions"]
