"""Patterns of sparse matrices: entries grouped by row, their values' places, and transposes."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import reference_ops as reference
import torch
from bits import assert_same_bits
from torch import Tensor
from torch.library import opcheck

from pyg_dist.backend import ops
from pyg_dist.backend.session.state import current
from pyg_dist.backend.sparse import csr, form_trial
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix, edge_product
from pyg_dist.errors import DataError

SIZES = [(0, 3, 4), (5, 1, 1), (40, 7, 9), (3000, 4000, 50), (300_000, 5000, 70)]  # entries, rows, columns


def entries(size: tuple[int, int, int], dtype: torch.dtype = torch.int64) -> tuple[Tensor, Tensor]:
    """Half of the entries in one row, as a hub has them."""
    generator = torch.Generator().manual_seed(size[0])
    row, col = (torch.randint(0, limit, (size[0],), generator=generator) for limit in size[1:])
    row[torch.rand(size[0], generator=generator) < 0.5] = size[1] // 2
    return row.to(dtype), col.to(dtype)


def undirected(num_nodes: int = 30) -> Tensor:
    """Edges in the order of their rows and columns, with duplicates and loops."""
    ends = torch.randint(0, num_nodes, (2, 200), generator=torch.Generator().manual_seed(0))
    ends = torch.cat([ends, ends.flip(0)], 1)
    return ends[:, torch.argsort(ends[0] * num_nodes + ends[1])]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_entries_are_grouped_as_the_reference_does(
    size: tuple[int, int, int], dtype: torch.dtype, is_sorted: bool
) -> None:
    row, col = entries(size, dtype)
    row = row.sort().values if is_sorted else row
    before = torch.get_num_threads()
    try:
        for edge in (None, torch.arange(size[0], dtype=dtype).flip(0) * 3):
            expected = reference.csr_from_edges(row, col.flip(0), edge, *size[1:])
            for num_threads in (1, 3):
                torch.set_num_threads(num_threads)
                *got, place = ops.csr_from_edges(row, col.flip(0), edge, *size[1:])
                if place is None:
                    assert edge is None
                    assert torch.equal(row.sort(stable=True).indices, torch.arange(size[0])), "in order already"
                    place = torch.arange(size[0], dtype=torch.int32)
                for mine, theirs in zip((*got, place), expected, strict=True):
                    assert_same_bits(mine, theirs)
    finally:
        torch.set_num_threads(before)


def test_values_are_found_in_their_storage() -> None:
    row, col = entries((40, 7, 9))
    storage = torch.randn(41)
    dense = torch.zeros(7, 9).index_put_((row, col), storage[:40], accumulate=True)
    negative = torch.arange(40) - 41  # numbers that count from the end
    for edge in (None, torch.arange(40), negative):
        pattern = CSR.from_edges(row, col, edge, 7, 9)
        assert pattern.edge.dtype == torch.int32, "small numbers take 32 bits"
        for matrix, expected in (Matrix(pattern, storage), dense), (Matrix(pattern, storage).transposed, dense.t()):
            x = torch.eye(matrix.num_cols)
            torch.testing.assert_close(matrix.multiply(x), expected)
        piece = Matrix(pattern, storage).columns(2, 6)
        torch.testing.assert_close(piece.multiply(torch.eye(4)), dense[:, 2:6])
    large = CSR.from_edges(row, col, torch.arange(40) + 2**33, 7, 9)
    assert large.transposed.edge.sort().values.tolist() == [2**33 + k for k in range(40)]


def test_values_in_order_from_a_place_on() -> None:
    """The same as with the places listed: values, those of some rows, and the transpose's."""
    row, col = entries((40, 7, 9))
    listed, storage = CSR.from_edges(row.sort().values, col, torch.arange(3, 43), 7, 9), torch.randn(50)
    ranged = CSR(listed.rowptr, listed.col, None, 9, first=3)
    some = torch.tensor([4, 0, 39])
    assert torch.equal(ranged.edge, listed.edge)
    assert torch.equal(ranged.places(some), some + 3)
    for one, other in (
        (ranged, listed),
        (ranged.rows(2, 5), listed.rows(2, 5)),
        (ranged.transposed, listed.transposed),
    ):
        assert_same_bits(one.values(storage), other.values(storage))
    x, found = torch.randn(9, 4), []
    for pattern in (ranged, listed):
        weight = storage.clone().requires_grad_()
        edge_product(weight, x, pattern).square().sum().backward()
        found.append(weight.grad)
    assert found[0].count_nonzero() == 40
    assert_same_bits(*found)


