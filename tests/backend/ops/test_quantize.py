"""Quantized rows against the reference, and as random variables: every instruction set by ``test_ops_isa.py``."""

from __future__ import annotations

import warnings

import pytest
import reference_ops as reference
import torch
from op_inputs import DTYPES, IS_SIMT
from torch import Tensor
from torch.library import opcheck

from pyg_dist.backend import ops
from pyg_dist.backend.comm.codec import EXACT, Quantized
from pyg_dist.backend.ops.quantize import packed_row_bytes
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.errors import DataError, NotFiniteError

BITS = [2, 4, 8, 16]
WIDTHS = [1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 33, 47, 64, 100, 129, 256, 602, 20_000]
if IS_SIMT:
    WIDTHS = [1, 3, 7, 16, 33, 129, 602]
NUM_SOURCES, NUM_ROWS = 40, 30

native = torch.ops.pyg_dist


def pattern(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Ten rows of one entry each, then rows of none to three."""
    generator = torch.Generator().manual_seed(seed)
    degree = torch.randint(0, 4, (NUM_ROWS,), generator=generator)
    degree[:10] = 1
    rowptr = torch.zeros(NUM_ROWS + 1, dtype=torch.int64)
    torch.cumsum(degree, 0, out=rowptr[1:])
    return rowptr, torch.randint(0, NUM_SOURCES, (int(rowptr[-1]),), generator=generator, dtype=torch.int32)


def quarters(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Multiples of 1/4, whose sums are exact in any order; some rows constant, some zero."""
    values = torch.randint(-40, 41, shape, generator=torch.Generator().manual_seed(seed)).to(dtype) / 4
    values[3:5] = torch.tensor([[0.0], [2.5]]).to(dtype)
    return values + 0.0  # no negative zeros: a sum that starts from zero has none


def identity(num_rows: int) -> tuple[Tensor, Tensor]:
    return torch.arange(num_rows + 1), torch.arange(num_rows, dtype=torch.int32)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantize_equals_the_reference(bits: int, dtype: torch.dtype) -> None:
    """Bit for bit, gathered or summed, with factors and without, at random and to nearest, and so does the way back."""
    rowptr, col = pattern()
    sums = torch.float64 if dtype == torch.float64 else torch.float32
    weight = torch.randint(1, 4, (col.numel(),), generator=torch.Generator().manual_seed(2)).to(sums)
    scale = torch.randint(1, 3, (NUM_SOURCES,), generator=torch.Generator().manual_seed(3)).to(sums)
    key = torch.randint(-(2**62), 2**62, (NUM_ROWS,), generator=torch.Generator().manual_seed(4))
    back, back_col = pattern(5)
    back_col = back_col % NUM_ROWS
    for turn, width in enumerate(WIDTHS, start=DTYPES.index(dtype)):
        x = quarters(NUM_SOURCES, width + 3, dtype=dtype)[:, 1:-2]
        for place, factors in enumerate(({}, {"weight": weight}, {"col_scale": scale})):
            # By turns one of both: each width and each dtype with each of the six.
            options = {"key": (None, key)[(turn + place) % 2], "seed": 2**63 + 12345, **factors}
            packed = ops.quantize_csr(rowptr, col, x, bits, **options)  # type: ignore[arg-type]
            assert packed.shape == (NUM_ROWS, packed_row_bytes(width, bits))
            assert torch.equal(packed, reference.quantize_csr(rowptr, col, x, bits, **options)), (width, options)  # type: ignore[arg-type]
        for factors in ({}, {"weight": weight.new_ones(back_col.numel()) * 2, "row_scale": scale[:NUM_ROWS]}):
            whole = quarters(NUM_ROWS + 2, width + 2, dtype=dtype, seed=9)
            expected = whole.double()
            reference.dequantize_csr_add(expected[1:-1, 1:-1], back, back_col, packed, bits, **factors)  # type: ignore[arg-type]
            out = whole[1:-1, 1:-1]
            assert ops.dequantize_csr_add(out, back, back_col, packed, bits, **factors) is out  # type: ignore[arg-type]
            tolerance = 2**-7 if dtype.itemsize == 2 else 1e-5
            torch.testing.assert_close(whole.double(), expected, rtol=tolerance, atol=1e-5 * expected.abs().max())
            whole[1:-1, 1:-1] = expected[1:-1, 1:-1].to(dtype)
            assert torch.equal(whole, expected.to(dtype))  # nothing beside it was touched


@pytest.mark.parametrize("bits", BITS)
def test_as_many_edges_as_rows(bits: int) -> None:
    """One each, as in messages of rows, with factors and without; or not, which a device cannot know beforehand."""
    generator, key = torch.Generator().manual_seed(0), torch.arange(NUM_ROWS)
    col = torch.randint(0, NUM_SOURCES, (NUM_ROWS,), generator=generator, dtype=torch.int32)
    weight, scale = (torch.randint(1, 4, (n,), generator=generator).float() for n in (NUM_ROWS, NUM_SOURCES))
    even = torch.arange(NUM_ROWS + 1)
    uneven = even.clone()
    uneven[3], uneven[7:9] = 4, 6  # of no edges, one, two and three
    for width in (3, 129):
        x = quarters(NUM_SOURCES, width)
        for rowptr in (even, uneven):
            for factors in ({}, {"weight": weight}, {"weight": weight, "col_scale": scale}):
                packed = ops.quantize_csr(rowptr, col, x, bits, key=key, seed=5, **factors)  # type: ignore[arg-type]
                expected = reference.quantize_csr(rowptr, col, x, bits, key=key, seed=5, **factors)  # type: ignore[arg-type]
                assert torch.equal(packed, expected), (width, factors)


def test_hubs_are_cut_by_work() -> None:
    """Rows of more edges than a chunk of work: sums of pieces, the same for any number of threads."""
    generator = torch.Generator().manual_seed(0)
    degree = torch.tensor([3, 1, 40_000, 0, 17_000, 1])
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    col = torch.randint(0, NUM_SOURCES, (int(rowptr[-1]),), generator=generator, dtype=torch.int32)
    for dtype in (d for d in DTYPES if d != torch.float16):  # which does not hold such sums
        x = quarters(NUM_SOURCES, 16, dtype=dtype)
        weight = torch.randint(1, 4, (col.numel(),), generator=generator).to(ops.sum_dtype(x))
        scale, options = weight[:6], {"key": torch.arange(6), "seed": 3}
        before, results = torch.get_num_threads(), []
        try:
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                packed = ops.quantize_csr(rowptr, col, x, 4, weight, **options)  # type: ignore[arg-type]
                rows = ops.quantize_csr(*identity(NUM_SOURCES), x, 8)
                out = quarters(6, 16, dtype=dtype, seed=7)
                results.append((packed, ops.dequantize_csr_add(out, rowptr, col, rows, 8, weight, row_scale=scale)))
        finally:
            torch.set_num_threads(before)
        assert torch.equal(packed, reference.quantize_csr(rowptr, col, x, 4, weight, **options))  # type: ignore[arg-type]
        expected = quarters(6, 16, dtype=dtype, seed=7).double()
        reference.dequantize_csr_add(expected, rowptr, col, rows, 8, weight, row_scale=scale)
        tolerance = 2**-7 if dtype.itemsize == 2 else 1e-3  # float32 sums of 40,000 terms
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=1e-3 * expected.abs().max())
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)
    x = quarters(NUM_SOURCES, 16)
    x[int(col[rowptr[3] - 1])] = float("nan")
    with pytest.raises(NotFiniteError, match="got NaN in row 2"):
        ops.quantize_csr(torch.tensor([0, 0, 0, 40_000]), col[rowptr[2] : rowptr[3]], x, 4)


