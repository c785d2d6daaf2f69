"""Norm, ReLU and dropout in one pass, and a residual."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GraphNorm, InstanceNorm

from pyg_dist.backend import ops
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.dense.norm_relu_dropout import norm_relu_dropout_rows
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.ops import Norm
from pyg_dist.errors import DataError, OptionError
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.functions.random import draw_seed

_NORMS = ("layer", "rms", None)


def norm_relu_dropout(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = "layer",
    eps: float = 1e-5,
    relu: bool = True,
    p: float = 0.5,
    training: bool = True,
    residual: Tensor | None = None,
) -> Tensor:
    r"""``F.dropout(F.relu(F.layer_norm(x, [F], weight, bias, eps)), p, training)`` in one pass, forward and back.

    .. math::
        y_i = \mathrm{dropout}(\mathrm{relu}(\mathrm{norm}(x_i) \odot w + b)) + r_i

    Exact: equal to torch's three functions up to rounding, with the masks of dropout on distributed rows (a function of
    one draw of torch's CPU generator, the global id of the node or edge, and the column; for a plain tensor, the number
    of the row). Torch's functions save three tensors of x's size for the backward pass; this saves x, and computes
    normed values and masks again. With ``norm=None`` and no weight it saves its output, whose zeros are the mask.
    Differentiable once. Not collective, except for the gradients of parameters, which are summed, and on the grid
    layout: for a norm, ranks that share a row's columns exchange one number per row forward and backward (ScaleGNN,
    eq. 29; two for layer norm), in full precision; and a residual is redistributed to x's sharding, from the second
    step on while the layer works whose input it was (IV-C4).

    Shapes:
        - x, residual: ``[N, F]`` node tensor, ``[E, F]`` edge tensor or plain CPU tensor (float32, float64, bfloat16 or
          float16)
        - weight, bias: ``[F]``
        - output: as x

    Args:
        x: The rows.
        weight: Factor of each normed column.
        bias: Summand of each column.
        norm: ``"layer"``, ``"rms"``, or ``None``: only ``bias``, ReLU and dropout.
        eps: Added to the variance (layer) or the mean square (RMS).
        relu: Whether negative values become zero.
        p: The probability of zero.
        training: Whether there is dropout.
        residual: What is added at the end.

    Raises:
        DataError: x has not two dimensions or another dtype.
        OptionError: ``norm`` or ``p`` is not one of the values allowed.

    Example:
        >>> y = norm_relu_dropout(data.x, p=0.5, training=False)
        >>> tuple(y.shape), bool((y >= 0).all())
        ((34, 34), True)
    """
    if norm not in _NORMS:
        raise OptionError(f"Expected 'norm' to be one of {_NORMS} (got {norm!r})")
    if not 0.0 <= p <= 1.0:
        raise OptionError(f"Expected 'p' to lie in [0, 1] (got {p})")
    rows = x._sharding if isinstance(x, RowTensor) else None
    split = rows.split_rows if rows is not None and norm is not None else None
    local = x.to_local() if isinstance(x, RowTensor) else x
    if local.dim() != 2 or local.dtype not in ops.FLOATS:
        raise DataError(
            f"Expected x [N, F] in float32, float64, bfloat16 or float16 (got {local.dim()} dimensions, "
            f"{local.dtype}): use torch's own functions"
        )
    arriving: Pending[Tensor] | None = None
    if rows is not None:
        if isinstance(residual, RowTensor):
            arriving = residual.start_redistribution(rows)
        weight, bias = (None if factor is None else rows.slice_columns(factor) for factor in (weight, bias))
    drops = training and p > 0
    key = None
    if drops and p < 1:
        key = torch.arange(len(local), device=local.device) if rows is None else on_device(rows.rng_key, local.device)
    seed = draw_seed() if drops else 0
    first_column = 0 if rows is None else rows.first_column
    spec = ops.NormReLUDropoutSpec(norm, eps, relu, p if key is not None else 0.0, seed, first_column)
    y = norm_relu_dropout_rows(local, weight, bias, key, spec, split)
    if drops and p == 1.0:
        y = F.dropout(y, 1.0)
    if arriving is not None:
        y, residual = y + arriving.wait(), None
    out = y if rows is None else RowTensor.from_local(y, rows)
    return out if residual is None else out + residual


class NormReLUDropout(nn.Module):
    """:func:`norm_relu_dropout` as a module, in place of a norm, ``relu()`` and dropout between two layers.

    ``module(conv(h, edge_index), h)`` adds the layer's input.

    Parameters and ``state_dict`` are those of ``torch.nn.LayerNorm(channels)`` or ``torch.nn.RMSNorm(channels)``, so
    that either loads the other's; without a norm there is only a bias.

    Args:
        channels: F.
        norm: ``"layer"``, ``"rms"`` or ``None``.
        p: The probability of zero.
        relu: Whether negative values become zero.
        eps: Added to the variance (layer) or the mean square (RMS); ``None`` is torch's default for each.
        bias: Whether there is a bias; never with ``"rms"``, as in torch.

    Raises:
        OptionError: ``norm`` is not one of the values allowed.

    Example:
        >>> NormReLUDropout(16, norm="layer", p=0.5)
        NormReLUDropout(16, norm='layer', p=0.5, relu=True)
    """

    def __init__(
        self,
        channels: int,
        norm: Norm | None = "layer",
        p: float = 0.5,
        relu: bool = True,
        eps: float | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if norm not in _NORMS:
            raise OptionError(f"Expected 'norm' to be one of {_NORMS} (got {norm!r})")
        self.channels, self.norm, self.p, self.relu, self.eps = channels, norm, p, relu, eps
        self.register_parameter("weight", None if norm is None else nn.Parameter(torch.ones(channels)))
        has_bias = bias and norm != "rms"
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)) if has_bias else None)

    def reset_parameters(self) -> None:
        """Ones and zeros, as torch's norms begin with."""
        with torch.no_grad():
            for parameter, value in ((self.weight, 1.0), (self.bias, 0.0)):
                if isinstance(parameter, Tensor):
                    parameter.fill_(value)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """See :func:`norm_relu_dropout`."""
        eps = self.eps
        if eps is None:
            eps = torch.finfo(x.dtype).eps if self.norm == "rms" else 1e-5
        given = {"eps": eps, "relu": self.relu, "p": self.p, "training": self.training, "residual": residual}
        return norm_relu_dropout(x, self.weight, self.bias, norm=self.norm, **given)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """The options."""
        return f"{self.channels}, norm={self.norm!r}, p={self.p}, relu={self.relu}"


class DistributedGraphNorm(GraphNorm):
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
        if batch is not None or not isinstance(x, RowTensor):
            return super().forward(x, batch, batch_size)  # type: ignore[no-any-return]
        out = x - x.mean(0, keepdim=True) * self.mean_scale
        std = (out.pow(2).mean(0, keepdim=True) + self.eps).sqrt()
        return self.weight * out / std + self.bias  # type: ignore[no-any-return]


class DistributedInstanceNorm(InstanceNorm):
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
        if batch is not None or not isinstance(x, RowTensor):
            return super().forward(x, batch, batch_size)  # type: ignore[no-any-return]
        # Of one graph it is batch norm, which counts its batches on the way and uses them where it tracks them.
        of_batch = self.training or not self.track_running_stats
        statistics = (self.running_mean, self.running_var, self.weight, self.bias)
        return F.batch_norm(x, *statistics, of_batch, self.momentum, self.eps)
