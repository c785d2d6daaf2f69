"""``benchmarks/small.py`` runs, and its figures are what it says. Nothing here looks at a time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import small
import torch


@pytest.mark.slow
def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "small.json"
    options = ["--convs", "sage", "--nodes", "34", "--rounds", "2", "--epochs", "2", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["small.py", *options])
    small.main()
    content = json.loads(output.read_text())
    (result,) = content["results"].values()
    ours, stock = (result["results"][name]["seconds"] for name in ("pyg_dist", "stock PyG"))
    assert len(ours) == len(stock) == 2
    assert result["ratio"] == pytest.approx(sum(ours) / sum(stock), abs=1e-3)  # of two, the median is the mean
    assert "sage" in capsys.readouterr().out


@pytest.mark.parametrize("conv", small.CONVS)
def test_both_sides_train_alike(conv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_DIST_STOCK_ELEMENTS", "1048576")
    stock, ours = (small.training_epoch(conv, 34, is_ours) for is_ours in (False, True))
    for _ in range(3):
        torch.testing.assert_close(ours(), stock())