def test_an_undirected_graph_and_its_transpose_share_memory() -> None:
    ends = undirected()
    pattern = CSR.from_edges(ends[0], ends[1], None, 30, 30)
    turned = pattern.transposed
    assert pattern.place is None
    assert turned.col.data_ptr() == pattern.col.data_ptr()
    assert turned.rowptr.data_ptr() == pattern.rowptr.data_ptr()
    assert torch.equal(ends[1][turned.edge], turned.row())
    assert torch.equal(ends[0][turned.edge], turned.col.long())
    directed = CSR.from_edges(ends[0, 3:], ends[1, 3:], None, 30, 30)
    assert directed.transposed.col.data_ptr() != directed.col.data_ptr()


def test_a_pattern_is_its_transpose_where_it_is_symmetric_and_columns_ascend() -> None:
    ends = undirected()
    shuffled = ends[:, torch.randperm(400, generator=torch.Generator().manual_seed(1))]
    last = torch.tensor([[29], [29]])
    cases = [(ends, True), (ends[:, :0], True), (ends[:, 1:], False), (shuffled, False), (ends[:, ends[0] < 20], False)]
    cases += [(torch.cat([ends, last], 1), True), (torch.cat([ends, last + 1], 1), False)]  # a column beyond the rows
    for (row, col), expected in cases:
        rowptr, col, _ = ops.csr_from_edges(row.clamp(max=29), col, None, 30, 31)
        assert ops.equals_transpose_csr(rowptr, col) == reference.equals_transpose_csr(rowptr, col) == expected
    with pytest.raises(DataError, match="'rowptr' to run from 0"):
        ops.equals_transpose_csr(torch.tensor([0, 2]), torch.tensor([0], dtype=torch.int32))


