"""Random numbers and dropout, keyed by node and column: against their references, and as random variables."""

from __future__ import annotations

import numpy as np
import pytest
import reference_ops as reference
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from op_inputs import DTYPES, WIDTHS, equal_bits, reals

from pyg_dist.backend import ops


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
    cases = list(zip([0, 1, 2**63 + 7, 2**64 - 1, 12345], OFFSETS, strict=True))
    for seed, offset in cases[(width + DTYPES.index(dtype)) % 2 :: 2]:
        assert equal_bits(
            ops.keyed_dropout(x, KEYS, 0.3, seed, offset), reference.keyed_dropout(x, KEYS, 0.3, seed, offset)
        )
        args = (KEYS, width, seed, offset, dtype)
        assert_same_bits(ops.keyed_uniform(*args), reference.keyed_uniform(*args))
        normal = ops.keyed_normal(KEYS[:7], *args[1:])
        atol, rtol = (0, 2**-7) if dtype.itemsize == 2 else (1e-12 if dtype == torch.float64 else 1e-6, 1e-6)
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
        assert_same_bits(function(chosen, slice(0, width)), whole[chosen])
        for cut in (1, 2, 4, 30):
            parts = [function(everything, slice(0, cut)), function(everything, slice(cut, width))]
            assert_same_bits(torch.cat(parts, 1), whole)


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
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


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


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_dropped_is_multiplied_by_zero(dtype: torch.dtype, p: float) -> None:
    """As in torch, whose own mask is all that differs: NaN and infinities become NaN, and signs stay."""
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), -3.0, 3.0, -0.0]).to(dtype).repeat(200, 7)
    factor = ops.keyed_dropout(torch.ones_like(x), torch.arange(200), p, 0)
    assert 0 <= float(factor.min()) < float(factor.max()) or p == 1
    assert equal_bits(ops.keyed_dropout(x, torch.arange(200), p, 0), x * factor)
    assert equal_bits(F.dropout(x, 1.0), x * 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_uniform_and_normal_distributions(dtype: torch.dtype) -> None:
    from scipy import stats  # half a second, in all that import this module

    key = torch.arange(3000)
    uniform = ops.keyed_uniform(key, 64, 5, dtype=dtype)
    assert bool((uniform >= 0).all() and (uniform < 1).all())
    assert stats.kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-3
    normal = ops.keyed_normal(key, 64, 5, dtype=dtype)
    assert stats.kstest(normal.flatten().numpy(), "norm").pvalue > 1e-3
    for values in (uniform, normal):
        correlation = np.corrcoef(values[:, :8].numpy(), rowvar=False) - np.eye(8)
        assert np.abs(correlation).max() < 0.09


def test_dropout_derivatives() -> None:
    x, key = reals(6, 5, dtype=torch.float64).requires_grad_(), torch.arange(6)
    assert torch.autograd.gradcheck(lambda x: ops.keyed_dropout(x, key, 0.5, 3), (x,))
    assert torch.autograd.gradgradcheck(lambda x: ops.keyed_dropout(x, key, 0.5, 3) ** 2, (x,))
    (grad,) = torch.autograd.grad(ops.keyed_dropout(x, key, 0.5, 3).sum(), x)
    assert_same_bits(grad, ops.keyed_dropout(torch.ones_like(x), key, 0.5, 3))
    three_dims = reals(6, 2, 3, dtype=torch.float64).requires_grad_()
    ops.keyed_dropout(three_dims, key, 0.5, 3).sum().backward()
    assert three_dims.grad is not None
