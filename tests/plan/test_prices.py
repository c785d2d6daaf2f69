"""Simulated epochs of a graph of which only statistics are known: rows, loads, what falls and grows with ranks."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from pyg_dist.errors import OptionError
from pyg_dist.plan.prices import HYBRID_SHARE, GraphStatistics, crossover, epoch, even_load, model_of, speedup
from pyg_dist.pricing.machine import Machine

CITATIONS = GraphStatistics(100_000_000, 1_600_000_000, 128, 172, halo_ranks=2048, halo_rows=4e8)
CLUSTER = replace(
    Machine(), call_seconds=0.0, intra_latency=2e-6, inter_latency=2e-6, intra_bandwidth=1e9, inter_bandwidth=4e9,
    ranks_per_node=4, cores=4, stream_rate=1e11, quantize_rate=1e11, gemm_rate=1e12,
)  # fmt: skip


def test_rows_by_ranks() -> None:
    """The power law through the given point; no rows alone, and never more than remote edges of random parts."""
    graph = GraphStatistics(1000, 5000, 8, 2, halo_ranks=4, halo_rows=300.0, growth=0.5)
    assert graph.rows(1) == 0
    assert graph.rows(4) == 300
    assert graph.rows(64) == pytest.approx(300 * 4)
    assert graph.rows(10**6) == pytest.approx(5000 * (1 - 1e-6))


@pytest.mark.parametrize("wrong", [{"num_nodes": 0}, {"num_classes": 0}, {"halo_rows": -1.0}, {"halo_rows": math.nan}])
def test_statistics_are_checked(wrong: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="positive numbers"):
        replace(CITATIONS, **wrong)


def test_even_parts_send_everything() -> None:
    load = even_load(CITATIONS, 64, ranks_per_node=4)
    sent = 64 * (load.rows_inside + load.rows_between)
    assert sent == pytest.approx(4e8 * (64 / 2048) ** 0.4 * HYBRID_SHARE)
    assert load.rows_inside / load.rows_between == pytest.approx(3 / 60)
    assert load.messages_inside + load.messages_between == pytest.approx(63)
    assert even_load(CITATIONS, 1, 4)[2:6] == (0, 0, 0, 0)


def test_epochs_by_ranks() -> None:
    model = model_of(CITATIONS, 3, 64)
    lines = [epoch(CITATIONS, model, ranks, CLUSTER, (32, 2)) for ranks in (1, 16, 256)]
    assert [line.halo[32].seconds for line in lines] == sorted((line.halo[32].seconds for line in lines), reverse=True)
    assert all(line.halo[2].seconds < line.halo[32].seconds for line in lines[1:])
    assert lines[0].halo[2].messages == lines[0].grid.messages == 0
    assert all(line.shape.size == line.ranks for line in lines)
    deep = epoch(CITATIONS, model_of(CITATIONS, 8, 64), 256, CLUSTER)
    assert deep.halo[32].seconds > 2 * lines[2].halo[32].seconds


def test_crossover() -> None:
    """From the last number of ranks backwards, as long as the grid is cheaper."""
    line = epoch(CITATIONS, model_of(CITATIONS, 3, 64), 4, CLUSTER)
    cheap, dear = replace(line.grid, messages=0.0, dense=0.0, streams=0.0, sparse=1e-9), replace(line.grid, dense=1e9)
    grid = [cheap, dear, cheap, cheap]
    lines = [line._replace(ranks=ranks, grid=price) for ranks, price in zip((1, 2, 4, 8), grid, strict=True)]
    assert crossover(lines) == 4
    assert crossover(lines[:2]) is None


def test_fewer_bits_have_the_shape_of_fig_7() -> None:
    """SuperGCN, eq. 8: near gamma while bytes decide, falling with latency, while there are rows for every partner."""
    machine = CLUSTER
    pairs = [speedup(even_load(CITATIONS, 2**k, 4), 256, machine, 2**k, 2) for k in range(4, 16)]
    ours, eq_8 = zip(*pairs, strict=True)
    assert eq_8[0] == pytest.approx(16, rel=0.01)
    assert 10 < ours[0] < 16
    assert all(high >= low for high, low in pairwise(eq_8))
    assert 1 < ours[-1] < 2
    # Without the time to quantize, and without parameters, the model is eq. 8.
    fast = replace(machine, stream_rate=math.inf, quantize_rate=math.inf)
    assert speedup(even_load(CITATIONS, 512, 4), 10**6, fast, 512, 2) == pytest.approx(
        (pairs[5][1], pairs[5][1]), rel=0.1
    )
