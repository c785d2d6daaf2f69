"""``linear`` and ``relu`` for large CPU tensors: the same numbers as torch's, at less traffic and memory.

Their outputs and gradients lie in huge pages (``csrc/ops/allocate.h``), which for an operator that streams once through
memory are most of its time (docs/performance.md), and ReLU keeps a byte per element for its backward, not its output.
Small tensors, and forms that these do not know, go to torch's own operators. No function is collective.

Legend: N rows, F columns in, O columns out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend import ops

LARGE = 8 << 20
"""Bytes from which on an output is worth huge pages; ``kWorthIt`` of ``csrc/ops/allocate.h``."""

_PLAINLY = torch._C.DisableTorchFunctionSubclass
"""Reentrant checkpointing hands the gradients of node tensors over as node tensors."""

_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def _is_large(x: Tensor, num_elements: int) -> bool:
    return num_elements * x.element_size() >= LARGE and x.dtype in _DTYPES and x.device.type == "cpu"


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, without autograd."""
    if not _is_large(a, a.shape[0] * b.shape[1]):
        return a @ b
    return torch.mm(a, b, out=ops.empty_rows(a, a.shape[0], b.shape[1]))


class _Linear(torch.autograd.Function):
    """The formulas are torch's own, product by product, so that the bits are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        out = ops.empty_rows(x, x.shape[0], weight.shape[0])
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        product = torch.mm if torch.is_grad_enabled() else _product  # with create_graph, torch differentiates again
        with _PLAINLY():
            by_x = product(grad, weight) if ctx.needs_input_grad[0] else None
            by_weight = product(grad.t(), x) if ctx.needs_input_grad[1] else None
            return by_x, by_weight, grad.sum(0) if ctx.needs_input_grad[2] else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``. Shapes: ``[N, F], [O, F], [O] -> [N, O]``."""
    if x.dim() == weight.dim() == 2 and _is_large(x, x.shape[0] * weight.shape[0]):
        same = x.dtype == weight.dtype and (bias is None or (bias.dtype == x.dtype and bias.dim() == 1))
        if same and x.shape[1] == weight.shape[1] and not torch.is_autocast_enabled("cpu"):
            return _Linear.apply(x.as_subclass(Tensor), weight, bias)  # type: ignore[no-any-return, no-untyped-call]
    return F.linear(x, weight, bias)


class _Relu(torch.autograd.Function):
    """Where values pass is all that the derivative needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, passed = ops.relu(x, ctx.needs_input_grad[0])
        ctx.save_for_backward(passed)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (passed,) = ctx.saved_tensors
        with _PLAINLY():
            return _Passed.apply(grad, passed)  # type: ignore[no-any-return, no-untyped-call]


class _Passed(torch.autograd.Function):
    """Zero where a mask says so: its own derivative."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, passed: Tensor) -> Tensor:
        ctx.save_for_backward(passed)
        return ops.relu_grad(grad, passed)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (passed,) = ctx.saved_tensors
        with _PLAINLY():
            return _Passed.apply(grad, passed), None  # type: ignore[no-untyped-call]


def relu(x: Tensor, inplace: bool = False) -> Tensor:
    """``torch.nn.functional.relu`` of any shape."""
    if inplace or not x.is_contiguous() or not _is_large(x, x.numel()):
        return F.relu(x, inplace)
    return _Relu.apply(x.as_subclass(Tensor))  # type: ignore[no-any-return, no-untyped-call]
