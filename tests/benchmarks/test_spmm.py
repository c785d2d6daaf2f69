"""``benchmarks/spmm.py``: forced forms differ from the chosen one in the form alone; the JSON has what each took."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import power_law
import pytest
import spmm
import torch

from pyg_dist.backend import ops
from pyg_dist.backend.sparse import csr as csr_module
from pyg_dist.backend.sparse import form_trial
from pyg_dist.backend.sparse.csr import CSR

FORMS = ("pyg_dist float32", "plain", "blocks")


@pytest.fixture
def pattern() -> CSR:
    """12 MiB of sources at width 64, which makes two forms."""
    generator = torch.Generator().manual_seed(0)
    row, col = (torch.randint(0, limit, (220_000,), generator=generator) for limit in (2000, 50_000))
    return CSR.from_edges(row, col, None, 2000, 50_000)


@pytest.mark.parametrize("prefetch_edges", [ops.SpmmWay().prefetch_edges, 64])
def test_forced_forms_ask_for_rows_as_far_ahead_as_the_chosen_one(
    pattern: CSR, prefetch_edges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    best = ops.SpmmWay("blocks", prefetch_edges)
    monkeypatch.setattr(form_trial.FormTrial, "is_over", True)
    monkeypatch.setattr(form_trial.FormTrial, "best", best)
    taken: list[ops.SpmmWay] = []
    spmm_csr = ops.spmm_csr

    def spied(*args: Any, form: ops.SpmmWay, **kwargs: Any) -> torch.Tensor:
        taken.append(form)
        return spmm_csr(*args, form=form, **kwargs)

    monkeypatch.setattr(ops, "spmm_csr", spied)
    chosen, ways = spmm.variants_of(pattern, 64, lambda name: name in FORMS)
    assert list(chosen) == list(FORMS)
    taken.clear()
    outputs = [run() for run in chosen.values()]
    expected = [best, best._replace(form="plain"), best]
    assert taken == expected == [ways[name] for name in FORMS]
    assert all(torch.equal(out, outputs[0]) for out in outputs)


def test_a_wrong_product_is_no_result(pattern: CSR, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50_000, 4)
    spmm.check_sums(pattern, x)
    monkeypatch.setattr(CSR, "multiply", lambda self, x: ops.spmm_csr(self.rowptr, self.col, x) + 0.02)
    with pytest.raises(AssertionError, match="not close"):
        spmm.check_sums(pattern, x)


def test_how_much_longer_the_chosen_way_takes() -> None:
    seconds = {"pyg_dist float32": [2.0, 2.2, 9.0], "plain": [4.0, 3.0, 5.0], "blocks": [1.9, 2.0, 2.1]}
    samples = {name: spmm.Samples(taken, [2 * taken[0]] * 3, [0.0] * 3) for name, taken in seconds.items()}
    assert spmm.over_forced(samples, "blocks") == {"choice": 1.0, "same way again": 1.1}
    assert spmm.over_forced(samples, "plain") == {"choice": 2.0, "same way again": 0.55}
    assert spmm.over_forced(samples, None) is None
    del samples["plain"]
    assert spmm.over_forced(samples, "blocks") is None


@pytest.mark.parametrize("options", [["--transposed"], ["--only", *FORMS]], ids=str)
def test_a_run(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(spmm, "RESULTS", tmp_path)
    monkeypatch.setattr(csr_module, "_WORTH_A_TRIAL", 1)
    monkeypatch.setitem(power_law.SIZES, "tiny", power_law.PowerLaw(1_000, 10_000, 16, 4, seed=1))
    arguments = ["--graph", "tiny", "--widths", "16", "2200", "--rounds", "1", "--retries", "1", *options]
    monkeypatch.setattr(sys, "argv", ["spmm.py", *arguments])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with warnings.catch_warnings():
            spmm.main()
    finally:
        torch.set_num_threads(before)
    (output,) = tmp_path.iterdir()
    transposed = "-transposed" if "--transposed" in options else ""
    assert output.name == f"spmm-tiny{transposed}-{spmm.machine.processor()}.json"
    results = json.loads(output.read_text())["results"]
    assert [(result["threads"], result["width"]) for result in results] == [(1, 16), (1, 2200), (2, 16), (2, 2200)]
    for result in results:
        names = set(result["samples"])
        assert names >= ({"pyg_dist float32"} if options[:1] == ["--only"] else {spmm.BASELINE, "copy", "gather"})
        has_forms = result["width"] == 2200  # 9 MiB of sources
        assert has_forms == (names >= set(FORMS)) == (result["over_forced"] is not None)
        assert all(result["ways"][form]["form"] == form for form in ("plain", "blocks") if has_forms)
    out = capsys.readouterr().out
    assert "the chosen form takes at most " in out
    assert ("of MKL" in out) == (options[:1] != ["--only"])
