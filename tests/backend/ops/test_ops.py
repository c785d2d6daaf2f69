"""The native ops against their references."""

from __future__ import annotations

import itertools

import pytest
import reference_ops as reference
import torch
from bits import assert_same_bits
from op_inputs import (
    DTYPES,
    IS_FORCED,
    IS_SIMT,
    NUM_ROWS,
    NUM_SOURCES,
    WIDTHS,
    equal_bits,
    integers,
    pattern,
    reals,
    sum_dtype,
)
from torch import Tensor
from torch.library import opcheck

from pyg_dist.backend import ops
from pyg_dist.backend.ops import library

FACTORS = [t for t in itertools.product([False, True], repeat=3) if sum(t) != 2][:: 2 if IS_FORCED else 1]
"""With or without weight, row_scale, col_scale."""

native = torch.ops.pyg_dist


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spmm_equals_the_reference(width: int, dtype: torch.dtype) -> None:
    """Half of the factors for each width and dtype: every width, and every dtype, with each of them."""
    for factors in FACTORS[(WIDTHS.index(width) + DTYPES.index(dtype)) % 2 :: 2]:
        check_spmm(width, dtype, factors)


def check_spmm(width: int, dtype: torch.dtype, factors: tuple[bool, bool, bool]) -> None:
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
    assert_same_bits(y, expected)

    # Accumulating into rows of a wider, longer tensor touches nothing beside them.
    whole = integers((NUM_ROWS + 2, width + 2), dtype, seed=9)
    expected_whole = whole.clone()
    reference.spmm_csr(rowptr, col, x, weight, row_scale=row_scale, col_scale=col_scale, out=expected_whole[1:-1, 1:-1])
    out = whole[1:-1, 1:-1]
    assert ops.spmm_csr(rowptr, col, x, weight, row_scale=row_scale, col_scale=col_scale, out=out) is out
    assert_same_bits(whole, expected_whole)
    expected_whole[1:-1, 1:-1] = expected
    ops.spmm_csr(rowptr, col, x, weight, row_scale=row_scale, col_scale=col_scale, out=out, accumulate=False)
    assert_same_bits(whole, expected_whole)


def test_spmm_of_few_dense_rows() -> None:
    """More bytes of columns than a GPU's second-level cache has, each read often: half as many columns at a time."""
    num_sources, degree, width = 66_000, 300, 128
    x = integers((num_sources, width), torch.float32)
    rowptr = torch.arange(4) * degree
    col = torch.randint(0, num_sources, (int(rowptr[-1]),), generator=torch.Generator().manual_seed(0)).int()
    assert_same_bits(ops.spmm_csr(rowptr, col, x), x[col.long()].view(3, degree, width).sum(1))


@pytest.mark.parametrize("width", [1, 7, 47, 256])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_spmm_divides(width: int, dtype: torch.dtype) -> None:
    """Sums are exact, so a quotient is rounded once: a factor 1 / r would be off in the last bit of thirds."""
    rowptr, col = pattern(width)
    x = integers((NUM_SOURCES, width), dtype)
    degree = rowptr.diff().clamp(min=1).to(sum_dtype(dtype))
    powers = 2.0 ** integers((NUM_SOURCES,), sum_dtype(dtype))
    expected = reference.spmm_csr(rowptr, col, x, row_scale=degree, col_scale=powers, divide=True)
    assert_same_bits(ops.spmm_csr(rowptr, col, x, row_scale=degree, col_scale=powers, divide=True), expected)
    out, expected_out = (integers((NUM_ROWS, width), dtype, seed=9) for _ in range(2))
    reference.spmm_csr(rowptr, col, x, row_scale=degree, divide=True, out=expected_out)
    ops.spmm_csr(rowptr, col, x, row_scale=degree, divide=True, out=out)
    assert_same_bits(out, expected_out)


