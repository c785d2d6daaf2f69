"""Order of the linear map and the sum over neighbours: they commute, so the cheaper order is used."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation
from torch_geometric.nn.dense import Linear

from pyg_dist.backend.session.settings import PROJECT_FIRST
from pyg_dist.graph.protocol import DistributedGraph, Norm, Operator
from pyg_dist.tensor import NodeTensor

NORMS: dict[type, Norm] = {SumAggregation: Norm.SUM, MeanAggregation: Norm.MEAN}
"""The aggregations that are products with a matrix."""


def commutes(lin: torch.nn.Module) -> bool:
    """Whether ``lin`` is a plain linear map: without hooks or a forward of its own, and of no other class (pruned,
    adapted, parametrized).
    """
    return (
        type(lin) is Linear
        and "forward" not in vars(lin)
        and not isinstance(lin.weight, UninitializedParameter)
        and not (lin._forward_hooks or lin._forward_pre_hooks or lin._backward_hooks or lin._backward_pre_hooks)
    )


def can_project_last(lin: torch.nn.Module, x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the map may come after a normalised sum in ``dtype``: where the stock order has that of x throughout."""
    return commutes(lin) and dtype == x.dtype and not torch.is_autocast_enabled(x.device.type)


def project_first(lin: Linear, graph: DistributedGraph, x: NodeTensor, operator: Operator) -> bool:
    """Whether ``A (x W)`` costs less than ``(A x) W``.

    Rows sent, values added and values waited for all grow with the number of columns that are aggregated, forward and
    backward, whatever the plan or the mesh: ``(A x) W`` aggregates F_in columns, and as many backward if x needs a
    gradient; ``A (x W)`` aggregates F_out, and as many backward if x or W needs one. What is cached is free from
    the second time on. (Where the widths are equal, the all-reduce form of the grid still sends more or less in one
    order than in the other, as its mesh has it; that is not looked at.)

    Args:
        lin: W.
        graph: whose edges A has.
        x: ``[N, F_in]``.
        operator: A.

    Where both orders cost the same the sum goes first, as in PyG's SAGE, whose bits one rank then has. But ``W`` needs
    ``A x`` for its derivative, and SAGE's root keeps x anyhow. ``PYG_DIST_PROJECT_FIRST=1`` lets the linear map go
    first: ``dW = x^T (A^T G)`` needs x, and what the derivative by x computes (hypergraph-gcn, eq. 4).
    """
    if graph.is_cached(x, operator):
        return False
    backward = torch.is_grad_enabled()
    first = lin.in_channels * (1 + (backward and x.requires_grad))
    second = lin.out_channels * (1 + (backward and (x.requires_grad or lin.weight.requires_grad)))
    if second > first or (second == first and not PROJECT_FIRST.value()):
        return False
    x._is_reused = True  # if it comes again, its sums are worth remembering
    return True