def test_numbers_depend_on_seed_key_and_column_only() -> None:
    x = torch.randn(50, 77, generator=torch.Generator().manual_seed(0))
    rowptr, col = identity(50)
    key = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:50]
    whole = ops.quantize_csr(rowptr, col, x, 2, key=key, seed=5)
    few = torch.tensor([40, 3, 17])
    assert torch.equal(ops.quantize_csr(*identity(3), x[few], 2, key=key[few], seed=5), whole[few])
    assert not torch.equal(ops.quantize_csr(rowptr, col, x, 2, key=key, seed=6), whole)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        many = torch.randint(0, 50, (500 if IS_SIMT else 20_000,), generator=torch.Generator().manual_seed(2))
        again = ops.quantize_csr(torch.arange(len(many) + 1), many.int(), x, 2, key=key[many], seed=5)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(again, whole[many])


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_unbiased_and_within_one_step(bits: int) -> None:
    """10,000 draws of each value: the mean is the value within five standard errors, each draw within a step."""
    num_draws, width = 10_000, 61
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1], [1e-20], [1e20], [3], [1]]
    )
    x[3], x[4] = 0.7, torch.linspace(-1000, -999, width)
    for row in x:
        packed = ops.quantize_csr(
            torch.arange(num_draws + 1), torch.zeros(num_draws, dtype=torch.int32), row[None], bits,
            key=torch.arange(num_draws), seed=3,
        )  # fmt: skip
        draws = reference.dequantize(packed, width, bits).double()
        step = packed[0, 2:4].view(torch.bfloat16).double()
        rounding = 2**-23 * row.double().abs()  # of Z + S q, in float32
        assert bool(((draws - row).abs() <= step + rounding).all())
        error = (draws.mean(0) - row).abs()
        spread = draws.std(0) / num_draws**0.5
        assert bool((error <= 5 * spread + 2**-16 * step + rounding).all())
        # All columns together: the shared byte of packed_rows.h does not tie them.
        total = (draws.sum(1) - row.double().sum()) / step
        expected = (draws.var(0).sum() / step**2).sqrt()
        assert bool(((total.std() - expected).abs() <= 0.06 * expected + 1e-6).all())


