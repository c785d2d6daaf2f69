"""``DistributedEdgeIndex``: the handle that stands for ``data.edge_index`` or ``data.adj_t``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property
from numbers import Number
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.typing import SparseTensor

from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import DataError, LayoutMismatchError, MixedRowsError, UnsupportedError
from pyg_dist.graph.edge_sets import graph_over
from pyg_dist.graph.edges import Edges, flips_ends, swaps_ends
from pyg_dist.graph.protocol import DistributedGraph, NodeSharding, Norm
from pyg_dist.partition.inputs import as_edges, check_ends
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.calling_code import EdgeHandle, class_as_asked
from pyg_dist.tensor.functions.indexing import select_rows
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.registry import dims_of, functions
from pyg_dist.tensor.row_tensor import DerivedOperand, EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.sharding import RowSharding, require_same

_PRODUCTS = {*functions("matmul", "mm", "mv"), torch.sparse.mm}

_MUL = {*functions("mul", "__mul__", "__rmul__")}

_NUM_KEPT = 8  # size of the cache of recent edge sets; edges that are drawn anew in each step never hit it


def _one_number(value: Any) -> Any:
    """A number, or a tensor of one, equal on every rank, as values meet it; ``None`` for anything else."""
    if isinstance(value, Tensor) and not isinstance(value, (RowTensor, DerivedOperand, DistributedEdgeIndex)):
        return value.view(-1) if value.dim() in (1, 2) and value.numel() == 1 else value if value.dim() == 0 else None
    return value if isinstance(value, Number) else None


def _linear(adjacency: DistributedEdgeIndex, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer of the rows of a matrix, as LINK has it."""
    out = adjacency.matmul(weight.t())
    return out if bias is None else out + bias


