"""Patterns cut, transposed and put in order, and places in ascending lists, equal their references."""

from __future__ import annotations

import pytest
import reference_ops as reference
import torch
from op_inputs import NUM_ROWS, NUM_SOURCES, pattern
from torch import Tensor
from torch.library import opcheck

from pyg_dist.backend import ops
from pyg_dist.errors import DataError


def chosen(size: int, share: float, seed: int) -> Tensor:
    return (torch.rand(size, generator=torch.Generator().manual_seed(seed)) < share).nonzero().view(-1)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_restriction_equals_the_reference(share: float) -> None:
    rowptr, col = pattern(2**20, seed=3)
    row = chosen(NUM_ROWS, share, 1)
    row = row[torch.randperm(row.numel(), generator=torch.Generator().manual_seed(2))]
    args = (rowptr, col, row, chosen(NUM_SOURCES, share, 3), NUM_SOURCES)
    for got, expected in zip(ops.restrict_csr(*args), reference.restrict_csr(*args), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_rows(num_threads: int) -> None:
    """Several chunks and words, and SciPy's own restriction."""
    num_nodes, before = 2000, torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    rowptr = torch.arange(0, 600 * num_nodes + 1, 600)
    col = torch.randint(0, num_nodes, (600 * num_nodes,), generator=generator, dtype=torch.int32)
    nodes = chosen(num_nodes, 0.7, 4)
    try:
        torch.set_num_threads(num_threads)
        first, second, entry, turned, turned_col, turned_entry = ops.restrict_csr(rowptr, col, nodes, nodes, num_nodes)
    finally:
        torch.set_num_threads(before)
    row = torch.repeat_interleave(torch.arange(nodes.numel()), first.diff())
    assert torch.equal(nodes[second.long()], col[entry].long())
    assert torch.equal(nodes[row], entry // 600)
    assert (entry.diff() > 0).all()
    assert int(torch.isin(col.view(num_nodes, 600)[nodes], nodes).sum()) == entry.numel()
    order = torch.argsort(second, stable=True)
    assert torch.equal(turned_entry, order)
    assert torch.equal(turned_col.long(), row[order])
    assert torch.equal(turned.diff(), torch.bincount(second, minlength=nodes.numel()))


def test_transposes_equal_the_reference() -> None:
    args = *pattern(2**20, seed=5), NUM_SOURCES
    for got, expected in zip(ops.transpose_csr(*args), reference.transpose_csr(*args), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)


def test_places_equal_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (0, 1, 2, 7, 500):
        numbers = torch.randint(0, 1000, (size,), generator=generator).unique()
        runs = [torch.randint(-5, 1005, (50,), generator=generator).sort().values for _ in range(3)]
        for value in (torch.cat(runs), torch.cat(runs).flip(0), numbers, torch.arange(0)):
            assert torch.equal(ops.find_sorted(numbers, value), reference.find_sorted(numbers, value))


def test_arguments() -> None:
    rowptr, col = torch.tensor([0, 2, 3]), torch.tensor([1, 2, 0], dtype=torch.int32)
    one = torch.tensor([1])
    for row, column, match in (
        (torch.tensor([0, 2]), one, r"'row' to name rows of 'rowptr' that lie in 'col', got 2 at position 1"),
        (torch.tensor([-1]), one, r"'row' .* got -1 at position 0"),
        (one, torch.tensor([1, 1]), r"'column' to ascend in \[0, 3\), got 1 at position 1"),
        (one, torch.tensor([3]), r"'column' to ascend in \[0, 3\), got 3 at position 0"),
        (one, torch.tensor([-1]), r"'column' .* got -1 at position 0"),
        (one.int(), one, "'row' .* Long"),
    ):
        with pytest.raises(DataError, match=match):
            ops.restrict_csr(rowptr, col, row, column, 3)
    for bad in (torch.tensor([0, 4, 3]), torch.tensor([0, 2, 1]), torch.tensor([-1, 2, 3])):
        with pytest.raises(DataError, match="'row' to name rows"):
            ops.restrict_csr(bad, col, torch.tensor([0, 1]), one, 3)
    for bad, at in ((2, 1), (-1, 1)):
        with pytest.raises(DataError, match=rf"'col' to lie in \[0, 2\), got {bad} at position {at}"):
            ops.transpose_csr(rowptr, torch.tensor([0, bad, 1], dtype=torch.int32), 2)
    with pytest.raises(DataError, match="'rowptr' to run from 0 to the 2 entries"):
        ops.transpose_csr(rowptr, col[:2], 3)
    with pytest.raises(DataError, match=r"'sorted' .* Long"):
        ops.find_sorted(one.int(), one)


def test_opcheck() -> None:
    rowptr, col = pattern(2**20)
    # No shapes without the data, and so nothing for FakeTensor: how many entries stay is in it.
    args = (rowptr, col, torch.arange(9), torch.arange(7), NUM_SOURCES)
    opcheck(torch.ops.pyg_dist.restrict_csr.default, args, test_utils=("test_schema", "test_autograd_registration"))
    opcheck(torch.ops.pyg_dist.transpose_csr.default, (rowptr, col, NUM_SOURCES))
    opcheck(torch.ops.pyg_dist.find_sorted.default, (torch.arange(9), torch.arange(7)))
