"""The graph convolution of Kipf and Welling."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import GCNConv
from torch_geometric.nn.aggr import SumAggregation

from pyg_dist.backend.aggregate import LinearOperator, aggregate, aggregate_edges
from pyg_dist.conv.grid import gcn_on_grid
from pyg_dist.conv.inputs import edge_rows, is_distributed, node_rows
from pyg_dist.conv.scripting import stock_twin
from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.tensor import DistributedEdgeIndex, EdgeTensor, NodeTensor
from pyg_dist.tensor.grid_graph import GridGraph


class DistributedGCNConv(GCNConv):  # type: ignore[misc]
    r"""PyG's :class:`~torch_geometric.nn.GCNConv` on one process or many, with the same numbers (exact).

    .. math::
        \mathbf{X}^{\prime} = \mathbf{\hat{D}}^{-1/2} \mathbf{\hat{A}}
        \mathbf{\hat{D}}^{-1/2} \mathbf{X} \mathbf{\Theta}

    Source: "Semi-supervised Classification with Graph Convolutional Networks" (Kipf and Welling, 2017). Constructor,
    parameters and ``state_dict`` are the stock conv's. Without edge weights no edge-sized floats are made: the norm is
    two scales per node. Weights that require gradients learn, through the degrees too. With a plain ``edge_index`` it
    *is* the stock conv.

    Shapes:
        - x: ``[N, F_in]`` node tensor (float32, float64 or bfloat16)
        - edge_index: a :class:`~pyg_dist.tensor.DistributedEdgeIndex`
        - edge_weight: ``[E]`` edge tensor or ``None``
        - output: ``[N, F_out]`` node tensor

    Collective, forward and backward.
    """

    is_distributed = True
    _cached_operator: LinearOperator | None = None

    def reset_parameters(self) -> None:
        """Draw the parameters anew and forget the cached norm."""
        super().reset_parameters()
        self._cached_operator = None

    def forward(self, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """See the class."""
        if isinstance(x, (tuple, list)) or not is_distributed(self, edge_index, x):
            return super().forward(x, edge_index, edge_weight)  # type: ignore[no-any-return]
        if type(self.aggr_module) is not SumAggregation:
            raise UnsupportedError(
                f"DistributedGCNConv expected aggr='add' (got {self.aggr!r}): the norm is defined for sums"
            )
        if isinstance(edge_index.graph, GridGraph):
            return gcn_on_grid(self, x, edge_index, edge_weight)
        x = self.lin(node_rows(self, edge_index.graph, x))
        out = NodeTensor.from_local(self._aggregate(x, edge_index, edge_weight), edge_index.graph.node_rows)
        return out if self.bias is None else out + self.bias

    def __prepare_scriptable__(self) -> GCNConv:
        return stock_twin(self, GCNConv)

    def __repr__(self) -> str:
        return super().__repr__().removeprefix("Distributed")  # a script prints the model that it names

    def _aggregate(self, x: NodeTensor, edge_index: DistributedEdgeIndex, edge_weight: Tensor | None) -> Tensor:
        graph, local = edge_index.graph, x.to_local()
        if self.cached and self._cached_operator is not None:
            if self._cached_operator.exchange is not graph.exchange:
                raise DataError("A DistributedGCNConv with cached=True got a second graph: use cached=False")
            return aggregate(local, self._cached_operator)
        weight = edge_rows(self, edge_index, edge_weight)
        # PyG gives all edges, loops included, weight one when there are no weights, `improved` or not.
        loop_value = 2.0 if self.improved and weight is not None else 1.0
        if weight is not None and weight.requires_grad:
            return self._aggregate_learnable(local, edge_index, weight, loop_value)
        if not self.normalize:
            return aggregate(local, graph.neighbourhood("sum", weight, x.dtype))
        operator = graph.symmetric_norm(self.add_self_loops, loop_value, weight, x.dtype)
        if self.cached:
            self._cached_operator = operator
        return aggregate(local, operator)

    def _aggregate_learnable(
        self, x: Tensor, edge_index: DistributedEdgeIndex, weight: EdgeTensor, loop_value: float
    ) -> Tensor:
        graph, values = edge_index.graph, weight.to_local().to(x.dtype)
        if self.normalize:
            return graph.symmetric_norm_product(x, values, self.add_self_loops, loop_value)
        return aggregate_edges(x, values, graph.local, graph.halo, graph.exchange)
