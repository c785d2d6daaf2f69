"""Distinct ids and the bytes of lists of them equal their references."""

from __future__ import annotations

import pytest
import reference_ops as reference
import torch
from torch.library import opcheck

from pyg_dist.backend import ops
from pyg_dist.errors import DataError


@pytest.mark.parametrize("span", [3, 100, 2**62])
def test_distinct_values_equal_the_reference(span: int) -> None:
    """Few values and many, which the table grows for; multiples of large powers of two, whose low bits are alike."""
    generator = torch.Generator().manual_seed(0)
    for num_known, num_values in ((0, 0), (0, 1), (1, 0), (3, 7), (0, 3000), (200, 2000)):
        for step in (1, -1, 2**40):
            number = torch.randint(0, span, (num_known + num_values,), generator=generator) * (
                step if span < 2**20 else 1
            )
            known, value = torch.unique(number[:num_known]), number[num_known:]
            known = known[torch.randperm(known.numel(), generator=generator)]
            for values in (value, value.int())[: 2 if abs(span * step) < 2**31 else 1]:
                found = ops.distinct(known, values)
                for got, expected in zip(found, reference.distinct(known, value), strict=True):
                    assert torch.equal(got, expected)
                assert torch.equal(torch.cat([known, value[found[0]]])[found[1]], value)


