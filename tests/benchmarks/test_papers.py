"""Printed tables and the models beside them: what was fitted to some printed numbers predicts others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "papers"))

import simulate
from comparisons import comparisons
from published import GRAPHS, MACHINES, TABLE_5, TABLE_5_RANKS, fugaku, undirected

from pyg_dist.plan.simulate import HYBRID_SHARE, ROWS_BY_EDGE


def test_fugaku_predicts_the_rows_that_it_was_not_solved_from() -> None:
    """Bandwidth and latency are those of int2; full precision sends 24 times as much, and the time follows."""
    machine = fugaku()
    for name in ("pre", "post", "hybrid"):
        volume, milliseconds = TABLE_5[name]
        sent = volume * 1e9 / TABLE_5_RANKS / machine.intra_bandwidth
        seconds = sent + (TABLE_5_RANKS - 1) * machine.intra_latency
        assert 1e3 * seconds == pytest.approx(milliseconds, rel=0.12)
    # The data sheet: six links of Tofu D with 6.8 GB/s each, shared by a node's four ranks; latencies from 0.5 us.
    assert 0.1e9 < machine.intra_bandwidth < 6 * 6.8e9 / 4
    assert 0.4e-6 < machine.intra_latency < 1e-5


def test_halo_grows_as_printed() -> None:
    """Plexus, 7.1: 18 million owned and halo nodes on 32 ranks, 22 on 256: the growth was fitted to both, rounded."""
    products = GRAPHS["products-14M"]
    assert (products.num_nodes + products.rows(32)) / 1e6 == pytest.approx(18, abs=0.5)
    assert (products.num_nodes + products.rows(256)) / 1e6 == pytest.approx(22, abs=0.5)
    papers = GRAPHS["papers100M"]
    assert undirected(papers).rows(64) == 2 * papers.rows(64)
    assert undirected(papers).num_edges == 2 * papers.num_edges


def test_the_package_s_defaults_are_table_5() -> None:
    mag = GRAPHS["mag240M"]
    assert mag.halo_rows / mag.num_edges == pytest.approx(ROWS_BY_EDGE)
    assert TABLE_5["hybrid"][0] / TABLE_5["post"][0] == pytest.approx(HYBRID_SHARE)


def test_comparisons_state_their_reasons() -> None:
    found = comparisons()
    assert {c.what.split(",")[0] for c in found} == {"S", "SP", "P", "U"}
    assert all(c.note for c in found)
    table_5 = [c for c in found if c.what.startswith("S,")]
    assert all(0.8 < c.ratio < 1.2 for c in table_5), table_5


def test_simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ["--ranks", "16", "64", "--layers", "3", "--widths", "50", "--bits", "2"]
    assert simulate.main(["papers100M", *options, "--plot", str(tmp_path / "speedup.svg")]) == 0
    out = capsys.readouterr().out
    assert "printed 2.163" in out
    assert "off by more than 2x: " in out
    assert (tmp_path / "speedup.svg").read_text().count("int2") >= 1
    for machine in MACHINES:
        assert simulate.main(["mag240M", *options, "--undirected", "--machine", machine, "--json"]) == 0
        numbers = json.loads(capsys.readouterr().out)
        assert [line["ranks"] for line in numbers["models"][0]["epochs"]] == [16, 64]
        assert numbers["printed"][0]["printed"] == 1131.62
    assert simulate.main(["mag240M", "--batch", "0"]) == 1
    assert "--batch of one node" in capsys.readouterr().err
