"""Products with a rank's edges: the operators of norms and weights, made when first needed, and kept.

So are the edges between a rank, or its machine, and others, from which batches are cut (:class:`HaloLinks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial, reduce
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pyg_dist.backend import host, ops
from pyg_dist.backend.autograd.linear_map import begin
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.comm.transport import Pending, Traffic, Transport
from pyg_dist.backend.dense import large_tensors
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.ops.quantize import row_bytes
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.graph import caches
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.gcn_norm import gcn_product, gcn_scales
from pyg_dist.graph.protocol import Norm, the_one
from pyg_dist.halo.exchange import Exchange, exchange_of
from pyg_dist.halo.operator import HaloOperator, LearningOperator, LinearOperator, RemoteSums, in_degree, require_dtype
from pyg_dist.halo.plan.cost import ExchangeCounts, sends_weights
from pyg_dist.halo.plan.links import MachineLinks, RemoteLinks
from pyg_dist.halo.plan.share import HaloShare
from pyg_dist.halo.plan.transfer import UNIT
from pyg_dist.halo.transfer import HaloTransfer
from pyg_dist.halo.view import HaloView
from pyg_dist.tensor.functions.layers import local_linear
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor, as_row_tensor_
from pyg_dist.tensor.sharding import lasting


class HaloProducts(HaloView):
    """See the module.

    Attributes:
        may_send_weights: whether ranks may make sums with weights that learn for one another.
    """

    may_send_weights = True

    def operator(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> HaloOperator:
        if norm.kind == "gcn" or norm.identity:
            the_one(self.sources, self.targets)
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            return self._learning(norm, weight.to_local())
        make = self._gcn if norm.kind == "gcn" else self._neighbourhood
        return self._operators.get((norm, dtype), weight, lambda: make(norm, _constant(weight, dtype), dtype))

    def aggregate(self, x: NodeTensor, operator: HaloOperator, layer: nn.Module | None = None) -> NodeTensor:
        return self.start(x, operator, layer).wait()

    def start(self, x: NodeTensor, operator: HaloOperator, layer: nn.Module | None = None) -> Pending[NodeTensor]:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.start`; local edges are multiplied at once."""
        if isinstance(operator, LearningOperator):
            out = self._learning_product(x, operator, layer)
            return Pending(lambda: out)
        codecs = self.codecs(layer)
        known = caches.lookup(x, operator)
        if known is None:
            local, is_kept = x.to_local(), caches.is_cacheable(x, self.targets)
            require_dtype(local)
            pending = begin(operator if is_kept else operator.coded(codecs), local)
            x._is_reused = True
            if not is_kept:
                return Pending(lambda: as_row_tensor_(pending.wait(), self.targets))  # type: ignore[arg-type, return-value]
            known = caches.store(x, operator, pending.wait(), self)
        rows = known.rows(NodeTensor, self.targets)
        return Pending(lambda: rows)

    def align(self, x: NodeTensor, like: NodeTensor) -> NodeTensor:
        """Itself: products are whole rows."""
        return x

    def linear_sum(
        self, pairs: Sequence[tuple[NodeTensor | Pending[NodeTensor], Tensor]], bias: Tensor | None = None
    ) -> NodeTensor:
        """``sum_k X_k W_k^T + bias``, added in the order given, the bias with the first: PyG's bits.

        An X that is under way is waited for last: its messages hide behind the other products.
        """
        products: list[Any] = [None] * len(pairs)
        for k in sorted(range(len(pairs)), key=lambda k: isinstance(pairs[k][0], Pending)):
            given, weight = pairs[k]
            x = given.wait() if isinstance(given, Pending) else given
            products[k] = local_linear(x, weight, None if k else bias)
        return as_row_tensor_(reduce(large_tensors.add_into_, products), x._sharding)  # type: ignore[no-any-return]

    def is_cached(self, x: NodeTensor, operator: HaloOperator) -> bool:
        return not operator.learns and caches.is_cached(x, lambda: operator, self.targets)

    def _neighbourhood(self, norm: Norm, values: Tensor | None, dtype: torch.dtype) -> LinearOperator:
        """Sum or mean over in-edges, for constant weights in edge storage order."""
        degree = in_degree(self.local, self.halo, dtype).clamp_(min=1) if norm.kind == "mean" else None
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
        local, loops = self.local, None
        if norm.kind == "gcn" and norm.add_self_loops:
            local = self.local if self.loop_rule == "add" else self._loops.others
            loops = partial(self._loops.weight, loop_value=norm.loop_value)
        return LearningOperator(norm, weight, local, self.halo, lambda: self._remote_sums, loops)

    @cached_property
    @lasting
    def _remote_sums(self) -> RemoteSums:
        """The exchange of sums whose weights learn, by edge storage."""
        return self._sums_stored(self.edge_sharding.num_local, lambda place: place)

    def _sums_stored(self, num_edges: int, stored: Callable[[Tensor], Tensor]) -> RemoteSums:
        """The exchange of sums whose weights learn. ``stored``: where, of ``num_edges``, those of edge storage are."""
        sums, weights = self._sum_transfer, self._weight_exchange

        def placed(csr: CSR, unit: int, number: Callable[[Tensor], Tensor]) -> CSR:
            return csr.placed(lambda place: torch.where(place == UNIT, unit, number(place)))

        outgoing = placed(sums.outgoing.pattern, weights.num_received, lambda place: place)
        incoming = placed(sums.incoming.pattern, num_edges, stored)
        places = stored(self.share.sum_transfer.weights_to_send)
        return RemoteSums(places, weights, outgoing, sums.between_slots, incoming)

    @cached_property
    def links(self) -> HaloLinks:
        """The remote edges, from which batches are cut (collective at the first use)."""
        return HaloLinks(self.share, self.group)

    @property
    def _weight_exchange(self) -> Exchange:
        """Weights of edges that are summed at their sources go there from the targets' ranks, which have them."""
        lists = self.share.sum_transfer
        return exchange_of(self._transport, lists.weight_send_counts, lists.weight_recv_counts)

    @cached_property
    @lasting
    def _exchange_counts(self) -> ExchangeCounts:
        rows, sums = self.share.row_transfer, self.share.sum_transfer
        counts = rows.outgoing.num_rows, sums.outgoing.num_rows, sum(sums.weight_send_counts)
        return ExchangeCounts(*self.exchange_group.stack(host.tensor(counts)).sum(0).tolist())

    def _sends_weights(self, x: Tensor, norm: Norm, layer: nn.Module | None) -> bool:
        """Whether weights that learn are sent for a product with x (collective at the first use)."""
        if not self.may_send_weights or self.share.exchange == "post" or self.exchange_group.size == 1:
            return False
        bits = (32, 32) if layer is None or not layer.training else self.targets.bits
        forward, backward = (row_bytes(x.shape[1], x.element_size(), b) for b in bits)
        learns = x.requires_grad or norm.kind == "gcn"  # rows are scaled by what depends on the weights
        return sends_weights(self._exchange_counts, forward, backward, x.element_size(), learns)

    def operator_over(
        self, edges: Edges, norm: Norm, weight: RowTensor | None, dtype: torch.dtype
    ) -> HaloOperator | None:
        if not edges.has_all_remote or norm.identity:
            return None
        here, there = edges.parts

        def remote_sums() -> RemoteSums:
            place = host.zeros(self.edge_sharding.num_local, dtype=torch.int64)
            place[self._remote.cpu()] = edges.remote.cpu()
            return self._sums_stored(edges.rows.num_local, lambda stored: place[stored.long()])  # of -1: of any

        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            sums = lambda: edges.kept.get("sums", None, remote_sums)  # noqa: E731
            return LearningOperator(norm, weight.to_local(), here, there, sums)

        def build() -> LinearOperator:
            values, stored = _constant(weight, dtype), None
            if values is not None:
                stored = values.new_zeros(self.edge_sharding.num_local)
                stored[self._remote] = values[edges.remote]
            _, halo = self._weighted(self.local, stored)
            scale = in_degree(here, there, dtype).clamp_(min=1) if norm.kind == "mean" else None
            return LinearOperator(Matrix(here, values), halo, row_scale=scale, divides=True)

        return edges.kept.get((norm, dtype), weight, build)

    @property
    def _remote(self) -> Tensor:
        """Places in edge storage of the edges with remote sources, ascending."""
        return self.halo.edge.long().sort().values

    def _learning_product(self, x: NodeTensor, a: LearningOperator, layer: nn.Module | None) -> NodeTensor:
        """The product with weights that learn; differentiable by x and by the weights (collective)."""
        by_sums = self._sends_weights(x, a.norm, layer)
        codecs = self.codecs(layer, of_rows=not by_sums)
        local = x.to_local()

        def times(rows: Tensor) -> Tensor:
            return a.by_sums(rows, codecs) if by_sums else a.by_rows(rows, self.row_transfer.coded(codecs))

        if a.norm.kind == "gcn":
            is_source = None if a.norm.add_self_loops else self._sources
            scales = a.scales.get(x.dtype, lambda: a.degree(x.dtype), is_source)
            out = gcn_product(local, scales, times)
        else:
            out = times(local)
            if a.norm.kind == "mean":
                out = out / in_degree(a.local, a.halo, x.dtype).clamp_(min=1).view(-1, 1)
        return NodeTensor.from_local(out, self.targets)

    def _weighted(self, local: CSR, values: Tensor | None) -> tuple[Matrix, HaloTransfer]:
        """The matrices of sums with constant weights, by edge storage and what is behind it (collective)."""
        if values is None:
            return Matrix(local), self._sum_transfer
        places = on_device(self.share.sum_transfer.weights_to_send, self.device)
        remote = self._weight_exchange.start(values[places]).wait()
        one = values.new_ones(1)  # the last value: of the entries UNIT
        storage = torch.cat([values, one])
        return Matrix(local, storage), self._sum_transfer.weighted(torch.cat([remote, one]), storage)

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


