"""``DistributedAdjacency``: the handle that stands for ``data.adj_t``, and its arithmetic as a matrix of the edges.

So are a script's sparse matrices as operands beside rows: ``torch.sparse_coo_tensor(edge_index, values, (N, N))`` of
distributed edges, and plain ones of torch or ``torch_sparse``, equal on every rank, which are laid out.
"""

from __future__ import annotations

from functools import wraps
from numbers import Number
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.typing import WITH_TORCH_SPARSE, SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from pyg_dist.errors import DataError, MixedRowsError, UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph, NodeSharding, Norm, nodes_at
from pyg_dist.graph.sharded_edges import ShardedEdges
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.functions import products
from pyg_dist.tensor.functions.full_tensor import stand_for_constructor
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.registry import TABLE, Args, Function, Kwargs, dims_of, functions
from pyg_dist.tensor.row_tensor import DerivedOperand, EdgeTensor, NodeTensor, RowTensor

_PRODUCTS = {*functions("matmul", "mm", "mv"), torch.sparse.mm}

_MUL = {*functions("mul", "__mul__", "__rmul__")}


def _one_number(value: Any) -> Any:
    """``value`` as a factor of values, where it is a number, or a tensor of one, equal on every rank; else ``None``."""
    if isinstance(value, Tensor) and not isinstance(value, (RowTensor, DerivedOperand)):
        return value.view(-1) if value.dim() in (1, 2) and value.numel() == 1 else value if value.dim() == 0 else None
    return value if isinstance(value, Number) else None


