"""The nodes and the operators of a graph at a sample of its nodes: made by each rank without a message.

With the probabilities of a sample's pairs they are those of the whole graph at the sample, ``w_ij / p_ij`` off the
diagonal and ``w_ii`` on it (ScaleGNN, III-D, eq. 23-24): GCN keeps the norm of the whole graph, a mean its degree, and
the mean over all samples that hold a node is the full aggregation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.graph.protocol import Norm
from pyg_dist.graph.sample import PairProbability, Sample
from pyg_dist.graph.sampled_edges import refuse_learning_weights, refuse_other_weights
from pyg_dist.halo.aggregate import LinearOperator
from pyg_dist.halo.operators import ConstantOperator, LearningOperator
from pyg_dist.halo.plan.restriction import Restriction
from pyg_dist.halo.products import HaloProducts
from pyg_dist.halo.sharding import HaloNodes
from pyg_dist.halo.transfer import HaloTransfer
from pyg_dist.tensor.row_index import origin_of
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.sharding import lasting


class SampledNodes(HaloNodes):
    """Sampled nodes. They are numbered by their places in the sample, and keyed as in the graph.

    Args:
        parent: the graph's nodes.
        row: the local ones among them, int64 ``[b]``.
        place: their places in the sample, int64 ``[b]``.
        sample: the sample. Where data groups have samples of their own, the rows are those of the union of all.
    """

    counts_selections = False  # each batch has masks of its own, and a step would wait for their numbers

    def __init__(self, parent: HaloNodes, row: Tensor, place: Tensor, sample: Sample) -> None:
        union, key = sample.group, parent.rng_key.index_select(0, row)
        self._sample, self._own_place = sample, place
        if union is None:
            size = sample.node_id.numel()
            super().__init__(parent.group, key, size, parent.exchange, parent.bits, parent.groups)
        else:  # groups draw other numbers for a node
            key = key + union.index * parent.num_rng_keys
            super().__init__(parent.groups.everyone, key, union.size, parent.exchange, parent.bits)
        self.parent, self.row = parent, row
        self._place = place + self.first
        self.traffic, self.buffers = parent.traffic, parent.buffers

    @property
    def position(self) -> Tensor:
        """The place of each local node in the sample, or in the union of all groups' samples."""
        return self._place

    @property
    def first(self) -> int:
        """See :class:`~pyg_dist.halo.sharding.HaloNodes`."""
        return 0 if self._sample.group is None else self._sample.group.first

    @property
    def sample(self) -> Sample:
        """See :class:`~pyg_dist.graph.protocol.NodeSharding`."""
        return self._sample

    @property
    def is_union(self) -> bool:
        """See :class:`~pyg_dist.graph.protocol.NodeSharding`."""
        return self._sample.group is not None

    def seed_of_group(self, seed: int) -> int:
        """See :class:`~pyg_dist.halo.sharding.HaloNodes`."""
        return seed if self._sample.group is None else ops.mixed_seed(seed, self._sample.group.index)

    @property
    def global_id(self) -> Tensor:
        """See :attr:`position`: it is what the batch's ``edge_index`` has."""
        return self._place

    @property
    def num_rng_keys(self) -> int:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding`."""
        return self.parent.num_rng_keys * (1 if self._sample.group is None else self._sample.group.index + 1)


class ProductsAtSample(HaloProducts):
    """See the module.

    Attributes:
        parent: the whole graph.
        restriction: which of its rows and edges are here.
    """

    lends_weights = False  # to know whether that pays, ranks would have to communicate for each batch
    parent: HaloProducts
    restriction: Restriction
    _sample: Sample

    def operator(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> Any:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.operator`.

        Raises:
            UnsupportedError: GCN's norm with weights that learn, or that are no attribute of the graph: it needs the
                degrees of the whole graph.
        """
        if self._sample.pairs is None:
            return super().operator(norm, weight, dtype)
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            return self._learning_at_sample(norm, weight.to_local(), dtype)
        return self._operators.get((norm, dtype), weight, lambda: self._at_sample(norm, weight, dtype))

    def operator_over(self, edges: Any, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> Any:
        """See :meth:`~pyg_dist.graph.protocol.EdgeView.operator_over`."""
        return super().operator_over(edges, norm, weight, dtype) if self._sample.pairs is None else None

    def _at_sample(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> ConstantOperator:
        """The graph's operator, restricted and rescaled (collective)."""
        origin = origin_of(weight)
        if weight is not None and origin is None:
            if norm.kind == "gcn":
                raise refuse_other_weights()
            return self._own_weights(norm, weight, dtype)
        of_graph: Any = None if origin is None else origin[0]
        operator = self._operator_of_graph(norm, of_graph, dtype)
        whole = operator.matrix
        p = self._pairs.uniform_p
        if p is not None and weight is None and not norm.add_self_loops and not self.parent.loops_exist:
            return self._divided_by(p, whole, dtype)
        values = whole.halo.incoming.storage
        borrowed = None if values is None else self.parent.links.borrowed(operator, values)
        local = None
        if norm.kind == "gcn" and norm.add_self_loops:
            local = self._with_loops(whole.local, dtype)
        at_edges = None if values is None else values[on_device(self.restriction.edge, self.device)]
        sent_weights = None if borrowed is None else borrowed[on_device(self.restriction.borrowed, self.device)]
        return self._rescaled(local, at_edges, sent_weights, whole, dtype)

    def _divided_by(self, p: float, whole: LinearOperator, dtype: torch.dtype) -> ConstantOperator:
        """The batch's operator where every edge has the same factor: rows are scaled, and edges have no values."""
        of_rows, of_cols = self._scales(whole)
        if of_rows is None:
            of_rows = torch.ones(self.num_local, dtype=dtype, device=self.device)
        of_rows = of_rows * p if whole.divides else of_rows / p
        return ConstantOperator(LinearOperator(Matrix(self.local), self._sum_transfer, of_rows, of_cols, whole.divides))

    def _scales(self, whole: LinearOperator) -> tuple[Tensor | None, Tensor | None]:
        """Those of the graph's rows and columns that are here."""
        row = on_device(self.restriction.row, self.device)
        of_rows, of_cols = (None if s is None else s[row] for s in (whole.row_scale, whole.col_scale))
        return of_rows, of_cols

    def _operator_of_graph(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> ConstantOperator:
        operator = self.parent.operator(norm, weight, dtype)
        assert isinstance(operator, ConstantOperator), "weights that learn go another way"
        return operator

    def _own_weights(self, norm: Norm, weight: RowTensor, dtype: torch.dtype) -> ConstantOperator:
        """Sum or mean with weights of the batch alone (collective)."""
        whole = self._operator_of_graph(norm, None, dtype).matrix
        values = weight.to_local().detach().to(dtype)
        _, halo = self._weighted(self.local, values)
        sent_weights = None if halo.outgoing.storage is None else halo.outgoing.storage[:-1]
        return self._rescaled(None, values, sent_weights, whole, dtype)

    def _rescaled(
        self,
        local: Matrix | None,
        values: Tensor | None,
        borrowed: Tensor | None,
        whole: LinearOperator,
        dtype: torch.dtype,
    ) -> ConstantOperator:
        """The batch's operator.

        Args:
            local: of the local edges; ``None``: by ``values``.
            values: of the edges, ``[e]``; ``None``: ones.
            borrowed: of those that are summed here for other ranks; ``None``: ones.
            whole: the graph's, whose scales hold.
            dtype: of the values.
        """
        one = torch.ones(1, dtype=dtype, device=self.device)
        storage = torch.cat([self._factors(dtype) if values is None else values * self._factors(dtype), one])
        source, target = self.restriction.borrowed_ends
        factor = self._pairs.factor(source, target, dtype).to(self.device)
        sent_weights = torch.cat([factor if borrowed is None else borrowed * factor, one])
        sums = self._sum_transfer
        halo = HaloTransfer(
            Matrix(sums.outgoing.pattern, sent_weights), sums.exchange, Matrix(sums.incoming.pattern, storage)
        )
        local = Matrix(self.local, storage) if local is None else local
        return ConstantOperator(LinearOperator(local, halo, *self._scales(whole), whole.divides))

    def _with_loops(self, whole: Matrix, dtype: torch.dtype) -> Matrix:
        """The local matrix of the graph, loops of the norm included, at the sample."""
        row = self.restriction.row
        pattern, entry = whole.pattern.restricted(row, row)
        ids = self.parent.node_sharding.global_id[row]
        ends = pattern.on_host.col.long(), pattern.on_host.row()
        factor = self._pairs.factor(*ends, dtype, ids).to(self.device)
        return Matrix(pattern, factor if whole.value is None else whole.value[entry] * factor)

    def _learning_at_sample(self, norm: Norm, weight: Tensor, dtype: torch.dtype) -> LearningOperator:
        """Sum or mean with weights that learn, rescaled."""
        if norm.kind == "gcn":
            raise refuse_learning_weights()
        factor = self._factors(weight.dtype)
        if norm.kind == "mean":
            degree = self.parent.in_degree(weight.dtype)[on_device(self.restriction.row, self.device)].clamp_(min=1)
            factor = factor / degree[self.ends()[1]]
        return self._learning(Norm.SUM, weight * factor)

    @property
    def _pairs(self) -> PairProbability:
        assert self._sample.pairs is not None
        return self._sample.pairs

    @lasting
    def _factors(self, dtype: torch.dtype) -> Tensor:
        """One over the probability of each edge's source, by edge storage, ``[e]``."""
        source, target = self._ends_on_host()
        ids = self._sample.node_id[self._neighbour_id_on_host - self.node_sharding.first]
        return self._pairs.factor(source, target, dtype, ids).to(self.device)
