"""The native ops against their references, at every instruction set of this machine."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor
from torch.library import opcheck

from pyg_dist.backend import library, ops, reference
from pyg_dist.backend.csr import CSR
from pyg_dist.errors import DataError, OptionError, PygDistError, UnsupportedError

WIDTHS = [1, 2, 3, 7, 8, 16, 17, 47, 64, 100, 128, 129, 256, 602]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]
FACTORS = list(itertools.product([False, True], repeat=3))  # with or without weight, row_scale, col_scale
NUM_ROWS, NUM_SOURCES = 60, 50
LEVEL = os.environ.get("PYG_DIST_ISA")

native = torch.ops.pyg_dist


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small integers: every order of summation gives the same bits, so a kernel must equal its reference exactly."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reals(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def pattern(width: int, seed: int = 0, num_sources: int = NUM_SOURCES) -> tuple[Tensor, Tensor]:
    """Rows of 0 to 12 edges, empty ones at both ends and in runs, and two hubs that are cut into several pieces."""
    generator = torch.Generator().manual_seed(seed)
    degree = torch.randint(0, 13, (NUM_ROWS,), generator=generator)
    degree[:2] = degree[20:25] = degree[-1] = 0
    chunk = min(max(2**18 // width, 256), 16384)  # chunk_work of csrc/ops/spmm_csr_cpu.cpp
    degree[7], degree[8] = 3 * chunk + 5, chunk + 1
    rowptr = torch.zeros(NUM_ROWS + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=rowptr[1:])
    return rowptr, torch.randint(0, num_sources, (int(rowptr[-1]),), generator=generator, dtype=torch.int32)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factors", FACTORS, ids=str)
def test_spmm_equals_the_reference(width: int, dtype: torch.dtype, factors: tuple[bool, bool, bool]) -> None:
    rowptr, col = pattern(width)
    x = integers((NUM_SOURCES, width), dtype)
    sizes = (col.numel(), NUM_ROWS, NUM_SOURCES)
    weight, row_scale, col_scale = (
        integers((size,), sum_dtype(dtype), seed) if given else None
        for seed, (size, given) in enumerate(zip(sizes, factors, strict=True))
    )
    expected = reference.spmm_csr(rowptr, col, x, weight, row_scale=row_scale, col_scale=col_scale)
    y = ops.spmm_csr(rowptr, col, x, weight, row_scale=row_scale, col_scale=col_scale)
    assert y.dtype == dtype
    assert torch.equal(y, expected)

    # Accumulating into rows of a wider, longer tensor touches nothing beside them.
    whole = integers((NUM_ROWS + 2, width + 2), dtype, seed=9)
    expected_whole = whole.clone()
    reference.spmm_csr(rowptr, col, x, weight, row_scale=row_scale, col_scale=col_scale, out=expected_whole[1:-1, 1:-1])
    out = whole[1:-1, 1:-1]
    assert ops.spmm_csr(rowptr, col, x, weight, row_scale=row_scale, col_scale=col_scale, out=out) is out
    assert torch.equal(whole, expected_whole)
    expected_whole[1:-1, 1:-1] = expected
    ops.spmm_csr(rowptr, col, x, weight, row_scale=row_scale, col_scale=col_scale, out=out, accumulate=False)
    assert torch.equal(whole, expected_whole)


@pytest.mark.parametrize("width", [1, 7, 47, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spmm_divides(width: int, dtype: torch.dtype) -> None:
    """Sums are exact, so a quotient is rounded once: a factor 1 / r would be off in the last bit of thirds."""
    rowptr, col = pattern(width)
    x = integers((NUM_SOURCES, width), dtype)
    degree = rowptr.diff().clamp(min=1).to(sum_dtype(dtype))
    powers = 2.0 ** integers((NUM_SOURCES,), sum_dtype(dtype))
    expected = reference.spmm_csr(rowptr, col, x, row_scale=degree, col_scale=powers, divide=True)
    assert torch.equal(ops.spmm_csr(rowptr, col, x, row_scale=degree, col_scale=powers, divide=True), expected)
    out, expected_out = (integers((NUM_ROWS, width), dtype, seed=9) for _ in range(2))
    reference.spmm_csr(rowptr, col, x, row_scale=degree, divide=True, out=expected_out)
    ops.spmm_csr(rowptr, col, x, row_scale=degree, divide=True, out=out)
    assert torch.equal(out, expected_out)


@pytest.mark.parametrize("width", [47, 64, 100, 130])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spmm_by_column_blocks(width: int, dtype: torch.dtype) -> None:
    """Sources and edges enough for blocks (``ColumnBlocks`` of csrc/ops/spmm_csr_cpu.cpp), out of a wider tensor."""
    num_sources, num_edges = 50_000, 4 * 51_000
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, NUM_ROWS - 2, (num_edges,), generator=generator).sort().values
    rowptr = torch.zeros(NUM_ROWS + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(row, minlength=NUM_ROWS), 0, out=rowptr[1:])
    col = torch.randint(0, num_sources, (num_edges,), generator=generator, dtype=torch.int32)
    x = integers((num_sources, width + 3), dtype)[:, 1:-2]
    scales = [integers((n,), sum_dtype(dtype), seed=n) for n in (num_edges, NUM_ROWS, num_sources)]
    expected = reference.spmm_csr(rowptr, col, x, scales[0], row_scale=scales[1], col_scale=scales[2])
    assert torch.equal(ops.spmm_csr(rowptr, col, x, scales[0], row_scale=scales[1], col_scale=scales[2]), expected)
    powers = 2.0 ** scales[2]
    expected = reference.spmm_csr(rowptr, col, x, col_scale=powers, divide=True)
    assert torch.equal(ops.spmm_csr(rowptr, col, x, col_scale=powers, divide=True), expected)
    whole = integers((NUM_ROWS + 2, width + 2), dtype, seed=9)
    expected_whole = whole.clone()
    reference.spmm_csr(rowptr, col, x, out=expected_whole[1:-1, 1:-1])
    ops.spmm_csr(rowptr, col, x, out=whole[1:-1, 1:-1])
    assert torch.equal(whole, expected_whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spmm_of_reals(dtype: torch.dtype) -> None:
    rowptr, col = pattern(100)
    x, weight = reals(NUM_SOURCES, 100, dtype=dtype), reals(col.numel(), dtype=sum_dtype(dtype), seed=1)
    exact = reference.spmm_csr(rowptr, col, x.double(), weight.double())
    bound = reference.spmm_csr(rowptr, col, x.double().abs(), weight.double().abs())
    error = (ops.spmm_csr(rowptr, col, x, weight).double() - exact).abs()
    eps = torch.finfo(sum_dtype(dtype)).eps
    degree = rowptr.diff().double().view(-1, 1)
    rounding = exact.abs() * torch.finfo(dtype).eps  # of the output
    assert bool((error <= degree * eps * bound + rounding).all())


def test_spmm_does_not_depend_on_threads() -> None:
    rowptr, col = pattern(64)
    x = reals(NUM_SOURCES, 64)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3, 2):
            torch.set_num_threads(num_threads)
            results.append(ops.spmm_csr(rowptr, col, x))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], result) for result in results[1:])


def test_spmm_takes_columns_of_a_wider_tensor_vectors_and_transposes() -> None:
    rowptr, col = pattern(32)
    wide = integers((NUM_SOURCES, 40), torch.float32)
    assert torch.equal(ops.spmm_csr(rowptr, col, wide[:, 3:35]), reference.spmm_csr(rowptr, col, wide[:, 3:35]))
    assert torch.equal(ops.spmm_csr(rowptr, col, wide[:, 3]), reference.spmm_csr(rowptr, col, wide[:, 3]))
    transposed = integers((32, NUM_SOURCES), torch.float32).t()
    assert torch.equal(ops.spmm_csr(rowptr, col, transposed), reference.spmm_csr(rowptr, col, transposed))
    expanded = wide[:1].expand(NUM_SOURCES, 40)
    assert torch.equal(ops.spmm_csr(rowptr, col, expanded), reference.spmm_csr(rowptr, col, expanded))


def test_spmm_widens_bfloat16_factors() -> None:
    rowptr, col = pattern(8)
    x, weight = integers((NUM_SOURCES, 8), torch.bfloat16), integers((col.numel(),), torch.bfloat16)
    assert torch.equal(ops.spmm_csr(rowptr, col, x, weight), reference.spmm_csr(rowptr, col, x, weight))


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_zero_sizes(shape: tuple[int, int, int]) -> None:
    num_rows, num_sources, width = shape
    rowptr, col = torch.zeros(num_rows + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    x = torch.ones(num_sources, width)
    none = torch.zeros(0, dtype=torch.int64)
    assert torch.equal(ops.spmm_csr(rowptr, col, x), torch.zeros(num_rows, width))
    out = torch.ones(num_rows, width)
    assert torch.equal(ops.spmm_csr(rowptr, col, x, out=out), torch.ones(num_rows, width))
    assert ops.sddmm_csr(rowptr, col, torch.ones(num_rows, width), x).shape == (0,)
    assert ops.gather_rows(x, none).shape == (0, width)
    assert torch.equal(ops.scatter_add_rows(x.clone(), none, torch.ones(0, width)), x)
    key = torch.arange(num_sources)
    assert ops.keyed_dropout(x, key, 0.5, 0).shape == x.shape
    assert ops.keyed_uniform(key, width, 0).shape == ops.keyed_normal(key, width, 0).shape == x.shape


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sddmm_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    rowptr, col = pattern(max(width, 100))
    a, b = integers((NUM_ROWS, width), dtype), integers((NUM_SOURCES, width + 3), dtype, seed=1)[:, 1:-2]
    d = ops.sddmm_csr(rowptr, col, a, b)
    assert d.dtype == sum_dtype(dtype)
    assert torch.equal(d, reference.sddmm_csr(rowptr, col, a, b))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16, torch.int64, torch.int16, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("trailing", [(), (1,), (3,), (47,), (4, 5), (602,)], ids=str)
def test_gather_rows(dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    x = integers((30, *trailing), torch.int64).to(dtype)
    index = torch.randint(0, 30, (77,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.gather_rows(x, index), x[index])
    whole = torch.ones((79, *trailing), dtype=dtype)
    out = whole[1:-1]
    assert ops.gather_rows(x, index, out=out) is out
    assert torch.equal(out, x[index])
    assert bool((whole[0] == 1).all() and (whole[-1] == 1).all())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scatter_add_rows(width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    index = torch.randint(0, 20, (500,), generator=generator)
    rows = reals(500, width, dtype=dtype)
    whole = reals(22, width + 2, dtype=dtype, seed=1)
    expected = whole.clone()
    reference.scatter_add_rows(expected[1:-1, 1:-1], index, rows)
    out = whole[1:-1, 1:-1]
    assert ops.scatter_add_rows(out, index, rows) is out
    assert torch.equal(whole, expected)  # the same order of additions, so the same bits


def test_scatter_add_rows_does_not_depend_on_threads() -> None:
    index = torch.randint(0, 50, (20_000,), generator=torch.Generator().manual_seed(2))
    rows = reals(20_000, 16)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(ops.scatter_add_rows(torch.zeros(50, 16), index, rows))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], reference.scatter_add_rows(torch.zeros(50, 16), index, rows))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_philox_known_answers() -> None:
    """The vectors that Random123 ships for philox4x32-10."""
    pi = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0]
    for (c0, c1, c2, c3, k0, k1), words in [
        ([0] * 6, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([2**32 - 1] * 6, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (pi, [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
    ]:
        key = torch.tensor(np.array([c0 + (c1 << 32)], np.uint64).view(np.int64))
        assert reference.philox(k0 + (k1 << 32), key, np.array([c2], np.uint64), c3)[0].tolist() == words


KEYS = torch.tensor([0, 1, 2, 5, 17, 2**31, 2**32 + 3, 2**40, 2**62, -1] * 13)
OFFSETS = [0, 1, 6, 4095, 2**32 + 5]


@pytest.mark.parametrize("width", [*WIDTHS, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_keyed_ops_equal_the_reference(width: int, dtype: torch.dtype) -> None:
    x = reals(KEYS.numel(), width, dtype=dtype)
    for seed, offset in zip([0, 1, 2**63 + 7, 2**64 - 1, 12345], OFFSETS, strict=True):
        assert torch.equal(
            ops.keyed_dropout(x, KEYS, 0.3, seed, offset), reference.keyed_dropout(x, KEYS, 0.3, seed, offset)
        )
        args = (KEYS, width, seed, offset, dtype)
        assert torch.equal(ops.keyed_uniform(*args), reference.keyed_uniform(*args))
        normal = ops.keyed_normal(KEYS[:7], *args[1:])
        atol, rtol = (0, 2**-7) if dtype == torch.bfloat16 else (1e-12 if dtype == torch.float64 else 1e-6, 1e-6)
        torch.testing.assert_close(normal, reference.keyed_normal(KEYS[:7], *args[1:]), atol=atol + 1e-9, rtol=rtol)


def test_keyed_values_depend_on_key_and_column_only() -> None:
    n, width = 300, 53
    key = torch.randperm(10_000, generator=torch.Generator().manual_seed(0))[:n]
    x = torch.ones(n, width)
    chosen = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:40]
    functions = {
        "dropout": lambda rows, columns: ops.keyed_dropout(x[rows][:, columns], key[rows], 0.4, 7, columns.start),
        "uniform": lambda rows, columns: ops.keyed_uniform(key[rows], columns.stop - columns.start, 7, columns.start),
        "normal": lambda rows, columns: ops.keyed_normal(key[rows], columns.stop - columns.start, 7, columns.start),
    }
    everything = torch.arange(n)
    for function in functions.values():
        whole = function(everything, slice(0, width))
        assert torch.equal(function(chosen, slice(0, width)), whole[chosen])
        for cut in (1, 2, 4, 30):
            parts = [function(everything, slice(0, cut)), function(everything, slice(cut, width))]
            assert torch.equal(torch.cat(parts, 1), whole)


def test_keyed_values_do_not_depend_on_threads() -> None:
    x, key = torch.ones(5000, 33), torch.arange(5000)
    before = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            results.append(ops.keyed_dropout(x, key, 0.5, 3))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_right_share(p: float) -> None:
    n, width = 4000, 64
    y = ops.keyed_dropout(torch.ones(n, width), torch.arange(n), p, 42)
    kept = (y != 0).double()
    deviation = (p * (1 - p) / (n * width)) ** 0.5
    assert abs(float(kept.mean()) - (1 - p)) <= 5 * deviation
    assert set(y.unique().tolist()) <= {0.0, float(torch.tensor(1 / (1 - p)))} if p < 1 else not y.any()
    if 0 < p < 1:  # rows, columns and seeds are not correlated
        other = (ops.keyed_dropout(torch.ones(n, width), torch.arange(n), p, 43) != 0).double()
        for a, b in [(kept[1:], kept[:-1]), (kept[:, 1:], kept[:, :-1]), (kept[:, 4:], kept[:, :-4]), (kept, other)]:
            assert abs(float(np.corrcoef(a.flatten(), b.flatten())[0, 1])) < 0.012


def test_dropout_propagates_and_drops_non_finite_values() -> None:
    x = torch.full((200, 8), float("nan"))
    y = ops.keyed_dropout(x, torch.arange(200), 0.5, 0)
    kept = ops.keyed_dropout(torch.ones(200, 8), torch.arange(200), 0.5, 0) != 0
    assert torch.equal(y.isnan(), kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_uniform_and_normal_distributions(dtype: torch.dtype) -> None:
    key = torch.arange(3000)
    uniform = ops.keyed_uniform(key, 64, 5, dtype=dtype)
    assert bool((uniform >= 0).all() and (uniform < 1).all())
    assert scipy.stats.kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-3
    normal = ops.keyed_normal(key, 64, 5, dtype=dtype)
    assert scipy.stats.kstest(normal.flatten().numpy(), "norm").pvalue > 1e-3
    for values in (uniform, normal):
        correlation = np.corrcoef(values[:, :8].numpy(), rowvar=False) - np.eye(8)
        assert np.abs(correlation).max() < 0.09


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(7, 33), (3, 80_000), (1, 1031), (1, 1), (0, 5)], ids=str)
def test_relu_equals_its_reference(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = integers(size, dtype)
    x[:, 0] = float("nan")
    for keeps_mask in (True, False):
        for got, expected in zip(ops.relu(x, keeps_mask), reference.relu(x, keeps_mask), strict=True):
            assert torch.equal(got.nan_to_num(9.0), expected.nan_to_num(9.0))
    passed = ops.relu(x, True)[1]
    assert torch.equal(ops.relu_grad(x.nan_to_num().t(), passed), reference.relu_grad(x.nan_to_num().t(), passed))


def far_rows(num_rows: int, width: int) -> Tensor:
    """Rows 2^30 + 5 floats apart: offsets overflow 32 bits from the third one on. Only what is touched takes memory."""
    stride = 2**30 + 5
    return torch.empty((num_rows - 1) * stride + width).as_strided((num_rows, width), (stride, 1))


def test_offsets_beyond_32_bits() -> None:
    near = integers((3, 20), torch.float32)
    far, out = far_rows(3, 20), far_rows(3, 20)
    far.copy_(near)
    out.copy_(near)
    rowptr, col = torch.tensor([0, 1, 1, 4]), torch.tensor([2, 0, 1, 2], dtype=torch.int32)
    expected = near + reference.spmm_csr(rowptr, col, near)
    assert torch.equal(ops.spmm_csr(rowptr, col, far, out=out), expected)
    assert torch.equal(ops.sddmm_csr(rowptr, col, far, far), reference.sddmm_csr(rowptr, col, near, near))
    assert torch.equal(ops.extreme_csr(rowptr, col, far, "max"), reference.extreme_csr(rowptr, col, near, "max"))
    index = torch.tensor([2, 0, 2])
    assert torch.equal(ops.gather_rows(far, index), near[index])
    reference.scatter_add_rows(expected, index, near)
    assert torch.equal(ops.scatter_add_rows(out, index, far), expected)


def test_columns_beyond_32_bits_are_refused() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(OptionError, match=r"at most 2\*\*31 - 1 columns .* use more ranks"):
        CSR.from_edges(none, none, none, 1, 2**31)


def test_dropout_derivatives() -> None:
    x, key = reals(6, 5, dtype=torch.float64).requires_grad_(), torch.arange(6)
    assert torch.autograd.gradcheck(lambda x: ops.keyed_dropout(x, key, 0.5, 3), (x,))
    assert torch.autograd.gradgradcheck(lambda x: ops.keyed_dropout(x, key, 0.5, 3) ** 2, (x,))
    (grad,) = torch.autograd.grad(ops.keyed_dropout(x, key, 0.5, 3).sum(), x)
    assert torch.equal(grad, ops.keyed_dropout(torch.ones_like(x), key, 0.5, 3))
    three_dims = reals(6, 2, 3, dtype=torch.float64).requires_grad_()
    ops.keyed_dropout(three_dims, key, 0.5, 3).sum().backward()
    assert three_dims.grad is not None


def test_opcheck() -> None:
    rowptr, col = pattern(100)
    x, g = reals(NUM_SOURCES, 5), reals(NUM_ROWS, 5)
    weight, row_scale, col_scale = reals(col.numel()), reals(NUM_ROWS), reals(NUM_SOURCES)
    index, key = torch.tensor([3, 1, 3]), torch.arange(NUM_SOURCES)
    opcheck(native.spmm_csr.default, (rowptr, col, x, weight, row_scale, None, False))
    opcheck(native.spmm_csr.default, (rowptr, col, x.bfloat16(), None, None, col_scale, True))
    opcheck(native.spmm_csr_add.default, (g.clone(), rowptr, col, x, None, row_scale, col_scale, True))
    opcheck(native.spmm_csr_into.default, (g.clone(), rowptr, col, x, weight, None, col_scale, False))
    opcheck(native.sddmm_csr.default, (rowptr, col, g, x))
    opcheck(native.sddmm_csr.default, (rowptr, col, g.bfloat16(), x.bfloat16()))
    opcheck(native.gather_rows.default, (x, index))
    opcheck(native.gather_rows_into.default, (torch.zeros(3, 5), x, index))
    opcheck(native.scatter_add_rows.default, (x.clone(), index, g[:3]))
    opcheck(native.relu.default, (x, True))
    opcheck(native.relu_grad.default, (x, native.relu(x, True)[1]))
    opcheck(native.keyed_dropout.default, (x, key, 0.5, 1, 0))
    opcheck(native.keyed_dropout.default, (x.clone().requires_grad_(), key, 0.5, 1, 2))
    opcheck(native.keyed_uniform.default, (key, 6, 1, 0, torch.bfloat16))
    opcheck(native.keyed_normal.default, (key, 6, 1, 0, torch.float64))


ROWPTR, COL, X = torch.tensor([0, 1, 2]), torch.tensor([0, 1], dtype=torch.int32), torch.ones(3, 4)
INDEX, FALLING, FLAT = torch.tensor([0, 2]), torch.tensor([0, 3, 2]), torch.ones(8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.spmm_csr(ROWPTR.int(), COL, X), "'rowptr'.*Long.*Int"),
        (lambda: ops.spmm_csr(ROWPTR, COL.long(), X), "'col'.*Int.*Long"),
        (lambda: ops.spmm_csr(ROWPTR[:0], COL, X), "'rowptr'.*one entry more"),
        (lambda: ops.spmm_csr(ROWPTR[:2], COL, X), "from 0 to the 2 entries.*got 0 to 1"),
        (lambda: ops.spmm_csr(ROWPTR[1:], COL, X), "got 1 to 2"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X[:0]), "'x' to have rows for 2 edges"),
        (lambda: ops.spmm_csr(FALLING, COL, X), "'rowptr' not to decrease, got 2 after 3 at position 2"),
        (lambda: ops.sddmm_csr(FALLING, COL, X[:2], X), "sddmm_csr: expected 'rowptr' not to decrease"),
        (lambda: ops.extreme_csr(FALLING, COL, X, "max"), "extreme_csr: expected 'rowptr' not to decrease"),
        (lambda: ops.quantize_csr(FALLING, COL, X, 4), "quantize_csr: expected 'rowptr' not to decrease"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=X[:2]), "'out' to share no memory with 'x'"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, FLAT[:2], out=FLAT.view(2, 4)), "'out' to share no memory with 'weight'"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, row_scale=FLAT[6:], out=FLAT.view(2, 4)), "memory with 'row_scale'"),
        (lambda: ops.gather_rows(X, INDEX, out=X[1:]), "'out' to share no memory with 'x'"),
        (lambda: ops.scatter_add_rows(X, INDEX, X[1:]), "'out' to share no memory with 'rows'"),
        (lambda: ops.quantize_csr(ROWPTR, COL, X, 8, out=X.view(torch.uint8).view(6, 8)[:2]), "with 'x'"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X.half()), "'x' to be float32, float64 or bfloat16, got Half"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, torch.ones(3)), "'weight' to have 2 entries, got 3"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, torch.ones(2).double()), "'weight'.*Float.*Double"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, row_scale=torch.ones(3)), "'row_scale' to have 2 entries"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, col_scale=torch.ones(2)), "'col_scale' to have 3 entries"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=torch.ones(3, 4)), r"'out' to have shape \[2, 4\], got \[3, 4\]"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=torch.ones(2, 4).double()), "'out' to have the dtype of 'x'"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=torch.ones(4, 2).t()), "rows of 'out' to be contiguous"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=torch.ones(1, 4).expand(2, 4)), "rows of 'out' not to overlap"),
        (lambda: ops.spmm_csr(ROWPTR, COL, torch.tensor(1.0)), "without dimensions"),
        (lambda: ops.sddmm_csr(ROWPTR, COL, X, X), "'a' to have the 2 rows"),
        (lambda: ops.sddmm_csr(ROWPTR, COL, X[:2], X[:, :3]), "as many columns, got 4 and 3"),
        (lambda: ops.sddmm_csr(ROWPTR, COL, X[:2], X.double()), "'b' to have the dtype of 'a'"),
        (lambda: ops.gather_rows(X, INDEX + 1), r"\[0, 3\), got 3 at position 1"),
        (lambda: ops.gather_rows(X, INDEX - 1), r"\[0, 3\), got -1 at position 0"),
        (lambda: ops.gather_rows(X, INDEX.int()), "'index'.*Long.*Int"),
        (lambda: ops.gather_rows(X, INDEX, out=torch.ones(3, 4)), r"'out' to have shape \[2, 4\]"),
        (lambda: ops.scatter_add_rows(X.clone(), INDEX + 1, X[:2]), r"\[0, 3\), got 3 at position 1"),
        (lambda: ops.scatter_add_rows(X.clone(), INDEX, X), r"'rows' to have shape \[2, 4\], got \[3, 4\]"),
        (lambda: ops.scatter_add_rows(torch.ones(3, 2, 4)[:, :, :2], INDEX, torch.ones(2, 2, 2)), "contiguous rows"),
        (lambda: ops.keyed_dropout(X, torch.arange(2), 0.5, 0), "'key' to have 3 entries.*got 2"),
        (lambda: ops.keyed_dropout(X, torch.arange(3), 1.5, 0), r"'p' to lie in \[0, 1\], got 1.5"),
        (lambda: ops.keyed_dropout(X, torch.arange(3), 0.5, 0, -1), "'column_offset'.*got -1"),
        (lambda: ops.keyed_dropout(X.long(), torch.arange(3), 0.5, 0), "'x' to be float32.*got Long"),
        (lambda: ops.keyed_uniform(INDEX, -1, 0), "got 0 and -1"),
        (lambda: ops.keyed_uniform(INDEX, 3, 0, dtype=torch.int64), "'dtype' to be float32.*got Long"),
        (lambda: ops.keyed_normal(INDEX.int(), 3, 0), "'key'.*Long.*Int"),
    ],
)
def test_errors_are_one_line(call: object, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_other_columns_of_one_matrix_may_be_written() -> None:
    wide = torch.arange(24.0).view(3, 8)
    ops.spmm_csr(torch.tensor([0, 1, 2, 2]), COL, wide[:, 4:], out=wide[:, :4], accumulate=False)
    assert torch.equal(wide[:2, :4], wide[:2, 4:])
    assert not wide[2, :4].any()
    with pytest.raises(DataError, match="share no memory"):
        ops.spmm_csr(torch.tensor([0, 1, 2, 2]), COL, wide[:, 3:7], out=wide[:, :4])


@pytest.mark.parametrize(("row", "col"), [([0, 2], [0, 0]), ([0, -1], [0, 0]), ([0, 1], [3, 0]), ([0, 1], [0, -1])])
def test_a_pattern_has_its_entries_in_range(row: list[int], col: list[int]) -> None:
    with pytest.raises(DataError, match=r"rows in \[0, 2\) and columns in \[0, 3\)"):
        CSR.from_edges(torch.tensor(row), torch.tensor(col), torch.arange(2), 2, 3)


def test_a_failed_scatter_leaves_out_alone() -> None:
    out = torch.zeros(3, 2)
    with pytest.raises(DataError):
        ops.scatter_add_rows(out, torch.tensor([0, 3]), torch.ones(2, 2))
    assert not out.any()


def test_other_layouts_are_refused_in_one_line() -> None:
    with pytest.raises(UnsupportedError, match="spmm_csr: expected dense tensors on cpu") as caught:
        ops.spmm_csr(ROWPTR, COL, X.to_sparse())
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, PygDistError)


def test_isa_and_build_info() -> None:
    info = library.build_info()
    assert set(info) == {"version", "torch", "compiler", "levels"}
    assert library.isa() in info["levels"].split(",")
    assert LEVEL is None or library.isa() == LEVEL


def run_with_isa(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Threads sleep while they wait: tests may share the machine with others."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYG_DIST_ISA": isa, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_unknown_isa_is_refused() -> None:
    result = run_with_isa("avx1024", "-c", "from pyg_dist.backend import ops")
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert "OptionError: PYG_DIST_ISA: expected an instruction set of this machine" in last
    assert "got 'avx1024'" in last


@pytest.mark.skipif(LEVEL is not None, reason="runs all the others")
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(isa: str) -> None:
    if isa not in library.build_info()["levels"].split(","):
        pytest.skip(f"this build has no {isa}")
    if run_with_isa(isa, "-c", "from pyg_dist.backend import ops").returncode != 0:
        pytest.skip(f"this machine has no {isa}")
    if isa == library.isa():
        return  # this very run
    kernels = "spmm or sddmm or rows or keyed or quantize or isa_and"
    files = __file__, str(Path(__file__).with_name("test_quantize.py"))
    result = run_with_isa(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", kernels, *files)
    assert result.returncode == 0, result.stdout[-3000:]
