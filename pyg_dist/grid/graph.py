"""A graph in the grid layout, ready to run, and the graphs that are made from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from pyg_dist.backend import host, ops
from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.redistribution import Redistribution
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.sparse.attention import Attended, RankAttention, attend
from pyg_dist.backend.sparse.attention_by_edge import (
    EdgeSums,
    Gradients,
    by_head,
    divided,
    sums_by_edge,
    weights_by_edge,
)
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.caches import AskedOfBatches, OperatorCache
from pyg_dist.graph.edge_sets import EdgesAndLoops, ListedEdges, SampledEdges, in_layout_of, sampled_nodes
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import EdgeView, NodeSharding, Norm, the_one
from pyg_dist.graph.sample import KeptEdges, Subset
from pyg_dist.grid.batch import PickedTiles, ProductsAtSample, SampledGrid
from pyg_dist.grid.collectives import AllGather, all_gather, reduce_scatter, sum_all
from pyg_dist.grid.operator import TiledOperator
from pyg_dist.grid.plan.mesh_shape import GRID_AXES, INPUT, WHOLE_ROWS, TileLayout, split
from pyg_dist.grid.products import GridProducts
from pyg_dist.grid.sharding import Grid, GridNodes
from pyg_dist.grid.whole_rows import EdgeEnds, OperatorEdges, WholeRows
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.row_index import PickedEdges
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.selection import Selection, rows_by_mask
from pyg_dist.tensor.sharding import RowSharding, lasting


class GridGraph(GridProducts):
    """A graph whose adjacency matrix is in tiles on a mesh; for arguments see :class:`GridProducts`."""

    one_rank_columns = 0.0  # rows are tiles, whatever the number of ranks
    needs_whole_subsets = True  # tiles are of other nodes than the rank's rows

    @staticmethod
    def of(grid: Grid, edge_index: Tensor, loop_rule: LoopRule, rows: type[RowSharding] = RowSharding) -> GridGraph:
        """The graph with the edges ``[2, E]``, which are split evenly over the ranks (not collective)."""
        axis, num_edges = grid.mesh.group(*GRID_AXES), edge_index.shape[1]
        low, high = split(num_edges, axis.size)[axis.rank : axis.rank + 2]
        edge_rows = rows(axis, "edge", num_edges, host.arange(low, high))
        return GridGraph(grid, edge_index[:, low:high].clone(), edge_rows, loop_rule)

    @property
    def one_rank_edges(self) -> Tensor:
        raise NotImplementedError  # not used where one_rank_columns is zero

    @cached_property
    def edge_view(self) -> EdgeView:
        return WholeRows.of(self.grid, self.edges_of_group, self.edge_sharding, self.loop_rule, self.device)

    def edges(self, weight: RowTensor | None = None) -> Edges:
        return OperatorEdges.of_graph(self, weight)

    def induced(self, sample: Subset) -> GridBatch:
        return GridBatch(self, sample)

    @lasting
    def among(self, nodes: NodeSharding) -> GridBatch:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.among`; gathers all edges on every rank."""
        assert isinstance(nodes, GridNodes)
        grid, (source, target) = nodes.grid, self.full_edge_index().cpu()
        assert isinstance(grid, SampledGrid)
        num_nodes, num_edges = self.grid.num_nodes, source.numel()
        every = host.arange(num_edges)
        kept = KeptEdges.between(grid.sample.node_id, num_nodes, (source, target), every, num_edges)
        return GridBatch(self, replace(grid.sample, kept=kept), grid)

    def _build_on(self, device: torch.device) -> None:
        """Tiles that were made are moved; operators are made anew."""
        self.device = device
        self._adjacency = {key: tile.to(device) for key, tile in self._adjacency.items()}
        self._operators, self._elsewhere = OperatorCache(self.edge_sharding.num_local), {}
        self.asked = AskedOfBatches()
        kept = "edge_view without_loops with_loops _edges_of_targets _edge_key _sources ends loops"
        for name in kept.split():
            self.__dict__.pop(name, None)

    def select(self, chosen: Selection) -> GridGraph:
        edge_index = self.edge_index[:, chosen.local_index.cpu()]
        return GridGraph(self.grid, edge_index, chosen.rows, self.loop_rule, device=self.device)

    @cached_property
    @lasting
    def without_loops(self) -> tuple[GridGraph, Tensor]:
        """The graph without self loops, and which local edges are left (collective at the first use)."""
        chosen = rows_by_mask(self.edge_sharding, self.edge_index[0] != self.edge_index[1])
        return self.select(chosen), chosen.local_index.to(self.device)

    @cached_property
    @lasting
    def with_loops(self) -> GridGraph:
        """The graph with a self loop for each node, behind its edges."""
        node = self.node_sharding.global_id
        edge_index = torch.cat([self.edge_index, node.expand(2, -1)], dim=1)
        rows = EdgesAndLoops(self.edge_sharding, self)
        return GridGraph(self.grid, edge_index, rows, self.loop_rule, device=self.device)

    def attribute_sharding(self, name: str, value: Tensor) -> RowSharding:
        """The sharding of a new node attribute: features as tiles, since only they are used as a matrix."""
        is_features = name == "x" and value.dim() == 2 and value.is_floating_point()
        return self.feature_sharding(value.shape[1]) if is_features else self.node_sharding

    def full_edge_index(self) -> Tensor:
        return self.edge_sharding.gather(self.edge_index.t()).t().contiguous().to(self.device)

    @cached_property
    @lasting
    def loops(self) -> tuple[Redistribution, Tensor]:
        """Sends values of self loops to their nodes, and the rows of these (collective at the first use)."""
        source, target = self.edges_of_group
        place = (source == target).nonzero().view(-1)
        owner, row = self.grid.owners(source[place])
        transport = self.grid.transport(*GRID_AXES, exact=True)
        home = Redistribution.of_copies(transport, owner, place, self.edge_sharding.global_id)
        row = torch.zeros_like(source).index_copy_(0, place, row)
        return home, home.start(row).wait().to(self.device)

    @cached_property
    @lasting
    def ends(self) -> tuple[EdgeEnds, EdgeEnds]:
        """The ends of this rank's edges: sources and targets (collective at the first use)."""
        source, target = (EdgeEnds.of(self.grid, ids, self.device) for ids in self.edges_of_group)
        return source, target

    def operator_over(
        self, edges: Edges, norm: Norm, weight: RowTensor | None, dtype: torch.dtype
    ) -> TiledOperator | None:
        """See :meth:`~pyg_dist.graph.protocol.EdgeView.operator_over`; in a batch weights are not rescaled."""
        return GridGraph.operator(self, norm, weight, dtype)

    @property
    def data_group(self) -> tuple[int, int]:
        mesh = self.grid.mesh
        return mesh.coordinates["data"], mesh.shape.data

    @property
    def ranks_per_machine(self) -> None:
        """None: subsets are whole on each rank, so batches are laid out without messages."""

    def prepare_subgraphs(self) -> None:
        self.stored_by_source  # noqa: B018
        self.grid.mesh.connect_data_groups()

    @cached_property
    @lasting
    def stored_by_source(self) -> CSR:
        """This rank's edges by source, from which subgraphs are cut."""
        source, target = self.edge_index
        num_nodes = self.grid.num_nodes
        return CSR.from_edges(source, target, None, num_nodes, num_nodes)

    # ---- Attention ---------------------------------------------------------------------------------------------------
    #
    # The tiles are those of the first layer's products. Sources are distributed as whole rows, and gathered for the
    # columns of a tile; targets are split over the third axis, too, so that no two ranks have the same edges.

    def attend(
        self,
        edges: Edges,
        inputs: AttentionInputs,
        spec: AttentionSpec,
        layer: nn.Module | None = None,
        has_weights: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.attend`; ``edges`` are all of this graph's."""
        tile, of_targets = self.adjacency(INPUT), self._target_layout
        by_row = ("query", "edge_weight") if spec.form == "dot" else ("query",)
        moved = {
            name: self._moved(x.flatten(1), WHOLE_ROWS, of_targets)
            for name, x in inputs._asdict().items()
            if name in by_row and x is not None
        }
        if inputs.edge_attr is not None:
            moved["edge_attr"] = apply(tile.dispatch, inputs.edge_attr)
        key = self._edge_key if spec.p > 0 else None
        sources = AllGather(self.grid.transport("z", "y", exact=True), self.grid.row_sizes(WHOLE_ROWS, "z", "y"))
        num_weights = tile.row.numel() if has_weights else 0
        csr = self._edges_of_targets
        targets = AllGather(self.grid.transport("x", exact=True), self.grid.row_sizes(self._target_layout, "x"))
        maps = sources, sources, targets, None, targets if spec.form == "dot" else None, None
        is_part, has_edge_sums = targets.transport.group.size > 1, spec.form == "dot" and inputs.edge_attr is not None
        a = GridAttention(
            csr, key, spec, num_weights, maps=maps, is_part=is_part, has_edge_sums=has_edge_sums, targets=targets
        )
        sums, of_edges, weights = attend(a, inputs._replace(**moved))
        if has_edge_sums:
            of_edges = self._moved(of_edges, of_targets, WHOLE_ROWS)
        weights = apply(tile.dispatch.transposed, weights) if has_weights else weights
        return self._moved(sums, of_targets, WHOLE_ROWS), of_edges, weights

    @property
    def _target_layout(self) -> TileLayout:
        """The layout of targets: over the tile's row axis, the third axis, and the axis that splits their in-edges."""
        return TileLayout(("z", "y", "x"), None, self.grid.other_order(WHOLE_ROWS.order))

    @cached_property
    @lasting
    def _edges_of_targets(self) -> CSR:
        """The tile's edges to this rank's part of its targets (collective at the tile's first use)."""
        order = self._target_layout.order
        (first, _), (low, high) = (self.grid.held(TileLayout(axes, None, order)) for axes in (("z",), ("z", "y")))
        return self.adjacency(INPUT).csr.rows(low - first, high - first)

    @cached_property
    @lasting
    def _edge_key(self) -> Tensor:
        """Keys of the dropout, by edge storage of the tile (collective at the first use)."""
        return self.adjacency(INPUT).dispatch.start(self.edge_sharding.rng_key).wait().to(self.device)

    def _moved(self, x: Tensor, before: TileLayout, after: TileLayout) -> Tensor:
        """Redistribute rows (collective)."""
        return self.grid.tile(before, x.shape[1]).to(x, self.grid.tile(after, x.shape[1]))


class GridBatch(ProductsAtSample, GridGraph):
    """The subgraph that a sample of nodes of ``parent`` induces: each rank restricts its own tiles, without a message.

    Not collective; :meth:`operator` may be, where the graph has not used the tile before.
    """

    parent: GridGraph

    def __init__(self, parent: GridGraph, sample: Subset, grid: SampledGrid | None = None) -> None:
        self.parent = parent
        self._sample = sample
        grid = SampledGrid(parent.grid, sample) if grid is None else grid
        which, kept = None, sample.kept
        if kept is None:
            node_id, stored = sample.node_id, parent.stored_by_source
            pattern, entry = stored.to(parent.device).restricted(node_id, node_id)
            place, order = stored.places(entry).long().sort()
            pattern = pattern.on_host
            edge_index = torch.stack([pattern.row(), pattern.col.long()])[:, order] + grid.first
        else:
            ids, places = parent.edge_sharding.ordered_position
            at = ops.find_sorted(ids, kept.edge_id)
            which = host.flatnonzero(at >= 0)
            place = places[at[which]]
            edge_index = kept.edge_index(which)
        key = parent.edge_sharding.rng_key.index_select(0, place)
        rows = SampledEdges(parent.edge_sharding, place, key, grid.ranks(*GRID_AXES), sample, which)
        super().__init__(grid, edge_index, rows, parent.loop_rule, device=parent.device)
        self._sampled_grid, self._place = grid, place

    @cached_property
    @lasting
    def _edges_of_targets(self) -> CSR:
        self.parent.asked.note("attention", lambda batch, _: batch._attention_ahead())
        return super()._edges_of_targets

    def _attention_ahead(self) -> None:
        self._edges_of_targets.edge, self._edges_of_targets.transposed.edge  # noqa: B018

    def pick_nodes(self) -> PickedTiles:
        return self._sampled_grid.picked(self.device)

    def pick_edges(self) -> PickedEdges:
        rows = self.edge_sharding
        ids = self.parent.edge_sharding.global_id[self._place]
        picked = PickedEdges.of(ids.to(self.device), rows, self.parent.edge_sharding, self._place)
        # The ranks that hold the same rows of the graph, and other rows of the batch.
        picked.replicas = None if self._sample.group is None else self.grid.mesh.group("data")
        return picked


@sampled_nodes.register
def _(nodes: GridNodes, subset: Subset, device: torch.device) -> PickedTiles:
    return SampledGrid(nodes.grid, subset).picked(device)


@in_layout_of.register
def _(nodes: GridNodes, edge_index: Tensor, loop_rule: LoopRule, sources: NodeSharding) -> GridGraph:
    the_one(sources, nodes)
    return GridGraph.of(nodes.grid, edge_index, loop_rule, ListedEdges)


@dataclass(frozen=True, kw_only=True)
class GridAttention(RankAttention):
    """Attention over a tile's edges, which are a part of its targets' in-edges; exact, collective both ways.

    Value and key are rows of this rank's sources; query, and for ``dot`` edge_weight, are rows of its targets.
    Gradients are summed on the ranks that sent the inputs. Weights of edges to targets of other ranks are zero.
    """

    targets: AllGather  # gathers the rows of targets; its ranks share their in-edges

    def keeps(self, y: Tensor) -> bool:
        """See :class:`RankAttention`; a rank's share is small, and recomputing it would send messages."""
        return True

    def over_ranks(self, y: Tensor, z: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """See :class:`RankAttention`; returns the logarithms of sums for all targets of the tile."""
        transport = self.targets.transport
        num_parts = transport.group.size
        if num_parts == 1:
            return y, z, lse
        # As many bytes as a maximum and a sum to all on four ranks, in one message instead of four.
        parts = AllGather(transport, [lse.shape[0]] * num_parts).start(lse).wait().view(num_parts, *lse.shape)
        whole = parts.logsumexp(0)
        share = _share_of_part(self.csr.rowptr, lse, whole)
        scatter, heads = self.targets.transposed, self.spec.heads
        outputs = [y, z] if self.has_edge_sums else [y]
        flying = [scatter.start((by_head(out, heads) * share).to(out.dtype).flatten(1)) for out in outputs]
        found = [pending.wait() for pending in flying]
        return found[0], found[1] if self.has_edge_sums else z, whole

    def at_targets(self, rows: Gradients) -> Gradients:
        flying = [None if x is None else self.targets.start(x) for x in rows]
        return [None if pending is None else pending.wait() for pending in flying]

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        return sum_all(sums, self.targets.transport)

    def by_edge(self, inputs: AttentionInputs) -> Attended:
        targets = self.targets
        held = [
            all_gather(x, m.transport, m.sizes) if isinstance(m, AllGather) and x is not None else x
            for x, m in zip(inputs, self.maps, strict=True)
        ]
        group = targets.transport.group
        largest = lambda logits: group.all_reduce_(logits, "max")  # noqa: E731
        sums = sums_by_edge(self.csr, self.edge_key, self.spec, AttentionInputs._make(held), largest)

        def total(sums: Tensor) -> Tensor:
            return reduce_scatter(sums, targets.transport, targets.sizes)

        z = total(sums.of_edge_attr) if self.has_edge_sums else sums.of_edge_attr
        of_ones = total(sums.of_ones)
        y, z = divided(EdgeSums(total(sums.of_values), z, of_ones, sums.powers))
        of_ones = all_gather(of_ones, targets.transport, targets.sizes)
        return y, z, weights_by_edge(self.csr, sums.powers, of_ones, self.num_weights)


def _share_of_part(rowptr: Tensor, lse: Tensor, whole: Tensor) -> Tensor:
    """The share of a part of each row's edges in its softmax: NaN if there are edges and all logits are -infinity.

    ``lse`` is the op's on the part, ``whole`` the logarithm of the sum over all parts. Shapes: ``[N, H] -> [N, H, 1]``.
    """
    is_empty = (rowptr.diff() == 0).unsqueeze(1)
    finite = whole.masked_fill(is_empty & (whole == -torch.inf), 0.0)  # a part without edges has sums of zero
    return (lse - finite).exp().unsqueeze(2)
