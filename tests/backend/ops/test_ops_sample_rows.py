"""Drawn entries of rows equal their reference, are uniform over entries and pairs, and never change."""

from __future__ import annotations

from typing import Any

import pytest
import reference_ops as reference
import torch
from scipy.special import chdtr, chdtrc, chdtri
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.errors import DataError


def rows_of(degrees: list[int]) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(degrees).cumsum(0)])


def drawn_from(rowptr: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The rows' bounds, and which entries are drawn."""
    starts, column, entry = ops.sample_rows(rowptr, columns_of(rowptr), None, *args, **options)
    assert torch.equal(column, columns_of(rowptr)[entry])
    return starts, entry


def columns_of(rowptr: Tensor) -> Tensor:
    return torch.arange(int(rowptr[-1]), dtype=torch.int32).flip(0)


DEGREES = [0, 1, 2, 3, 5, 40, 0, 1000, 33, 64, 65, 256, 257]
PLACES = [(7 * k) % sum(DEGREES) for k in range(sum(DEGREES))]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("count", [-1, 0, 1, 2, 5, 32, 33, 40, 900])
def test_it_equals_the_reference(count: int, replace: bool) -> None:
    if count < 0 and replace:
        return
    rowptr, row = rows_of(DEGREES), torch.tensor([7, 0, 9, 12, 5, 4, 3, 2, 1, 6, 8, 7, 10, 11])
    for seed in (0, 1, -1, 2**63 + 5):
        args = row, row * 3 - 5, count, seed, replace
        starts, entry = drawn_from(rowptr, *args)
        for place in (None, entry.new_tensor(PLACES), torch.tensor(PLACES, dtype=torch.int32)):
            pattern = rowptr, columns_of(rowptr), place
            for got, expected in zip(
                ops.sample_rows(*pattern, *args), reference.sample_rows(*pattern, *args), strict=True
            ):
                assert torch.equal(got, expected)
        for k, r in enumerate(row.tolist()):
            drawn = entry[starts[k] : starts[k + 1]].tolist()
            assert drawn == sorted(drawn)
            assert replace or len(set(drawn)) == len(drawn)
            assert all(int(rowptr[r]) <= e < int(rowptr[r + 1]) for e in drawn)


def test_it_depends_on_key_and_seed_alone() -> None:
    before, row = torch.get_num_threads(), torch.arange(5000)
    rowptr = rows_of([50] * 5000)
    try:
        torch.set_num_threads(1)
        _, entry = drawn_from(rowptr, row, row, 5, 7)
        torch.set_num_threads(3)
        assert torch.equal(drawn_from(rowptr, row, row, 5, 7)[1], entry)
    finally:
        torch.set_num_threads(before)
    some = torch.tensor([4000, 3, 77])
    _, found = drawn_from(rowptr, some, some, 5, 7)
    assert torch.equal(found.view(3, 5), entry.view(-1, 5)[some])
    assert torch.equal(drawn_from(rows_of([50]), torch.tensor([0]), torch.tensor([77]), 5, 7)[1] + 77 * 50, found[10:])


def test_values_are_fixed() -> None:
    """A run that is restarted under another version, or on another machine, draws the same batches."""
    rowptr = rows_of([1000, 1000])
    drawn = [
        drawn_from(rowptr, torch.tensor([0, 1]), torch.tensor([0, 1]), 3, 7, replace)[1].tolist()
        for replace in (False, True)
    ]
    assert drawn == GOLDEN


GOLDEN = [[290, 360, 585, 1131, 1550, 1579], [290, 360, 585, 1131, 1551, 1579]]


@pytest.mark.parametrize(("size", "count"), [(2, 1), (5, 2), (8, 4), (13, 4), (50, 9), (90, 40)])
def test_entries_and_pairs_are_uniform(size: int, count: int) -> None:
    """Chi-square statistics of samples without replacement, at a level of 10^-6; the seeds are fixed."""
    num_samples = 20_000
    row, key = torch.zeros(num_samples, dtype=torch.int64), torch.arange(num_samples)
    _, entry = drawn_from(rows_of([size]), row, key, count, 3)
    chosen = torch.zeros(num_samples, size, dtype=torch.float64).scatter_(1, entry.view(num_samples, count), 1)
    together = chosen.T @ chosen
    expected = num_samples * count / size
    entries = float((together.diag() - expected).square().sum() / expected) * (size - 1) / (size - count)
    assert chdtrc(size - 1, entries) > 1e-6
    assert chdtr(size - 1, entries) > 1e-6
    if count > 1:
        # Counts of pairs are correlated, which the bound leaves room for.
        pairs = together[torch.triu_indices(size, size, 1).unbind()]
        expected = num_samples * count * (count - 1) / size / (size - 1)
        assert float((pairs - expected).square().sum() / expected) < chdtri(pairs.numel(), 1e-6)


def test_draws_with_replacement_are_uniform_and_independent() -> None:
    size, num_samples = 7, 40_000
    row, key = torch.zeros(num_samples, dtype=torch.int64), torch.arange(num_samples)
    _, entry = drawn_from(rows_of([size]), row, key, 2, 5, replace=True)
    low, high = entry.view(-1, 2).unbind(1)
    counts = torch.bincount(low * size + high, minlength=size * size).view(size, size).double()
    number = size * (size + 1) // 2
    expected = torch.full((size, size), 2.0).triu(1) + torch.eye(size)
    expected *= num_samples / size**2
    at = torch.triu_indices(size, size).unbind()
    assert chdtrc(number - 1, float(((counts - expected)[at].square() / expected[at]).sum())) > 1e-6


def test_errors() -> None:
    rowptr, row = rows_of([2, 3]), torch.tensor([0, 1])
    col = columns_of(rowptr)
    for bad in (-1, 2):
        with pytest.raises(DataError, match=f"'row' to name rows of 'rowptr', got {bad} at position 1"):
            ops.sample_rows(rowptr, col, None, torch.tensor([0, bad]), row, 1, 0)
    with pytest.raises(DataError, match="'row' to name rows of 'rowptr', got 1 at position 1"):
        ops.sample_rows(rowptr, col[:4], None, row, row, 1, 0)
    with pytest.raises(DataError, match="'key' to have 2 entries, got 1"):
        ops.sample_rows(rowptr, col, None, row, row[:1], 1, 0)
    with pytest.raises(DataError, match="'place' to have 5 entries, got 2"):
        ops.sample_rows(rowptr, col, row, row, row, 1, 0)
    with pytest.raises(DataError, match="'count' not to be negative with replacement, got -1"):
        ops.sample_rows(rowptr, col, None, row, row, -1, 0, replace=True)
    with pytest.raises(DataError, match="one entry more than there are rows"):
        ops.sample_rows(rowptr[:0], col, None, row, row, 1, 0)
    with pytest.raises(DataError, match="'row' to be a contiguous vector of dtype Long"):
        ops.sample_rows(rowptr, col, None, row.int(), row, 1, 0)
