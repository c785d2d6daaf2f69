"""``benchmarks/patterns.py`` runs on a tiny graph, and its figures are what it says. Nothing here looks at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import patterns
import pytest
import torch
from spmm import Samples

NAMES = ["CSR.from_edges", "torch.argsort", "CSR.from_edges, in order", "CSR.transposed"]


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "patterns.json"
    options = ["--graphs", "tiny", "--threads", "1", "2", "--widths", "16", "--rounds", "2", "--retries", "1"]
    monkeypatch.setattr(sys, "argv", ["patterns.py", *options, "--output", str(output)])
    before = torch.get_num_threads()
    try:
        patterns.main()
    finally:
        torch.set_num_threads(before)
    content = json.loads(output.read_text())
    assert content["machine"]["last_cache_mib"] >= 0
    assert [result["threads"] for result in content["results"]] == [1, 2]
    for result in content["results"]:
        assert (result["graph"], result["nodes"], result["edges"]) == ("tiny", 300, 3000)
        assert list(result["samples"]) == [*NAMES, "spmm_csr, width 16", "sddmm_csr, width 16"]
        assert all(len(taken["seconds"]) == 2 for taken in result["samples"].values())
    assert "sddmm_csr, width 16" in capsys.readouterr().out


def test_figures() -> None:
    seconds = {"CSR.from_edges": 0.5, "torch.argsort": 2.0, "other": 0.25}
    samples = {name: Samples([taken] * 3, [2 * taken] * 3, [0.0] * 3) for name, taken in seconds.items()}
    assert patterns.summary(samples, 10**8) == {
        "nanoseconds_per_edge": {"CSR.from_edges": [5.0, 10.0], "torch.argsort": [20.0, 40.0], "other": [2.5, 5.0]},
        "argsort_over_from_edges": [4.0, 4.0],
    }


def test_the_sort_refuses_an_edge_outside() -> None:
    with pytest.raises(ValueError, match=r"expected entries in \[0, 2\), got 0 to 2"):
        patterns.by_argsort(torch.tensor([0, 2]), torch.tensor([0, 1]), 2, 2)