@pytest.mark.parametrize(
    ("width", "dtype"), [(47, torch.float64), (64, torch.float32), (130, torch.bfloat16), (130, torch.float32)], ids=str
)
def test_spmm_by_column_blocks(width: int, dtype: torch.dtype) -> None:
    """As many sources and edges as ``ColumnBlocks`` of csrc/ops/cpu/spmm_csr.cpp need, out of a wider tensor."""
    if IS_SIMT and width != 47:
        pytest.skip("one width is enough there")
    num_sources = (8 << 20) // (64 * -(-width * dtype.itemsize // 64)) + 1
    num_edges = 4 * (NUM_ROWS + num_sources)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(0, NUM_ROWS - 2, (num_edges,), generator=generator).sort().values
    rowptr = torch.zeros(NUM_ROWS + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(row, minlength=NUM_ROWS), 0, out=rowptr[1:])
    col = torch.randint(0, num_sources, (num_edges,), generator=generator, dtype=torch.int32)
    x = integers((num_sources, width + 3), dtype)[:, 1:-2]
    assert IS_SIMT or ops.guessed_form(rowptr, col, x) is not None, "there are two forms"
    scales = [integers((n,), sum_dtype(dtype), seed=n) for n in (num_edges, NUM_ROWS, num_sources)]
    powers = 2.0 ** scales[2]
    scaled = reference.spmm_csr(rowptr, col, x, scales[0], row_scale=scales[1], col_scale=scales[2])
    divided = reference.spmm_csr(rowptr, col, x, col_scale=powers, divide=True)
    whole = integers((NUM_ROWS + 2, width + 2), dtype, seed=9)
    added = whole.clone()
    reference.spmm_csr(rowptr, col, x, out=added[1:-1, 1:-1])
    ways = [ops.SpmmWay("plain"), ops.SpmmWay("blocks"), ops.SpmmWay("plain", 0), ops.SpmmWay("blocks", 1 << 20)]
    for form in ways[: 1 if IS_SIMT else None]:  # GPUs have one form
        got = ops.spmm_csr(rowptr, col, x, scales[0], row_scale=scales[1], col_scale=scales[2], form=form)
        assert_same_bits(got, scaled)
        assert_same_bits(ops.spmm_csr(rowptr, col, x, col_scale=powers, divide=True, form=form), divided)
        out = whole.clone()
        ops.spmm_csr(rowptr, col, x, out=out[1:-1, 1:-1], form=form)
        assert_same_bits(out, added)


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
    assert all(equal_bits(results[0], result) for result in results[1:])


def test_spmm_takes_columns_of_a_wider_tensor_vectors_and_transposes() -> None:
    rowptr, col = pattern(32)
    wide = integers((NUM_SOURCES, 40), torch.float32)
    assert_same_bits(ops.spmm_csr(rowptr, col, wide[:, 3:35]), reference.spmm_csr(rowptr, col, wide[:, 3:35]))
    assert_same_bits(ops.spmm_csr(rowptr, col, wide[:, 3]), reference.spmm_csr(rowptr, col, wide[:, 3]))
    transposed = integers((32, NUM_SOURCES), torch.float32).t()
    assert_same_bits(ops.spmm_csr(rowptr, col, transposed), reference.spmm_csr(rowptr, col, transposed))
    expanded = wide[:1].expand(NUM_SOURCES, 40)
    assert_same_bits(ops.spmm_csr(rowptr, col, expanded), reference.spmm_csr(rowptr, col, expanded))


@pytest.mark.parametrize("width", [1, 17, 32])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_spmm_rounds_sixteen_bits_as_torch_does(width: int, dtype: torch.dtype) -> None:
    """Every number of 16 bits to float32 and back, and float32 numbers of every size to 16 bits."""
    if IS_SIMT and width != 17:
        pytest.skip("one width is enough there")
    whole = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    real = torch.randint(-(2**31), 2**31, (len(whole),), generator=generator).to(torch.int32).view(torch.float32)
    ties = whole.float() * (1 + torch.finfo(dtype).eps / 2)
    rowptr, col = torch.arange(len(whole) + 1), torch.arange(len(whole), dtype=torch.int32)
    rows = whole.view(-1, 1).expand(-1, width).contiguous()
    assert equal_bits(ops.spmm_csr(rowptr, col, rows), rows + 0)  # sums begin with 0, which -0.0 leaves
    ones = torch.ones_like(rows)
    for scale in (real, ties):
        expected = scale.to(dtype).view(-1, 1).expand(-1, width)
        assert equal_bits(ops.spmm_csr(rowptr, col, ones, row_scale=scale), expected)


def test_spmm_widens_bfloat16_factors() -> None:
    rowptr, col = pattern(8)
    x, weight = integers((NUM_SOURCES, 8), torch.bfloat16), integers((col.numel(),), torch.bfloat16)
    assert_same_bits(ops.spmm_csr(rowptr, col, x, weight), reference.spmm_csr(rowptr, col, x, weight))


@pytest.mark.parametrize("shape", [(0, 5, 3), (4, 0, 3), (4, 5, 0), (0, 0, 0)])
def test_zero_sizes(shape: tuple[int, int, int]) -> None:
    num_rows, num_sources, width = shape
    rowptr, col = torch.zeros(num_rows + 1, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)
    x = torch.ones(num_sources, width)
    none = torch.zeros(0, dtype=torch.int64)
    assert_same_bits(ops.spmm_csr(rowptr, col, x), torch.zeros(num_rows, width))
    out = torch.ones(num_rows, width)
    assert_same_bits(ops.spmm_csr(rowptr, col, x, out=out), torch.ones(num_rows, width))
    assert ops.sddmm_csr(rowptr, col, torch.ones(num_rows, width), x).shape == (0,)
    assert ops.gather_rows(x, none).shape == (0, width)
    assert_same_bits(ops.scatter_add_rows(x.clone(), none, torch.ones(0, width)), x)
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
    assert_same_bits(d, reference.sddmm_csr(rowptr, col, a, b))