def test_nearest_is_within_half_a_step() -> None:
    x = torch.randn(100, 50, generator=torch.Generator().manual_seed(0))
    for bits in (2, 4, 8):
        packed = ops.quantize_csr(*identity(100), x, bits)
        step = packed[:, 2:4].contiguous().view(torch.bfloat16).double()
        assert bool(((reference.dequantize(packed, 50, bits) - x).abs() <= 0.5001 * step).all())


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_extreme_rows(bits: int) -> None:
    """Constant rows come back rounded outward at most; tiny, huge and negative ones within a step."""
    rows = [0.0, -0.0, 2.5, -2.5, 1e-44, -1e-44, 1e-36, 3e38, -3e38]
    x = torch.tensor(rows)[:, None].expand(-1, 9).contiguous()
    x = torch.cat(
        [x, torch.tensor([[1e-44, 2e-44], [-1.6e38, 1.6e38], [1.0, 1.0 + 2**-23]]).repeat_interleave(9, 1)[:, 4:13]]
    )
    packed = ops.quantize_csr(*identity(len(x)), x, bits, key=torch.arange(len(x)), seed=1)
    assert torch.equal(packed, reference.quantize_csr(*identity(len(x)), x, bits, key=torch.arange(len(x)), seed=1))
    step = packed[:, 2:4].contiguous().view(torch.bfloat16).double()
    back = reference.dequantize(packed, 9, bits).double()
    assert bool(((back - x.double()).abs() <= step).all())
    assert torch.equal(back[:4], x[:4].double())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3.4e38])
def test_what_is_not_finite_is_refused(value: float) -> None:
    for width in (1, 9, 100):
        x = torch.ones(4, width)
        x[2, width - 1] = value
        if value == 3.4e38:
            x[2, 0] = -value  # each is finite, their distance is not
        for key in (None, torch.arange(4)):
            with pytest.raises(DataError, match=r"expected finite values .* row 2") as caught:
                ops.quantize_csr(*identity(4), x, 2, key=key)
            assert "\n" not in str(caught.value)
        with pytest.raises(NotFiniteError, match=r"row 2: bfloat16 holds 3.3895e\+38"):
            ops.quantize_csr(*identity(4), x, 16)  # 3.4e38 rounds to infinity


def test_what_is_refused_is_told_apart() -> None:
    """The first row in question, what it holds, and whether that is finite."""
    wide = torch.tensor([[1e39, -1e39]], dtype=torch.float64)
    for x, bits, got, is_finite in (
        (torch.tensor([[1.0, float("nan")]]), 2, "NaN", False),
        (torch.tensor([[1.0, -float("inf")]]), 8, "an infinity", False),
        (torch.tensor([[2e38, -2e38]]), 4, "values from -2e+38 to 2e+38", True),
        (wide, 2, "values from -1e+39 to 1e+39", True),
        (wide, 16, "values from -1e+39 to 1e+39", True),
        (torch.tensor([[3.39e38, -3.4e38]]), 16, "values from -3.4e+38 to 3.39e+38", True),
    ):
        rows = torch.cat([torch.zeros(9, 2), x, torch.zeros(9, 2), x])
        with pytest.raises(NotFiniteError) as caught:
            ops.quantize_csr(*identity(len(rows)), rows, bits)
        assert (caught.value.row, caught.value.got, caught.value.is_finite) == (9, got, is_finite)
    sums, half = (torch.tensor([0, 0, 2]), torch.tensor([0, 0], dtype=torch.int32)), torch.full((2,), 0.5).double()
    with pytest.raises(NotFiniteError, match=r"values from -2e[+]39 to 2e[+]39 in row 1"):
        ops.quantize_csr(*sums, wide, 2, half, col_scale=torch.tensor([2.0]).double())


