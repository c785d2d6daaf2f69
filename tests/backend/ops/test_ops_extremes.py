"""Largest and smallest in-neighbours: the kernels against their reference, and the gradient against torch's."""

from __future__ import annotations

from typing import Literal

import pytest
import reference_ops as reference
import torch
from bits import assert_same_bits
from op_inputs import DTYPES, equal_bits
from torch import Tensor
from torch.library import opcheck

from pyg_dist.backend import ops
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import extreme
from pyg_dist.errors import DataError

WIDTHS = [1, 2, 3, 7, 8, 16, 17, 47, 64, 100, 129, 256]
REDUCES: list[Literal["max", "min"]] = ["max", "min"]
NUM_ROWS, NUM_SOURCES = 60, 50


def pattern(num_edges_of_hub: int = 3000) -> CSR:
    """Rows of 0 to 8 edges, repeated edges among them, empty rows at both ends, and two hubs."""
    generator = torch.Generator().manual_seed(0)
    degree = torch.randint(0, 9, (NUM_ROWS,), generator=generator)
    degree[:2] = degree[20:25] = degree[-1] = 0
    degree[7], degree[8] = num_edges_of_hub, 257
    row = torch.repeat_interleave(torch.arange(NUM_ROWS), degree)
    col = torch.randint(0, NUM_SOURCES - 3, (row.numel(),), generator=generator)  # the last sources have no target
    return CSR.from_edges(row, col, None, NUM_ROWS, NUM_SOURCES)