@pytest.mark.parametrize("width", [1, 2, 3, 16, 17])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sddmm_of_negative_zeros_is_zero(width: int, dtype: torch.dtype) -> None:
    """Sums begin with 0, as torch's do: adding -0.0 to it leaves 0."""
    rowptr, col = torch.tensor([0, 1]), torch.zeros(1, dtype=torch.int32)
    a, b = torch.full((1, width), -3.0, dtype=dtype), torch.zeros(1, width, dtype=dtype)
    assert_same_bits(ops.sddmm_csr(rowptr, col, a, b), torch.zeros(1, dtype=sum_dtype(dtype)))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.int16, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("trailing", [(), (1,), (3,), (47,), (4, 5), (602,)], ids=str)
def test_gather_rows(dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    x = integers((30, *trailing), torch.int64).to(dtype)
    index = torch.randint(0, 30, (77,), generator=torch.Generator().manual_seed(1))
    assert_same_bits(ops.gather_rows(x, index), x[index])
    whole = torch.ones((79, *trailing), dtype=dtype)
    out = whole[1:-1]
    assert ops.gather_rows(x, index, out=out) is out
    assert_same_bits(out, x[index])
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
    assert_added(whole, expected)


def assert_added(got: Tensor, expected: Tensor) -> None:
    """The same order of additions has the same bits; kernels for GPUs cut wide sums of many rows."""
    if library.isa() == "simt" and got.dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 if got.dtype == torch.float32 else 1e-12)
    else:
        assert_same_bits(got, expected)


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
    assert_added(results[0], reference.scatter_add_rows(torch.zeros(50, 16), index, rows))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [(7, 33), (3, 80_000), (1, 1031), (1, 1), (0, 5)], ids=str)
def test_relu_equals_its_reference(size: tuple[int, int], dtype: torch.dtype) -> None:
    x = integers(size, dtype)
    x[:, 0] = float("nan")
    x[:, -1:] = -0.0
    for keeps_mask in (True, False):
        for got, expected in zip(ops.relu(x, keeps_mask), reference.relu(x, keeps_mask), strict=True):
            assert torch.equal(got.isnan(), expected.isnan())
            assert_same_bits(got[~got.isnan()], expected[~expected.isnan()])  # a NaN has a sign, which nothing reads
    passed = ops.relu(x, True)[1]
    grad = x.t().contiguous()
    grad[-1:] = float("-inf")
    assert_same_bits(ops.relu_grad(grad, passed), reference.relu_grad(grad, passed))
    assert not reference.relu_grad(grad, torch.zeros_like(passed)).any(), "zero, not zero times infinity"


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
    assert_same_bits(ops.spmm_csr(rowptr, col, far, out=out), expected)
    assert_same_bits(ops.sddmm_csr(rowptr, col, far, far), reference.sddmm_csr(rowptr, col, near, near))
    assert_same_bits(ops.extreme_csr(rowptr, col, far, "max"), reference.extreme_csr(rowptr, col, near, "max"))
    index = torch.tensor([2, 0, 2])
    assert_same_bits(ops.gather_rows(far, index), near[index])
    reference.scatter_add_rows(expected, index, near)
    assert_same_bits(ops.scatter_add_rows(out, index, far), expected)


@pytest.mark.slow
def test_opcheck() -> None:
    rowptr, col = pattern(100)
    x, g = reals(NUM_SOURCES, 5), reals(NUM_ROWS, 5)
    weight, row_scale, col_scale = reals(col.numel()), reals(NUM_ROWS), reals(NUM_SOURCES)
    index, key = torch.tensor([3, 1, 3]), torch.arange(NUM_SOURCES)
    opcheck(native.spmm_csr.default, (rowptr, col, x, weight, row_scale, None, False, 0, 32))
    opcheck(native.spmm_csr.default, (rowptr, col, x.bfloat16(), None, None, col_scale, True, 1, 32))
    opcheck(native.spmm_csr_add.default, (g.clone(), rowptr, col, x, None, row_scale, col_scale, True, 2, 32))
    opcheck(native.spmm_csr_into.default, (g.clone(), rowptr, col, x, weight, None, col_scale, False, 0, 32))
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
