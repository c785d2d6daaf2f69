"""``Edges``: an ``edge_index`` as the code of a conv sees it, by the ranks of its targets."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, wraps
from typing import Any, NamedTuple, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor
from torch_geometric.utils import scatter as pyg_scatter
from torch_geometric.utils import softmax as pyg_softmax

from pyg_dist.backend.dense.indexed_rows import select, sum_rows
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.errors import MixedRowsError, UnsupportedError
from pyg_dist.graph.caches import AskedOfBatches, OperatorCache
from pyg_dist.graph.edge_sets import EdgesAndLoops, graph_over
from pyg_dist.graph.gcn_norm import put_loop_values
from pyg_dist.graph.layer_call import neighbour_rows
from pyg_dist.graph.protocol import EdgeView, End, nodes_at, the_one
from pyg_dist.graph.sharded_edges import ShardedEdges
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.operands import by_row_mask, local_values
from pyg_dist.tensor.registry import Args, Function, Kwargs
from pyg_dist.tensor.row_index import RowIndex
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor, as_row_tensor_, local_tensors
from pyg_dist.tensor.selection import rows_by_mask
from pyg_dist.tensor.sharding import RowSharding, lasting

T = TypeVar("T")
E = TypeVar("E", bound="Edges")


def _asked(make: Callable[[Edges], T]) -> Callable[[Edges], T]:
    """Decorator: the result is kept, and of a batch the next one has it made ahead (:meth:`Edges.make_ahead`)."""

    @wraps(make)
    @lasting
    def noted(edges: Edges) -> T:
        if edges.asked is not None:
            edges.asked.edges.add((*edges.path, make.__name__))
        return make(edges)

    return noted


class Edges(ShardedEdges):
    """The edges of a graph, or some of them, or with self loops added, as the code of a conv gets them.

    A rank has its own only, with local numbers of nodes.

    Attributes:
        graph: the graph.
        rows: which edges are here; edge tensors with these rows belong to them.
        source: int64 ``[e]``: neighbours, that is local rows of sources, then those that arrive.
        target: int64 ``[e]``: local rows of targets.
        weight: the values of an ``adj_t``: what weighs its edges where a conv has no other weights.
        has_all_remote: whether they have every edge of the graph whose ends lie on two ranks, in their order.
        asked: what batches of a batch's graph have asked for; ``path``: how these edges are reached from all of it.
    """

    graph: EdgeView
    rows: RowSharding
    source: Tensor
    target: Tensor
    weight: EdgeTensor | None
    has_all_remote: bool
    asked: AskedOfBatches | None = None
    path: tuple[str, ...] = ()

    @staticmethod
    @lasting
    def all_of(graph: EdgeView, weight: RowTensor | None = None) -> Edges:
        """All edges of a graph, in edge storage order.

        ``weight``: the values of an ``adj_t``, wherever they lie.
        """
        rows = graph.edge_sharding
        values = None if weight is None else cast(EdgeTensor, weight.redistribute(rows))
        return Edges.of(graph, rows, *graph.ends(), values, has_all_remote=True)

    @classmethod
    def of(
        cls: type[E],
        graph: EdgeView,
        rows: RowSharding,
        source: Tensor,
        target: Tensor,
        weight: EdgeTensor | None = None,
        has_all_remote: bool = False,
    ) -> E:
        edges = cls.empty()
        edges.graph, edges.rows, edges.source, edges.target, edges.weight = graph, rows, source, target, weight
        edges.has_all_remote = has_all_remote
        return edges

    def end(self, end: End) -> NodeIds:
        """Global ids of the sources (0) or targets (1), an edge tensor."""
        ids = self._global_ids[end]
        if ids._version != 0:
            raise MixedRowsError(
                f"edge_index[{end}] was changed in place, and edges of a distributed graph are fixed: change a clone"
            )
        self.rows.known.edges = ref(self)
        return NodeIds.of(ids, self, end)  # not kept: it knows these edges

    def global_shape(self) -> torch.Size:
        return torch.Size((2, self.rows.size))

    @cached_property
    @_asked
    def _global_ids(self) -> tuple[Tensor, Tensor]:
        with local_tensors():
            sources = self.graph.neighbour_id[self.source]
            return sources, on_device(self.graph.targets.global_id, self.target.device)[self.target]

    @cached_property
    @_asked
    def by_target(self) -> Tensor:
        """The order by target in which one target's edges keep PyG's order, int64 ``[e]``."""
        order = torch.argsort(on_device(self.rows.rng_key, self.target.device))
        return order[torch.argsort(self.target[order], stable=True)]

    @cached_property
    @_asked
    def csr(self) -> CSR:
        """Targets by neighbours; values lie in the order of these edges."""
        if self.rows is self.graph.edge_sharding:
            return self.graph.csr
        return CSR.from_edges(self.target, self.source, None, self.graph.num_local, self.graph.num_neighbours)

    @cached_property
    @_asked
    def parts(self) -> tuple[CSR, CSR]:
        """Targets by local sources, and boundary nodes by halo slots; values lie in the order of these edges."""
        graph = self.graph
        is_local = self.source < graph.num_sources
        here, there = (mask.nonzero().view(-1) for mask in (is_local, ~is_local))
        inner = graph.num_local - graph.num_boundary
        return (
            CSR.from_edges(self.target[here], self.source[here], here, graph.num_local, graph.num_sources),
            CSR.from_edges(
                self.target[there] - inner,
                self.source[there] - graph.num_sources,
                there,
                graph.num_boundary,
                graph.num_neighbours - graph.num_sources,
            ),
        )

    @cached_property
    @_asked
    def remote(self) -> Tensor:
        """Places of the edges whose sources are on other ranks, ascending."""
        return (self.source >= self.graph.num_sources).nonzero().view(-1)

    @cached_property
    def kept(self) -> OperatorCache:
        """Operators over these edges, by their weights."""
        return OperatorCache(self.rows.num_local)

    @cached_property
    @lasting
    def max_in_degree(self) -> int:
        """Largest number of edges with one target (collective at the first use)."""
        degree = torch.bincount(self.target)
        return max(self.rows.group.gather_counts(int(degree.max()) if degree.numel() else 0))

    @cached_property
    @lasting
    def end_of_ids(self) -> int:
        """One more than the largest id of a node that has an edge (collective at the first use)."""
        with local_tensors():
            largest = max([int(ids.max()) for ids in self._global_ids if ids.numel()], default=-1)
        return max(self.rows.group.gather_counts(largest + 1))

    @cached_property
    @_asked
    def loops(self) -> Tensor:
        """Places of the self loops, in PyG's order."""
        the_one(self.graph.sources, self.graph.targets)
        place = (self.source == self.target).nonzero().view(-1)
        return place[torch.argsort(on_device(self.rows.rng_key, place.device)[place])]

    @cached_property
    @_asked
    def without_loops(self) -> SelectedEdges:
        """The edges that are not self loops (collective at the first use)."""
        the_one(self.graph.sources, self.graph.targets)
        rows, picked = rows_by_mask(self.rows, self.source != self.target)
        ends = self.source[picked], self.target[picked]
        return SelectedEdges(self._others("without_loops", rows, *ends), picked)

    def selected(self, mask: RowTensor) -> Edges:
        """The edges where ``mask`` holds; their values are ``value[mask]`` (collective at the mask's first use)."""
        rows, picked = by_row_mask(self.rows, mask)
        return Edges.of(self.graph, rows, self.source[picked], self.target[picked])

    @cached_property
    @_asked
    def with_loops(self) -> Edges:
        """These edges, then a self loop for every node."""
        node = torch.arange(self.graph.num_local, device=self.source.device)
        rows = EdgesAndLoops(self.rows, self.graph)
        ends = torch.cat([self.source, node]), torch.cat([self.target, node])
        return self._others("with_loops", rows, *ends)

    def some(self, index: object) -> Edges | None:
        return self.selected(index) if isinstance(index, RowTensor) else None

    def _others(self, name: str, rows: RowSharding, source: Tensor, target: Tensor) -> Edges:
        """The edges with other self loops."""
        others = Edges.of(self.graph, rows, source, target, has_all_remote=self.has_all_remote)
        others.asked, others.path = self.asked, (*self.path, name)
        return others

    @cached_property
    @lasting
    def reversed(self) -> Edges:
        """These edges from targets to sources, in their order (collective at the first use: gathers them)."""
        graph = self.graph
        if graph.loop_rule != "remaining":
            raise UnsupportedError("A conv turns its edges around (got an adj_t, a matrix): give it data.edge_index")
        turned = graph_over(self.full_tensor().flip(0), graph.targets, graph.sources, graph.loop_rule)
        return cast(Edges, turned.to(graph.device).edges(None))

    def make_ahead(self) -> None:
        """Make what earlier batches have asked of their edges, before a step asks; not collective."""
        for path in [*self.asked.edges] if self.asked is not None else ():
            made: Any = self
            for name in path:
                edges = made
                made = getattr(edges, name)
                made = made.edges if isinstance(made, SelectedEdges) else made
            for csr in made if isinstance(made, tuple) else (made,):
                if isinstance(csr, CSR):
                    csr.edge, csr.transposed.edge  # noqa: B018
            on_device(edges.rows.rng_key, edges.source.device)

    def fetch(self, x: NodeTensor, end: End) -> EdgeTensor:
        rows = x.to_rows()
        local = rows.to_local() if end == 1 else neighbour_rows(rows, self.graph)
        return self.tensor(select(local, self.target if end == 1 else self.source))

    def reduce(self, values: Tensor, end: End, reduce: str) -> Tensor:
        """The values of each node's in-edges (1) or, sums only, out-edges (0), reduced.

        Differentiable; collective for out-edges.

        Shapes: values ``[e, ...]``; output ``[n, ...]``.
        """
        if end == 0:
            return self.graph.sum_to_owners(sum_rows(values, self.source, self.graph.num_neighbours))
        if reduce in ("sum", "add", "mean"):
            return sum_rows(values, self.target, self.graph.num_local, mean=reduce == "mean")
        return cast(Tensor, pyg_scatter(values, self.target, 0, self.graph.num_local, reduce))

    def with_loop_values(self, filled: Tensor, values: Tensor, rule: LoopRule) -> Tensor:
        """:func:`~pyg_dist.graph.gcn_norm.put_loop_values` of the loops among these edges.

        Shapes: filled ``[n, ...]``; values of all of these edges, ``[e, ...]``.
        """
        return put_loop_values(filled, self.target[self.loops], values[self.loops], rule)

    def softmax_by_target(self, values: Tensor) -> Tensor:
        """The softmax over each target's edges. Shapes: ``[e, ...] -> [e, ...]``."""
        return cast(Tensor, pyg_softmax(values, self.target, num_nodes=self.graph.num_local))

    @property
    def by_target_rank(self) -> Edges:
        """These edges where their targets are: itself, but for those that lie anywhere."""
        return self

    def tensor(self, local: Tensor) -> EdgeTensor:
        """The edge tensor with these local values, a fresh plain tensor."""
        # not from_local: code of a conv may write to it in place
        return cast(EdgeTensor, as_row_tensor_(local, self.rows))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Edges({self.rows!r}, {self.rows.num_local} on rank {self.rows.group.rank})"


