"""GraphSAGE."""

from __future__ import annotations

from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from pyg_dist.conv.accumulate import add_into_
from pyg_dist.conv.grid import sage_on_grid
from pyg_dist.conv.inputs import edge_handle, edge_rows, features
from pyg_dist.conv.linear_order import commutes, project_first
from pyg_dist.conv.local_aggregation import aggregate_neighbours
from pyg_dist.conv.scripting import stock_twin
from pyg_dist.layout.aggregation_cache import cached_aggregate
from pyg_dist.layout.edge_index import DistributedEdgeIndex
from pyg_dist.layout.grid.graph import GridGraph, learns
from pyg_dist.layout.halo.graph import HaloGraph
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.functions.reductions import accumulation_dtype


class DistributedSAGEConv(SAGEConv):  # type: ignore[misc]
    r"""PyG's :class:`~torch_geometric.nn.SAGEConv` on one process or many, with the same numbers (exact).

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N(i)}} \mathbf{x}_j

    Source: "Inductive Representation Learning on Large Graphs" (Hamilton et al., 2017). Constructor, parameters and
    ``state_dict`` are the stock conv's. With the ``edge_index`` of a
    :class:`~pyg_dist.DistributedData`, aggregation runs over all ranks: ``mean`` and ``sum`` by the native kernel while
    messages fly, every other ``aggr`` on the neighbours' rows. Means and sums are taken after ``lin_l`` where that
    is cheaper, and those of constant features only once. On plain tensors it *is* the stock conv.

    Shapes:
        - x: ``[N, F_in]`` node tensor (float32, float64 or bfloat16), or a pair of them (source, target or ``None``)
        - edge_index: a :class:`~pyg_dist.tensor.DistributedEdgeIndex`, or plain edges ``[2, E]``, equal on every rank
        - output: ``[N, F_out]`` node tensor

    Collective, forward and backward.
    """

    is_distributed = True

    def forward(self, x: Any, edge_index: Any, size: Any = None) -> Tensor:
        """See the class."""
        handle = edge_handle(self, edge_index, x, calls_message=False)
        if handle is None:
            return super().forward(x, edge_index, size)  # type: ignore[no-any-return]
        edge_index, graph = handle, handle.graph
        if isinstance(graph, GridGraph):
            return sage_on_grid(self, x, edge_index)
        source, target = x if isinstance(x, (tuple, list)) else (x, x)
        source = features(self, graph, source)
        if self.project:
            source = self.lin(source).relu()
        out = self._neighbourhood(source, edge_index, graph)
        if self.root_weight and target is not None:
            root = self.lin_r(features(self, graph, target))
            out = add_into_(out, root) if commutes(self.lin_l) else out + root
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _neighbourhood(self, x: NodeTensor, edge_index: DistributedEdgeIndex, graph: HaloGraph) -> Tensor:
        """``lin_l`` of the aggregated neighbours."""
        # PyG reads the values of a torch.sparse adj_t where it multiplies by it, and ignores edge weights otherwise.
        weight = edge_rows(self, edge_index, None) if self.fuse and graph.loop_rule == "add" else None
        if type(self.aggr_module) not in (MeanAggregation, SumAggregation):
            values = None if weight is None else weight.to_local()
            return self.lin_l(aggregate_neighbours(self, graph, x, values))  # type: ignore[no-any-return]
        reduce: Literal["mean", "sum"] = "mean" if type(self.aggr_module) is MeanAggregation else "sum"
        learning = learns(weight)
        operator = None if learning else graph.neighbourhood(reduce, weight, accumulation_dtype(x.dtype))
        codecs = graph.codecs(self, of_rows=learning)

        def summed(rows: NodeTensor) -> NodeTensor:
            if operator is not None:
                return cached_aggregate(rows, operator, codecs)
            assert weight is not None
            local, values = rows.to_local(), weight.to_local().to(rows.dtype)
            out = graph.neighbourhood_product(local, values, reduce, graph.row_transfer.coded(codecs))
            return NodeTensor.from_local(out, graph.node_sharding)

        if not (commutes(self.lin_l) and project_first(self.lin_l, graph, x, operator)):
            return self.lin_l(summed(x))  # type: ignore[no-any-return]
        # The bias comes after: a mean keeps it, a sum or a node without neighbours would not.
        out = summed(F.linear(x, self.lin_l.weight))  # type: ignore[arg-type]
        # Autocast narrows the product.
        return out if self.lin_l.bias is None else add_into_(out, self.lin_l.bias.to(out.dtype))

    def __prepare_scriptable__(self) -> SAGEConv:
        return stock_twin(self, SAGEConv)

    def __repr__(self) -> str:
        return str(super().__repr__()).removeprefix("Distributed")  # a script prints the model that it names