class HaloLinks:
    """The edges between this rank and others, with both ends; one exchange with the other ranks (collective).

    ``links`` are the edges; ``of_machine``, in two levels, those between this rank's machine and others.
    """

    @lasting
    def __init__(self, share: HaloShare, group: Group) -> None:
        incoming = share.row_transfer.incoming
        slot, target = incoming.col.long(), share.node_id[incoming.row() + share.num_inner]
        sender_of_slot = share.halo_owner.long()
        order = torch.argsort(sender_of_slot[slot], stable=True)
        slot, target, place = slot[order], target[order], incoming.edge.long()[order]
        sender, source = sender_of_slot[slot], share.halo_id[slot]
        mine = torch.stack([share.edge_id[place], source, target, place], dim=1)

        counts = torch.bincount(sender, minlength=share.num_ranks)
        from_rank = group.stack(counts)[:, share.rank]
        lists = tuple(counts.tolist()), tuple(from_rank.tolist())
        self._place = place
        self._exchange = exchange_of(Transport(group, Traffic()), *lists, num_messages=group.size**2)
        theirs = self._exchange.start(mine[:, :3]).wait()
        load = host.tensor(group.gather_counts(share.edge_id.numel()))
        receiver = torch.repeat_interleave(host.arange(share.num_ranks), from_rank)
        self.links = RemoteLinks.of(share, mine, theirs, sender, receiver, load)
        self.of_machine = None
        if share.ranks_per_machine is not None:
            into, out_of = torch.cat([mine[:, :3], sender.view(-1, 1)], 1), torch.cat([theirs, receiver.view(-1, 1)], 1)
            self.of_machine = _links_of_machine(share, group, into, out_of, load)
        self._remote_weights: WeakKeyDictionary[LinearOperator, Tensor] = WeakKeyDictionary()

    @lasting
    def remote_weights(self, operator: LinearOperator, values: Tensor) -> Tensor:
        """The operator's ``values``, by edge storage, of the edges that begin here (collective at the first use)."""
        if operator not in self._remote_weights:
            places = on_device(self._place, values.device)
            self._remote_weights[operator] = self._exchange.start(values[places]).wait()
        return self._remote_weights[operator]


def _links_of_machine(share: HaloShare, group: Group, into: Tensor, out_of: Tensor, load: Tensor) -> MachineLinks:
    """The edges between all ranks of this machine and other machines (collective).

    ``into`` and ``out_of`` are this rank's remote edges: id, source, target, and the other rank, int64 ``[m, 4]``.
    """
    on_each, own = share.ranks_per_machine, share.rank
    assert on_each is not None
    edges = torch.cat([into, out_of])
    ends = host.full((2, len(edges)), own)
    ends[0, : len(into)], ends[1, len(into) :] = into[:, 3], out_of[:, 3]
    crosses = ends[0] // on_each != ends[1] // on_each
    mine = torch.cat([edges[crosses, :3], ends[:, crosses].T], 1)
    shares = [q // on_each == own // on_each for q in range(group.size)]
    whole = IdLists(group).send(mine.repeat(sum(shares), 1), [len(mine) * is_near for is_near in shares])
    edge, source, target, sender, receiver = whole.unbind(1)
    return MachineLinks.of(edge, (source, target), (sender, receiver), share, load)
