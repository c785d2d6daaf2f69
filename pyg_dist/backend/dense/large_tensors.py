"""Some of torch's functions of rows for large CPU tensors: the same numbers at less traffic and memory.

Their outputs and gradients lie in memory that is used again (:mod:`pyg_dist.backend.ops.memory`): where an operator
streams once through memory, page faults are most of its time (benchmarks/REPORT.md). ReLU saves one bit per element for
its backward, not its output. Small tensors, other forms, ``torch.func`` and forward-mode differentiation use torch's
own operators. No function is collective.

Legend: N rows, F columns in, O columns out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import Context, LocalFunction

LARGE = 2 << 20
"""Bytes from which on an output is worth a block; ``kWorthIt`` of ``csrc/ops/cpu/block_pool.h``."""


def is_large(x: Tensor, num_elements: int) -> bool:
    """Whether the functions here do otherwise than torch's for ``num_elements`` made of ``x``."""
    if torch._C._get_tracing_state() is not None:  # sizes are tensors, and torch's functions what is traced
        return False
    large = num_elements * x.element_size() >= LARGE and x.dtype in ops.FLOATS and x.device.type == "cpu"
    return large and not is_transformed()


def is_transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation is at work, which know torch's own functions only."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, without autograd."""
    if not is_large(a, a.shape[0] * b.shape[1]):
        return a @ b
    return torch.mm(a, b, out=ops.empty_rows(a, a.shape[0], b.shape[1]))


class _Linear(LocalFunction[Tensor]):
    """Plus a bias, or written into ``out``. The formulas are torch's own, product by product, so that the bits are."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        if out is not None:
            ctx.mark_dirty(out)
            return out.addmm_(x, weight.t())
        out = ops.empty_rows(x, x.shape[0], weight.shape[0])
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_x, of_weight, of_bias, of_out = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        product = torch.mm if torch.is_grad_enabled() else _product  # with create_graph, torch differentiates again
        by_weight = product(grad.t(), x) if of_weight else None
        del x  # unless something else refers to it, its memory is free for its gradient
        ctx.maybe_clear_saved_tensors()
        by_x = product(grad, weight) if of_x else None
        return by_x, by_weight, grad.sum(0) if of_bias else None, grad if of_out else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``. Shapes: ``[N, F], [O, F], [O] -> [N, O]``."""
    if x.dim() == weight.dim() == 2 and is_large(x, x.shape[0] * weight.shape[0]):
        same = x.dtype == weight.dtype and (bias is None or (bias.dtype == x.dtype and bias.dim() == 1))
        if same and x.shape[1] == weight.shape[1] and not torch.is_autocast_enabled("cpu"):
            return _Linear.apply(x.as_subclass(Tensor), weight, bias, None)
    return F.linear(x, weight, bias)


class _LinearPair(LocalFunction[tuple[Tensor, Tensor]]):
    """Two linear maps of the same rows, whose gradients by these are added up in one tensor."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight, narrow)
        return _product(x, weight.t()), x @ narrow.t()

    @staticmethod
    def backward(ctx: Context, grad: Tensor, of_narrow: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, narrow = ctx.saved_tensors
        of_x, of_weight, of_both = ctx.needs_input_grad
        by_weight = grad.t() @ x if of_weight else None
        by_narrow = of_narrow.t() @ x if of_both else None
        if not of_x:
            return None, by_weight, by_narrow
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            return grad @ weight + of_narrow @ narrow, by_weight, by_narrow
        return _product(grad, weight).addmm_(of_narrow, narrow), by_weight, by_narrow


def linear_pair(x: Tensor, weight: Tensor, narrow: Tensor) -> tuple[Tensor, Tensor]:
    """``x weight^T`` and ``x narrow^T``. Shapes: ``[N, F], [O, F], [P, F] -> [N, O], [N, P]``."""
    if is_large(x, x.shape[0] * weight.shape[0]):
        return _LinearPair.apply(x, weight, narrow)
    return F.linear(x, weight), F.linear(x, narrow)


def add_product_(out: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """``out + x weight^T``, written into ``out`` as :func:`add_into_` does. Shapes: ``[N, O], [N, F], [O, F]``."""
    is_plain = out.dtype == x.dtype == weight.dtype and not torch.is_autocast_enabled(x.device.type)
    if is_plain and is_large(x, out.numel()) and not out._is_view() and not torch._C._len_torch_dispatch_stack():
        return _Linear.apply(x, weight, None, out)
    return add_into_(out, linear(x, weight))


class _SplitColumns(LocalFunction[tuple[Tensor, ...]]):
    """Views; the gradients side by side."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, widths: Sequence[int]) -> tuple[Tensor, ...]:
        ctx.shape = x.shape
        return torch.split(x, [*widths, x.shape[1] - sum(widths)], 1)[: len(widths)]

    @staticmethod
    def backward(ctx: Context, *grads: Tensor) -> tuple[Tensor, None]:
        num_rows, num_columns = ctx.shape
        rest = grads[0].new_zeros(num_rows, num_columns - sum(grad.shape[1] for grad in grads))
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            return torch.cat([*grads, rest], 1), None
        return torch.cat([*grads, rest], 1, out=ops.empty_rows(grads[0], num_rows, num_columns)), None


