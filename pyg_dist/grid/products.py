"""Tiles of the adjacency matrix, made when first needed, and their products."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from pyg_dist.backend import host
from pyg_dist.backend.autograd.linear_map import append, apply
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.transport import Pending, Traffic
from pyg_dist.backend.on_device import CopiedToDevices, on_device
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.graph import caches
from pyg_dist.graph.caches import AskedOfBatches, OperatorCache
from pyg_dist.graph.gcn_norm import gcn_product, gcn_scales
from pyg_dist.graph.protocol import End, NodeSharding, Norm
from pyg_dist.grid.adjacency import AdjacencyTile, Entries, ReadTile
from pyg_dist.grid.collectives import sum_all
from pyg_dist.grid.functions import linear_sum
from pyg_dist.grid.operator import GridOperator, Side, TiledOperator, TileProduct, multiply
from pyg_dist.grid.plan.mesh_shape import GRID_AXES, INPUT, TileLayout, Tiling
from pyg_dist.grid.sharding import Grid, Tile
from pyg_dist.grid.tile_tensor import TileTensor, as_tile
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor
from pyg_dist.tensor.sharding import RowSharding, lasting

Build = Callable[[AdjacencyTile, Tensor | None], GridOperator]


class GridProducts(CopiedToDevices):
    """A graph whose adjacency matrix is in tiles on a mesh. The edges themselves are spread evenly, by their numbers.

    ``edge_index``, int64 ``[2, e]``, are this rank's edges, on the host, and ``edge_rows`` is their sharding, by
    ascending key. ``read_tile`` reads stored tiles; ``None``: a tile's edges are fetched from all ranks. ``digest``: of
    edges that a script has made.
    """

    def __init__(
        self,
        grid: Grid,
        edge_index: Tensor,
        edge_rows: RowSharding,
        loop_rule: LoopRule,
        read_tile: ReadTile | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.grid = grid
        self.edge_index = edge_index
        self.edge_sharding = edge_rows
        self.loop_rule: LoopRule = loop_rule
        self.group: Group = grid.ranks(*GRID_AXES)
        self.sources: NodeSharding = grid.node_sharding
        self.targets = self.node_sharding = self.sources  # tiles are of square matrices
        self.device = torch.device(device)
        self.digest: str | None = None
        self._read_tile = read_tile
        self._adjacency: dict[Tiling, AdjacencyTile] = {}
        self._operators = OperatorCache(edge_rows.num_local)
        self.asked = AskedOfBatches()
        self._elsewhere: dict[torch.device, object] = {}

    @property
    def traffic(self) -> Traffic:
        counters = self.grid.mesh.traffic.values()
        return Traffic(sum(t.num_bytes for t in counters), sum(t.num_messages for t in counters))

    def feature_sharding(self, width: int) -> Tile:
        """The sharding of features of ``width`` columns: rows over x and z, columns over y."""
        return self.grid.tile(INPUT, width)

    def place(self, x: NodeTensor, layer: nn.Module | None = None) -> TileTensor:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.place`; a residual may be redistributed early."""
        is_tile = isinstance(x, TileTensor) and x._sharding.layout.columns is not None
        tiles = as_tiles(x) if is_tile else as_tile(x, self.feature_sharding(x.shape[1]))
        if layer is not None and tiles is x:
            tiles.note_layer_input(layer)
        return tiles

    def owns(self, x: RowTensor, end: End = 1) -> bool:
        return x._sharding is self.node_sharding or (isinstance(x, TileTensor) and x._sharding.grid is self.grid)

    def operator(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> TiledOperator:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.operator`. Tiles are built when first needed."""
        learning = learns(weight)
        if norm.kind == "gcn":
            build = partial(self._sums_with_loops if learning else self._gcn, norm, dtype)
        else:
            build = partial(self._neighbourhood, norm, dtype)
        return TiledOperator(norm, learning, self._tiles((norm, learning, dtype), weight, dtype, build))

    def aggregate(self, x: NodeTensor, operator: TiledOperator, layer: nn.Module | None = None) -> TileTensor:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.aggregate`: Plexus, Alg. 1, lines 2-4, for any layout.

        With rows of x split by axis r, columns by c, and k the third axis, rows of the tile are split by k and columns
        by r. The product's rows are split by k; its sum over r is scattered over r, or on all of r.
        """
        if operator.norm.kind == "gcn" and operator.learns:
            return self._gcn_product(as_tiles(x), operator)
        return self.start(x, operator, layer).wait()

    def start(self, x: NodeTensor, operator: TiledOperator, layer: nn.Module | None = None) -> Pending[TileTensor]:
        """:meth:`aggregate` up to its last sum. For a cached product nothing is sent."""
        if operator.norm.kind == "gcn" and operator.learns:
            out = self.aggregate(x, operator)
            return Pending(lambda: out)
        return self._start(as_tiles(x), operator)

    def _start(self, x: TileTensor, operator: TiledOperator, exact: bool = False) -> Pending[TileTensor]:
        """The product up to its last sum; with ``exact`` no message is narrower than x."""
        grid, layout = self.grid, x._sharding.layout
        row, column, free = layout.rows[0], layout.columns, layout.free_axis()
        after = self._product_sharding(x, x._sharding.width)
        matrix = operator.tile(layout)
        known = caches.lookup(x, matrix)
        if known is not None:
            return Pending(lambda: known.rows(TileTensor, after))
        kept = not matrix.learns and caches.is_cacheable(x, after)
        exact = exact or kept  # the rounding of a kept product would stay in all epochs
        scatters, is_scattered = self.grid.sums == "reduce_scatter", len(layout.rows) == 2
        # A gather is the second half of a large sum if x is a scattered sum; else it gathers an input.
        of_input = is_scattered and (x.is_leaf or not scatters)
        pieces = TileLayout((free, row), column, after.layout.order)
        product = TileProduct(
            matrix,
            Side(
                grid.transport(free, exact=exact or of_input),
                tuple(grid.row_sizes(TileLayout((row, free), column, layout.order), free)),
                is_scattered,
            ),
            Side(grid.transport(row, exact=exact), tuple(grid.row_sizes(pieces, row)), scatters),
            grid.num_blocks,
        )
        local = x.to_local()
        pending = None if matrix.learns else product.start(local)

        def finish() -> TileTensor:
            out = multiply(local, product, pending)
            x._is_reused = True
            if not kept:
                return TileTensor.from_local(out, after)
            return caches.store(x, matrix, out, self).rows(TileTensor, after)

        return Pending(finish)

    def is_cached(self, x: NodeTensor, operator: TiledOperator) -> bool:
        if operator.learns:
            return False
        tiles = as_tiles(x)
        after = self._product_sharding(tiles, tiles._sharding.width)
        return caches.is_cached(tiles, lambda: operator.tile(tiles._sharding.layout), after)

    def linear_sum(
        self, pairs: Sequence[tuple[NodeTensor | Pending[NodeTensor], Tensor]], bias: Tensor | None = None
    ) -> TileTensor:
        """``sum_k X_k W_k^T + bias`` with one sum over the column axis (:func:`~.functions.linear_sum`; collective).

        A pending X comes last: its messages hide behind the other products (ScaleGNN, V-D).
        """
        ordered = sorted(pairs, key=lambda pair: not isinstance(pair[0], TileTensor))
        return linear_sum(ordered, bias)  # type: ignore[arg-type]

    def align(self, x: NodeTensor, like: NodeTensor) -> TileTensor:
        x = as_tiles(x)
        rows = self._product_sharding(as_tiles(like), x._sharding.width)
        known = caches.lookup(x, rows)
        if known is not None:
            return known.rows(TileTensor, rows)
        out = as_tile(x, rows)
        if out is not x and caches.is_cacheable(x, rows):
            return caches.store(x, rows, out.to_local(), self).rows(TileTensor, rows)
        return out

    def _product_sharding(self, x: TileTensor, width: int) -> Tile:
        """The sharding of a product of x, or of a tensor to add to it, with ``width`` columns."""
        layout = x._sharding.layout
        row, free = layout.rows[0], layout.free_axis()
        rows = (free, row) if self.grid.sums == "reduce_scatter" else (free,)
        return self.grid.tile(TileLayout(rows, layout.columns, self.grid.other_order(layout.order)), width)

    def _neighbourhood(
        self, norm: Norm, dtype: torch.dtype, tile: AdjacencyTile, values: Tensor | None
    ) -> GridOperator:
        """The tile of ``y_i = sum or mean over in-edges of w_ji x_j``."""
        if norm.identity:
            loops = tile.loops("add")
            return GridOperator(Matrix(loops.added, loops.with_loops(values, norm.identity, dtype)))
        if norm.kind == "sum":
            return GridOperator(Matrix(tile.csr, values))
        degree = self._row_sums(tile, tile.csr, None, dtype).clamp_(min=1)
        if values is not None and values.requires_grad:
            return GridOperator(Matrix(tile.csr, values / degree[on_device(tile.row, self.device)]))
        return GridOperator(Matrix(tile.csr, values), row_scale=degree, divides=True)

    def _gcn(self, norm: Norm, dtype: torch.dtype, tile: AdjacencyTile, values: Tensor | None) -> GridOperator:
        """The tile of GCN's ``D^-1/2 (A + loops) D^-1/2`` for constant weights."""
        csr = tile.loops(self.loop_rule).added if norm.add_self_loops else tile.csr
        if norm.add_self_loops:
            values = tile.loops(self.loop_rule).with_loops(values, norm.loop_value, dtype)
        redistribution = self.grid.redistribution(*(self.grid.tile(layout, 1) for layout in tile.layouts))
        is_source = torch.zeros(csr.num_cols, dtype=torch.bool, device=self.device)
        is_source[csr.col.long()] = True
        scales = gcn_scales(
            self._row_sums(tile, csr, values, dtype),
            lambda scale: redistribution.start(scale.view(-1, 1)).wait().view(-1),
            is_source,
        )
        return GridOperator(Matrix(csr, values), *scales)

    def _sums_with_loops(
        self, norm: Norm, dtype: torch.dtype, tile: AdjacencyTile, values: Tensor | None
    ) -> GridOperator:
        """The tile of ``A_w``, and of the loops of GCN's norm, for weights that learn."""
        if not norm.add_self_loops:
            return GridOperator(Matrix(tile.csr, values))
        assert values is not None
        loops = tile.loops(self.loop_rule)
        return GridOperator(Matrix(loops.added, append([values, loops.weight(values, norm.loop_value)])))

    def _gcn_product(self, x: TileTensor, operator: TiledOperator) -> TileTensor:
        """GCN's aggregation with weights that learn; differentiable by x and by the weights (collective)."""
        rows = self.grid.tile(x._sharding.layout, 1)
        dtype = accumulation_dtype(x.dtype)
        ones = TileTensor.from_local(torch.ones(rows.local_shape(1), dtype=dtype, device=self.device), rows)
        is_source = None if operator.norm.add_self_loops else self._sources
        scales = operator.scales.get(dtype, lambda: self._start(ones, operator, exact=True).wait(), is_source)
        return gcn_product(x, scales, lambda tiles: self._start(tiles, operator).wait())  # type: ignore[no-any-return]

    @cached_property
    @lasting
    def _sources(self) -> Tensor:
        """Which nodes have out-edges, bool ``[N]`` (collective at the first use)."""
        is_source = host.zeros(self.grid.num_nodes, dtype=torch.bool)
        is_source[self.edge_index[0]] = True
        return self.group.all_reduce_(is_source, "max").to(self.device)

    @lasting
    def adjacency(self, layout: TileLayout) -> AdjacencyTile:
        """The tile that multiplies an x of this layout (collective at the first use of its axes and order)."""
        tiling = Tiling.of(layout)
        if tiling not in self._adjacency:
            self._adjacency[tiling] = self._tile(tiling, None if self._read_tile is None else self._read_tile(tiling))
        return self._adjacency[tiling]

    def _tile(self, tiling: Tiling, entries: Entries | None) -> AdjacencyTile:
        stored = self.edges_of_group, self.edge_sharding.global_id
        return AdjacencyTile.of(self.grid, *stored, tiling, self.device, entries)

    @property
    def edges_of_group(self) -> Tensor:
        """:attr:`edge_index`, nodes counted from the first one of the data group."""
        return self.edge_index - self.grid.first if self.grid.is_union else self.edge_index

    def _row_sums(self, tile: AdjacencyTile, csr: CSR, values: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The sum of each row of the whole matrix, for the tile's rows (collective)."""
        entries = torch.ones(csr.num_entries, dtype=dtype, device=self.device) if values is None else csr.values(values)
        sums = torch.zeros(csr.num_rows, dtype=dtype, device=self.device).index_add_(0, csr.row(), entries)
        return sum_all(sums, self.grid.transport(tile.tiling.column_axis, exact=True))

    def _tiles(
        self, key: Hashable, weight: RowTensor | None, dtype: torch.dtype, build: Build
    ) -> Callable[[TileLayout], GridOperator]:
        """Gives the operator by layout of x; it is built anew (collective) for other weights, or a change of these.

        With weights that learn it belongs to one graph of autograd, and is to be used in one forward pass.
        """
        learning: dict[Hashable, GridOperator] = {}

        def of(layout: TileLayout) -> GridOperator:
            tile = self.adjacency(layout)
            whole_key = (key, tile.tiling)
            if weight is not None and learns(weight):
                if whole_key not in learning:
                    values = apply(tile.dispatch, weight.to_local().to(dtype))
                    learning[whole_key] = build(tile, values)
                return learning[whole_key]

            def build_constant() -> GridOperator:
                if weight is None:
                    return build(tile, None)
                return build(tile, tile.dispatch.start(weight.to_local().detach().to(dtype)).wait())

            return self._operators.get(whole_key, weight, build_constant)

        return of


def learns(weight: Tensor | None) -> bool:
    """Whether products are to be differentiated by ``weight``."""
    return weight is not None and weight.requires_grad and torch.is_grad_enabled()


def as_tiles(x: NodeTensor) -> TileTensor:
    """``x``, which comes from :meth:`GridProducts.place`."""
    assert isinstance(x, TileTensor), "products take results of place()"
    return x