@pytest.mark.parametrize("kind", ["undirected", "directed", "shuffled", "wide"])
def test_transposes_without_values_share_what_they_can(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ends, num_cols = undirected(), 31 if kind == "wide" else 30
    ends = ends[:, 3:] if kind == "directed" else ends
    if kind == "shuffled":
        ends = ends[:, torch.randperm(400, generator=torch.Generator().manual_seed(1))]
    made: list[int] = []
    transpose_csr = ops.transpose_csr
    monkeypatch.setattr(ops, "transpose_csr", lambda *args: made.append(1) or transpose_csr(*args))
    first, second = (CSR.from_edges(ends[0], ends[1], None, 30, num_cols) for _ in range(2))
    alone, x = first.transposed_pattern, torch.randn(30, 4)
    assert (alone is first) == (kind == "undirected") == (not made)
    assert alone.place is None or alone is first
    assert first.transposed_pattern is alone
    turned = second.transposed
    assert second.transposed_pattern is turned, "there is one already"
    assert all(torch.equal(getattr(alone, name), getattr(turned, name)) for name in ("rowptr", "col"))
    assert (alone.num_rows, alone.num_cols) == (turned.num_rows, turned.num_cols) == (num_cols, 30)
    assert_same_bits(Matrix(first).transposed.multiply(x), Matrix(second).transposed.multiply(x))
    later = first.transposed
    assert torch.equal(later.edge, turned.edge)
    for name in ("rowptr", "col"):
        assert getattr(later, name).data_ptr() == getattr(alone, name).data_ptr()


def test_a_pattern_that_is_its_transpose_is_freed_at_once() -> None:
    ends = undirected()
    pattern = CSR.from_edges(ends[0], ends[1], None, 30, 30)
    assert pattern.transposed_pattern is pattern
    freed = weakref.ref(pattern)
    gc.disable()
    try:
        del pattern
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("bad", [-1, 7, -(2**62), 2**62])
@pytest.mark.parametrize("is_col", [False, True])
def test_the_first_entry_outside_is_named(bad: int, is_col: bool) -> None:
    ends = [*entries((200_000, 7, 7))]
    ends[is_col][150_000], ends[is_col][170_000] = bad, -5
    got = (int(ends[0][150_000]), int(ends[1][150_000]))
    words = rf"rows in \[0, 7\) and columns in \[0, 7\), got row {got[0]} and column {got[1]} at position 150000"
    with pytest.raises(DataError, match=words):
        CSR.from_edges(*ends, None, 7, 7)


def test_opcheck() -> None:
    row, col = entries((40, 7, 9))
    opcheck(torch.ops.pyg_dist.csr_from_edges.default, (row, col, None, 7, 9))
    opcheck(torch.ops.pyg_dist.csr_from_edges.default, (row.int(), col, torch.arange(40), 7, 9))


@pytest.fixture
def large() -> tuple[CSR, Tensor]:
    """A pattern and rows with two forms of a product: 12 MiB of sources, of whole numbers."""
    row, col = entries((220_000, 2000, 50_000))
    return CSR.from_edges(row, col, None, 2000, 50_000), torch.randint(-8, 8, (50_000, 64)).float()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> tuple[list[ops.SpmmWay], dict[ops.SpmmWay, float]]:
    """The ways that products have taken, and the seconds that each is to take."""
    clock, taken, seconds = [0.0], [], {}
    spmm_csr = ops.spmm_csr

    def timed(*args: Any, form: ops.SpmmWay, **kwargs: Any) -> Tensor:
        taken.append(form)
        clock[0] += seconds[form]
        return spmm_csr(*args, form=form, **kwargs)

    monkeypatch.setattr(ops, "spmm_csr", timed)
    monkeypatch.setattr(form_trial, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    current().add(csr._TrialsBySize())
    return taken, seconds


@pytest.mark.parametrize("is_further_faster", [True, False])
def test_the_first_products_try_all_ways_and_the_fastest_one_stays(
    large: tuple[CSR, Tensor],
    timed: tuple[list[ops.SpmmWay], dict[ops.SpmmWay, float]],
    is_further_faster: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG", "pyg_dist")
    pattern, x = large
    taken, seconds = timed
    plain, blocks, further = ops.SpmmWay("plain"), ops.SpmmWay("blocks"), ops.SpmmWay("blocks", 64)
    seconds |= {plain: 3.0, blocks: 2.0, further: 1.0 if is_further_faster else 2.5}
    expected = reference.spmm_csr(pattern.rowptr, pattern.col, x)
    guess = pattern.form(x)
    for _ in range(2):
        assert_same_bits(pattern.multiply(x), expected)
    assert taken == [guess] * 2, "products that may not try keep the guess"
    for _ in range(15):
        assert_same_bits(pattern.multiply(x, tries=True), expected)
    assert taken[2] == guess, "whose memory is new"
    assert sorted(taken[3:9]) == [blocks] * 3 + [plain] * 3
    assert taken[9:15] == [blocks, further] * 3
    assert taken[15:] == [further if is_further_faster else blocks] * 2 == [pattern.form(x)] * 2
    # What was chosen, and why: in the log, and for profile().
    times = [1e9 * of / pattern.num_entries for of in (3.0, 2.0, seconds[further])]
    (line,) = csr.timed_forms()
    assert caplog.messages == [f"product of {line}"]
    assert line.startswith(
        f"2000 x 50000, 220000 entries, by 64 columns of torch.float32, guess {guess and guess.form}"
    )
    assert f": blocks, {64 if is_further_faster else 32} ahead (ns an entry: " in line
    for way, nanoseconds in zip(("plain, 32", "blocks, 32", "blocks, 64"), times, strict=True):
        assert f"{way} ahead {nanoseconds:.2f}" in line
    seconds |= {blocks: 4.0, ops.SpmmWay("plain", 64): 3.5}
    wide = torch.cat([x, x], 1)
    pattern.choose_form(wide)
    assert pattern.form(wide) == plain, "each width for itself"
    assert len(taken) == 17 + 13
    pattern.choose_form(x)
    assert len(taken) == 17 + 13, "it is known"


@pytest.mark.parametrize("is_lucky", [True, False])
def test_forms_that_are_close_take_more_turns_and_a_few_samples_decide_nothing(
    large: tuple[CSR, Tensor], timed: tuple[list[ops.SpmmWay], dict[ops.SpmmWay, float]], is_lucky: bool
) -> None:
    """Blocks are the faster form by a tenth; but plain has a sample of half its time, or blocks two of twice theirs."""
    pattern, x = large
    taken, seconds = timed
    plain, blocks, further = ops.SpmmWay("plain"), ops.SpmmWay("blocks"), ops.SpmmWay("blocks", 64)
    seconds |= {plain: 1.1, blocks: 1.0, further: 2.0}
    for k in range(15):
        seconds[plain] = 0.5 if is_lucky and k in (3, 4) else 1.1
        seconds[blocks] = 2.0 if not is_lucky and k in (1, 2, 3, 4) else 1.0
        pattern.multiply(x, tries=True)
    assert sorted(taken[1:]) == [blocks] * 7 + [plain] * 7
    seconds[blocks] = 1.0
    pattern.choose_form(x)
    assert taken[15:] == [blocks, further] * 3
    assert pattern.form(x) == blocks


def test_products_of_one_form_try_how_far_ahead_they_ask_for_rows(
    timed: tuple[list[ops.SpmmWay], dict[ops.SpmmWay, float]],
) -> None:
    row, col = entries((220_000, 2000, 200_000))
    pattern, x = CSR.from_edges(row, col, None, 2000, 200_000), torch.randint(-8, 8, (200_000, 16)).float()
    taken, seconds = timed
    near, far = ops.SpmmWay(), ops.SpmmWay(None, 64)
    seconds |= {near: 2.0, far: 1.0}
    expected = reference.spmm_csr(pattern.rowptr, pattern.col, x)
    for _ in range(9):
        assert_same_bits(pattern.multiply(x, tries=True), expected)
    assert taken == [near, *[near, far] * 3, far, far]


def test_patterns_of_like_size_share_a_trial(timed: tuple[list[ops.SpmmWay], dict[ops.SpmmWay, float]]) -> None:
    """The first four have trials of their own; a batch would repeat it in each step."""
    taken, seconds = timed
    x = torch.randint(-8, 8, (50_000, 64)).float()
    plain, blocks = ops.SpmmWay("plain"), ops.SpmmWay("blocks")
    seconds |= {plain: 3.0, blocks: 2.0, ops.SpmmWay("blocks", 64): 2.5, ops.SpmmWay("plain", 64): 3.5}

    def of(num_entries: int) -> CSR:
        row, col = entries((num_entries, 2000, 50_000))
        return CSR.from_edges(row, col, None, 2000, 50_000)

    batches = [of(219_000 + 100 * k) for k in range(16)]
    for batch in batches:
        batch.multiply(x, tries=True)
    assert taken[:6] == taken[:1] * 5 + [plain if taken[0] == blocks else blocks]
    for known, batch in enumerate(batches[3:0:-1]):
        batch.choose_form(x)
        assert batch.form(x) == blocks
        assert len(taken) == 16 + 12 * known, "the last one's is over, and the others have theirs"
    of(500_000).choose_form(x)
    assert len(taken) == 16 + 12 * 2 + 13, "another size"


@pytest.mark.parametrize("form", ["plain", "blocks"])
def test_a_setting_fixes_the_form(
    large: tuple[CSR, Tensor], form: ops.SpmmForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYG_DIST_SPMM_FORM", form)
    pattern, x = large
    taken: list[ops.SpmmWay] = []
    monkeypatch.setattr(ops, "spmm_csr", lambda *args, form, **kwargs: taken.append(form))
    pattern.choose_form(x)
    for _ in range(8):
        pattern.multiply(x, tries=True)
    assert taken == [ops.SpmmWay(form)] * 8


def test_small_products_have_one_form() -> None:
    pattern = CSR.from_edges(*entries((40, 7, 9)), None, 7, 9)
    assert pattern.form(torch.ones(9, 64)) is None
    assert pattern.form(torch.ones(9)) is None


@pytest.mark.parametrize("column", [-1, 3])
def test_columns_outside_are_refused_when_the_pattern_is_made(column: int) -> None:
    rowptr, col = torch.tensor([0, 1, 2]), torch.tensor([0, column], dtype=torch.int32)
    with pytest.raises(DataError, match="Expected columns from 0 to 2 in a pattern"):
        CSR(rowptr, col, None, 3)
