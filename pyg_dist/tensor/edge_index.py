"""``DistributedEdgeIndex``: the handle that stands for ``data.edge_index`` or ``data.adj_t``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from pyg_dist.errors import LayoutMismatchError, MixedRowsError
from pyg_dist.tensor.grid_graph import GridGraph
from pyg_dist.tensor.halo_graph import HaloGraph
from pyg_dist.tensor.row_tensor import RowTensor

Graph = HaloGraph | GridGraph
"""The runtime form of a graph, in one layout or the other."""


class DistributedEdgeIndex:
    """A graph whose edges lie on several ranks; Distributed convs take it where they take ``edge_index``.

    It is not a tensor, on purpose: code that looks at edges itself (indexing, unpacking, structural transforms,
    stock convs) would see one rank's edges, and gets an error instead.

    Args:
        graph: this rank's runtime form.
        sparse: whether it stands for ``adj_t``, whose shape is ``[N, N]``, not for ``edge_index``, ``[2, E]``.
        weight: the values of ``adj_t``, where it has any.
    """

    def __init__(self, graph: Graph, sparse: bool = False, weight: RowTensor | None = None) -> None:
        self._graph = graph
        self._sparse = sparse
        self.weight = weight

    def __deepcopy__(self, memo: object) -> DistributedEdgeIndex:
        return self  # immutable

    @property
    def graph(self) -> Graph:
        """The runtime form of the graph (this rank's part)."""
        return self._graph

    @property
    def is_sparse(self) -> bool:
        """Whether it stands for ``adj_t``."""
        return self._sparse

    @property
    def shape(self) -> torch.Size:
        """``[2, E]``, or ``[N, N]`` for ``adj_t``, of the whole graph."""
        nodes, edges = self._graph.node_rows.size, self._graph.edge_rows.size
        return torch.Size((nodes, nodes) if self._sparse else (2, edges))

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
        return self._graph.device

    def full_tensor(self) -> Tensor:
        """All edges in the input's order, int64 ``[2, E]``, on every rank, for code that looks at them (collective)."""
        if self._sparse:
            self._refuse("adj_t.full_tensor()")
        return self._graph.full_edge_index()

    def to(self, device: Any, *args: Any, **kwargs: Any) -> DistributedEdgeIndex:
        """Itself: a graph moves together with its node tensors, through ``data.to(device)``."""
        if isinstance(device, (str, torch.device)) and torch.device(device) != self.device:
            raise LayoutMismatchError(
                f"Expected edge_index to stay on {self.device} (got {device}): move the graph, data.to({device!r})"
            )
        return self

    def on(self, graph: Graph) -> DistributedEdgeIndex:
        """The handle of the same graph after a move to another device."""
        weight = None
        if self.weight is not None:
            weight = RowTensor.from_local(self.weight.to_local().to(graph.device), graph.edge_rows)
        return DistributedEdgeIndex(graph, self._sparse, weight)

    def __repr__(self) -> str:
        rows = self._graph.edge_rows
        return f"{type(self).__name__}({list(self.shape)}, {rows.num_local} edges on rank {rows.axis.rank})"

    def _refuse(self, what: str) -> NoReturn:
        raise MixedRowsError(
            f"{what} needs all edges, and each rank holds only its own: apply it to the graph before DistributedData"
            + ("" if self._sparse else ", or to edge_index.full_tensor() (all edges, collective)")
        )

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("Indexing edge_index")

    def __iter__(self) -> NoReturn:
        self._refuse("Unpacking edge_index")

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("Converting edge_index to an array")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise MixedRowsError(
            "A DistributedEdgeIndex cannot be pickled: it belongs to this run; save the input graph instead"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f"edge_index.{name}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> NoReturn:
        name = getattr(func, "__name__", str(func))
        raise MixedRowsError(
            f"torch's {name} on an edge_index needs all edges, and each rank holds only its own: "
            f"apply it to the graph before DistributedData"
        )