def split_columns(x: Tensor, widths: Sequence[int]) -> Sequence[Tensor]:
    """The first ``widths`` columns of x, as views. Shapes: ``[N, F] -> [N, widths[k]]``."""
    if is_large(x, x.numel()):
        return _SplitColumns.apply(x, widths)
    return torch.split(x, [*widths, x.shape[1] - sum(widths)], 1)[: len(widths)]


class _LayerNorm(LocalFunction[Tensor]):
    """By blocks of rows, whose outputs torch takes from the heap, in the cache, and takes again for the next block.

    A row's numbers depend on no other row, so the bits are torch's; the sums over all rows are taken in one call.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        out, moments = ops.empty_rows(x, *x.shape), []
        for x_block, out_block in zip(_blocks(x), _blocks(out), strict=True):
            y, *of_rows = torch.native_layer_norm(x_block, x.shape[1:], weight, bias, eps)
            out_block.copy_(y)
            moments.append(of_rows)
        mean, rstd = (torch.cat(blocks) for blocks in zip(*moments, strict=True))
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        derivative = torch.ops.aten.native_layer_norm_backward
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            needs = [of_x, of_weight, of_bias]
            return *derivative(grad, x, x.shape[1:], mean, rstd, weight, bias, needs), None
        needs = [False, of_weight, of_bias]
        _, by_weight, by_bias = derivative(grad, x, x.shape[1:], mean, rstd, weight, bias, needs)
        if not of_x:
            return None, by_weight, by_bias, None
        by_x = ops.empty_rows(x, *x.shape)
        rows = (torch.split(tensor, _block_rows(x)) for tensor in (grad, x, mean, rstd, by_x))
        for g, x_block, m, r, out in zip(*rows, strict=True):
            out.copy_(derivative(g, x_block, x.shape[1:], m, r, weight, bias, [True, False, False])[0])
        return by_x, by_weight, by_bias, None


def _block_rows(x: Tensor) -> int:
    return max((2 << 20) // (x.shape[1] * x.element_size()), 1)


def _blocks(x: Tensor) -> Sequence[Tensor]:
    return torch.split(x, _block_rows(x))


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """``torch.layer_norm``. Shapes: ``[N, F], [F], [F] -> [N, F]``."""
    same = all(p is None or p.dtype == x.dtype for p in (weight, bias)) and not torch.is_autocast_enabled("cpu")
    if same and x.dim() == 2 and x.is_contiguous() and is_large(x, x.numel()) and (*normalized_shape,) == x.shape[1:]:
        return _LayerNorm.apply(x.as_subclass(Tensor), weight, bias, eps)
    return torch.layer_norm(x, normalized_shape, weight, bias, eps, cudnn_enable)


class _Relu(LocalFunction[Tensor]):
    """Where values pass is all that the derivative needs."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        y, passed = ops.relu(x, ctx.needs_input_grad[0])
        ctx.save_for_backward(passed)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        (passed,) = ctx.saved_tensors
        return _Passed.apply(grad, passed)


class _Passed(LocalFunction[Tensor]):
    """Zero where a mask says so: its own derivative."""

    @staticmethod
    def forward(ctx: Context, grad: Tensor, passed: Tensor) -> Tensor:
        ctx.save_for_backward(passed)
        return ops.relu_grad(grad, passed)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        (passed,) = ctx.saved_tensors
        return _Passed.apply(grad, passed), None