def test_places_of_values_equal_the_reference() -> None:
    """None, few and many among many, which are sorted in two ways; a value that is out of range changes nothing."""
    generator = torch.Generator().manual_seed(0)
    place_of, expected = (torch.full((200_000,), -1, dtype=torch.int32) for _ in range(2))
    known = 0
    for size, span in ((0, 500), (1, 500), (40, 500), (3000, 500), (10, 200_000), (700, 200_000), (9000, 200_000)):
        for dtype in (torch.int64, torch.int32):
            value = torch.randint(0, span, (size,), generator=generator, dtype=dtype)
            again = (place_of >= known - known // 9).nonzero().view(-1)
            added = ops.add_places(place_of, value, known, again)
            assert torch.equal(added, reference.add_places(expected, value, known, again))
            assert torch.equal(place_of, expected)
            known += added.numel()
    for bad in (-1, 200_000):
        with pytest.raises(DataError, match=f"expected values in 'place_of', got {bad} at position 1"):
            ops.add_places(place_of, torch.tensor([1, bad]), known)
        with pytest.raises(DataError, match=f"expected values in 'place_of', got {bad} at position 1"):
            ops.add_places(place_of, torch.tensor([1]), known, torch.tensor([bad]))
    with pytest.raises(DataError, match="expected places from 0 to 2\\^31, got 2147483647 and 1 values"):
        ops.add_places(place_of, torch.tensor([1]), 2**31 - 1)
    assert torch.equal(place_of, expected)


@pytest.mark.parametrize("span", [2000, 200_000, 2**62])
def test_numbers_of_ids_equal_the_reference(span: int) -> None:
    """Ids close together and far apart, negative ones, lists without any; groups of many ids and of none."""
    generator = torch.Generator().manual_seed(0)
    for size, num_ranks, num_groups in ((0, 1, 1), (1, 1, 1), (700, 2, 1), (900, 3, 4), (900, 1, 0)):
        some = torch.randint(-span // 8, span, (2 * size,), generator=generator).unique()
        some = some[torch.randperm(some.numel(), generator=generator)][:size]
        ends = torch.randint(0, size + 1, (max(0, num_ranks * num_groups - 1),), generator=generator).sort().values
        bounds = torch.cat([torch.tensor([size // 9]), ends.clamp(min=size // 9), torch.tensor([some.numel()])])
        count = bounds.diff() if num_groups else bounds[:0]
        given, id = some[: size // 9], some[size // 9 :] if num_groups else some[:0]
        first = torch.randint(0, 10**6, (num_groups,), generator=generator)
        value = torch.cat([some, some + 1, torch.tensor([-(2**63), 2**63 - 1])])
        arguments = (id, count, first, given, torch.randperm(given.numel(), generator=generator), value)
        assert torch.equal(ops.find_numbers(*arguments), reference.find_numbers(*arguments))


def test_counts_of_other_ids_are_refused() -> None:
    one = torch.tensor([1])
    for count, first, message in (
        ([2], one, "'count' to sum up to the 1 ids"),
        ([3, -2], one, "'count' to sum up to the 1 ids"),
        ([1], one[:0], "groups for 1 lists"),
    ):
        with pytest.raises(DataError, match=message):
            ops.find_numbers(one, torch.tensor(count), first, one[:0], one[:0], one)
    with pytest.raises(DataError, match="given_number"):
        ops.find_numbers(one, one, one, one, one[:0], one)


EDGES = [0, 1, *(2**k + d for k in (7, 8, 16, 24, 32, 40, 56) for d in (-1, 0)), 2**62, 2**63 - 1]


def test_bytes_of_numbers_of_every_length() -> None:
    rows, each = torch.tensor(EDGES).view(-1, 1), torch.ones(len(EDGES), dtype=torch.int64)
    content, num_bytes = ops.encode_ids(rows, each, True)
    sizes = [8 if v >= 2**24 else max(1, -(-v.bit_length() // 8)) for v in EDGES]
    assert num_bytes.tolist() == [8 + 1 + size for size in sizes]  # how many rows, the lengths of four numbers
    assert content.tolist() == reference.encode_ids(rows, each, True)
    found, count = ops.decode_ids(content, num_bytes, 1, True)
    assert torch.equal(found, rows)
    assert torch.equal(count, each)


@pytest.mark.parametrize("is_ascending", [False, True])
@pytest.mark.parametrize("columns", [1, 2, 3])
def test_bytes_of_lists(columns: int, is_ascending: bool) -> None:
    """Empty lists and negative ids, too."""
    generator = torch.Generator().manual_seed(0)
    for high, counts in ((3, [0, 5, 0]), (2**40, [300, 0, 2]), (2**62, [1]), (9, []), (9, [0, 0])):
        rows = torch.randint(-1, high, (sum(counts), columns), generator=generator)
        if is_ascending:
            rows = torch.cat([part[part[:, 0].argsort()] for part in rows.split(counts)] or [rows])
        count = torch.tensor(counts, dtype=torch.int64)
        content, num_bytes = ops.encode_ids(rows, count, is_ascending)
        assert content.tolist() == reference.encode_ids(rows, count, is_ascending)
        found, found_count = ops.decode_ids(content, num_bytes, columns, is_ascending)
        assert torch.equal(found, rows)
        assert torch.equal(found_count, count)


def test_arguments() -> None:
    one = torch.tensor([1])
    with pytest.raises(DataError, match="distinct values in 'known', got 5 again at position 2"):
        ops.distinct(torch.tensor([5, 1, 5]), one)
    with pytest.raises(DataError, match=r"'value' .* Int"):
        ops.distinct(one, one.double())
    for counts, got in (([2], 2), ([-1, 2], -1)):
        with pytest.raises(DataError, match=f"'count' to sum up to the 1 rows, got {got}"):
            ops.encode_ids(one.view(1, 1), torch.tensor(counts), True)
    with pytest.raises(DataError, match=r"'rows' to be contiguous, of dtype Long and with columns, got shape \[1, 0\]"):
        ops.encode_ids(one.view(1, 1)[:, :0], one, True)


def test_bytes_that_are_no_rows() -> None:
    """Cut off, longer, with another number of rows or of columns, with lengths of no numbers: the list is named."""
    content, num_bytes = ops.encode_ids(torch.tensor([[300], [301], [4]]), torch.tensor([2, 1]), True)
    with pytest.raises(DataError, match="'num_bytes' to sum up to the 22 bytes, got 3"):
        ops.decode_ids(content, torch.tensor([3]), 1, True)
    second = int(num_bytes[0])
    wrong = [
        (content[:second], [second - 1, 1], 1, 0),
        (content, [second + 1, 21 - second], 1, 0),
        (content, [22], 1, 0),
    ]
    for place, value, at in ((0, 3, 0), (0, 0, 0), (7, 128, 0), (7, 64, 0), (second, 2, 1), (second + 8, 4, 1)):
        altered = content.clone()
        altered[place] = value
        wrong.append((altered, num_bytes.tolist(), 1, at))
    wrong.append((content, num_bytes.tolist(), 2, 0))
    for some, sizes, columns, at in wrong:
        with pytest.raises(DataError, match=f"bytes of whole rows of {columns} ids, got others in list {at}"):
            ops.decode_ids(some, torch.tensor(sizes), columns, True)


def test_opcheck() -> None:
    """No shapes without the data, and so nothing for FakeTensor: how many come out is in it."""
    one = torch.tensor([1])
    native, tests = torch.ops.pyg_dist, ("test_schema", "test_autograd_registration")
    opcheck(native.distinct.default, (torch.arange(9), torch.tensor([3, 20, 20])), test_utils=tests)
    opcheck(native.add_places.default, (torch.tensor([-1, 0], dtype=torch.int32), one, 1, one), test_utils=tests)
    opcheck(native.find_numbers.default, (one, one, one, one[:0], one[:0], torch.arange(9)), test_utils=tests)
    opcheck(native.encode_ids.default, (torch.arange(4).view(2, 2), torch.tensor([2]), True), test_utils=tests)
    content, num_bytes = ops.encode_ids(one.view(1, 1), one, True)
    opcheck(native.decode_ids.default, (content, num_bytes, 1, True), test_utils=tests)
