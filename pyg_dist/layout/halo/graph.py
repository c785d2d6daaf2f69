"""A graph in the halo layout, ready to run: this rank's share, its exchanges, and the operators made from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dist.backend import ops
from pyg_dist.backend.comm.codec import EXACT, Codec
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.quantized import Bits, quantized
from pyg_dist.backend.comm.transport import Pending, Traffic, Transport
from pyg_dist.backend.halo.attention import HaloAttention, halo_attention
from pyg_dist.backend.halo.exchange import Exchange
from pyg_dist.backend.halo.message_blocks import MessageBlocks, Place, Run, reduce_by_blocks
from pyg_dist.backend.halo.operator import HaloRows, LentSums, LinearOperator, aggregate, halo_rows, halo_sums
from pyg_dist.backend.halo.transfer import HaloTransfer
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.ops.row_format import row_bytes
from pyg_dist.backend.sparse.attention import attention
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.layout import aggregation_cache, node_edge
from pyg_dist.layout.accumulate import add_into_
from pyg_dist.layout.edges import Edges
from pyg_dist.layout.gcn_norm import gcn_product, gcn_scales
from pyg_dist.layout.graph import Norm
from pyg_dist.layout.halo.links import HaloLinks
from pyg_dist.layout.halo.operator import ConstantOperator, HaloOperator, LearningOperator
from pyg_dist.layout.halo.sharding import HaloNodes
from pyg_dist.layout.operator_cache import OperatorCache
from pyg_dist.layout.self_loops import LoopRule, SelfLoops
from pyg_dist.plan.halo.cost import ExchangeCounts, lends_weights
from pyg_dist.plan.halo.share import HaloShare
from pyg_dist.plan.halo.transfer import UNIT, Transfer
from pyg_dist.tensor.functions.random import draw_seed
from pyg_dist.tensor.layer_names import name_of
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor, as_row_tensor_
from pyg_dist.tensor.sharding import RowSharding, Selection, lasting

G = TypeVar("G", bound="HaloGraph")


class HaloGraph:
    """The runtime form of a :class:`~pyg_dist.plan.halo.share.HaloShare`.

    Operators are built when first used, and kept.

    Args:
        share: this rank's part.
        nodes: the share's rows, where they lie.
        loop_rule: how GCN's self loops meet existing ones; it follows from the form of the input.
        is_dense: see :class:`~pyg_dist.backend.halo.exchange.Exchange`.
        edge_rows: the share's edges; ``None``: all those of a graph.
        exchange_group: the ranks that exchange rows; ``None``: all those that have nodes.
        device: where rows are that it is to work on. The share stays on the host.

    Attributes:
        digest: of the edges, where a script has made them.
        lends_weights: whether ranks may make sums with weights that learn for one another.
    """

    lends_weights = True

    def __init__(
        self,
        share: HaloShare,
        nodes: HaloNodes,
        loop_rule: LoopRule,
        is_dense: bool = False,
        edge_rows: RowSharding | None = None,
        exchange_group: Group | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.share = share
        self.node_sharding = nodes
        self.loop_rule: LoopRule = loop_rule
        self.is_dense = is_dense
        self.group = nodes.group
        self.exchange_group = nodes.group if exchange_group is None else exchange_group
        self.digest: str | None = None
        self.edge_sharding = (
            RowSharding(self.group, "edge", share.num_edges, share.edge_id) if edge_rows is None else edge_rows
        )
        self._lie_on(torch.device(device))

    def _lie_on(self, device: torch.device) -> None:
        """Make what products are made with there."""
        share, num_local = self.share, self.num_local
        self.device = device
        self.local = share.local.to(device)
        node, local = torch.arange(num_local), share.local
        # local, not self, which would be a cycle: batches are freed with their last reference
        entries = lambda: (local.row(), local.col, local.edge)  # noqa: E731
        shape, num_edges = (num_local, num_local), self.edge_sharding.num_local
        self._loops = SelfLoops(entries, shape, node, node, self.loop_rule, num_edges, device)
        self._loops_beside = SelfLoops(entries, shape, node, node, "add", num_edges, device)
        self.row_transfer = self._halo(share.row_transfer)
        self._sum_transfer = (
            self.row_transfer if share.sum_transfer is share.row_transfer else self._halo(share.sum_transfer)
        )
        self._operators: OperatorCache[ConstantOperator] = OperatorCache()
        self._neighbour_lists: dict[int, tuple[Tensor, Tensor]] = {}
        self._elsewhere: dict[torch.device, HaloGraph] = {}
        for name in ("csr", "_feeds_halos", "_neighbour_id_there", "_lent_sums"):
            self.__dict__.pop(name, None)

    def __deepcopy__(self, memo: object) -> HaloGraph:
        return self  # immutable, apart from caches

    @property
    def _transport(self) -> Transport:
        return Transport(self.exchange_group, self.traffic)

    def _halo(self, transfer: Transfer) -> HaloTransfer:
        """The runtime form of a transfer, all values one."""
        counts = transfer.send_counts, transfer.recv_counts
        exchange = Exchange(self._transport, *counts, self.is_dense, self.node_sharding.buffers)
        return HaloTransfer(
            Matrix(transfer.outgoing.to(self.device)), exchange, Matrix(transfer.incoming.to(self.device))
        )

    def to(self, device: torch.device | str) -> HaloGraph:
        """The same edges over the same nodes on another device."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = self._copy_on(device)
        return self._elsewhere[device]

    def _copy_on(self: G, device: torch.device) -> G:
        moved = copy.copy(self)
        moved._lie_on(device)
        return moved

    def select(self, chosen: Selection) -> HaloGraph:
        """The graph of some of the edges, over the same nodes; no communication.

        Args:
            chosen: of :attr:`edge_sharding`.
        """
        share = self.share.selected(chosen.local_index.cpu())
        nodes, ranks = self.node_sharding, self.exchange_group
        return HaloGraph(share, nodes, self.loop_rule, self.is_dense, chosen.rows, ranks, self.device)

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
        seed = self.node_sharding.seed_of_group(draw_seed())
        if not torch.is_grad_enabled():
            return EXACT, EXACT
        transfer = self.share.row_transfer if of_rows else self.share.sum_transfer
        keys = on_device(transfer.outgoing_key, self.device), on_device(transfer.incoming_key, self.device)
        return quantized(self.bits, keys, seed, partial(name_of, layer))

    def owns(self, x: RowTensor) -> bool:
        """Whether x has a row for every node of this graph."""
        return x._sharding is self.node_sharding

    def feature_sharding(self, width: int) -> RowSharding:
        """How features of ``width`` columns lie."""
        return self.node_sharding

    def attribute_sharding(self, name: str, value: Tensor) -> RowSharding:
        """The sharding of a new node attribute."""
        return self.node_sharding

    def place_attribute(self, name: str, value: RowTensor) -> RowTensor:
        """An attribute as it is kept."""
        return value

    def place(self, x: NodeTensor, layer: nn.Module | None = None) -> NodeTensor:
        """Itself: rows are what products take."""
        return x

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
    def data_group(self) -> tuple[int, int]:
        """See :class:`~pyg_dist.layout.graph.DistributedGraph`."""
        return self.node_sharding.groups.index, self.node_sharding.groups.count

    def prepare_subgraphs(self) -> None:
        """See :class:`~pyg_dist.layout.graph.DistributedGraph`."""
        self.links, self.loops_exist  # noqa: B018

    @cached_property
    def loops_exist(self) -> bool:
        """:meth:`has_self_loops`, computed once (collective at the first use)."""
        return self.has_self_loops()

    @cached_property
    def links(self) -> HaloLinks:
        """What subgraphs are cut from (collective at the first use)."""
        return HaloLinks(self.share, self.group)

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
        local, halo = self.share.local, self.share.row_transfer.incoming
        row = torch.cat([local.row(), halo.row() + self.num_local - self.num_boundary])
        col = torch.cat([local.col, halo.col + self.num_local])
        edge = torch.cat([local.edge, halo.edge])
        order = torch.argsort(self.edge_sharding.global_id[edge])
        csr = CSR.from_edges(row[order], col[order], edge[order], self.num_local, self.num_neighbours)
        return csr.to(self.device)

    def full_edge_index(self) -> Tensor:
        """All edges by global ids in the input's order, int64 ``[2, E]``, on every rank (collective)."""
        return Edges.all_of(self).full_tensor()

    # ---- EdgeView ----------------------------------------------------------------------------------------------------

    @lasting
    def ends(self) -> tuple[Tensor, Tensor]:
        """Neighbour and local row of each edge in edge storage order, int64 ``[e]``; made at each call."""
        source, target = self._ends_on_host()
        return source.to(self.device), target.to(self.device)

    def _ends_on_host(self) -> tuple[Tensor, Tensor]:
        ends = torch.empty(2, self.edge_sharding.num_local, dtype=torch.int64)
        for csr, first_row, first_col in (
            (self.share.local, 0, 0),
            (self.share.row_transfer.incoming, self.num_local - self.num_boundary, self.num_local),
        ):
            ends[0, csr.edge], ends[1, csr.edge] = csr.col.long() + first_col, csr.row() + first_row
        return ends[0], ends[1]

    @property
    def num_neighbours(self) -> int:
        """Local rows and halo slots, n + h."""
        return self.num_local + self.halo.num_cols

    @property
    def neighbour_id(self) -> Tensor:
        """Global ids of the local rows and of the halo slots, int64 ``[n + h]``."""
        return self._neighbour_id_on_host if self.device.type == "cpu" else self._neighbour_id_there

    @cached_property
    @lasting
    def _neighbour_id_there(self) -> Tensor:
        return self._neighbour_id_on_host.to(self.device)

    @property
    def _neighbour_id_on_host(self) -> Tensor:
        return torch.cat([self.node_sharding.global_id, self.share.halo_id + self.node_sharding.first])

    def neighbour_rows(self, x: Tensor, layer: nn.Module | None = None) -> Tensor:
        """Local rows, then halo slots; differentiable (collective).

        Exact, but for a training ``layer`` with ``bits``. Floating types travel as they are (float16 of the CPU as
        float32), or in ``bits``; integers and bools as int64.

        Shapes:
            - x: ``[n, ...]``
            - output: ``[n + h, ...]``
        """
        transfer = self.row_transfer
        if layer is not None:
            transfer = transfer.coded(self.codecs(layer, of_rows=True))
        if self.exchange_group.size == 1:
            return x
        halo = _halo(x.reshape(x.shape[0], x.shape[1:].numel()), transfer)
        return torch.cat([x, halo.view(halo.shape[0], *x.shape[1:])])

    def attend(
        self,
        edges: Edges,
        inputs: AttentionInputs,
        spec: AttentionSpec,
        layer: nn.Module | None = None,
        has_weights: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See :meth:`~pyg_dist.layout.graph.DistributedGraph.attend`."""
        key = on_device(edges.rows.rng_key, self.device) if spec.p > 0 else None
        by_value, by_key = (self._edge_transfer(x, layer) for x in (inputs.value, inputs.key))
        num_weights = edges.rows.num_local if has_weights else 0
        if self.exchange_group.size == 1:
            return attention(edges.csr, key, spec, inputs, num_weights)
        return halo_attention(HaloAttention(*edges.parts, by_value, by_key, key, spec, num_weights), inputs)

    def reduce_by_blocks(
        self, edges: Edges, inputs: Sequence[tuple[Place, Tensor]], run: Run, max_edges: int, layer: nn.Module
    ) -> Tensor:
        """See :meth:`~pyg_dist.layout.graph.EdgeView.reduce_by_blocks`."""
        talks = self.exchange_group.size > 1
        maps = tuple(HaloRows(self._edge_transfer(x, layer)) if talks and p == "source" else None for p, x in inputs)
        num_inner = self.num_local - self.num_boundary if talks else self.num_local
        places, tensors = tuple(p for p, _ in inputs), [x for _, x in inputs]
        return reduce_by_blocks(MessageBlocks(edges.csr, num_inner, max_edges, places, maps, run), tensors)

    def _edge_transfer(self, x: Tensor | None, layer: nn.Module | None) -> HaloTransfer:
        """How rows reach edges: in few bits while ``layer`` trains, unless they are narrow."""
        if layer is None or x is None or not node_edge.is_wide(x):
            return self.row_transfer
        return self.row_transfer.coded(self.codecs(layer, of_rows=True))

    def sum_to_owners(self, rows: Tensor) -> Tensor:
        """The transpose of :meth:`neighbour_rows`: halo slots go home, where they are added (collective).

        Shapes:
            - rows: ``[n + h, ...]``
            - output: ``[n, ...]``
        """
        if self.exchange_group.size == 1:
            return rows
        own, halo = torch.split(rows, [self.num_local, self.halo.num_cols])
        home = halo_sums(halo.reshape(halo.shape[0], halo.shape[1:].numel()), self.row_transfer)
        return own + home.view_as(own)

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

    # ---- Linear algebra ----------------------------------------------------------------------------------------------

    def operator(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> HaloOperator:
        """See :meth:`~pyg_dist.layout.graph.DistributedGraph.operator`."""
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            return self._learning(norm, weight.to_local())
        make = self._gcn if norm.kind == "gcn" else self._neighbourhood
        return self._operators.get(
            (norm, dtype), weight, lambda: ConstantOperator(make(norm, _constant(weight, dtype), dtype))
        )

    def aggregate(self, x: NodeTensor, operator: HaloOperator, layer: nn.Module | None = None) -> NodeTensor:
        """See :meth:`~pyg_dist.layout.graph.DistributedGraph.aggregate`."""
        if isinstance(operator, LearningOperator):
            return self._learning_product(x, operator, layer)
        codecs = (EXACT, EXACT) if layer is None else self.codecs(layer)
        result = aggregation_cache.lookup(x, operator)
        if result is None:
            cached = aggregation_cache.is_cacheable(x, x._sharding)
            matrix = operator.matrix if cached else operator.matrix.coded(codecs)
            result = aggregate(x.to_local(), matrix)
            x._is_reused = True
            if not cached:
                return as_row_tensor_(result, x._sharding)  # type: ignore[return-value]
            aggregation_cache.store(x, operator, result)
        return NodeTensor.from_local(result, x._sharding)

    def start(self, x: NodeTensor, operator: HaloOperator, layer: nn.Module | None = None) -> Pending[NodeTensor]:
        """:meth:`aggregate`, which hides its messages behind local edges."""
        out = self.aggregate(x, operator, layer)
        return Pending(lambda: out)

    def align(self, x: NodeTensor, like: NodeTensor) -> NodeTensor:
        """Itself: a product has the sharding of its input."""
        return x

    def linear_sum(
        self, pairs: Sequence[tuple[NodeTensor | Pending[NodeTensor], Tensor]], bias: Tensor | None = None
    ) -> NodeTensor:
        """``sum_k X_k W_k^T + bias``, added in the order given, the bias with the first: PyG's bits."""
        out: Any = None
        for given, weight in pairs:
            x = given if isinstance(given, NodeTensor) else given.wait()
            product: Any = F.linear(x, weight, bias if out is None else None)
            out = product if out is None else add_into_(out, product)
        return out  # type: ignore[no-any-return]

    def is_cached(self, x: NodeTensor, operator: HaloOperator) -> bool:
        """Whether the product of the operator and x is known, or would be kept."""
        return not operator.learns and aggregation_cache.is_cached(x, lambda: operator, x._sharding)

    def _neighbourhood(self, norm: Norm, values: Tensor | None, dtype: torch.dtype) -> LinearOperator:
        """Sum or mean over in-edges, for constant weights in edge storage order."""
        degree = self.in_degree(dtype).clamp_(min=1) if norm.kind == "mean" else None
        local = self.local
        if norm.identity:
            local = self._loops_beside.added
            values = self._loops_beside.with_loops(values, norm.identity, dtype)
        return LinearOperator(*self._weighted(local, values), row_scale=degree, divides=True)

    def _gcn(self, norm: Norm, values: Tensor | None, dtype: torch.dtype) -> LinearOperator:
        """``D^-1/2 (A + loops) D^-1/2`` for constant weights (collective)."""
        local = self.local
        if norm.add_self_loops:
            local = self._loops.added
            values = self._loops.with_loops(values, norm.loop_value, dtype)
        is_source = None if norm.add_self_loops else self._sources
        scales = gcn_scales(self._degree(local, values, dtype), lambda scale: scale, is_source)
        return LinearOperator(*self._weighted(local, values), *scales)

    def _learning(self, norm: Norm, weight: Tensor) -> LearningOperator:
        """The operator of weights that learn."""
        local, loops = self.local, None
        if norm.kind == "gcn" and norm.add_self_loops:
            local = self.local if self.loop_rule == "add" else self._loops.others
            loops = partial(self._loops.weight, loop_value=norm.loop_value)
        return LearningOperator(norm, weight, local, self.halo, lambda: self._lent_sums, self.in_degree, loops)

    @cached_property
    @lasting
    def _lent_sums(self) -> LentSums:
        """The exchange of sums whose weights learn, by edge storage."""
        return self._lending(self.edge_sharding.num_local, lambda place: place)

    def _lending(self, num_edges: int, stored: Callable[[Tensor], Tensor]) -> LentSums:
        """The exchange of sums whose weights learn.

        Args:
            num_edges: of their storage.
            stored: where the weights of remote edges lie in it, given their places in edge storage.
        """
        lists, sums = self.share.sum_transfer, self._sum_transfer
        exchange = Exchange(self._transport, lists.weight_send_counts, lists.weight_recv_counts)

        def placed(csr: CSR, unit: int, number: Callable[[Tensor], Tensor]) -> CSR:
            return csr.placed(lambda place: torch.where(place == UNIT, unit, number(place)))

        outgoing = placed(sums.outgoing.pattern, exchange.num_received, lambda place: place)
        incoming = placed(sums.incoming.pattern, num_edges, stored)
        return LentSums(stored(lists.weights_to_send), exchange, outgoing, sums.exchange, incoming)

    @cached_property
    @lasting
    def _exchange_counts(self) -> ExchangeCounts:
        """What the two exchanges move (collective at the first use)."""
        share, group = self.share, self.exchange_group
        counts = map(
            sum, (share.row_transfer.send_counts, share.sum_transfer.send_counts, share.sum_transfer.weight_send_counts)
        )
        gathered = group.gather_rows(torch.tensor([[*counts]]), [1] * group.size)
        return ExchangeCounts(*gathered.sum(0).tolist())

    def _lends(self, x: Tensor, norm: Norm, layer: nn.Module | None) -> bool:
        """Whether weights that learn are lent for a product with x (collective at the first use)."""
        if not self.lends_weights or self.share.exchange == "post" or self.exchange_group.size == 1:
            return False
        bits = (32, 32) if layer is None or not layer.training else self.bits
        forward, backward = (row_bytes(x.shape[1], x.element_size(), b) for b in bits)
        learns = x.requires_grad or norm.kind == "gcn"  # rows are scaled by what depends on the weights
        return lends_weights(self._exchange_counts, forward, backward, x.element_size(), learns)

    def operator_over(
        self, edges: Edges, norm: Norm, weight: RowTensor | None, dtype: torch.dtype
    ) -> HaloOperator | None:
        """See :meth:`~pyg_dist.layout.graph.EdgeView.operator_over`."""
        if not edges.has_all_remote:
            return None
        here, there = edges.parts

        def degree(dtype: torch.dtype) -> Tensor:
            degree = here.rowptr.diff()
            degree[self.num_local - self.num_boundary :] += there.rowptr.diff()
            return degree.to(dtype)

        def lending() -> LentSums:
            place = torch.zeros(self.edge_sharding.num_local, dtype=torch.int64)
            place[self._remote.cpu()] = edges.remote.cpu()
            return self._lending(edges.rows.num_local, lambda stored: place[stored.long()])  # of -1: of any

        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            lent: Any = lambda: edges.kept.get("lent", None, lending)  # noqa: E731
            return LearningOperator(norm, weight.to_local(), here, there, lent, degree)

        def build() -> ConstantOperator:
            values, stored = _constant(weight, dtype), None
            if values is not None:
                stored = values.new_zeros(self.edge_sharding.num_local)
                stored[self._remote] = values[edges.remote]
            _, halo = self._weighted(self.local, stored)
            scale = degree(dtype).clamp_(min=1) if norm.kind == "mean" else None
            return ConstantOperator(LinearOperator(Matrix(here, values), halo, row_scale=scale, divides=True))

        return edges.kept.get((norm, dtype), weight, build)  # type: ignore[no-any-return]

    @property
    def _remote(self) -> Tensor:
        """Places in edge storage of the edges whose sources are on other ranks, ascending."""
        return self.halo.edge.long().sort().values

    def _learning_product(self, x: NodeTensor, a: LearningOperator, layer: nn.Module | None) -> NodeTensor:
        """The product with weights that learn; differentiable by x and by the weights (collective)."""
        lends = self._lends(x, a.norm, layer)
        codecs = (EXACT, EXACT) if layer is None else self.codecs(layer, of_rows=not lends)
        local = x.to_local()

        def times(rows: Tensor) -> Tensor:
            return a.by_sums(rows, codecs) if lends else a.by_rows(rows, self.row_transfer.coded(codecs))

        if a.norm.kind == "gcn":
            is_source = None if a.norm.add_self_loops else self._sources
            scales = a.scales.get(x.dtype, lambda: a.degree(x.dtype), is_source)
            out = gcn_product(local, scales, times)
        else:
            out = times(local)
            if a.norm.kind == "mean":
                out = out / a.in_degree(x.dtype).clamp_(min=1).view(-1, 1)
        return NodeTensor.from_local(out, self.node_sharding)

    def _weighted(self, local: CSR, values: Tensor | None) -> tuple[Matrix, HaloTransfer]:
        """The matrices of sums with constant weights, by edge storage and what lies behind it (collective)."""
        if values is None:
            return Matrix(local), self._sum_transfer
        # Weights stay with the target's rank; the source's rank borrows those of the edges that it sums.
        lists, one = self.share.sum_transfer, values.new_ones(1)  # the last value: of the entries UNIT
        borrow = Exchange(self._transport, lists.weight_send_counts, lists.weight_recv_counts)
        borrowed = borrow.start(values[on_device(lists.weights_to_send, self.device)]).wait()
        storage = torch.cat([values, one])
        halo = HaloTransfer(
            Matrix(self._sum_transfer.outgoing.pattern, torch.cat([borrowed, one])),
            self._sum_transfer.exchange,
            Matrix(self._sum_transfer.incoming.pattern, storage),
        )
        return Matrix(local, storage), halo

    def _degree(self, local: CSR, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Sum of the weights of each local node's in-edges, ``[n]``; ``weight`` is constant."""
        ones = torch.ones(max(local.num_cols, self.halo.num_cols), 1, dtype=dtype, device=self.device)
        degree = torch.zeros(self.num_local, 1, dtype=dtype, device=self.device)
        for csr, out in ((local, degree), (self.halo, degree[self.num_local - self.num_boundary :])):
            values = None if weight is None else csr.values(weight)
            ops.spmm_csr(csr.rowptr, csr.col, ones[: csr.num_cols], values, out=out)
        return degree.view(-1)


def _constant(weight: RowTensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None else weight.to_local().detach().to(dtype)


def _halo(flat: Tensor, transfer: HaloTransfer) -> Tensor:
    """Halo slots (collective). Shapes: ``[n, F] -> [h, F]``."""
    if flat.dtype.is_floating_point:
        return halo_rows(flat, transfer)
    outgoing = transfer.outgoing.pattern
    sent = flat[flat.shape[0] - outgoing.num_cols :][outgoing.col.long()]
    return transfer.exchange.start(sent.long()).wait().to(flat.dtype)