SINGLE_EDGES = frozenset(
    "source target end full_tensor by_target csr parts remote max_in_degree loops without_loops selected".split()
    + "end_of_ids with_loops has_all_remote kept fetch reduce with_loop_values softmax_by_target by_target_rank".split()
    + ["reversed"]
)
"""Names of attributes that look at single edges."""


class SelectedEdges(NamedTuple):
    """Some edges."""

    edges: Edges
    places: Tensor  # of these edges among those that they were selected from


class NodeIds(RowIndex):
    """The global id of each edge's source or target; ``x[ids]`` fetches rows."""

    edges: Edges
    end: End

    @staticmethod
    def of(local: Tensor, edges: Edges, end: End) -> NodeIds:
        ids = local.as_subclass(NodeIds)
        ids._sharding, ids.edges, ids.end = edges.rows, edges, end
        return ids

    def fetch(self, x: NodeTensor) -> EdgeTensor:
        """Each edge's row of ``x``: its source's or its target's. Differentiable, collective for sources.

        Exact, but for sources' rows of 16 columns or more in a conv's training with ``bits``: those are rounded at
        random, and so are their gradients on the way back.

        Shapes: x ``[N, ...]``; floating types travel as they are (float16 as float32), or in ``bits``; integers and
        bools as int64; output ``[E, ...]``.
        """
        self.edges.end(self.end)  # raises where they were changed
        if not self.edges.graph.owns(x, self.end):  # as x[torch.randperm(N)] has them, or another graph: raises
            x = cast(NodeTensor, x.redistribute(nodes_at(self.edges.graph, self.end)))
        return self.edges.fetch(x, self.end)

    def add_up(self, values: Tensor, reduce: str = "sum") -> NodeTensor:
        """Reduce the values of the edges that share a target or a source. Exact, differentiable.

        Collective for sources; but for sums their edges are turned around.

        Shapes: values ``[E, ...]``; output ``[N, ...]``.
        """
        if self.end == 0 and reduce not in ("sum", "add"):
            return self.edges.reversed.end(1).add_up(values, reduce)
        out = self.edges.reduce(local_values(values, self.edges.rows), self.end, reduce)
        return cast(NodeTensor, as_row_tensor_(out, nodes_at(self.edges.graph, self.end)))

    def selected(self, mask: RowTensor) -> NodeIds:
        return self.edges.selected(mask).end(self.end)

    @classmethod
    def __torch_function__(
        cls, func: Function, types: tuple[type, ...], args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        out = super().__torch_function__(func, types, args, kwargs)
        if func is torch.stack and all(isinstance(ids, NodeIds) for ids in args[0]):
            out.nodes = tuple(nodes_at(ids.edges.graph, ids.end) for ids in args[0])  # what the stacked ids are of
        return out
