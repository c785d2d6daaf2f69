"""A graph in the halo layout, ready to run: this rank's share, its exchanges, and the operators made from them."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor, nn

from pyg_dist.backend import ops
from pyg_dist.backend.comm.codec import EXACT, Codec
from pyg_dist.backend.comm.quantized import Bits, quantized
from pyg_dist.backend.comm.transport import Traffic, Transport
from pyg_dist.backend.halo.exchange import Exchange
from pyg_dist.backend.halo.operator import LinearOperator, aggregate_edges, halo_sums
from pyg_dist.backend.halo.transfer import HaloTransfer
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.layout import aggregation_cache
from pyg_dist.layout.gcn_norm import inverse_sqrt_degree, mask_non_sources
from pyg_dist.layout.halo.edges import Edges
from pyg_dist.layout.halo.sharding import HaloNodes
from pyg_dist.layout.operator_cache import OperatorCache
from pyg_dist.layout.self_loops import LoopRule, SelfLoops
from pyg_dist.plan.halo.share import HaloShare
from pyg_dist.plan.halo.transfer import Transfer
from pyg_dist.tensor.functions.random import draw_seed
from pyg_dist.tensor.layer_names import name_of
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.sharding import RowSharding, Selection, lasting


class HaloGraph:
    """The runtime form of a :class:`~pyg_dist.plan.halo.share.HaloShare`.

    Operators are built when first used, and kept.

    Args:
        share: this rank's part.
        nodes: the share's rows, where they lie.
        loop_rule: how GCN's self loops meet existing ones; it follows from the form of the input.
        is_dense: see :class:`~pyg_dist.backend.halo.exchange.Exchange`.
        edge_rows: the share's edges; ``None``: all those of a graph.

    Attributes:
        digest: of the edges, where a script has made them.
    """

    def __init__(
        self,
        share: HaloShare,
        nodes: HaloNodes,
        loop_rule: LoopRule,
        is_dense: bool = False,
        edge_rows: RowSharding | None = None,
    ) -> None:
        self.share = share
        self.node_sharding = nodes
        self.loop_rule: LoopRule = loop_rule
        self.is_dense = is_dense
        self.group = nodes.group
        self.device = nodes.key.device
        self._given_rows = edge_rows
        self.digest: str | None = None
        edge_id = share.edge_id.to(self.device)
        self.edge_sharding = (
            RowSharding(self.group, "edge", share.num_edges, edge_id) if edge_rows is None else edge_rows
        )
        self.local = share.local.to(self.device)
        self._loops = SelfLoops(self.local, loop_rule, self.edge_sharding.num_local)
        self.row_transfer = self._halo(share.post)
        self._sum_transfer = self.row_transfer if share.sums is share.post else self._halo(share.sums)
        self._operators: OperatorCache[LinearOperator] = OperatorCache()
        self._neighbour_lists: dict[int, tuple[Tensor, Tensor]] = {}

    def __deepcopy__(self, memo: object) -> HaloGraph:
        return self  # immutable, apart from caches

    @property
    def _transport(self) -> Transport:
        return Transport(self.group, self.traffic)

    def _halo(self, transfer: Transfer) -> HaloTransfer:
        """The runtime form of a transfer, all values one."""
        counts = transfer.send_counts, transfer.recv_counts
        exchange = Exchange(self._transport, *counts, self.is_dense, self.node_sharding.buffers)
        return HaloTransfer(
            Matrix(transfer.outgoing.to(self.device)), exchange, Matrix(transfer.incoming.to(self.device))
        )

    def to(self, device: torch.device | str) -> HaloGraph:
        """The same graph on another device."""
        if torch.device(device) == self.device:
            return self
        return self.over(self.node_sharding.to(device))

    def over(self, nodes: HaloNodes) -> HaloGraph:
        """The same edges over the same nodes on another device."""
        return HaloGraph(self.share, nodes, self.loop_rule, self.is_dense, self._given_rows)

    def select(self, chosen: Selection) -> HaloGraph:
        """The graph of some of the edges, over the same nodes: nothing is asked of other ranks.

        Args:
            chosen: of :attr:`edge_sharding`.
        """
        share = self.share.selected(chosen.local_index.cpu())
        return HaloGraph(share, self.node_sharding, self.loop_rule, self.is_dense, chosen.rows)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent so far, for all graphs over these nodes."""
        return self.node_sharding.traffic

    @property
    def bits(self) -> tuple[Bits, Bits]:
        """Of a value in a message, forward and backward."""
        return self.node_sharding.bits

    def codecs(self, layer: nn.Module, of_rows: bool = False) -> tuple[Codec, Codec]:
        """How the messages of one aggregation in ``layer`` are coded: forward, backward.

        Exact unless ``bits`` says otherwise, the layer is training and gradients are on. With ``bits``, each call in
        training draws one number, whatever the world size and whether or not anything is sent: masks that are drawn
        later depend on the script alone, and are drawn again alike when a checkpoint computes again what it had
        computed without gradients.

        Args:
            layer: whose messages they are.
            of_rows: for :attr:`row_transfer`, not for the exchange of sums.
        """
        if self.bits == (32, 32) or not layer.training:
            return EXACT, EXACT
        seed = draw_seed()
        if not torch.is_grad_enabled():
            return EXACT, EXACT
        transfer = self.share.post if of_rows else self.share.sums
        keys = transfer.outgoing_key.to(self.device), transfer.incoming_key.to(self.device)
        return quantized(self.bits, keys, seed, partial(name_of, layer))

    def owns(self, x: RowTensor) -> bool:
        """Whether x has a row for every node of this graph."""
        return x._sharding is self.node_sharding

    def feature_rows(self, width: int) -> RowSharding:
        """How features of ``width`` columns lie."""
        return self.node_sharding

    def input_rows(self, name: str, value: Tensor) -> RowSharding:
        """How a new node attribute lies."""
        return self.node_sharding

    def store_attribute(self, name: str, value: RowTensor) -> RowTensor:
        """An attribute as it is kept."""
        return value

    def has_isolated_nodes(self) -> bool:
        """Whether some node has no edge other than self loops (collective)."""
        row = self.local.row()
        linked = torch.zeros(self.num_local, dtype=torch.bool, device=self.device)
        other = row != self.local.col
        linked[row[other]] = True
        linked[self.local.col[other].long()] = True
        linked[self.num_local - self.num_boundary + self.halo.row()] = True
        linked[self._feeds_halos] = True
        return not self.group.all_true(bool(linked.all()))

    def has_self_loops(self) -> bool:
        """Whether some edge is a self loop (collective)."""
        return not self.group.all_true(not bool((self.local.row() == self.local.col).any()))

    @property
    def num_local(self) -> int:
        """Nodes of this rank, n."""
        return self.node_sharding.num_local

    @property
    def halo(self) -> CSR:
        """The edges with a remote source: boundary nodes by halo slots."""
        return self.row_transfer.incoming.pattern

    @property
    def num_boundary(self) -> int:
        """Nodes with remote sources, the last ones."""
        return self.halo.num_rows

    @cached_property
    @lasting
    def csr(self) -> CSR:
        """All edges of this rank: columns are local rows, then halo slots; one target's edges in input order."""
        row = torch.cat([self.local.row(), self.halo.row() + self.num_local - self.num_boundary])
        col = torch.cat([self.local.col, self.halo.col + self.num_local])
        edge = torch.cat([self.local.edge, self.halo.edge])
        order = torch.argsort(self.edge_sharding.key[edge])
        return CSR.from_edges(row[order], col[order], edge[order], self.num_local, self.num_local + self.halo.num_cols)

    @lasting
    def edges(self, weight: EdgeTensor | None = None) -> Edges:
        """All edges of this rank, in edge storage order, for code that makes a message of each; made at each call.

        Args:
            weight: the values of an ``adj_t``.
        """
        whole, ends = self.csr, torch.empty(2, self.edge_sharding.num_local, dtype=torch.int64, device=self.device)
        ends[0, whole.edge], ends[1, whole.edge] = whole.col.long(), whole.row()
        return Edges.of(self, self.edge_sharding, ends[0], ends[1], weight)

    def full_edge_index(self) -> Tensor:
        """All edges by global ids in the input's order, int64 ``[2, E]``, on every rank (collective)."""
        return self.edges().full_tensor()

    @cached_property
    @lasting
    def max_in_degree(self) -> int:
        """Largest in-degree of the whole graph (collective at the first use)."""
        degree = self.csr.rowptr.diff()
        return max(self.group.gather_counts(int(degree.max()) if degree.numel() else 0))

    @lasting
    def neighbour_lists(self, num_padding: int) -> tuple[Tensor, Tensor]:
        """Source and target of this rank's edges, by target, behind ``num_padding`` edges from n + h to target 0.

        Sources count local rows, then halo slots; targets are local ids plus one; edges of one target are in input
        order.

        Shapes:
            - output: ``[num_padding + e]`` each, int64
        """
        known = self._neighbour_lists.get(num_padding)
        if known is None:
            source, target = self.csr.col.long(), self.csr.row() + 1
            known = self._neighbour_lists[num_padding] = (
                torch.cat([source.new_full((num_padding,), self.csr.num_cols), source]),
                torch.cat([target.new_zeros(num_padding), target]),
            )
        return known

    def in_degree(self, dtype: torch.dtype) -> Tensor:
        """Number of in-edges of the local nodes, ``[n]``."""
        degree = self.local.rowptr.diff()
        degree[self.num_local - self.num_boundary :] += self.halo.rowptr.diff()
        return degree.to(dtype)

    @cached_property
    @lasting
    def _feeds_halos(self) -> Tensor:
        """Which local nodes have out-edges to other ranks, bool ``[n]`` (collective at the first use)."""
        arrives = torch.zeros(self.halo.num_cols, 1, device=self.device)
        arrives[self.halo.col.long()] = 1
        return halo_sums(arrives, self.row_transfer).view(-1) > 0

    @property
    def _sources(self) -> Tensor:
        """Which local nodes have out-edges, bool ``[n]`` (collective at the first use)."""
        return self._feeds_halos.index_fill(0, self.local.col.long(), True)

    def is_cached(self, x: NodeTensor, operator: LinearOperator) -> bool:
        """Whether the product of the operator and x is known, or would be kept."""
        return aggregation_cache.is_cached(x, lambda: operator, x._sharding)

    def neighbourhood(
        self, reduce: Literal["sum", "mean"], weight: RowTensor | None, dtype: torch.dtype
    ) -> LinearOperator:
        """``y_i = sum or mean over in-edges of w_ji x_j`` for constant weights in edge storage order."""

        def build() -> LinearOperator:
            degree = self.in_degree(dtype).clamp_(min=1) if reduce == "mean" else None
            local, halo = self._weighted(self.local, _constant(weight, dtype))
            return LinearOperator(local, halo, row_scale=degree, divides=True)

        return self._operators.get(("neighbourhood", reduce, dtype), weight, build)

    def symmetric_norm(
        self, add_self_loops: bool, loop_value: float, weight: RowTensor | None, dtype: torch.dtype
    ) -> LinearOperator:
        """GCN's ``D^-1/2 (A + loops) D^-1/2`` for constant weights (collective when built)."""

        def build() -> LinearOperator:
            local, values = self.local, _constant(weight, dtype)
            if add_self_loops:
                local = self._loops.added
                if values is None and loop_value != 1.0:
                    values = torch.ones(self.edge_sharding.num_local, dtype=dtype, device=self.device)
                if values is not None:
                    values = torch.cat([values, self._loops.weight(values, loop_value)])
            scale = self.inverse_sqrt_degree(local, values, dtype)
            of_sources = scale if add_self_loops else mask_non_sources(scale, self._sources)
            return LinearOperator(*self._weighted(local, values), scale, of_sources)

        return self._operators.get(("symmetric", add_self_loops, loop_value, dtype), weight, build)

    def _weighted(self, local: CSR, values: Tensor | None) -> tuple[Matrix, HaloTransfer]:
        """The matrices of sums with constant weights, by edge storage and what lies behind it (collective)."""
        if values is None:
            return Matrix(local), self._sum_transfer
        # Weights stay with the target's rank; the source's rank borrows those of the edges that it sums.
        lists, one = self.share.sums, values.new_ones(1)  # the last value: of the entries UNIT
        borrow = Exchange(self._transport, lists.weight_send_counts, lists.weight_recv_counts)
        borrowed = borrow.start(values[lists.weights_to_send.to(self.device)]).wait()
        storage = torch.cat([values, one])
        halo = HaloTransfer(
            Matrix(self._sum_transfer.outgoing.pattern, torch.cat([borrowed, one])),
            self._sum_transfer.exchange,
            Matrix(self._sum_transfer.incoming.pattern, storage),
        )
        return Matrix(local, storage), halo

    def inverse_sqrt_degree(self, local: CSR, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """``degree^-1/2`` of the local nodes, zero for degree zero; ``weight`` is constant."""
        ones = torch.ones(max(local.num_cols, self.halo.num_cols), 1, dtype=dtype, device=self.device)
        degree = torch.zeros(self.num_local, 1, dtype=dtype, device=self.device)
        for csr, out in ((local, degree), (self.halo, degree[self.num_local - self.num_boundary :])):
            values = None if weight is None else weight[csr.edge]
            ops.spmm_csr(csr.rowptr, csr.col, ones[: csr.num_cols], values, out=out)
        return inverse_sqrt_degree(degree.view(-1))

    def neighbourhood_product(
        self, x: Tensor, weight: Tensor, reduce: Literal["sum", "mean"], post: HaloTransfer
    ) -> Tensor:
        """:meth:`neighbourhood` with weights that learn; differentiable by x and by the weights (collective)."""
        out = aggregate_edges(x, weight, self.local, post)
        if reduce == "sum":
            return out
        return out / self.in_degree(x.dtype).clamp_(min=1).view(-1, 1)

    def symmetric_norm_product(
        self, x: Tensor, weight: Tensor, add_self_loops: bool, loop_value: float, post: HaloTransfer
    ) -> Tensor:
        """GCN's aggregation with weights that learn; differentiable by x and by the weights (collective).

        ``y = s * (A_w (s * x) + l * s * x)`` with ``s = degree^-1/2`` and the loops' weights l: the degree depends
        on the weights, too.
        """
        local = self._loops.others if add_self_loops else self.local
        loops = self._loops.weight(weight, loop_value).view(-1, 1) if add_self_loops else None
        ones = x.new_ones(self.num_local, 1)
        degree = aggregate_edges(ones, weight, local, self.row_transfer)
        scale = inverse_sqrt_degree((degree if loops is None else degree + loops).view(-1)).view(-1, 1)
        of_sources = scale if add_self_loops else mask_non_sources(scale, self._sources)
        scaled = of_sources * x
        out = aggregate_edges(scaled, weight, local, post)
        return scale * (out if loops is None else out + loops * scaled)


def _constant(weight: RowTensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else weight.to_local().detach().to(dtype)