@pytest.mark.parametrize("bits", BITS)
def test_zero_sizes(bits: int) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    for num_rows, width in ((0, 5), (4, 0), (0, 0)):
        packed = ops.quantize_csr(torch.zeros(num_rows + 1, dtype=torch.int64), none, torch.ones(3, width), bits)
        assert packed.shape == (num_rows, packed_row_bytes(width, bits))
    empty = ops.quantize_csr(torch.zeros(3, dtype=torch.int64), none, torch.ones(3, 5), bits)
    assert not empty.any()  # sums of nothing
    out = torch.ones(2, 5)
    assert torch.equal(
        ops.dequantize_csr_add(out, torch.zeros(3, dtype=torch.int64), none, empty, bits), torch.ones(2, 5)
    )


def test_row_bytes_at_width_256() -> None:
    assert [1024 / packed_row_bytes(256, bits) for bits in (16, 8, 4, 2)] == [2, 1024 / 260, 1024 / 132, 1024 / 68]


X = torch.ones(3, 8)
PACKED = ops.quantize_csr(*identity(3), X, 4)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.quantize_csr(*identity(3), X, 3), "'bits' to be 2, 4, 8 or 16, got 3"),
        (lambda: ops.quantize_csr(*identity(3), X, 4, key=torch.arange(2)), "'key' to have 3 entries, got 2"),
        (lambda: ops.quantize_csr(*identity(3), X.int(), 4), "'x' to be float32.*got Int"),
        (lambda: ops.quantize_csr(*identity(3), X, 4, out=PACKED[:, 1:]), "uint8 rows of 8 bytes"),
        (lambda: ops.quantize_csr(*identity(3), X, 4, out=PACKED[:2]), "'packed' to have 3 rows, got 2"),
        (lambda: ops.dequantize_csr_add(torch.ones(3, 9), *identity(3), PACKED, 4), "rows of 9 bytes, got shape"),
        (lambda: ops.dequantize_csr_add(torch.ones(2, 8), *identity(3), PACKED, 4), "'out' to have 3 rows, got 2"),
        (lambda: ops.dequantize_csr_add(torch.ones(3, 8), *identity(3), PACKED, 8), "rows of 12 bytes"),
    ],
)
def test_errors_are_one_line(call: object, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_opcheck() -> None:
    rowptr, col = identity(3)
    weight = torch.ones(3)
    packed, bad_row = PACKED.clone(), torch.zeros(1, dtype=torch.int64)
    key = torch.arange(3)
    opcheck(native.quantize_csr_into.default, (packed, bad_row, rowptr, col, X, weight, None, 4, key, 1))
    opcheck(native.dequantize_csr_add.default, (X.clone(), rowptr, col, PACKED, weight, None, 4))


def test_codecs_are_the_same_only_where_they_are_one() -> None:
    two, eight = (Quantized(bits, None, bits, str) for bits in (2, 8))
    assert two != eight
    assert len({two, eight, EXACT}) == 3


@pytest.mark.parametrize(
    ("offset", "spread", "seed", "is_told"),
    [(1000.0, 1.0, 16, True), (-1000.0, 1.0, 1 << 63, True), (1000.0, 1.0, 17, False), (10.0, 1.0, 16, False),
     (1.0, 0.0, 16, False)],
)  # fmt: skip
def test_offsets_that_dwarf_the_spread_are_told(offset: float, spread: float, seed: int, is_told: bool) -> None:
    """Some calls look, so that it costs nothing; rows of ones are held as they are."""
    x = offset + spread * torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    codec = Quantized(2, torch.arange(40), seed, lambda: "'conv1' (GCNConv(64, 8))")
    message = torch.empty(40, codec.row_bytes(64, torch.float32), dtype=torch.uint8)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        codec.pack(message, Matrix(CSR.identity(40, x.device)), x)
    what = "features" if seed < 1 << 63 else "gradients"
    expected = f"Most {what} in the messages of 'conv1' (GCNConv(64, 8)) lie so far from zero that 2 bits hold them"
    assert [str(w.message).startswith(expected) for w in told] == [True] * is_told
