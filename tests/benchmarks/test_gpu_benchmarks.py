"""The benchmarks for a GPU run, tiny and on the CPU: so that they run the first time that there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import gpu_bandwidth
import gpu_epoch
import gpu_measure
import gpu_spmm
import pytest

from pyg_dist.backend import calibration


def once(run: Callable[[], object], *args: object, **kwargs: object) -> float:
    """Seconds of a call, in the place of the best of several with cold caches."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def test_every_part_writes_its_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {name: gpu_measure.TRIAL_SIZES["arxiv-like"] for name in ("arxiv-like", "products-like")}
    monkeypatch.setattr(gpu_measure, "TRIAL_SIZES", sizes)
    monkeypatch.setattr(calibration, "best_seconds", once)
    monkeypatch.setenv("PYG_DIST_REMEMBER_MIB", "inf")  # which the epochs change
    place, path = gpu_measure.Place.of("cpu"), tmp_path / "gpu.json"
    for part, run in (("spmm", gpu_spmm.run), ("bandwidth", gpu_bandwidth.run), ("epoch", gpu_epoch.run)):
        run(place, gpu_measure.Log(path, part))
    found = gpu_measure.read(path)
    assert found["spmm"]["summary"]["over torch, least"] > 0
    assert found["spmm"]["tiles of products"]["1 x 64 x 1"]["seconds"] > 0
    assert found["spmm"]["extremes"]["speed-up"] > 0
    assert set(found["bandwidth"]) == {
        "copy GB/s", "pack, 2 bits", "unpack and add, 2 bits", "gather_rows", "norm_relu_dropout",
    }  # fmt: skip
    assert all("error" not in str(value) for part in found.values() for value in part.values())
    assert all(f"arxiv-like, gcn, {form}" in found["epoch"] for form in gpu_epoch.FORMS)


def test_a_variant_that_fails_ends_no_other(tmp_path: Path) -> None:
    log = gpu_measure.Log(tmp_path / "gpu.json", "part")

    def fails() -> None:
        raise RuntimeError("no room\nmore")

    log.attempt("large", fails)
    log.attempt("small", lambda: 3)
    assert gpu_measure.read(tmp_path / "gpu.json") == {
        "part": {"large": {"error": "RuntimeError: no room"}, "small": 3}
    }
