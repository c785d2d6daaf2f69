"""Sparse matrices that a script makes of edges: products with rows, in which they are an ``adj_t`` over these nodes.

``torch.sparse_coo_tensor(edge_index, values, (N, N))`` of distributed edges is one. A plain matrix, equal on every
rank, is laid out when it meets rows: torch's, and ``torch_sparse``'s, whose constructor copies all edges.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from pyg_dist.errors import DataError
from pyg_dist.graph.adjacency import DistributedAdjacency
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import NodeSharding, nodes_at
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.functions import products
from pyg_dist.tensor.functions.full_tensor import stand_for_constructor
from pyg_dist.tensor.registry import TABLE, Function
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor


def adjacency(matrix: Any, x: Any) -> DistributedAdjacency | None:
    """The ``adj_t`` that a plain sparse matrix of all nodes by all nodes is, over the nodes of ``x`` (collective).

    ``None`` for anything else. It is known again by its values, see :meth:`DistributedEdgeIndex.over`.

    Raises:
        AgreementError: The ranks have different matrices.
        DataError: It is not of all nodes by all nodes.
    """
    loop_rule: LoopRule
    if not isinstance(x, NodeTensor) or isinstance(matrix, RowTensor):
        return None
    if isinstance(matrix, SparseTensor):
        row, col, values = matrix.coo()
        size, loop_rule = matrix.sparse_sizes(), "replace"
    elif isinstance(matrix, Tensor) and is_torch_sparse_tensor(matrix):
        coo = matrix.to_sparse_coo().coalesce()
        (row, col), values, size, loop_rule = coo.indices(), coo.values(), coo.shape, "add"
    else:
        return None
    if values is not None and not values.requires_grad and bool((values == 1).all()):
        values = None
    nodes = x._sharding.whole
    return _matrix(torch.stack([row, col]), (nodes, nodes), values, size, loop_rule)  # type: ignore[arg-type]


def _matrix(
    indices: Tensor, nodes: tuple[NodeSharding, NodeSharding], values: Tensor | None, size: Any, loop_rule: LoopRule
) -> DistributedAdjacency:
    """The matrix with ``values`` at ``indices``, int64 ``[2, E]``, of these nodes by these nodes (collective)."""
    shape = tuple(rows.size for rows in nodes)
    if size is not None and tuple(size) != shape:
        raise DataError(f"Expected a matrix of all nodes by all nodes, {list(shape)} (got {list(size)}): give its size")
    edges = DistributedEdgeIndex.over(indices.flip(0), nodes[0], indices.device, loop_rule, sources=nodes[1])
    assert edges is not None
    return DistributedAdjacency(edges.graph).set_value(values)


_stock = torch.sparse_coo_tensor


@wraps(_stock)
def _coo(*args: Any, **options: Any) -> Any:
    given = {**dict(zip(("indices", "values", "size"), args, strict=False)), **options}
    indices, values = given.get("indices"), given.get("values")
    nodes: tuple[NodeSharding, NodeSharding] | None
    if isinstance(indices, (DistributedEdgeIndex, Edges)):
        nodes = nodes_at(indices.graph, 0), nodes_at(indices.graph, 1)
    else:
        nodes = getattr(indices, "nodes", None)  # of ends that a script has stacked
    if nodes is None and isinstance(values, RowTensor):
        return _stock(**{**given, "values": values.full_tensor()})  # in the order of the script's own edges
    if indices is None or nodes is None or values is None:
        return _stock(*args, **options)
    values = values if options.get("dtype") is None else values.to(options["dtype"])
    return _matrix(indices.full_tensor(), nodes, values, given.get("size"), "add")


def _copying_edges(stock: Any) -> Any:
    @wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        def copied(value: object) -> object:
            return value.full_tensor() if isinstance(value, RowTensor) else value

        stock(self, *map(copied, args), **{name: copied(value) for name, value in kwargs.items()})

    return init


def _spmm(function: Function, row: object, rowptr: Tensor, col: Tensor, values: Tensor | None, *others: Any) -> Any:
    """What ``torch_sparse.matmul`` calls."""
    num_nodes, x = rowptr.numel() - 1, others[-1]
    matrix = SparseTensor(rowptr=rowptr, col=col, value=values, sparse_sizes=(num_nodes, num_nodes), is_sorted=True)
    if not isinstance(x, NodeTensor):
        raise DataError(f"torch_sparse.matmul expected a row for each node (got {type(x).__name__} {list(x.shape)})")
    return adjacency(matrix, x).matmul(x)  # type: ignore[union-attr]


def install() -> None:
    """Add these to the table of functions of rows, and to the constructors."""
    stand_for_constructor("sparse_coo_tensor", _coo)
    products.matrix_of_edges = adjacency  # type: ignore[assignment]
    if WITH_TORCH_SPARSE:
        SparseTensor.__init__ = _copying_edges(SparseTensor.__init__)
        TABLE[torch.ops.torch_sparse.spmm_sum] = _spmm
