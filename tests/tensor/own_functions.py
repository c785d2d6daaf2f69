"""``autograd.Function``s as scripts write them: of one tensor (``ONE``), and of rows and a parameter (``TWO``)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, once_differentiable

CLASSES = 4  # columns


class Backward(Function):
    """Most of those below have this forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.5


class NumRows(Backward):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 2 / g.shape[0] / len(g) / g.numel()


class Norm(Backward):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g / (g.norm() + g.abs().max())


class Centred(Backward):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x - x.mean(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g - g.mean(0)


class Reversed(Backward):
    """Its input itself comes out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float = 1.0) -> Tensor:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return -ctx.factor * g, None


class InPlace(Backward):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * g + g.mean()


class Rounded(Backward):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g


class Exp(Backward):
    """Saves its output, and what is between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        half = x.tanh()
        out = half.exp()
        ctx.save_for_backward(out, half, None)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        out, half, nothing = ctx.saved_tensors
        assert nothing is None
        return g * out * (1 - half**2) / out.sum() + 0 * out.mean(0)


class Cumulated(Backward):
    """Along rows: on the grid, tiles have to meet for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.flip(1).cumsum(1).flip(1)


class Softmax(Backward):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.softmax(-1))
        return x.log_softmax(-1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (p,) = ctx.saved_tensors
        return g - p * g.sum(-1, keepdim=True)


class SetUp(Function):
    """In the newer style, with a keyword's default."""

    @staticmethod
    def forward(x: Tensor, power: int = 2) -> Tensor:
        return x**power

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, ctx.power = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def vjp(ctx: Any, g: Tensor) -> Any:
        x, output = ctx.saved_tensors
        return ctx.power * g * x / output.mean(), None


class Twice(SetUp):
    """By the methods of another."""

    @staticmethod
    def forward(x: Tensor, power: int = 2) -> Tensor:
        return 2 * SetUp.forward(x, power)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        SetUp.setup_context(ctx, inputs, output)

    @staticmethod
    def vjp(ctx: Any, g: Tensor) -> Any:
        return SetUp.vjp(ctx, 2 * g)


class Once(Backward):
    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        return g / g.norm()


class OfAllRows(Backward):
    """Gives a plain gradient of all rows."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        whole = g.full_tensor() if hasattr(g, "full_tensor") else g
        return whole.flip(0)


class Chosen(Backward):
    """Rows by a list: the gradient comes back in another order than it lies in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.order = torch.arange(len(x) - 1, -1, -1)
        return x[ctx.order]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g[ctx.order] + g.mean(0)


class Widened(Backward):
    """Gives one column more dimensions, which torch sums."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x[:, :1].expand(-1, CLASSES) * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return torch.stack([g, 2 * g])


class Amp(Backward):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, g: Tensor) -> Any:
        return 2 * g * ctx.saved_tensors[0] / g.shape[0]


class Unused(Backward):
    """Without zeros for outputs that are not used."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        places = x.argmax(-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        return x * 2, places, x * 3, x.mean(0), "more"

    @staticmethod
    def backward(ctx: Any, g: Tensor, of_places: Any, unused: Any, of_mean: Any, of_more: Any) -> Any:
        assert unused is of_more is None
        (places,) = ctx.saved_tensors
        return 2 * g * (places == 1).view(-1, 1) + (0 if of_mean is None else of_mean / g.shape[0]) + g.mean()


ONE = (
    *(
        NumRows,
        Norm,
        Centred,
        Reversed,
        InPlace,
        Rounded,
        Exp,
        Cumulated,
        Softmax,
        SetUp,
        Twice,
        Once,
        OfAllRows,
        Chosen,
    ),
    *(Widened, Amp),
)


class AddBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        return x + p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, g.sum(0)


class AddsBias(AddBias):
    """Lets torch sum the gradient of what it has broadcast."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g, g if ctx.needs_input_grad[1] else None


class Scaled(AddBias):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, p = ctx.saved_tensors
        return g * p, (g * x).sum(0)


class Quantized(AddBias):
    """A learned step size (LSQ)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        ctx.save_for_backward(x, p)
        return torch.clamp((x / p).round(), -4, 3) * p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, p = ctx.saved_tensors
        scale, low, high = 1 / math.sqrt(x.numel() * 3), x / p < -4, x / p > 3
        inside = ~(low | high)
        of_step = low * -4.0 + high * 3.0 + inside * ((x / p).round() - x / p)
        return g * inside, (of_step * g * scale).sum(0)


class Mapped(AddBias):
    """A product with a matrix that learns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        matrix = torch.outer(p, p)
        ctx.save_for_backward(x, p)
        return x @ matrix

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, p = ctx.saved_tensors
        of_matrix = x.t() @ g
        return g @ torch.outer(p, p).t(), (of_matrix + of_matrix.t()) @ p


class Loss(AddBias):
    """Rows come in, a number comes out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Tensor:
        distance = (x - p).tanh()
        ctx.save_for_backward(distance)
        return distance.square().mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (distance,) = ctx.saved_tensors
        of_rows = g * 2 * distance * (1 - distance**2) / distance.numel()
        return of_rows, -of_rows.sum(0)


class LossSetUp(Function):
    @staticmethod
    def forward(x: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
        return (x * p).square().sum(), x.mean(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, of_mean: Tensor) -> Any:
        x, p = ctx.saved_tensors
        return 2 * g * x * p * p + of_mean / x.shape[0], (2 * g * x * x * p).sum(0)


TWO = (AddBias, AddsBias, Scaled, Quantized, Mapped, Loss, LossSetUp)
early = Norm.apply  # bound before there are any rows
native: Any = torch._C._FunctionBase.__dict__["apply"].__get__(None, Norm)  # as apply itself is from torch 2.14 on
