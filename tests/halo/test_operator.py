"""What is added to last rows in place, with its derivatives."""

from __future__ import annotations

import pytest
import torch
from bits import assert_same_bits
from torch import Tensor

from pyg_dist.halo.operator import add_to_last_rows


@pytest.mark.parametrize("num_last", [0, 2, 5])
def test_add_to_last_rows(num_last: int) -> None:
    out, addend = torch.randn(5, 3, dtype=torch.float64), torch.randn(num_last, 3, dtype=torch.float64)
    expected = out + torch.cat([torch.zeros(5 - num_last, 3, dtype=torch.float64), addend])
    product = out * 1
    assert_same_bits(add_to_last_rows(product, addend), expected)
    assert_same_bits(product, expected, "no other tensor of all rows")

    def squared(out: Tensor, addend: Tensor) -> Tensor:
        return add_to_last_rows(out**2, addend**3)

    leaves = out.requires_grad_(), addend.requires_grad_()
    assert torch.autograd.gradcheck(squared, leaves)
    assert torch.autograd.gradgradcheck(squared, leaves)