class DistributedAdjacency(DistributedEdgeIndex):
    """A sparse matrix ``[N, N]``, targets by sources, whose entries are the edges; ``adj_t @ x`` are node rows.

    Its values are ``weight``, ``[E]``, or ones where it has none.
    """

    is_sparse = True
    layout = torch.sparse_coo  # by which `to_edge_index(adj_t)` reads it

    def __init__(self, graph: DistributedGraph, weight: RowTensor | None = None) -> None:
        super().__init__(graph, weight)
        self._stands_for = SparseTensor if graph.loop_rule == "replace" else type(self)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance reads where the type says no
        return self._stands_for

    def global_shape(self) -> torch.Size:
        return torch.Size((self.graph.targets.size, self.graph.sources.size))

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the values."""
        return torch.get_default_dtype() if self.weight is None else self.weight.dtype

    def to(  # type: ignore[override]
        self, device: object = None, *args: object, **kwargs: object
    ) -> DistributedAdjacency:
        """Itself, or one whose values are cast; see :meth:`DistributedEdgeIndex.to`."""
        super().to(device)
        dtypes = [value for value in (device, *args, kwargs.get("dtype")) if isinstance(value, torch.dtype)]
        return self.set_value(self.values().to(dtypes[0])) if dtypes else self

    def detach(self) -> DistributedAdjacency:
        """One whose values do not learn."""
        values: Any = None if self.weight is None else self.weight.detach()
        return self if values is None else DistributedAdjacency(self.graph, values)

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise MixedRowsError(
            f"{what} needs all edges, and each rank holds only its own: apply it to the graph before DistributedData"
        )

    def _refuse_edges(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("adj_t by an index, unbind, flip or full_tensor, or on the right of a product,")

    __getitem__ = unbind = flip = full_tensor = _refuse_edges

    def coo(self) -> tuple[EdgeTensor, EdgeTensor, RowTensor | None]:
        """Targets, sources and values, as those of a ``SparseTensor``."""
        edges = self.edges(by_operator=True)
        return edges.end(1), edges.end(0), self.weight

    def matmul(self, x: Any) -> NodeTensor:
        """``adj_t @ x``: the sum of each node's in-edges' sources, times the edges' values. Exact (collective).

        Shapes:
            - x: ``[N, F]`` or ``[N]``, rows of sources in a floating type; a plain one has to be equal on every rank
            - output: as x

        Raises:
            DataError: x is something else.
        """
        graph = self.graph
        if isinstance(x, DistributedEdgeIndex):
            raise UnsupportedError(
                "A product of two sparse matrices of edges has edges of its own, which no rank makes: multiply rows by "
                "one after the other, adj_t @ (adj_t @ x), or keep the product in data before DistributedData"
            )
        sources = graph.sources
        if isinstance(x, Tensor) and not isinstance(x, RowTensor) and x.shape[:1] == (sources.size,):
            x = NodeTensor.from_local(sources.slice(x), sources)
        if isinstance(x, NodeTensor) and not graph.owns(x, 0):  # all nodes in another order, x[torch.randperm(N)]
            moved = sources.align_by_position(x.to_local(), x._sharding)
            x = x if moved is None else NodeTensor.from_local(moved, sources)
        if not (isinstance(x, NodeTensor) and x.dim() in (1, 2) and x.is_floating_point() and graph.owns(x, 0)):
            raise DataError(
                f"adj_t @ x expected a row of floats for each of the {sources.size} nodes of this graph "
                f"(got {f'{x.dtype} of shape {list(x.shape)}' if isinstance(x, Tensor) else type(x).__name__}): give "
                f"it data.x or what was made of it"
            )
        if x.dim() == 1:
            return self.matmul(x.view(-1, 1)).view(-1)  # type: ignore[return-value]
        dtype = x.dtype if self.weight is None else torch.promote_types(x.dtype, self.weight.dtype)
        values = None if self.weight is None else self.values()
        operator = graph.operator(Norm.SUM, values, accumulation_dtype(dtype))
        return graph.aggregate(graph.place(x.to(dtype)), operator)  # type: ignore[arg-type]

    __matmul__ = mm = spmm = matmul  # type: ignore[assignment]

    def values(self) -> EdgeTensor:
        """The values; ones, where it has none."""
        rows = self.graph.edge_sharding
        if self.weight is not None:
            return self.weight.redistribute(rows)  # type: ignore[return-value]
        return EdgeTensor.from_local(torch.ones(rows.num_local, device=self.device), rows)

    def set_value(self, value: Tensor | None, layout: object = None) -> DistributedAdjacency:
        """A matrix of the same edges with other values, ``[E]``, in the order of :meth:`values`."""
        if value is not None and tuple(value.shape) != (self.nnz(),):
            raise DataError(f"Expected a value for each edge, [{self.nnz()}] (got {list(value.shape)})")
        if value is not None and not isinstance(value, RowTensor):
            value = EdgeTensor.from_local(self.graph.edge_sharding.slice(value), self.graph.edge_sharding)
        return DistributedAdjacency(self.graph, value)

    def _coalesced_(self, value: bool) -> DistributedAdjacency:
        return self

    def indices(self) -> Tensor:
        """Targets and sources, global ids, ``[2, E]``, in the order of :meth:`values`."""
        return torch.stack(self.coo()[:2])

    def nnz(self) -> int:
        """How many edges there are."""
        return self.graph.edge_sharding.size

    _nnz = nnz

    def t(self) -> DistributedAdjacency:
        """The transpose (collective at the first use)."""
        return DistributedAdjacency(self.reversed.graph, self.weight)

    T = property(t)

    def transpose(self, dim0: int, dim1: int) -> DistributedAdjacency:
        """Like ``Tensor.transpose``."""
        first, second = dims_of((dim0, dim1), 2)
        return self if first == second else self.t()

    def sum(self, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """The sum of the values; of each node's in-edges (1), or out-edges (0). Exact, differentiable."""
        dims, values = dims_of(dim, 2), self.values().to(dtype or self.dtype)
        if len(dims) != len({*dims}):
            raise DataError(f"The sum of a matrix expected each dimension once (got dim={dim})")
        if len(dims) == 2:
            return values.sum().view((1, 1) if keepdim else ())
        out = self.edges(by_operator=True).end(dims[0]).add_up(values)
        return out.unsqueeze(dims[0]) if keepdim else out

    def mul(self, other: Any) -> DistributedAdjacency:  # type: ignore[override]
        """The matrix times a number, or with its rows (``[N, 1]``) or columns (``[1, N]`` or ``[N]``) scaled.

        Raises:
            DataError: ``other`` has another shape.
        """
        number, shape, (num_targets, num_sources) = _one_number(other), tuple(getattr(other, "shape", ())), self.shape
        if number is not None:
            return self.set_value(self.values() * number)
        end = int(shape == (num_targets, 1))
        if not isinstance(other, Tensor) or not (end or shape in ((1, num_sources), (num_sources,))):
            raise DataError(
                f"The factor of a sparse matrix of edges was expected to be a number, [{num_targets}, 1], "
                f"[1, {num_sources}] or [{num_sources}] (got {list(shape) if shape else type(other).__name__})"
            )
        nodes = self.graph.targets if end else self.graph.sources
        factor: Any = other.view(-1) if end or other.dim() == 1 else other.movedim(1, 0).reshape(-1)
        if not isinstance(factor, RowTensor):
            factor = NodeTensor.from_local(nodes.slice(factor), nodes)
        of_edges = factor[self.edges(by_operator=True).end(end)]
        return self.set_value(of_edges if self.weight is None else of_edges * self.values())

    def __truediv__(self, other: Any) -> DistributedAdjacency:
        number = _one_number(other)
        if number is None:
            self._refuse("Division of a sparse matrix by anything but a number,")
        return self.set_value(self.values() / number)

    def __neg__(self) -> DistributedAdjacency:
        return self.mul(-1)

    __mul__ = __rmul__ = __imul__ = mul
    __itruediv__ = __truediv__

    def _linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer of the rows of the matrix, as LINK has it."""
        out = self.matmul(weight.t())
        return out if bias is None else out + bias

    def float(self) -> DistributedAdjacency:
        """One with values in float32."""
        return self.to(torch.float32)

    def double(self) -> DistributedAdjacency:
        """One with values in float64."""
        return self.to(torch.float64)

    __eq__, __ne__, __hash__ = object.__eq__, object.__ne__, object.__hash__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(f"adj_t.{name}")

    @classmethod
    def of_all(cls, func: Function, args: Args, kwargs: Kwargs | None) -> object:
        cls._refuse(f"torch's {getattr(func, '__name__', func)} of adj_t")

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        named = dict(kwargs or {})
        first = args[0] if args else named.pop("input", None)
        others = (*args[1:], *named.values())
        if isinstance(first, DistributedAdjacency):
            if func in _PRODUCTS and len(others) == 1:
                return first.matmul(*others)
            if func is F.linear:
                return first._linear(*args[1:], **named)
            if func in (torch.sparse.sum, torch._sparse_sum):
                return first.sum(*args[1:], **named)
        if func in _MUL and len(others) == 1:
            return first.mul(*others) if isinstance(first, DistributedAdjacency) else others[0].mul(first)
        return super().__torch_function__(func, types, args, kwargs)


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
    return DistributedAdjacency(edges.graph).set_value(values)


_stock = torch.sparse_coo_tensor


@wraps(_stock)
def _coo(*args: Any, **options: Any) -> Any:
    given = {**dict(zip(("indices", "values", "size"), args, strict=False)), **options}
    indices, values = given.get("indices"), given.get("values")
    nodes: tuple[NodeSharding, NodeSharding] | None
    if isinstance(indices, ShardedEdges):
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
    """``spmm_sum``, which ``torch_sparse.matmul`` calls."""
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
