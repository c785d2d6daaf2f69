"""The same bits, which ``torch.equal`` does not ask for: it takes -0.0 for 0.0, and NaN for no NaN."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same_bits(a: Tensor, b: Tensor, msg: str = "") -> None:
    """Fail, with ``msg`` in front, unless ``a`` and ``b`` have the same dtype, shape and bits."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{msg}: {a.dtype} {[*a.shape]} and {b.dtype} {[*b.shape]}"
    bits_a, bits_b = (_as_integers(t.detach()) for t in (a, b))
    if not torch.equal(bits_a, bits_b):
        where = (bits_a != bits_b).nonzero()
        first = tuple(where[0].tolist())
        raise AssertionError(
            f"{msg}: {len(where)} of {bits_a.numel()} numbers differ, first {bits_a[first]:#x} and {bits_b[first]:#x} "
            f"at {list(first)}"
        )


def assert_all_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """:func:`assert_same_bits` of each pair."""
    for k, (one, other) in enumerate(zip(a, b, strict=True)):
        assert_same_bits(one, other, f"tensor {k}")


def have_same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` have the same dtype, shape and bits."""
    is_alike = (a.dtype, a.shape) == (b.dtype, b.shape)
    return is_alike and torch.equal(_as_integers(a.detach()), _as_integers(b.detach()))


def _as_integers(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


def results(function: Callable[..., Tensor], *operands: Tensor) -> list[Tensor]:
    """The output, and the gradient of every operand."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out.dtype)
    (out * weight).sum().backward()
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
