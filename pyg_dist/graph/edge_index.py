"""``DistributedEdgeIndex``: the handle that stands for ``data.edge_index``."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import LayoutMismatchError, UnsupportedError
from pyg_dist.graph.edge_sets import graph_over
from pyg_dist.graph.edges import Edges, NodeIds
from pyg_dist.graph.protocol import DistributedGraph, End, NodeSharding
from pyg_dist.graph.sharded_edges import ShardedEdges
from pyg_dist.partition.inputs import as_edges, check_ends
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.calling_code import of_whole_graphs
from pyg_dist.tensor.functions.indexing import select_rows
from pyg_dist.tensor.registry import Args, Function, Kwargs
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.sharding import require_same

_NUM_KEPT = 8  # size of the cache of recent edge sets; edges that are drawn anew in each step never hit it


class DistributedEdgeIndex(ShardedEdges):
    """A graph whose edges lie on several ranks; Distributed convs take it where they take ``edge_index``.

    Stock convs and structural transforms refuse it. ``row, col = edge_index`` are
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

    graph: DistributedGraph
    is_distributed = True  # type: ignore[assignment]
    is_sparse = False

    @staticmethod
    def __new__(cls: type[DistributedEdgeIndex], *args: object) -> DistributedEdgeIndex:
        return cls.empty()

    def __init__(self, graph: DistributedGraph, weight: RowTensor | None = None) -> None:
        self.graph = graph
        self.weight = weight
        self.edge_attr: RowTensor | None = None
        self._edges: tuple[RowTensor | None, Edges] | None = None

    def global_shape(self) -> torch.Size:
        return torch.Size((2, self.graph.edge_sharding.size))

    def full_tensor(self) -> Tensor:
        return self.graph.full_edge_index()

    def to(  # type: ignore[override]
        self, device: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Itself: a graph moves together with its node tensors, through ``data.to(device)``.

        A plain tensor of all edges in another dtype (collective).
        """
        given = (device, *args, *kwargs.values())
        dtypes = [x.dtype if isinstance(x, Tensor) else x for x in given if isinstance(x, (torch.dtype, Tensor))]
        if dtypes and dtypes[0] != self.dtype:
            return self.full_tensor().to(device, *args, **kwargs)
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

    def __repr__(self) -> str:  # type: ignore[override]
        rows = self.graph.edge_sharding
        return f"{type(self).__name__}({list(self.global_shape())}, {rows.num_local} edges on rank {rows.group.rank})"

    def clone(self, *args: Any, **kwargs: Any) -> DistributedEdgeIndex:
        """Itself: it is immutable."""
        return self

    contiguous = long = coalesce = detach = clone

    def cpu(self) -> Tensor:  # type: ignore[override]
        return self.to("cpu")

    def end(self, end: End) -> NodeIds:
        return self.edges(by_operator=True).end(end)

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

    def some(self, index: object) -> ShardedEdges | None:
        if not isinstance(index, (Tensor, np.ndarray, slice, list, range)):
            return None
        return DistributedEdgeIndex(self.graph.select(select_rows(self.graph.edge_sharding, index)))

    @classmethod
    def of_all(cls, func: Function, args: Args, kwargs: Kwargs | None) -> object:
        if message := of_whole_graphs():  # code of PyG's that would go on with its own edges
            raise UnsupportedError(message)
        return super().of_all(func, args, kwargs)