class DistributedEdgeIndex(EdgeHandle):
    """A graph whose edges lie on several ranks; Distributed convs take it where they take ``edge_index``.

    It is not a tensor, on purpose: code that looks at edges itself (structural transforms, stock convs) would see one
    rank's edges, and gets an error instead. What a script does most is answered: ``row, col = edge_index`` are
    :class:`~pyg_dist.tensor.EdgeTensor` of global ids, ``x[row]`` is a row for each edge,
    ``edge_index[:, mask]`` and ``edge_index.flip(0)`` are graphs again, over the same nodes, and ``adj_t @ x`` are
    node rows.

    Args:
        graph: this rank's runtime form.
        sparse: whether it stands for ``adj_t``, whose shape is ``[N, N]`` (targets by sources), not for ``edge_index``,
            ``[2, E]``.
        weight: the values of ``adj_t``, where it has any.

    Attributes:
        graph: the runtime form of the graph (this rank's part).
        is_sparse: whether it stands for ``adj_t``.
        edge_attr: the values of the edges that ``data.edge_set`` was given, if any.

    Example:
        >>> row, col = data.edge_index
        >>> forward = data.edge_index[:, row < col]
        >>> tuple(forward.shape), tuple(data.edge_index.full_tensor().shape)
        ((2, 78), (2, 156))
    """

    is_distributed = True

    @property  # type: ignore[misc]
    def __class__(self) -> type[DistributedEdgeIndex]:  # what isinstance reads where the type says no
        graph = self.__dict__.get("graph")
        is_sparse_tensor = self.__dict__.get("is_sparse") and graph is not None and graph.loop_rule == "replace"
        kind = SparseTensor if is_sparse_tensor else Tensor
        return class_as_asked(DistributedEdgeIndex, kind, sys._getframe(1))

    def __init__(self, graph: DistributedGraph, sparse: bool = False, weight: RowTensor | None = None) -> None:
        self.graph = graph
        self.is_sparse = sparse
        self.weight = weight
        self.edge_attr: RowTensor | None = None
        self._edges: tuple[RowTensor | None, Edges] | None = None

    def __deepcopy__(self, memo: object) -> DistributedEdgeIndex:
        return self  # immutable

    @property
    def shape(self) -> torch.Size:
        """``[2, E]``, or ``[N, N]`` for ``adj_t``, of the whole graph."""
        graph = self.graph
        return torch.Size((graph.targets.size, graph.sources.size) if self.is_sparse else (2, graph.edge_sharding.size))

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Like ``Tensor.size``."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Two, as for the tensor."""
        return 2

    def numel(self) -> int:
        """Like ``Tensor.numel``."""
        return self.shape.numel()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of node ids; of a matrix, that of its values."""
        if not self.is_sparse:
            return torch.int64
        return torch.get_default_dtype() if self.weight is None else self.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where this rank's edges lie."""
        return self.graph.device

    def full_tensor(self) -> Tensor:
        """All edges in the input's order, int64 ``[2, E]``, on every rank, for code that looks at them (collective)."""
        if self.is_sparse:
            self._refuse("adj_t.full_tensor()")
        return self.graph.full_edge_index()

    def to(self, device: object = None, *args: object, **kwargs: object) -> DistributedEdgeIndex:
        """Itself: a graph moves together with its node tensors, through ``data.to(device)``. A matrix may be cast."""
        if isinstance(device, (str, torch.device)) and torch.device(device).type != self.device.type:
            raise LayoutMismatchError(
                f"Expected edge_index to stay on {self.device} (got {device}): move the graph, data.to({device!r})"
            )
        dtypes = [value for value in (device, *args, kwargs.get("dtype")) if isinstance(value, torch.dtype)]
        return self.set_value(self.values().to(dtypes[0])) if dtypes and self.is_sparse else self

    def on(self, graph: DistributedGraph) -> DistributedEdgeIndex:
        """The handle of the same graph after a move to another device."""
        weight = None
        if self.weight is not None:
            weight = RowTensor.from_local(self.weight.to_local().to(graph.device), graph.edge_sharding)
        return DistributedEdgeIndex(graph, self.is_sparse, weight)

    def __repr__(self) -> str:
        rows = self.graph.edge_sharding
        return f"{type(self).__name__}({list(self.shape)}, {rows.num_local} edges on rank {rows.group.rank})"

    def clone(self, *args: object, **kwargs: object) -> DistributedEdgeIndex:
        """Itself: it is immutable."""
        return self

    contiguous = long = coalesce = clone

    def detach(self) -> DistributedEdgeIndex:
        """Itself; of a matrix, one whose values do not learn."""
        values: Any = None if self.weight is None else self.weight.detach()
        return self if values is None else DistributedEdgeIndex(self.graph, self.is_sparse, values)

    def cpu(self) -> DistributedEdgeIndex:
        return self.to("cpu")

    @property
    def ndim(self) -> int:
        """Two, as for the tensor."""
        return 2

    def new_ones(self, *size: Any, dtype: torch.dtype = torch.int64, **kwargs: Any) -> Tensor:
        """Like ``Tensor.new_ones``: a plain tensor."""
        return torch.ones(*size, dtype=dtype, device=self.device, **kwargs)

    def new_zeros(self, *size: Any, **kwargs: Any) -> Tensor:
        """Like ``Tensor.new_zeros``: a plain tensor."""
        return self.new_ones(*size, **kwargs).zero_()

    @staticmethod
    def over(
        edge_index: Tensor,
        nodes: RowSharding | int,
        device: torch.device,
        loop_rule: LoopRule = "remaining",
        is_kept: bool = True,
        sources: RowSharding | None = None,
    ) -> DistributedEdgeIndex | None:
        """A script's own edges, laid out over nodes of a ``DistributedData``; ``None`` for other rows.

        They are known again by their values, of the latest few sets, so that it does not matter whether a script keeps
        the tensor or makes it anew in each forward. Collective: digests are compared, and new edges planned.

        ``edge_index``, integers ``[2, E]`` equal on every rank, goes from ``sources``, by default the same, to
        ``nodes``; or to so many hyperedges, each of which lies where most of its nodes are. Unless ``is_kept``, as
        where the script keeps the handle, it is not one of the latest few.

        Raises:
            AgreementError: The ranks have different edges.
            DataError: They are no edges between these nodes.
        """
        sources = sources if sources is not None or isinstance(nodes, int) else nodes
        if not (isinstance(nodes, (NodeSharding, int)) and isinstance(sources, NodeSharding)):
            return None
        edge_index = as_edges(edge_index)
        identity = digest(edge_index)
        require_same(sources.group, identity, "edge_index")
        name, known = f"{identity} {loop_rule} {device.type}", (sources if isinstance(nodes, int) else nodes).edge_sets
        if isinstance(nodes, int):
            name += f" {nodes} hyperedges"
        elif sources is not nodes:
            name += f" {id(sources)}"  # which the handle keeps alive
        handle: DistributedEdgeIndex | None = known.get(name)
        if handle is None:
            if isinstance(nodes, int):
                check_ends(edge_index[0], sources.size, "hyperedge_index[0]")
                nodes = sources.hyperedges(edge_index, nodes)
            handle = DistributedEdgeIndex(graph_over(edge_index, sources, nodes, loop_rule).to(device))
            handle.graph.digest = name
        if is_kept:
            known[name] = handle
            known.move_to_end(name)
            if len(known) > _NUM_KEPT:
                known.popitem(last=False)
        return handle

    def edges(self, by_operator: bool = False) -> Edges:
        """The edges as the code of a conv may look at them (may be collective at the first use).

        ``by_operator``: whether the graph's operators, and rows at the ends of edges wherever these lie, are enough.
        """
        # Kept here, not with the graph, which they know: drawn edges are freed with their handle, and not later.
        if self._edges is None or self._edges[0] is not self.weight:
            self._edges = self.weight, self.graph.edges(self.weight)
        edges = self._edges[1]
        return edges if by_operator else edges.by_target_rank

    @cached_property
    def reversed(self) -> DistributedEdgeIndex:
        """The same edges from targets to sources, made once (collective: gathers all edges)."""
        graph = self.graph
        turned = self.over(
            graph.full_edge_index().flip(0), graph.sources, graph.device, graph.loop_rule, sources=graph.targets
        )
        assert turned is not None
        return turned

    def flip(self, *given: object, dims: object = None) -> DistributedEdgeIndex:
        """Like ``Tensor.flip`` along dimension 0; see :attr:`reversed`."""
        if self.is_sparse or not flips_ends(*given, dims=dims):
            self._refuse("This edge_index.flip")
        return self.reversed

    def unbind(self, dim: int = 0) -> tuple[EdgeTensor, EdgeTensor]:
        """Sources and targets, global ids."""
        if self.is_sparse or dim not in (0, -2):
            self._refuse(f"edge_index.unbind({dim})")
        edges = self.edges(by_operator=True)
        return edges.end(0), edges.end(1)

    def __iter__(self) -> Iterator[EdgeTensor]:
        return iter(self.unbind())

    def coo(self) -> tuple[EdgeTensor, EdgeTensor, RowTensor | None]:
        """Targets, sources and values of ``adj_t``, as those of a ``SparseTensor``."""
        if not self.is_sparse:
            self._refuse("edge_index.coo()")
        edges = self.edges(by_operator=True)
        return edges.end(1), edges.end(0), self.weight

    def __getitem__(self, index: object) -> object:
        """``edge_index[0]``: one end of all edges; ``edge_index[:, mask]``: some edges, a graph (may be collective)."""
        first, *rest = index if isinstance(index, tuple) else (index,)
        if self.is_sparse or len(rest) > 1:
            self._refuse("Indexing edge_index like this")
        if type(first) is int and -2 <= first < 2:
            end = self.unbind()[first]
            return end if rest in ([], [slice(None)], [Ellipsis]) else end[rest[0]]
        if swaps_ends(index):
            return self.reversed
        has_all_ends = first is Ellipsis or (isinstance(first, slice) and first == slice(None))
        if not (rest and has_all_ends and isinstance(rest[0], (Tensor, np.ndarray, slice, list, range))):
            self._refuse("Indexing edge_index like this")
        return DistributedEdgeIndex(self.graph.select(select_rows(self.graph.edge_sharding, rest[0])))

    def matmul(self, x: Any) -> NodeTensor:
        """``adj_t @ x``: the sum of each node's in-edges' sources, times the edges' values. Exact (collective).

        Shapes:
            - x: ``[N, F]`` or ``[N]``, rows of sources in a floating type; a plain one has to be equal on every rank
            - output: as x

        Raises:
            DataError: x is something else.
        """
        graph = self.graph
        if not self.is_sparse:
            self._refuse("A product with edge_index")
        if type(x) is DistributedEdgeIndex:
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
        is_matrix = isinstance(x, NodeTensor) and x.dim() in (1, 2) and x.is_floating_point() and graph.owns(x, 0)
        if not is_matrix:
            raise DataError(
                f"adj_t @ x expected a row of floats for each of the {sources.size} nodes of this graph "
                f"(got {f'{x.dtype} of shape {list(x.shape)}' if isinstance(x, Tensor) else type(x).__name__}): give "
                f"it data.x or what was made of it"
            )
        if x.dim() == 1:
            return self.matmul(x.view(-1, 1)).view(-1)  # type: ignore[return-value]
        return self._sum(x, Norm.SUM)

    __matmul__ = mm = spmm = matmul

    def _sum(self, x: NodeTensor, norm: Norm) -> NodeTensor:
        graph, weight = self.graph, self.weight
        dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
        values = None if weight is None else weight.redistribute(graph.edge_sharding)
        operator = graph.operator(norm, values, accumulation_dtype(dtype))
        return graph.aggregate(graph.place(x.to(dtype)), operator)  # type: ignore[arg-type]

    def values(self) -> EdgeTensor:
        """The values of an ``adj_t``; ones, where it has none."""
        rows = self.graph.edge_sharding
        if self.weight is not None:
            return self.weight.redistribute(rows)  # type: ignore[return-value]
        return EdgeTensor.from_local(torch.ones(rows.num_local, device=self.device), rows)

    def set_value(self, value: Tensor | None, layout: object = None) -> DistributedEdgeIndex:
        """An ``adj_t`` of the same edges with other values, ``[E]``, in the order of :meth:`values`."""
        if value is not None and tuple(value.shape) != (self.nnz(),):
            raise DataError(f"Expected a value for each edge, [{self.nnz()}] (got {list(value.shape)})")
        if value is not None and not isinstance(value, RowTensor):
            value = EdgeTensor.from_local(self.graph.edge_sharding.slice(value), self.graph.edge_sharding)
        return DistributedEdgeIndex(self.graph, self.is_sparse, value)

    @property
    def layout(self) -> torch.layout:
        """That of ``adj_t``, by which ``to_edge_index(adj_t)`` reads it."""
        if not self.is_sparse:
            self._refuse("edge_index.layout")
        return torch.sparse_coo

    def _coalesced_(self, value: bool) -> DistributedEdgeIndex:
        return self

    def indices(self) -> Tensor:
        """Targets and sources of ``adj_t``, global ids, ``[2, E]``, in the order of :meth:`values`."""
        return torch.stack(self.coo()[:2])

    def nnz(self) -> int:
        """How many edges there are."""
        return self.graph.edge_sharding.size

    _nnz = nnz

    def t(self) -> DistributedEdgeIndex | Tensor:
        """The transpose of an ``adj_t`` (collective at the first use); of edges a plain one, of all (collective)."""
        return (
            DistributedEdgeIndex(self.reversed.graph, True, self.weight) if self.is_sparse else self.full_tensor().t()
        )

    @property
    def T(self) -> DistributedEdgeIndex | Tensor:
        """Like ``Tensor.T``."""
        return self.t()

    def transpose(self, dim0: int, dim1: int) -> DistributedEdgeIndex | Tensor:
        """Like ``Tensor.transpose``."""
        first, second = dims_of((dim0, dim1), 2)
        return self if first == second else self.t()

    def sum(self, dim: Any = None, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
        """The sum of an ``adj_t``'s values; of each node's in-edges (1), or out-edges (0). Exact, differentiable."""
        if not self.is_sparse:
            return self.full_tensor().sum(dim, keepdim, dtype=dtype)
        dims, values = dims_of(dim, 2), self.values().to(dtype or self.dtype)
        if len(dims) != len({*dims}):
            raise DataError(f"The sum of a matrix expected each dimension once (got dim={dim})")
        if len(dims) == 2:
            return values.sum().view((1, 1) if keepdim else ())
        out = self.edges(by_operator=True).end(dims[0]).add_up(values)
        return out.unsqueeze(dims[0]) if keepdim else out

    def mul(self, other: Any) -> DistributedEdgeIndex:
        """An ``adj_t`` times a number, or with its rows (``[N, 1]``) or columns (``[1, N]`` or ``[N]``) scaled.

        Raises:
            DataError: ``other`` has another shape.
        """
        if not self.is_sparse:
            self._refuse_operator()
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

    def __truediv__(self, other: Any) -> DistributedEdgeIndex:
        number = _one_number(other)
        if not self.is_sparse or number is None:
            self._refuse("Division of edge_index, or of a sparse matrix by anything but a number,")
        return self.set_value(self.values() / number)

    def __neg__(self) -> DistributedEdgeIndex:
        return self.mul(-1)

    __mul__ = __rmul__ = mul

    def _refuse(self, what: str) -> NoReturn:
        raise MixedRowsError(
            f"{what} needs all edges, and each rank holds only its own: apply it to the graph before DistributedData"
            + ("" if self.is_sparse else ", or to edge_index.full_tensor(), all edges, which convs take as well")
        )

    def _refuse_operator(self, *args: object) -> NoReturn:
        self._refuse("Arithmetic or comparison with edge_index")

    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __sub__ = __rsub__ = _refuse_operator
    __mod__ = __floordiv__ = __invert__ = __and__ = __or__ = _refuse_operator

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: object = None) -> np.typing.NDArray[Any]:
        return np.asarray(self.full_tensor().cpu(), dtype)

    def __dlpack_device__(self) -> NoReturn:
        self._refuse("Converting edge_index to a tensor")  # torch.tensor and torch.sparse_coo_tensor ask for it

    __dlpack__ = __dlpack_device__

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if self.is_sparse and name in ("float", "double"):
            return lambda: self.to(getattr(torch, name))
        if name in ("tolist", "numpy", "max", "min"):  # of all edges (collective)
            return lambda *args, **kwargs: getattr(self.full_tensor().cpu(), name)(*args, **kwargs)
        self._refuse(f"edge_index.{name}")

    @classmethod
    def __torch_function__(cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> object:
        name, kwargs = getattr(func, "__name__", str(func)), dict(kwargs or {})
        first = args[0] if args else kwargs.pop("input", kwargs.pop("tensors", None))
        if func in (torch.flip, torch.unbind) and isinstance(first, DistributedEdgeIndex):
            return getattr(first, name)(*args[1:], **kwargs)
        others = (*args[1:], *kwargs.values())
        if func in _PRODUCTS and isinstance(first, DistributedEdgeIndex) and len(others) == 1:
            return first.matmul(*others)
        if func is F.linear and isinstance(first, DistributedEdgeIndex):
            return _linear(first, *args[1:], **kwargs)
        if func in (torch.sparse.sum, torch._sparse_sum) and isinstance(first, DistributedEdgeIndex):
            return first.sum(*args[1:], **kwargs)
        if func in _MUL and len(others) == 1:
            return first.mul(*others) if isinstance(first, DistributedEdgeIndex) else others[0].mul(first)
        if func in (torch.cat, torch.concat) and others in ((1,), (-1,)):
            # Further edges, such as self loops: a plain tensor, which convs lay out.
            return torch.cat([e.full_tensor() if isinstance(e, DistributedEdgeIndex) else e for e in first], dim=1)
        raise MixedRowsError(
            f"torch's {name} on an edge_index needs all edges, and each rank holds only its own: apply it to the "
            f"graph before DistributedData, or to edge_index.full_tensor(), all edges, which convs take as well"
        )
