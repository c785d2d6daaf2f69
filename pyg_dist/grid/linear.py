"""A linear map of tiles with replicas: the sum of their gradients overlaps with the product for the weight gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.session.settings import GRID_EARLY_SUMS
from pyg_dist.grid.collectives import (
    AllGather,
    ReduceScatter,
    copy_to_replicas,
    near_equal,
    reduce_from_replicas,
)


class _ReplicatedLinear(LocalFunction[Tensor]):
    """``x W^T``, each replica of x times other rows of W (ScaleGNN, V-D).

    The sum over the replicas has two halves, a scattered sum and a gather; each flies during half of the product.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transport: Transport) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.transport = transport
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        transport: Transport = ctx.transport
        if torch.is_grad_enabled():  # gradients of gradients
            return reduce_from_replicas(grad @ weight, transport), grad.t() @ x, None
        by_x = grad @ weight
        sizes = near_equal(by_x.numel(), transport.group.size)
        scattered = ReduceScatter(transport, sizes).start(by_x.view(-1))
        by_weight, half = weight.new_empty(weight.shape), weight.shape[0] // 2
        torch.mm(grad[:, :half].t(), x, out=by_weight[:half])
        gathered = AllGather(transport, sizes).start(scattered.wait())
        torch.mm(grad[:, half:].t(), x, out=by_weight[half:])
        return gathered.wait().view(by_x.shape), by_weight, None


def replicated_linear(x: Tensor, weight: Tensor, transport: Transport) -> Tensor:
    """``x W^T`` of a replica of x and this rank's rows of W (backward by x: a sum over the replicas, collective).

    Exact: the bits are those of the sum made before the other product.

    Shapes:
        - x: ``[n, F]``; weight: ``[G, F]``
        - output: ``[n, G]``

    Args:
        x: equal on the ranks of ``transport``.
        weight: of which each of them has other rows.
        transport: the replicas.
    """
    is_early = (
        transport.group.size > 1
        and x.requires_grad
        and weight.requires_grad
        and not torch.is_autocast_enabled(x.device.type)
        and GRID_EARLY_SUMS.value()
    )
    if is_early:
        return _ReplicatedLinear.apply(x, weight, transport)
    return F.linear(copy_to_replicas(x, transport), weight)
