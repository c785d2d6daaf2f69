"""Rows that are selected and added up by an index, against torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bits import assert_same_bits, results
from torch_geometric.utils import scatter

from pyg_dist.backend.dense import indexed_rows, large_tensors


@pytest.fixture
def num_rows() -> int:
    """Enough for outputs of 37 columns to be large, in the narrowest dtype."""
    return large_tensors.LARGE // 2 // 37 + 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(37,), (2, 1, 19)], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_rows_have_the_bits_of_torch(num_rows: int, dtype: torch.dtype, shape: tuple[int, ...], reduce: str) -> None:
    """Of any shape; sums of 0 to many rows, some of which are -0.0."""
    x = torch.randn(num_rows, *shape).to(dtype).masked_fill_(torch.rand(num_rows, *shape) < 0.1, -0.0)
    index = torch.randint(num_rows // 3, (num_rows,)).square() // num_rows
    moved = lambda x: indexed_rows.sum_rows(x, index, num_rows, reduce == "mean")  # noqa: E731
    assert "_SumRows" in str(walk(moved(x.clone().requires_grad_()).grad_fn))
    assert "_Select" in str(walk(indexed_rows.select(x.clone().requires_grad_(), index).grad_fn))
    for mine, stock in (
        (moved, lambda x: scatter(x, index, 0, num_rows, reduce)),
        (lambda x: indexed_rows.select(x, index), lambda x: x.index_select(0, index)),
    ):
        for got, expected in zip(results(mine, x), results(stock, x), strict=True):
            assert_same_bits(got, expected)


def walk(node: Any) -> list[str]:
    """The names of a function's derivative and of those behind it."""
    return (
        []
        if node is None
        else [node.name(), *(name for following, _ in node.next_functions for name in walk(following))]
    )
