"""Products with a rank's edges at a sample of nodes.

With the probabilities of a sample's pairs, operators are those of the whole graph at the sample, ``w_ij / p_ij`` off
the diagonal and ``w_ii`` on it (ScaleGNN, III-D, eq. 23-24): GCN keeps the norm of the whole graph, a mean its degree,
and the mean over all samples that hold a node is the full aggregation.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.on_device import copied_to, on_device
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.graph.edge_sets import refuse_learning_weights, refuse_other_weights
from pyg_dist.graph.protocol import Norm
from pyg_dist.graph.sample import Subset
from pyg_dist.halo.operator import LearningOperator, LinearOperator, in_degree
from pyg_dist.halo.plan.restriction import Restriction
from pyg_dist.halo.products import HaloProducts
from pyg_dist.tensor.row_index import origin_of
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.sharding import lasting


class ProductsAtSample(HaloProducts):
    """See the module; ``parent`` is the whole graph, from which ``restriction`` was cut."""

    parent: HaloProducts
    restriction: Restriction
    _sample: Subset

    may_send_weights = False  # to know whether that pays, ranks would have to communicate for each batch

    def operator(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> Any:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.operator`.

        GCN's norm needs the degrees of the whole graph: with weights that learn, or that are no attribute of it, it
        raises.
        """
        if self._sample.scale is None:
            if weight is None and norm.kind != "gcn":  # whose norm needs messages
                self.parent.asked.note(("exact", norm, dtype), lambda batch, _: batch._exact_ahead(norm, dtype))
            return super().operator(norm, weight, dtype)
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            return self._learning_at_sample(norm, weight.to_local(), dtype)
        return self._operators.get((norm, dtype), weight, lambda: self._at_sample(norm, weight, dtype))

    def operator_over(self, edges: Any, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> Any:
        return super().operator_over(edges, norm, weight, dtype) if self._sample.scale is None else None

    def _at_sample(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> LinearOperator:
        origin = origin_of(weight)
        if weight is not None and origin is None:
            if norm.kind == "gcn":
                raise refuse_other_weights()
            return self._own_weights(norm, weight, dtype)
        of_graph: Any = None if origin is None else origin[0]
        whole = self._operator_of_graph(norm, of_graph, dtype)
        made = self._restricted(whole, norm, weight, dtype)
        ahead = lambda batch, weight: batch._restricted_ahead(whole, norm, weight, dtype)  # noqa: E731
        self.parent.asked.note(("at a sample", norm, dtype), ahead, of_graph)
        return made

    def make_ahead(self, weights: Iterable[RowTensor]) -> None:
        self.parent.asked.make_ahead(self, weights)
        if self.parent.asked.edges:
            self._remote_patterns_ahead()

    def _exact_ahead(self, norm: Norm, dtype: torch.dtype) -> None:
        if self._sample.scale is None:
            _make_values(super().operator(norm, None, dtype))

    def _restricted_ahead(
        self, whole: LinearOperator, norm: Norm, weight: RowTensor | None, dtype: torch.dtype
    ) -> None:
        if self._sample.scale is not None:
            make = partial(self._restricted, whole, norm, weight, dtype)
            _make_values(self._operators.get((norm, dtype), weight, make))

    def _remote_patterns_ahead(self) -> None:
        for matrix in (self.row_transfer.outgoing, self.row_transfer.incoming):
            matrix.pattern.edge, matrix.pattern.transposed.edge  # noqa: B018

    def _patterns_ahead(self) -> None:
        self.local.edge, self.local.transposed.edge  # noqa: B018
        self._remote_patterns_ahead()

    def _restricted(
        self, whole: LinearOperator, norm: Norm, weight: RowTensor | None, dtype: torch.dtype
    ) -> LinearOperator:
        """The graph's operator at the sample (collective where an earlier batch had no such one)."""
        p = self._sample.pairs.uniform_p
        if p is not None and weight is None and not norm.add_self_loops and not self.parent.loops_exist:
            return self._divided_by(p, whole, dtype)
        values = whole.halo.incoming.storage
        local = self._with_loops(whole.local, dtype) if norm.kind == "gcn" and norm.add_self_loops else None
        if values is None:
            return self._rescaled(local, None, None, whole, dtype)
        remote = self.parent.links.remote_weights(whole, values)
        edge, remote_edge = (on_device(x, self.device) for x in (self.restriction.edge, self.restriction.remote_edge))
        return self._rescaled(local, values[edge], remote[remote_edge], whole, dtype)

    def _divided_by(self, p: float, whole: LinearOperator, dtype: torch.dtype) -> LinearOperator:
        """The batch's operator where every edge has the same factor: rows are scaled, and edges have no values."""
        of_rows, of_cols = self._scales(whole)
        if of_rows is None:
            of_rows = torch.ones(self.num_local, dtype=dtype, device=self.device)
        of_rows = of_rows * p if whole.divides else of_rows / p
        return LinearOperator(Matrix(self.local), self._sum_transfer, of_rows, of_cols, whole.divides)

    def _scales(self, whole: LinearOperator) -> tuple[Tensor | None, Tensor | None]:
        row = on_device(self.restriction.rows.row, self.device)
        of_rows, of_cols = (None if s is None else s[row] for s in (whole.row_scale, whole.col_scale))
        return of_rows, of_cols

    def _operator_of_graph(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> LinearOperator:
        operator = self.parent.operator(norm, weight, dtype)
        assert isinstance(operator, LinearOperator), "weights that learn go another way"
        return operator

    def _own_weights(self, norm: Norm, weight: RowTensor, dtype: torch.dtype) -> LinearOperator:
        whole = self._operator_of_graph(norm, None, dtype)
        values = weight.to_local().detach().to(dtype)
        sent = self._weighted(self.local, values)[1].outgoing.storage
        return self._rescaled(None, values, None if sent is None else sent[:-1], whole, dtype)

    def _rescaled(
        self,
        local: Matrix | None,
        values: Tensor | None,
        remote_weights: Tensor | None,
        whole: LinearOperator,
        dtype: torch.dtype,
    ) -> LinearOperator:
        """The batch's operator: with the scales of the ``whole`` graph's.

        ``local`` is made by ``values`` where there is none. ``values``, of the edges, and ``remote_weights``, of those
        that are summed here for other ranks, may be ones (``None``).
        """
        one = torch.ones(1, dtype=dtype, device=self.device)
        storage = torch.cat([self._factors(dtype) if values is None else values * self._factors(dtype), one])
        source, target = self.restriction.remote_ends
        factor = copied_to(self._sample.pairs.factor(source, target, dtype), self.device)
        sent = torch.cat([factor if remote_weights is None else remote_weights * factor, one])
        halo = self._sum_transfer.weighted(sent, storage)
        local = Matrix(self.local, storage) if local is None else local
        return LinearOperator(local, halo, *self._scales(whole), whole.divides)

    def _with_loops(self, whole: Matrix, dtype: torch.dtype) -> Matrix:
        """The local matrix of the graph, loops of the norm included, at the sample."""
        row = self.restriction.rows.row
        pattern, entry = whole.pattern.restricted(row, row)
        ids = self.parent.node_sharding.global_id[row]
        ends = pattern.on_host.col.long(), pattern.on_host.row()
        factor = copied_to(self._sample.pairs.factor(*ends, dtype, ids), self.device)
        return Matrix(pattern, factor if whole.value is None else whole.value[on_device(entry, self.device)] * factor)

    def _learning(self, norm: Norm, weight: Tensor) -> LearningOperator:
        self.parent.asked.note("patterns", lambda batch, _: batch._patterns_ahead())
        return super()._learning(norm, weight)

    def _learning_at_sample(self, norm: Norm, weight: Tensor, dtype: torch.dtype) -> LearningOperator:
        if norm.kind == "gcn":
            raise refuse_learning_weights()
        factor = self._factors(weight.dtype)
        if norm.kind == "mean":
            row = on_device(self.restriction.rows.row, self.device)
            degree = in_degree(self.parent.local, self.parent.halo, weight.dtype)[row]
            factor = factor / degree.clamp_(min=1)[self.ends()[1]]
        return self._learning(Norm.SUM, weight * factor)

    @lasting
    def _factors(self, dtype: torch.dtype) -> Tensor:
        """One over the probability of each edge's source, by edge storage, ``[e]``."""
        source, target = self._ends_on_host()
        ids = self._sample.node_id[self._neighbour_id_on_host - self.node_sharding.first]
        return copied_to(self._sample.pairs.factor(source, target, dtype, ids), self.device)


def _make_values(operator: Any) -> None:
    """Make the values of a constant operator's matrices, and of their transposes."""
    for matrix in (operator.local, operator.halo.outgoing, operator.halo.incoming):
        matrix.value, matrix.transposed.value  # noqa: B018
