"""Norms whose code in PyG or torch looks at all rows at once; PyG's other norms work as they are."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GraphNorm, InstanceNorm

from pyg_dist.tensor import RowTensor


class DistributedGraphNorm(GraphNorm):  # type: ignore[misc]
    r"""PyG's :class:`~torch_geometric.nn.GraphNorm` on plain or distributed rows, with the same numbers (exact).

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \alpha \odot \textrm{E}[\mathbf{x}]}
        {\sqrt{\textrm{Var}[\mathbf{x} - \alpha \odot \textrm{E}[\mathbf{x}]] + \epsilon}} \odot \gamma + \beta

    Source: "GraphNorm: A Principled Approach to Accelerating Graph Neural Network Training" (Cai et al., 2021).
    Constructor, parameters and ``state_dict`` are the stock norm's. Collective on distributed rows.

    Shapes:
        - x: ``[N, F]``; output the same
        - batch: ``[N]``, the graph of each node; None: one graph

    Example:
        >>> norm = DistributedGraphNorm(34)
        >>> tuple(norm(data.x).shape)
        (34, 34)
    """

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """See the class."""
        if batch is not None or not isinstance(x, RowTensor):
            return super().forward(x, batch, batch_size)  # type: ignore[no-any-return]
        out = x - x.mean(0, keepdim=True) * self.mean_scale
        std = (out.pow(2).mean(0, keepdim=True) + self.eps).sqrt()
        return self.weight * out / std + self.bias  # type: ignore[no-any-return]


class DistributedInstanceNorm(InstanceNorm):  # type: ignore[misc]
    r"""PyG's :class:`~torch_geometric.nn.InstanceNorm` on plain or distributed rows, with the same numbers (exact).

    .. math::
        \mathbf{x}^{\prime}_i = \frac{\mathbf{x} - \textrm{E}[\mathbf{x}]}{\sqrt{\textrm{Var}[\mathbf{x}] + \epsilon}}
        \odot \gamma + \beta

    Source: "Instance Normalization: The Missing Ingredient for Fast Stylization" (Ulyanov et al., 2016). Constructor,
    parameters and ``state_dict`` are the stock norm's. Collective on distributed rows.

    Shapes:
        - x: ``[N, F]``; output the same
        - batch: ``[N]``, the graph of each node; None: one graph

    Example:
        >>> norm = DistributedInstanceNorm(34)
        >>> tuple(norm(data.x).shape)
        (34, 34)
    """

    def forward(self, x: Tensor, batch: Tensor | None = None, batch_size: int | None = None) -> Tensor:
        """See the class."""
        if batch is not None or not isinstance(x, RowTensor):
            return super().forward(x, batch, batch_size)  # type: ignore[no-any-return]
        # Of one graph it is batch norm, which counts its batches on the way and uses them where it tracks them.
        of_batch = self.training or not self.track_running_stats
        statistics = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.batch_norm(x, *statistics, of_batch, self.momentum, self.eps)
