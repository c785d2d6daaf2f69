"""``DistributedAdjacency``: the handle that stands for ``data.adj_t``, and its arithmetic as a matrix of the edges."""

from __future__ import annotations

from numbers import Number
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.typing import SparseTensor

from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph, Norm
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.registry import Args, Function, Kwargs, dims_of, functions
from pyg_dist.tensor.row_tensor import DerivedOperand, EdgeTensor, NodeTensor, RowTensor

_PRODUCTS = {*functions("matmul", "mm", "mv"), torch.sparse.mm}

_MUL = {*functions("mul", "__mul__", "__rmul__")}


def _one_number(value: Any) -> Any:
    """A number, or a tensor of one, equal on every rank, as values meet it; ``None`` for anything else."""
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
        self._stands_for = SparseTensor if graph.loop_rule == "replace" else Tensor

    @property
    def shape(self) -> torch.Size:
        """``[N, N]`` of the whole graph."""
        return torch.Size((self.graph.targets.size, self.graph.sources.size))

    @property
    def dtype(self) -> torch.dtype:
        """That of the values."""
        return torch.get_default_dtype() if self.weight is None else self.weight.dtype

    def to(self, device: object = None, *args: object, **kwargs: object) -> DistributedAdjacency:
        """Itself, or one whose values are cast; see :meth:`DistributedEdgeIndex.to`."""
        super().to(device)
        dtypes = [value for value in (device, *args, kwargs.get("dtype")) if isinstance(value, torch.dtype)]
        return self.set_value(self.values().to(dtypes[0])) if dtypes else self

    def detach(self) -> DistributedAdjacency:
        """One whose values do not learn."""
        values: Any = None if self.weight is None else self.weight.detach()
        return self if values is None else DistributedAdjacency(self.graph, values)

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

    __matmul__ = mm = spmm = matmul

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

    def sum(self, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """The sum of the values; of each node's in-edges (1), or out-edges (0). Exact, differentiable."""
        dims, values = dims_of(dim, 2), self.values().to(dtype or self.dtype)
        if len(dims) != len({*dims}):
            raise DataError(f"The sum of a matrix expected each dimension once (got dim={dim})")
        if len(dims) == 2:
            return values.sum().view((1, 1) if keepdim else ())
        out = self.edges(by_operator=True).end(dims[0]).add_up(values)
        return out.unsqueeze(dims[0]) if keepdim else out

    def mul(self, other: Any) -> DistributedAdjacency:
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

    def __getattr__(self, name: str) -> object:
        return (lambda: self.to(getattr(torch, name))) if name in ("float", "double") else super().__getattr__(name)

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