def with_ties(width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small integers of both signs, a third of them zero."""
    drawn = torch.randint(-4, 5, (NUM_SOURCES, width), generator=torch.Generator().manual_seed(seed))
    return torch.where(drawn.abs() < 2, 0, drawn).to(dtype)


def by_torch(x: Tensor, csr: CSR, reduce: str) -> Tensor:
    """What PyG's aggregations call on CPU."""
    index = csr.row().view(-1, 1).expand(-1, x.shape[1])
    return x.new_zeros(csr.num_rows, x.shape[1]).scatter_reduce(
        0, index, x[csr.col.long()], f"a{reduce}", include_self=False
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_equal_the_reference(width: int, dtype: torch.dtype) -> None:
    """One of both in turn: every width, and every dtype, with each."""
    reduce = REDUCES[(WIDTHS.index(width) + DTYPES.index(dtype)) % 2]
    csr, x = pattern(), with_ties(width + 3, dtype)[:, 1:-2]
    transposed = csr.transposed
    grad = with_ties(width, dtype, seed=1).repeat(2, 1)[:NUM_ROWS]
    y = ops.extreme_csr(csr.rowptr, csr.col, x, reduce)
    assert_same_bits(y, reference.extreme_csr(csr.rowptr, csr.col, x, reduce))
    shares = ops.extreme_csr_shares(csr.rowptr, csr.col, x, y, grad)
    expected_shares = reference.extreme_csr_shares(csr.rowptr, csr.col, x, y, grad)
    torch.testing.assert_close(shares, expected_shares, rtol=0, atol=0, equal_nan=True)
    by_kernel = ops.extreme_csr_grad(transposed.rowptr, transposed.col, x, y, shares)
    by_reference = reference.extreme_csr_grad(transposed.rowptr, transposed.col, x, y, shares)
    torch.testing.assert_close(by_kernel, by_reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("after_relu", [False, True], ids=["signed", "after relu"])
def test_gradient_at_ties_equals_torch(dtype: torch.dtype, reduce: Literal["max", "min"], after_relu: bool) -> None:
    csr, x = pattern(), with_ties(19, dtype)
    x = x.relu() if after_relu else x
    weights = torch.randn(NUM_ROWS, 19, generator=torch.Generator().manual_seed(3), dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = extreme(ours, csr, reduce), by_torch(theirs, csr, reduce)
    assert_same_bits(y, expected)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad)
    assert bool((ours.grad[-3:] == 0).all())  # sources without targets


def test_gradcheck() -> None:
    csr = pattern(20)
    x = torch.randn(NUM_SOURCES, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # no ties
    for reduce in REDUCES:
        assert torch.autograd.gradcheck(lambda x, r=reduce: extreme(x, csr, r), (x.requires_grad_(),))
        assert torch.autograd.gradgradcheck(lambda x, r=reduce: extreme(x, csr, r), (x,))


@pytest.mark.parametrize("width", [1, 47, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hubs_among_sources(width: int, dtype: torch.dtype) -> None:
    """The last pass adds up a hub's columns by blocks, as the first two take theirs."""
    hubs = pattern(20_000)  # of the transposed pattern
    csr, x = hubs.transposed, with_ties(width, dtype).repeat(2, 1)[:NUM_ROWS]
    y = ops.extreme_csr(csr.rowptr, csr.col, x, "max")
    shares = with_ties(width, torch.float64 if dtype == torch.float64 else torch.float32, seed=1)
    got = ops.extreme_csr_grad(hubs.rowptr, hubs.col, x, y, shares)
    expected = reference.extreme_csr_grad(hubs.rowptr, hubs.col, x, y, shares)
    assert bool((expected != 0).any())
    assert equal_bits(got, expected)  # sums of small integers


def test_not_a_number_wins() -> None:
    csr, x = pattern(), with_ties(20, torch.float32)
    x[3, 5] = x[11, 6] = float("nan")
    x[12, 7], x[13, 7] = float("inf"), float("-inf")
    for reduce in REDUCES:
        y = ops.extreme_csr(csr.rowptr, csr.col, x, reduce)
        torch.testing.assert_close(y, by_torch(x, csr, reduce), rtol=0, atol=0, equal_nan=True)
        assert bool(y.isnan().any())


def test_results_do_not_depend_on_threads() -> None:
    csr = pattern(40_000)
    x = torch.randn(NUM_SOURCES, 33, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before, gradients = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            gradients.append(torch.autograd.grad(extreme(x, csr, "max").square().sum(), x)[0])
    finally:
        torch.set_num_threads(before)
    assert_same_bits(gradients[0], gradients[1])
    assert_same_bits(gradients[0], gradients[2])


def test_opcheck_and_zero_sizes() -> None:
    csr, x = pattern(), with_ties(5, torch.float32)
    transposed, native = csr.transposed, torch.ops.pyg_dist
    y = ops.extreme_csr(csr.rowptr, csr.col, x, "max")
    opcheck(native.extreme_csr.default, (csr.rowptr, csr.col, x, True))
    opcheck(native.extreme_csr_shares.default, (csr.rowptr, csr.col, x, y, torch.ones_like(y)))
    opcheck(native.extreme_csr_grad.default, (transposed.rowptr, transposed.col, x, y, torch.ones_like(y)))
    nothing = torch.zeros(0, dtype=torch.int32)
    for rows, sources, width in [(0, 5, 3), (4, 0, 3), (4, 5, 0)]:
        rowptr = torch.zeros(rows + 1, dtype=torch.int64)
        y = ops.extreme_csr(rowptr, nothing, torch.ones(sources, width), "min")
        assert_same_bits(y, torch.zeros(rows, width))


def test_wrong_arguments_are_refused() -> None:
    csr, x = pattern(), with_ties(5, torch.float32)
    y = ops.extreme_csr(csr.rowptr, csr.col, x, "max")
    with pytest.raises(DataError, match="extreme_csr: expected 'rowptr' to run from 0"):
        ops.extreme_csr(csr.rowptr[:-9], csr.col, x, "max")
    with pytest.raises(DataError, match="extreme_csr: expected 'x' to have rows"):
        ops.extreme_csr(csr.rowptr, csr.col, x[:0], "max")
    with pytest.raises(DataError, match=r"extreme_csr_shares: expected 'y' to be a contiguous \[60, 5\] of Float"):
        ops.extreme_csr_shares(csr.rowptr, csr.col, x, y[:-1], y)
    with pytest.raises(DataError, match="extreme_csr_grad: expected 'x' to have the 50 rows"):
        ops.extreme_csr_grad(csr.transposed.rowptr, csr.transposed.col, x[1:], y, y)
    with pytest.raises(DataError, match="extreme_csr_grad: expected 'shares'"):
        ops.extreme_csr_grad(csr.transposed.rowptr, csr.transposed.col, x, y, y.double())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", REDUCES)
def test_the_gradient_that_is_differentiated_again(reduce: Literal["max", "min"], dtype: torch.dtype) -> None:
    x = with_ties(16, dtype).requires_grad_()
    total = extreme(x, pattern(30), reduce).sin().sum()
    (by_kernels,) = torch.autograd.grad(total, x, retain_graph=True)
    (by_edges,) = torch.autograd.grad(total, x, create_graph=True)
    torch.testing.assert_close(by_edges, by_kernels)


@pytest.mark.parametrize("again", [False, True], ids=["once", "differentiated again"])
def test_the_gradient_of_what_is_no_number_equals_torch(again: bool) -> None:
    csr, x = pattern(), with_ties(19, torch.float64)
    x[3, 5] = x[11, 6] = float("nan")
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    (got,) = torch.autograd.grad(extreme(ours, csr, "max").sum(), ours, create_graph=again)
    (expected,) = torch.autograd.grad(by_torch(theirs, csr, "max").sum(), theirs)
    assert expected.isnan().any()
    torch.testing.assert_close(got.detach(), expected, equal_nan=True)