def relu(x: Tensor, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.relu`` of any shape."""
    if inplace or not x.is_contiguous() or not is_large(x, x.numel()):
        return F.relu(x, inplace)
    return _Relu.apply(x.as_subclass(Tensor))


class _Sum(LocalFunction[Tensor]):
    """``a + alpha * b``, where b is a tensor of the same shape, a row for all, or a number; maybe written into a."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Any, alpha: float, in_place: bool) -> Tensor:
        ctx.alpha, ctx.is_row = alpha, isinstance(b, Tensor) and b.dim() == 1
        if in_place:
            ctx.mark_dirty(a)
            return a.add_(b, alpha=alpha)
        return torch.add(a, b, alpha=alpha, out=ops.empty_rows(a, *a.shape))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_a, of_b, *_ = ctx.needs_input_grad
        if not of_b:
            return grad, None, None, None
        by_b = grad.sum(0) if ctx.is_row else grad
        return grad if of_a else None, by_b if ctx.alpha == 1 else multiply(by_b, ctx.alpha), None, None


class _Product(LocalFunction[Tensor]):
    """``a * b``, where b is a tensor of the same shape or a number, or ``a / b`` by a number."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Any, divides: bool) -> Tensor:
        of_a, of_b, _ = ctx.needs_input_grad
        by_tensor = isinstance(b, Tensor)
        ctx.save_for_backward(a if of_b else None, b if of_a and by_tensor else None)
        ctx.number, ctx.times = None if by_tensor else b, divide if divides else multiply
        return (torch.div if divides else torch.mul)(a, b, out=ops.empty_rows(a, *a.shape))

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        of_a, of_b, _ = ctx.needs_input_grad
        a, b = ctx.saved_tensors
        by_a = ctx.times(grad, b if ctx.number is None else ctx.number) if of_a else None
        return by_a, multiply(grad, a) if of_b else None, None


def _are_large(a: object, b: object) -> bool:
    """Whether an elementwise function of these is one of rows, whose output is worth a block."""
    if not isinstance(a, Tensor) or a.dim() != 2 or not is_large(a, a.numel()) or not a.is_contiguous():
        return False
    if isinstance(b, Tensor):
        return b.shape == a.shape and b.dtype == a.dtype and b.device == a.device
    return type(b) in (int, float)


def _is_row_for_all(a: Any, b: object) -> bool:
    """Whether b, a row, is to be added to each of a's, which are many."""
    if not isinstance(b, Tensor) or b.dim() != 1:
        return False
    return _are_large(a, 0) and b.shape == a.shape[1:] and b.dtype == a.dtype


def _plain(operand: object) -> object:
    return operand.as_subclass(Tensor) if isinstance(operand, Tensor) else operand


def add(a: Any, b: Any, *, alpha: float = 1) -> Tensor:
    """``torch.add``, of any operands."""
    if type(alpha) in (int, float) and (_are_large(a, b) or _is_row_for_all(a, b)):
        return _Sum.apply(_plain(a), _plain(b), alpha, False)
    return torch.add(a, b, alpha=alpha)


def add_(a: Tensor, b: Tensor, alpha: float = 1) -> Tensor:
    """``Tensor.add_``."""
    if alpha != 1 and isinstance(b, Tensor) and _are_large(a, b):
        return _Sum.apply(a, b, alpha, True)
    return a.add_(b, alpha=alpha)


def add_into_(out: Tensor, addend: Tensor, alpha: float = 1) -> Tensor:
    """``out + alpha * addend``, written into ``out`` where that changes nothing else.

    To be called only if nothing else refers to ``out`` and no derivative needs it, as for the output of a linear map
    without hooks. It is not done in place for views, whose gradients autograd copies for functions in place, nor under
    dispatch modes, since selective checkpointing keeps outputs of linear maps.
    """
    if out.dtype == addend.dtype and not out._is_view() and not torch._C._len_torch_dispatch_stack():
        return add_(out, addend, alpha)
    return torch.add(out, addend, alpha=alpha)


def subtract(a: Any, b: Any, *, alpha: float = 1) -> Tensor:
    """``torch.sub``, of any operands."""
    if _are_large(a, b) and type(alpha) in (int, float):
        return _Sum.apply(_plain(a), _plain(b), -alpha, False)
    return torch.sub(a, b, alpha=alpha)


def multiply(a: Any, b: Any) -> Tensor:
    """``torch.mul``, of any operands."""
    if _are_large(a, b):
        return _Product.apply(_plain(a), _plain(b), False)
    return torch.mul(a, b)


def divide(a: Any, b: Any) -> Tensor:
    """``torch.div``, of any operands."""
    if not isinstance(b, Tensor) and _are_large(a, b):
        return _Product.apply(_plain(a), b, True)
    return torch.div(a, b)


class _LogSoftmax(LocalFunction[Tensor]):
    """Within rows, as torch has it."""

    @staticmethod
    def forward(ctx: Context, x: Tensor) -> Tensor:
        y = torch.log_softmax(x, 1, out=ops.empty_rows(x, *x.shape))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        derivative = torch.ops.aten._log_softmax_backward_data
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            by_x: Tensor = derivative(grad, y, 1, y.dtype)
        else:
            by_x = derivative.out(grad, y, 1, y.dtype, out=ops.empty_rows(y, *y.shape))
        return by_x


def log_softmax(x: Tensor) -> Tensor:
    """``torch.nn.functional.log_softmax`` of every row. Shapes: ``[N, F] -> [N, F]``."""
    if x.dim() == 2 and is_large(x, x.numel()):
        return _LogSoftmax.apply(x.as_subclass(Tensor))
    return F.log_softmax(x, 1)
