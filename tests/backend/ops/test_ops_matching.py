"""Matchings are matchings, as large as the reference's and SciPy's, and reach what these do; repeated entries."""

from __future__ import annotations

import numpy as np
import pytest
import reference_ops as reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor
from torch.library import opcheck

from pyg_dist.backend import ops
from pyg_dist.errors import DataError

patterns = st.tuples(st.integers(1, 14), st.lists(st.lists(st.integers(0, 13), max_size=9), max_size=14))


def csr(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    rowptr = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return rowptr, torch.tensor([c for row in rows for c in row], dtype=torch.int32)


def checked_size(rowptr: Tensor, col: Tensor, num_cols: int) -> int:
    """Rows with a column, after a look at each: an entry has it, and no other row does."""
    col_of = ops.bipartite_matching(rowptr, col, num_cols)[0]
    assert col_of.dtype == torch.int32
    assert col_of.shape == (rowptr.numel() - 1,)
    row = torch.repeat_interleave(torch.arange(col_of.numel()), rowptr.diff())
    is_used = col == col_of[row]
    assert torch.equal(row[is_used].unique(), (col_of >= 0).nonzero().view(-1)), "a row has a column without an entry"
    used = col_of[col_of >= 0]
    assert used.unique().numel() == used.numel(), "two rows have one column"
    return used.numel()


@settings(max_examples=300, deadline=None, derandomize=True)
@given(patterns)
def test_as_large_as_the_reference(pattern: tuple[int, list[list[int]]]) -> None:
    num_cols, rows = pattern
    args = *csr([[c % num_cols for c in row] for row in rows]), num_cols
    col_of, *reached = reference.bipartite_matching(*args)
    assert checked_size(*args) == int((col_of >= 0).sum())
    for got, expected in zip(ops.bipartite_matching(*args)[1:], reached, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("num_rows", "num_cols"), [(1000, 1000), (1000, 700), (400, 1000)])
@pytest.mark.parametrize("degree", [0.5, 1, 2, 3, 8])
def test_as_large_as_scipy(num_rows: int, num_cols: int, degree: float) -> None:
    """On patterns without repeated entries, which SciPy's search has no room for."""
    rng = np.random.default_rng(0)
    place = np.unique(rng.integers(num_rows * num_cols, size=int(degree * num_rows)))
    matrix = csr_array((np.ones(place.size), (place // num_cols, place % num_cols)), shape=(num_rows, num_cols))
    size = checked_size(torch.from_numpy(matrix.indptr).long(), torch.from_numpy(matrix.indices).int(), num_cols)
    assert size == (maximum_bipartite_matching(matrix) >= 0).sum()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(2, 60))
def test_repeated_entries(seed: int, copies: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    once = torch.randint(0, 2, (30, 30), generator=generator) * torch.randint(0, 2, (30, 30), generator=generator)
    rows = [row.nonzero().view(-1).tolist() for row in once]
    repeated = [[c for c in row for _ in range(copies)] for row in rows]
    for both in zip(*(ops.bipartite_matching(*csr(p), 30) for p in (rows, repeated)), strict=True):
        assert torch.equal(*both)


@pytest.mark.parametrize(
    ("rows", "num_cols", "expected"),
    [
        ([], 0, []),
        ([], 3, []),
        ([[], []], 0, [-1, -1]),
        ([[2, 1]], 3, [2]),
        ([[0]] * 5, 1, [0, -1, -1, -1, -1]),
        ([[0, 0, 0]] * 3, 2, [0, -1, -1]),
        ([[0, 1], [0]], 2, [1, 0]),  # the second row takes the first one's column
        ([[0, 1], [0, 2], [1, 0], [0]], 3, [0, 2, 1, -1]),
    ],
)
def test_small_patterns(rows: list[list[int]], num_cols: int, expected: list[int]) -> None:
    args = *csr(rows), num_cols
    assert checked_size(*args) == sum(c >= 0 for c in expected)
    assert ops.bipartite_matching(*args)[0].tolist() == expected


def test_lattice() -> None:
    """Most depth-first searches end nowhere here: SciPy's begins all of them again, and does not end."""
    num_rows, width = 30_000, 173
    generator = torch.Generator().manual_seed(0)
    col = torch.arange(num_rows)[:, None] + torch.tensor([0, 1, width, -width])
    has = (col >= 0) & (col < num_rows) & (torch.rand(col.shape, generator=generator) < 0.8)
    place = torch.randperm(num_rows, generator=generator)
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), has.sum(1).cumsum(0)])
    col = place[col[has]].int()
    size = checked_size(rowptr, col, num_rows)
    turned, row, _ = ops.transpose_csr(rowptr, col, num_rows)
    assert size == checked_size(turned, row, num_rows)


def test_long_path() -> None:
    """One augmenting path through all 100,000 rows."""
    size = 100_000
    row = torch.arange(size - 1)
    rowptr = torch.cat([torch.arange(0, 2 * size - 1, 2), torch.tensor([2 * size - 1])])
    col = torch.cat([torch.stack([row, row + 1], 1).view(-1), torch.tensor([0])]).int()
    assert checked_size(rowptr, col, size) == size


def test_arguments() -> None:
    rowptr, col = csr([[1, 2], [0]])
    for bad in (3, -1, 2**31 - 1):
        with pytest.raises(DataError, match=rf"'col' to lie in \[0, 3\), got {bad} at position 1"):
            ops.bipartite_matching(rowptr, torch.tensor([1, bad, 0], dtype=torch.int32), 3)
    with pytest.raises(DataError, match="'rowptr' to run from 0 to the 2 entries"):
        ops.bipartite_matching(rowptr, col[:2], 3)
    with pytest.raises(DataError, match="'rowptr' not to decrease, got 3 after 4"):
        ops.bipartite_matching(torch.tensor([0, 4, 3]), col, 3)
    with pytest.raises(DataError, match="'rowptr' to have one entry more than there are rows"):
        ops.bipartite_matching(rowptr[:0], col, 3)
    with pytest.raises(DataError, match=r"'col' .* Int"):
        ops.bipartite_matching(rowptr, col.long(), 3)
    for num_cols in (-1, 2**31):
        with pytest.raises(DataError, match=rf"fewer than 2\^31 rows and columns, got 2 and {num_cols}"):
            ops.bipartite_matching(rowptr, col, num_cols)


def test_opcheck() -> None:
    opcheck(torch.ops.pyg_dist.bipartite_matching.default, (*csr([[1, 2, 2], [], [0]]), 3))
