"""The graph convolution of Kipf and Welling."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.nn.aggr import SumAggregation

from pyg_dist.conv.any_conv import own_form, run_on_edges
from pyg_dist.conv.fast_paths import has_changed_step
from pyg_dist.conv.inputs import edge_handle, edge_rows, features, has_batch, require_floats, snapshot
from pyg_dist.conv.lazy_norm import norm_of
from pyg_dist.conv.one_rank import stock_result, stock_twin
from pyg_dist.conv.weighted_sum import add_into_, can_project_last, commutes, project_first
from pyg_dist.errors import DataError
from pyg_dist.graph.protocol import DistributedGraph, Norm, Operator, have_same_edges
from pyg_dist.tensor import EdgeTensor
from pyg_dist.tensor.functions.reductions import accumulation_dtype


class _CachedNorm(NamedTuple):
    """The cache of ``cached=True``, of the first call."""

    graph: DistributedGraph
    norm: Norm
    weight: EdgeTensor | None  # a copy
    operators: dict[torch.dtype, Operator]


@own_form
class DistributedGCNConv(GCNConv):
    r"""PyG's :class:`~torch_geometric.nn.GCNConv` on one process or many, with the same numbers (exact).

    .. math::
        \mathbf{X}^{\prime} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}}
        \mathbf{\hat{D}}^{-1/2} \mathbf{X} \mathbf{\Theta}

    Source: "Semi-supervised Classification with Graph Convolutional Networks" (Kipf and Welling, 2017). Constructor,
    parameters and ``state_dict`` are the stock conv's. Without edge weights there is no number per edge: the norm is
    two scales per node. Weights that require grad get their gradient, also through the degrees. On plain tensors it
    *is* the stock conv.

    Shapes:
        - x: ``[N, F_in]`` node tensor (float32, float64, bfloat16 or float16); or a batch, ``[B, N, F_in]``, for which
          rows are exchanged once
        - edge_index: a :class:`~pyg_dist.tensor.DistributedEdgeIndex`, or plain edges ``[2, E]``, equal on every rank
        - edge_weight: ``[E]`` edge tensor or ``None``
        - output: ``[N, F_out]`` node tensor, or ``[B, N, F_out]``

    Collective, forward and backward.

    Example:
        >>> conv = DistributedGCNConv(34, 16)
        >>> tuple(conv(data.x, data.edge_index).shape)
        (34, 16)
    """

    is_distributed = True
    _cached_norm: _CachedNorm | None = None

    def reset_parameters(self) -> None:
        """Draw the parameters anew and forget the cached norm."""
        super().reset_parameters()
        self._cached_norm = None

    def forward(self, x: object, edge_index: object, edge_weight: Tensor | None = None) -> Tensor:
        is_sum = type(self.aggr_module) is SumAggregation
        small = stock_result(self, GCNConv, (x, edge_index, edge_weight), {}, lambda: True) if is_sum else None
        if small is not None:
            return small
        if has_batch(x):
            return run_on_edges(self, x, edge_index, edge_weight)
        handle = None if isinstance(x, (tuple, list)) else edge_handle(self, edge_index, x, calls_message=False)
        if handle is None:
            return super().forward(x, edge_index, edge_weight)  # type: ignore[no-any-return]
        if not is_sum or has_changed_step(self):
            return run_on_edges(self, x, edge_index, edge_weight)
        graph = handle.graph
        if graph.loop_rule != "remaining":  # PyG does not look at edge_weight beside a sparse adj_t, which has values
            edge_weight = None
        x = graph.place(features(self, graph, x, 1), self)
        weight = edge_rows(self, handle, edge_weight)
        dtype = torch.promote_types(x.dtype, (x if weight is None else weight).dtype)
        operator = self._operator(graph, weight, x.dtype) if can_project_last(self.lin, x, dtype) else None
        if operator is not None and not project_first(self.lin, graph, x, operator):
            out: Tensor = graph.linear_sum([(graph.start(x, operator, self), self.lin.weight)])
        else:
            projected = graph.linear_sum([(x, self.lin.weight)]) if commutes(self.lin) else self.lin(x)
            if self.normalize or weight is not None:
                # PyG's norm has the dtype of the weights or of x, which autocast does not change, and promotes.
                wide = torch.promote_types(projected.dtype, dtype)
                projected = projected if projected.dtype == wide else projected.to(wide)
            if operator is None or projected.dtype != x.dtype:
                operator = self._operator(graph, weight, projected.dtype)
            out = graph.aggregate(graph.place(projected), operator, self)
        if self.bias is None:
            return out
        return add_into_(out, self.bias) if commutes(self.lin) else out + self.bias

    def __prepare_scriptable__(self) -> GCNConv:
        return stock_twin(self, GCNConv)

    def __repr__(self) -> str:
        return str(super().__repr__()).removeprefix("Distributed")  # a script prints the model that it names

    def __getstate__(self) -> dict[str, object]:
        # Operators belong to this run: a saved or copied model makes them anew.
        return {**self.__dict__, "_cached_norm": None, "_cached_edge_index": None, "_cached_adj_t": None}

    def _operator(self, graph: DistributedGraph, weight: EdgeTensor | None, dtype: torch.dtype) -> Operator:
        """The normalised adjacency matrix (may be collective when built)."""
        norm = Norm.SUM
        if self.normalize:
            require_floats("DistributedGCNConv", weight)
            norm = norm_of(graph, self.add_self_loops, self.improved, weight is not None)
        dtype = accumulation_dtype(dtype)
        cached = self._cached_norm if self.cached else None
        if cached is None:
            if not self.cached or not self.normalize or (weight is not None and weight.requires_grad):
                return graph.operator(norm, weight, dtype)
            # Operators of tiles and of other dtypes are made later, of the weights of now.
            cached = self._cached_norm = _CachedNorm(graph, norm, None if weight is None else snapshot(weight), {})
        elif not have_same_edges(cached.graph, graph):
            raise DataError("A DistributedGCNConv with cached=True got a second graph: use cached=False")
        if dtype not in cached.operators:
            cached.operators[dtype] = cached.graph.operator(cached.norm, cached.weight, dtype)
        return cached.operators[dtype]
