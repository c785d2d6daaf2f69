"""GraphSAGE."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import SAGEConv

from pyg_dist.backend.ops.library import sum_dtype
from pyg_dist.conv.any_conv import own_form, run_on_edges
from pyg_dist.conv.fast_paths import NORMS, has_changed_step
from pyg_dist.conv.hetero_conv import LinearTerms
from pyg_dist.conv.inputs import edge_handle, edge_rows, features, has_batch, require_all_nodes
from pyg_dist.conv.local_aggregation import aggregate_neighbours
from pyg_dist.conv.one_rank import stock_result, stock_twin
from pyg_dist.conv.weighted_sum import add_into_, can_project_last, commutes, project_first
from pyg_dist.graph.protocol import DistributedGraph, Operator
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.row_tensor import local_tensors


@own_form
class DistributedSAGEConv(SAGEConv):
    r"""PyG's :class:`~torch_geometric.nn.SAGEConv` on one process or many, with the same numbers (exact).

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_1 \mathbf{x}_i + \mathbf{W}_2 \cdot
        \mathrm{mean}_{j \in \mathcal{N(i)}} \mathbf{x}_j

    Source: "Inductive Representation Learning on Large Graphs" (Hamilton et al., 2017). Constructor, parameters and
    ``state_dict`` are the stock conv's. With the ``edge_index`` of a :class:`~pyg_dist.DistributedData`, aggregation
    runs over all ranks: ``mean`` and ``sum`` by the native kernel, which overlaps with messages, every other ``aggr``
    on the neighbours' rows. Means and sums are computed after ``lin_l`` if that is cheaper, and those of constant
    features only once. On plain tensors it *is* the stock conv.

    Shapes:
        - x: ``[N, F_in]`` node tensor (float32, float64, bfloat16 or float16), or a pair of them (source, target or
          ``None``); or a batch, ``[B, N, F_in]``, for which rows are exchanged once
        - edge_index: a :class:`~pyg_dist.tensor.DistributedEdgeIndex`, or plain edges ``[2, E]``, equal on every rank
        - output: ``[N, F_out]`` node tensor, or ``[B, N, F_out]``

    Collective, forward and backward.

    Example:
        >>> conv = DistributedSAGEConv(34, 16)
        >>> tuple(conv(data.x, data.edge_index).shape)
        (34, 16)
    """

    is_distributed = True
    gives_terms = False  # set by a HeteroConv that sums the results of several relations itself

    def forward(self, x: object, edge_index: object, size: object = None) -> Tensor:
        out = stock_result(self, SAGEConv, (x, edge_index), {}, lambda: True) if size is None else None
        if out is not None:
            return out
        if has_batch(x):
            return run_on_edges(self, x, edge_index, size)
        handle = edge_handle(self, edge_index, x, calls_message=False)
        if handle is None:
            return super().forward(x, edge_index, size)  # type: ignore[no-any-return]
        if has_changed_step(self):
            return run_on_edges(self, x, edge_index, size)
        graph = handle.graph
        require_all_nodes(type(self).__name__, graph, size)
        source, target = x if isinstance(x, (tuple, list)) else (x, x)
        is_root, has_root = target is source, self.root_weight and target is not None
        source = placed = graph.place(features(self, graph, source, 0), self)
        if self.project:
            source = graph.place(self.lin(source).relu())
        root = None
        if has_root:
            is_placed = is_root and graph.sources is graph.targets
            root = placed if is_placed else graph.place(features(self, graph, target, 1))
        # PyG uses the values of a torch.sparse adj_t in the fused product only, and ignores edge weights otherwise.
        weight = edge_rows(self, handle, None) if self.fuse and graph.loop_rule == "add" else None
        norm = NORMS.get(type(self.aggr_module))
        if norm is not None:
            with local_tensors():
                dtype = sum_dtype(source)
            operator = graph.operator(norm, weight, dtype)
            if self.gives_terms and self._is_linear(source, root):
                return LinearTerms(self, graph, operator, source, root)  # type: ignore[return-value]
            out = self.linear_aggregation(graph, source, root, operator)
        else:
            out = self.lin_l(aggregate_neighbours(self, handle, source, is_weighted=weight is not None))
            out = out if root is None else out + self.lin_r(root)
        return F.normalize(out, p=2.0, dim=-1) if self.normalize else out

    def _is_linear(self, source: NodeTensor, root: NodeTensor | None) -> bool:
        """Whether the result is a sum of products of rows and weights, to which other relations may be added."""
        if self.normalize or type(source) is not NodeTensor or not self._commutes(root):
            return False
        with local_tensors():
            maps = (self.lin_l, self.lin_r) if root is not None else (self.lin_l,)
            return all(can_project_last(lin, source, lin.weight.dtype) for lin in maps)

    def _commutes(self, root: NodeTensor | None) -> bool:
        return commutes(self.lin_l) and (root is None or commutes(self.lin_r))

    def linear_aggregation(
        self, graph: DistributedGraph, source: NodeTensor, root: NodeTensor | None, operator: Operator
    ) -> Tensor:
        """``W_2 A source + W_1 root``, in the cheaper order."""
        out: Tensor
        if not self._commutes(root):
            out = self.lin_l(graph.aggregate(source, operator, self))
            return out if root is None else out + self.lin_r(root)
        if not project_first(self.lin_l, graph, source, operator):
            # The root's redistribution and linear map may overlap with the neighbours' messages.
            pairs: list[Any] = [(graph.start(source, operator, self), self.lin_l.weight)]
            if root is not None:
                pairs.append((graph.align(root, source), self.lin_r.weight))
            return graph.linear_sum(pairs, self.lin_l.bias)
        pending = graph.start(graph.linear_sum([(source, self.lin_l.weight)]), operator, self)
        of_root = None if root is None else graph.linear_sum([(root, self.lin_r.weight)])
        out = pending.wait()
        # The bias comes after the sum, which would multiply it by the degree. Autocast narrows the sum's dtype.
        if self.lin_l.bias is not None:
            with local_tensors():
                bias = self.lin_l.bias.to(out.dtype)
            out = add_into_(out, bias)
        return out if of_root is None else add_into_(out, of_root)

    def __prepare_scriptable__(self) -> SAGEConv:
        return stock_twin(self, SAGEConv)

    def __repr__(self) -> str:
        return str(super().__repr__()).removeprefix("Distributed")  # a script prints the model that it names
