"""Simulated epochs: the printed volumes, the shape of Fig. 7, and what grows and falls with the number of ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from pyg_dist.plan import published
from pyg_dist.plan.halo.cost import halo_price
from pyg_dist.plan.published import GRAPHS, MACHINES, TABLE_5
from pyg_dist.plan.simulate import comparisons, crossover, epoch, even_load, model_of, speedup

PAPERS = GRAPHS["papers100M"]


def test_table_5_is_of_whole_rows_with_four_bytes_of_parameters() -> None:
    """SuperGCN, Table 5: what was read out of the printed volumes."""
    rows = TABLE_5["hybrid"][0] * 1e9 / (4 * published.TABLE_5_WIDTH)
    assert TABLE_5["int2 parameters"][0] * 1e9 / rows == pytest.approx(4, rel=1e-3)
    assert TABLE_5["int2 data"][0] * 1e9 / rows == pytest.approx(published.TABLE_5_WIDTH * 2 / 8, rel=0.02)
    assert GRAPHS["mag240M"].rows(2048) == pytest.approx(1934.8559e9 / 3072)


def test_fugaku_goes_through_both_rows_of_int2() -> None:
    machine, ranks = published.fugaku(), published.TABLE_5_RANKS
    for name in ("int2 data", "int2 parameters"):
        volume, milliseconds = TABLE_5[name]
        seconds = volume * 1e9 / ranks / machine.intra_bandwidth + (ranks - 1) * machine.intra_latency
        assert 1e3 * seconds == pytest.approx(milliseconds)


def test_halo_grows_as_printed() -> None:
    """Plexus, 7.1: 18 million owned and halo nodes at 32 ranks, 22 at 256; never more rows than remote edges."""
    products = GRAPHS["products-14M"]
    assert products.num_nodes + products.rows(32) == pytest.approx(18e6)
    assert products.num_nodes + products.rows(256) == pytest.approx(22e6, rel=0.01)
    assert products.rows(1) == 0
    assert products.rows(2**60) == products.num_edges
    assert PAPERS.undirected().rows(64) == 2 * PAPERS.rows(64)


def test_even_parts_send_everything() -> None:
    load = even_load(PAPERS, 64, ranks_per_node=4)
    sent = 64 * (load.rows_inside + load.rows_between)
    assert sent == pytest.approx(PAPERS.rows(64) * published.HYBRID_SHARE)
    assert load.rows_inside / load.rows_between == pytest.approx(3 / 60)
    assert load.messages_inside + load.messages_between == pytest.approx(63)
    assert even_load(PAPERS, 1, 4)[2:] == (0, 0, 0, 0)


@pytest.mark.parametrize("name", list(MACHINES))
def test_epochs_by_ranks(name: str) -> None:
    machine, model = MACHINES[name](), model_of(PAPERS, 3, 64)
    lines = [epoch(PAPERS, model, ranks, machine, (32, 2)) for ranks in (1, 16, 256)]
    assert [line.halo[32].seconds for line in lines] == sorted((line.halo[32].seconds for line in lines), reverse=True)
    assert all(line.halo[2].seconds < line.halo[32].seconds for line in lines[1:])
    assert lines[0].halo[2].messages == lines[0].grid.messages == 0
    assert all(line.shape.size == line.ranks for line in lines)
    deep = epoch(PAPERS, model_of(PAPERS, 8, 64), 256, machine)
    assert deep.halo[32].seconds > 2 * lines[2].halo[32].seconds


def test_crossover() -> None:
    """From the last number of ranks backwards, as long as the grid is cheaper."""
    line = epoch(PAPERS, model_of(PAPERS, 3, 64), 4, published.fugaku())
    cheap, dear = replace(line.grid, messages=0.0, dense=0.0, streams=0.0, sparse=1e-9), replace(line.grid, dense=1e9)
    grid = [cheap, dear, cheap, cheap]
    lines = [line._replace(ranks=ranks, grid=price) for ranks, price in zip((1, 2, 4, 8), grid, strict=True)]
    assert crossover(lines) == 4
    assert crossover(lines[:2]) is None


def test_fewer_bits_have_the_shape_of_fig_7() -> None:
    """SuperGCN, eq. 8: near gamma while bytes decide, falling with latency, while there are rows for every partner."""
    machine = published.fugaku()
    pairs = [speedup(even_load(PAPERS, 2**k, 4), 256, machine, 2**k, 2) for k in range(4, 16)]
    ours, eq_8 = zip(*pairs, strict=True)
    assert eq_8[0] == pytest.approx(16, rel=0.01)
    assert 10 < ours[0] < 16
    assert all(high >= low for high, low in pairwise(eq_8))
    assert 1 < ours[-1] < 2
    # Without the time to quantize, and without parameters, the model is eq. 8.
    fast = replace(machine, stream_rate=math.inf)
    assert speedup(even_load(PAPERS, 512, 4), 10**6, fast, 512, 2) == pytest.approx((pairs[5][1], pairs[5][1]), rel=0.1)


def test_savings_are_ours_alone() -> None:
    machine, model = published.fugaku(), model_of(PAPERS, 3, 256)
    load = even_load(PAPERS, 768, 4)
    ours, theirs = (halo_price(model, [load], machine, 768, saves=saves) for saves in (True, False))
    assert ours.messages < theirs.messages
    assert ours.dense == theirs.dense


def test_comparisons_state_their_reasons() -> None:
    found = comparisons()
    assert {c.what.split(",")[0] for c in found} == {"S", "SP", "P", "U"}
    assert all(c.note for c in found)
    table_5 = [c for c in found if c.what.startswith("S,")]
    assert all(0.8 < c.ratio < 1.2 for c in table_5), table_5
