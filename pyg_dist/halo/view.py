"""All in-edges of a rank's nodes, and the exchanges that bring rows to them: the edge view of both layouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from pyg_dist.backend import host
from pyg_dist.backend.comm.codec import Codec, quantized
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.transport import Traffic, Transport
from pyg_dist.backend.on_device import CopiedToDevices, on_device
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.session.settings import LOCAL_BITS, Bits
from pyg_dist.backend.sparse.attention import RankAttention, attend
from pyg_dist.backend.sparse.csr import CSR, Place, Run
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.graph.caches import AskedOfBatches, OperatorCache
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.gcn_norm import SelfLoops
from pyg_dist.graph.layer_call import is_wide
from pyg_dist.graph.protocol import End, NodeSharding, the_one
from pyg_dist.halo.exchange import exchange_of
from pyg_dist.halo.message_blocks import MessageBlocks, reduce_by_blocks
from pyg_dist.halo.operator import aggregate
from pyg_dist.halo.plan.share import HaloShare
from pyg_dist.halo.plan.transfer import Transfer
from pyg_dist.halo.sharding import HaloNodes
from pyg_dist.halo.transfer import AS_THEY_ARE, Codecs, HaloTransfer, Relay
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.calling_code import name_of
from pyg_dist.tensor.functions.random import draw_seed
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor
from pyg_dist.tensor.sharding import RowSharding, lasting


class HaloView(CopiedToDevices):
    """The runtime form of a :class:`~pyg_dist.halo.plan.share.HaloShare`. Operators are built when first used.

    ``nodes`` are the share's rows of targets, and of sources, unless there are other ``sources``. ``num_messages`` are
    those of one aggregation, all ranks together. ``edge_rows``: by default all edges of a graph; ``exchange_group``: by
    default all ranks that have nodes. The share stays on the host. ``digest``: of edges that a script has made.
    """

    def __init__(
        self,
        share: HaloShare,
        nodes: HaloNodes,
        loop_rule: LoopRule,
        num_messages: int = 0,
        edge_rows: RowSharding | None = None,
        exchange_group: Group | None = None,
        device: torch.device | str = "cpu",
        sources: NodeSharding | None = None,
    ) -> None:
        self.share = share
        self.targets = nodes
        self.sources: NodeSharding = nodes if sources is None else sources
        self.loop_rule: LoopRule = loop_rule
        self.num_messages = num_messages
        self.group = nodes.group
        self.exchange_group = nodes.group if exchange_group is None else exchange_group
        self.digest: str | None = None
        self.edge_sharding = (
            RowSharding(self.group, "edge", share.num_edges, share.edge_id) if edge_rows is None else edge_rows
        )
        self._build_on(torch.device(device))

    def _build_on(self, device: torch.device) -> None:
        share, num_local = self.share, self.num_local
        self.device = device
        self.local = share.local.to(device)
        node, local = host.arange(num_local), share.local
        # local, not self, which would be a cycle: batches are freed with their last reference
        entries = lambda: (local.row(torch.int32), local.col, local.edge)  # noqa: E731
        shape, num_edges = (num_local, self.num_sources), self.edge_sharding.num_local
        self._loops = SelfLoops(entries, shape, node, node, self.loop_rule, num_edges, device)
        self._loops_beside = SelfLoops(entries, shape, node, node, "add", num_edges, device)
        self._sum_transfer = self._halo(share.sum_transfer)
        self._operators = OperatorCache(num_edges)
        self.asked = AskedOfBatches()
        self._elsewhere: dict[torch.device, object] = {}
        for name in ("row_transfer", "one_rank_columns", "one_rank_edges", "csr", "_feeds_halos", "_remote_sums"):
            self.__dict__.pop(name, None)

    @property
    def _transport(self) -> Transport:
        return Transport(self.exchange_group, self.traffic)

    @cached_property
    def row_transfer(self) -> HaloTransfer:
        """The transfer of rows of sources, for whatever cannot be summed by the sender (not collective)."""
        share = self.share
        return self._sum_transfer if share.exchange == "post" else self._halo(share.row_transfer)

    def _halo(self, transfer: Transfer) -> HaloTransfer:
        """The runtime form of a transfer, all values one."""
        transport, lists, relay = self._transport, transfer.relay, None
        num_messages = self.num_messages if lists is None else 0  # in two levels no kind is sent by most pairs
        exchange = exchange_of(transport, transfer.send_counts, transfer.recv_counts, num_messages)
        if lists is not None:
            rows, sums, gather, spread = (exchange_of(transport, *counts) for counts in lists[:4])
            relay = Relay(rows, lists.out_of, spread, gather, lists.into, sums)
        outgoing, incoming = (Matrix(csr.to(self.device)) for csr in (transfer.outgoing, transfer.incoming))
        return HaloTransfer(outgoing, exchange, incoming, transport, relay)

    @property
    def traffic(self) -> Traffic:
        """Counts of this rank's messages so far, for all graphs over these nodes."""
        return self.targets.traffic

    def codecs(self, layer: nn.Module | None, of_rows: bool = False) -> Codecs:
        """How the messages of an aggregation in ``layer`` are coded, forward and backward; or those ``of_rows`` alone.

        Exact unless ``bits`` says otherwise, there is a layer in training and gradients are on. With ``bits``, each
        call in training draws one number, whatever the world size and whether or not anything is sent: masks that are
        drawn later depend on the script alone, and are drawn again alike when a checkpoint computes again what it had
        computed without gradients.
        """
        if self.targets.bits == (32, 32) or layer is None or not layer.training:
            return AS_THEY_ARE
        seed = self.targets.seed_of_group(draw_seed())
        if not torch.is_grad_enabled():
            return AS_THEY_ARE
        transfer = self.share.row_transfer if of_rows else self.share.sum_transfer
        direct = self.targets.bits if transfer.relay is None else LOCAL_BITS.value()

        def coded(bits: tuple[Bits, Bits], keys: tuple[Tensor, Tensor]) -> tuple[Codec, Codec]:
            outgoing, incoming = (on_device(key, self.device) for key in keys)
            return quantized(bits, (outgoing, incoming), seed, partial(name_of, layer))

        return Codecs(*map(coded, (direct, self.targets.bits, self.targets.bits), transfer.keys))

    @property
    def node_sharding(self) -> HaloNodes:
        the_one(self.sources, self.targets)
        return self.targets

    def owns(self, x: RowTensor, end: End = 1) -> bool:
        return x._sharding is (self.targets if end else self.sources)

    def feature_sharding(self, width: int) -> RowSharding:
        return self.node_sharding

    def place(self, x: NodeTensor, layer: nn.Module | None = None) -> NodeTensor:
        """Itself: rows are what products take."""
        return x

    @property
    def num_local(self) -> int:
        return self.targets.num_local

    @property
    def num_sources(self) -> int:
        return self.sources.num_local

    @property
    def halo(self) -> CSR:
        """The edges with a remote source: boundary nodes by halo slots."""
        return self.row_transfer.incoming.pattern

    @property
    def num_boundary(self) -> int:
        return self.halo.num_rows

    @cached_property
    @lasting
    def csr(self) -> CSR:
        row, col, edge = self._entries()
        order = torch.argsort(self.edge_sharding.global_id[edge])
        csr = CSR.from_edges(row[order], col[order], edge[order], self.num_local, self.num_neighbours)
        return csr.to(self.device)

    @lasting
    def ends(self) -> tuple[Tensor, Tensor]:
        source, target = self._ends_on_host()
        return source.to(self.device), target.to(self.device)

    def _ends_on_host(self) -> tuple[Tensor, Tensor]:
        row, col, edge = self._entries()
        ends = host.empty(2, self.edge_sharding.num_local, dtype=torch.int64)
        ends[0, edge], ends[1, edge] = col.long(), row
        return ends[0], ends[1]

    def _entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """Local row, neighbour and place of each edge: local edges, then those of the halo."""
        local, halo = self.share.local, self.share.row_transfer.incoming
        row = torch.cat([local.row(), halo.row() + self.num_local - self.num_boundary])
        return row, torch.cat([local.col, halo.col + self.num_sources]), torch.cat([local.edge, halo.edge])

    @property
    def num_neighbours(self) -> int:
        return self.num_sources + self.halo.num_cols

    @property
    def neighbour_id(self) -> Tensor:
        return on_device(self._neighbour_id_on_host, self.device)

    @property
    def neighbour_rank(self) -> Tensor:
        return torch.cat([host.full((self.num_sources,), self.share.rank), self.share.halo_owner.long()])

    @cached_property
    @lasting
    def _neighbour_id_on_host(self) -> Tensor:
        return torch.cat([self.sources.global_id, self.share.halo_id + self.sources.first])

    def neighbour_rows(self, x: Tensor, layer: nn.Module | None = None) -> Tensor:
        """See :meth:`~pyg_dist.graph.protocol.EdgeView.neighbour_rows`.

        Floating types travel as they are (float16 of the CPU as float32), or in ``bits``; integers and bools as int64.
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
        key = on_device(edges.rows.rng_key, self.device) if spec.p > 0 else None
        by_value, by_key = (self._edge_transfer(x, layer) for x in (inputs.value, inputs.key))
        num_weights = edges.rows.num_local if has_weights else 0
        a = RankAttention(edges.csr, key, spec, num_weights)
        if self.exchange_group.size > 1:  # targets without remote sources are worked on while messages are in flight
            a = replace(a, far=(by_value.to_slots, by_key.to_slots), num_inner=self.num_local - self.num_boundary)
        return attend(a, inputs)

    def reduce_by_blocks(
        self, edges: Edges, inputs: Sequence[tuple[Place, Tensor]], run: Run, max_edges: int, layer: nn.Module
    ) -> Tensor:
        exchanges = self.exchange_group.size > 1
        maps = tuple(self._edge_transfer(x, layer).to_slots if exchanges and p == "source" else None for p, x in inputs)
        num_inner = self.num_local - self.num_boundary if exchanges else self.num_local
        places, tensors = tuple(p for p, _ in inputs), [x for _, x in inputs]
        blocks = MessageBlocks(edges.csr, self.num_sources, num_inner, max_edges, places, maps, run)
        return reduce_by_blocks(blocks, tensors)

    def _edge_transfer(self, x: Tensor | None, layer: nn.Module | None) -> HaloTransfer:
        """How rows reach edges: in few bits while ``layer`` trains, unless they are narrow."""
        if layer is None or x is None or not is_wide(x):
            return self.row_transfer
        return self.row_transfer.coded(self.codecs(layer, of_rows=True))

    def sum_to_owners(self, rows: Tensor) -> Tensor:
        if self.exchange_group.size == 1:
            return rows
        own, halo = torch.split(rows, [self.num_sources, self.halo.num_cols])
        returned = aggregate(halo.reshape(halo.shape[0], halo.shape[1:].numel()), self.row_transfer.to_slots.transposed)
        return own + returned.view_as(own)

    @cached_property
    @lasting
    def _feeds_halos(self) -> Tensor:
        """Which local nodes have out-edges to other ranks, bool ``[n]`` (collective at the first use)."""
        arrives = torch.zeros(self.halo.num_cols, 1, device=self.device)
        arrives[self.halo.col.long()] = 1
        return aggregate(arrives, self.row_transfer.to_slots.transposed).view(-1) > 0

    @property
    def _sources(self) -> Tensor:
        """Which local nodes have out-edges, bool ``[n]`` (collective at the first use)."""
        return self._feeds_halos.index_fill(0, self.local.col.long(), True)

    @cached_property
    def loops_exist(self) -> bool:
        """Whether some edge is a self loop (collective at the first use)."""
        the_one(self.sources, self.targets)
        return not self.group.all_true(not bool((self.local.row() == self.local.col).any()))


def _halo(flat: Tensor, transfer: HaloTransfer) -> Tensor:
    """Halo slots (collective). Shapes: ``[n, F] -> [h, F]``."""
    if flat.dtype.is_floating_point:
        return aggregate(flat, transfer.to_slots)
    outgoing = transfer.outgoing.pattern
    sent = flat[flat.shape[0] - outgoing.num_cols :][outgoing.col.long()]
    return transfer.between_slots.start(sent.long()).wait().to(flat.dtype)
