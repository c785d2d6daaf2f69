"""``DistributedEdgeIndex``: the handle that stands for ``data.edge_index``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import LayoutMismatchError, MixedRowsError
from pyg_dist.graph.edge_sets import graph_over
from pyg_dist.graph.edges import Edges, all_edges, flips_ends, of_all_edges, swaps_ends
from pyg_dist.graph.protocol import DistributedGraph, NodeSharding
from pyg_dist.partition.inputs import as_edges, check_ends
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.calling_code import EdgeHandle, class_as_asked, of_whole_graphs
from pyg_dist.tensor.functions.indexing import select_rows
from pyg_dist.tensor.registry import Args, Function, Kwargs
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.sharding import require_same

_NUM_KEPT = 8  # size of the cache of recent edge sets; edges that are drawn anew in each step never hit it


class DistributedEdgeIndex(EdgeHandle):
    """A graph whose edges lie on several ranks; Distributed convs take it where they take ``edge_index``.

    It is not a tensor, on purpose: code that looks at edges itself (structural transforms, stock convs) would see one
    rank's edges, and gets an error instead. ``row, col = edge_index`` are
    :class:`~pyg_dist.tensor.EdgeTensor` of global ids, ``x[row]`` is a row for each edge,
    ``edge_index[:, mask]`` and ``edge_index.flip(0)`` are graphs again, over the same nodes. What else a tensor does,
    ``edge_index.unique()``, ``mapping[edge_index]``, ``edge_index + n``, gathers all edges on every rank, in each call
    (collective), and returns plain tensors. What stands for ``data.adj_t`` is a
    :class:`~pyg_dist.graph.adjacency.DistributedAdjacency`.

    Attributes:
        graph: the runtime form of the graph (this rank's part).
        weight: the values of an ``adj_t``, where it has any.
        is_sparse: whether it stands for ``adj_t``.
        edge_attr: the values of the edges that ``data.edge_set`` was given, if any.

    Example:
        >>> row, col = data.edge_index
        >>> forward = data.edge_index[:, row < col]
        >>> tuple(forward.shape), tuple(data.edge_index.full_tensor().shape)
        ((2, 78), (2, 156))
    """

    is_distributed = True
    is_sparse = False
    ndim = 2
    _stands_for: type = Tensor

    @property  # type: ignore[misc]
    def __class__(self) -> type[DistributedEdgeIndex]:  # what isinstance reads where the type says no
        return class_as_asked(type(self), self._stands_for, sys._getframe(1))

    def __init__(self, graph: DistributedGraph, weight: RowTensor | None = None) -> None:
        self.graph = graph
        self.weight = weight
        self.edge_attr: RowTensor | None = None
        self._edges: tuple[RowTensor | None, Edges] | None = None

    def __deepcopy__(self, memo: object) -> DistributedEdgeIndex:
        return self  # immutable

    @property
    def shape(self) -> torch.Size:
        """``[2, E]`` of the whole graph."""
        return torch.Size((2, self.graph.edge_sharding.size))

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
        """The dtype of node ids."""
        return torch.int64

    @property
    def device(self) -> torch.device:
        """Where this rank's edges lie."""
        return self.graph.device

    def full_tensor(self) -> Tensor:
        """All edges in the input's order, int64 ``[2, E]``, on every rank, for code that looks at them (collective)."""
        return self.graph.full_edge_index()

    def to(self, device: object = None, *args: object, **kwargs: object) -> DistributedEdgeIndex:
        """Itself: a graph moves together with its node tensors, through ``data.to(device)``."""
        if isinstance(device, (str, torch.device)) and torch.device(device).type != self.device.type:
            raise LayoutMismatchError(
                f"Expected edge_index to stay on {self.device} (got {device}): move the graph, data.to({device!r})"
            )
        return self

    def on(self, graph: DistributedGraph) -> DistributedEdgeIndex:
        """The handle of the same graph after a move to another device."""
        weight = None
        if self.weight is not None:
            weight = RowTensor.from_local(self.weight.to_local().to(graph.device), graph.edge_sharding)
        return type(self)(graph, weight)

    def __repr__(self) -> str:
        rows = self.graph.edge_sharding
        return f"{type(self).__name__}({list(self.shape)}, {rows.num_local} edges on rank {rows.group.rank})"

    def clone(self, *args: Any, **kwargs: Any) -> DistributedEdgeIndex:
        """Itself: it is immutable."""
        return self

    contiguous = long = coalesce = detach = clone

    def cpu(self) -> DistributedEdgeIndex:
        return self.to("cpu")

    @staticmethod
    def over(
        edge_index: Tensor,
        nodes: NodeSharding | int,
        device: torch.device,
        loop_rule: LoopRule = "remaining",
        is_kept: bool = True,
        sources: NodeSharding | None = None,
    ) -> DistributedEdgeIndex:
        """A script's own edges, laid out over nodes of a ``DistributedData``.

        They are known again by their values, of the latest few sets, so that it does not matter whether a script keeps
        the tensor or makes it anew in each forward. Collective: digests are compared, and new edges planned.

        ``edge_index``, integers ``[2, E]`` equal on every rank, goes from ``sources``, by default the same, to
        ``nodes``; or to so many hyperedges, each of which lies where most of its nodes are. Unless ``is_kept``, as
        where the script keeps the handle, it is not one of the latest few.

        Raises:
            AgreementError: The ranks have different edges.
            DataError: They are no edges between these nodes.
        """
        sources = nodes if sources is None else sources  # type: ignore[assignment]
        assert isinstance(sources, NodeSharding), "hyperedges have their nodes named"
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
        ends = graph.full_edge_index().flip(0)
        return self.over(ends, graph.sources, graph.device, graph.loop_rule, sources=graph.targets)

    def flip(self, *given: Any, dims: Any = None) -> DistributedEdgeIndex | Tensor:
        """Like ``Tensor.flip`` along dimension 0; see :attr:`reversed`."""
        return self.reversed if flips_ends(*given, dims=dims) else self.full_tensor().flip(*given or (dims,))

    def unbind(self, dim: int = 0) -> tuple[Tensor, ...]:
        """Sources and targets, global ids."""
        if dim not in (0, -2):
            return self.full_tensor().unbind(dim)
        edges = self.edges(by_operator=True)
        return edges.end(0), edges.end(1)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def __getitem__(self, index: object) -> object:
        """``edge_index[0]``: one end of all edges; ``edge_index[:, mask]``: some edges, a graph (may be collective).

        Anything else is of all edges, a plain tensor.
        """
        first, *rest = index if isinstance(index, tuple) else (index,)
        if not rest[1:] and type(first) is int and -2 <= first < 2:
            end = self.unbind()[first]
            return end if rest in ([], [slice(None)], [Ellipsis]) else end[rest[0]]
        if swaps_ends(index):
            return self.reversed
        has_all_ends = first is Ellipsis or (isinstance(first, slice) and first == slice(None))
        if not (len(rest) == 1 and has_all_ends and isinstance(rest[0], (Tensor, np.ndarray, slice, list, range))):
            return self.full_tensor()[all_edges(index)]
        return DistributedEdgeIndex(self.graph.select(select_rows(self.graph.edge_sharding, rest[0])))

    @staticmethod
    def _refuse(what: str) -> NoReturn:
        raise MixedRowsError(
            f"{what} needs all edges, and each rank holds only its own: apply it to the graph before DistributedData"
        )

    @staticmethod
    def _refuse_writing(*args: object) -> NoReturn:
        raise MixedRowsError("This line would change a distributed edge_index, which is fixed: copy it")

    __setitem__ = _refuse_writing

    def __matmul__(self, x: Any) -> Any:
        self._refuse("A product with edge_index")

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: object = None) -> np.typing.NDArray[Any]:
        return np.asarray(self.full_tensor().cpu(), dtype)

    def __dlpack_device__(self) -> NoReturn:  # torch.tensor, torch.sparse_coo_tensor and EdgeIndex ask for it
        raise MixedRowsError(
            "edge_index is no tensor, and each rank holds only its own edges: edge_index.full_tensor() is"
        )

    __dlpack__ = __dlpack_device__

    def __getattr__(self, name: str) -> Any:
        """What a plain tensor of all edges has; it is gathered when it is asked for (collective)."""
        if name.startswith("__") or not (self.is_sparse or hasattr(Tensor, name)):
            raise AttributeError(f"edge_index has no attribute {name!r}")
        if name.startswith("new_"):  # as PyG's explainers and convs make other tensors beside edges
            return getattr(torch.empty(0, dtype=torch.int64, device=self.device), name)
        if self.is_sparse:
            self._refuse(f"adj_t.{name}")
        if message := of_whole_graphs():  # a loader of PyG's asks what edges are, and would read its part of them
            raise MixedRowsError(message)
        if name.startswith(("is_", "requires_grad")):
            return getattr(torch.empty(0, dtype=self.dtype, device=self.device), name)
        if name.endswith("_"):
            raise MixedRowsError(f"edge_index.{name} would change a distributed edge_index, which is fixed: copy it")
        if callable(getattr(Tensor, name)):
            return lambda *args, **kwargs: getattr(self.full_tensor(), name)(*args, **kwargs)
        return getattr(self.full_tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        first = args[0] if args else (kwargs or {}).get("input")
        if isinstance(first, DistributedEdgeIndex):
            if first.is_sparse:
                first._refuse(f"torch's {getattr(func, '__name__', func)} of adj_t")
            if func in (torch.flip, torch.unbind):
                named = {name: value for name, value in (kwargs or {}).items() if name != "input"}
                return getattr(first, func.__name__)(*args[1:], **named)
        return of_all_edges(func, args, kwargs)


def _operator(name: str) -> Any:
    def of_all(handle: DistributedEdgeIndex, *others: Any) -> Any:
        if handle.is_sparse:
            return NotImplemented if name in ("__eq__", "__ne__") else handle._refuse("Arithmetic with adj_t")
        return getattr(handle.full_tensor(), name)(*map(all_edges, others))

    return of_all


_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift"
_NAMES = f"eq ne lt le gt ge neg abs invert contains {_OPERATORS} r{_OPERATORS.replace(' ', ' r')}"
for _name in _NAMES.split():
    setattr(DistributedEdgeIndex, f"__{_name}__", _operator(f"__{_name}__"))
for _name in _OPERATORS.split():
    setattr(DistributedEdgeIndex, f"__i{_name}__", DistributedEdgeIndex._refuse_writing)
