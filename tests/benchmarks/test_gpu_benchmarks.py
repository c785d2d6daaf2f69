"""The benchmarks for a GPU run, tiny and on the CPU: so that they run the first time that there is one."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cusparse
import gpu_bandwidth
import gpu_epoch
import gpu_measure
import gpu_spmm
import pytest
import torch

from pyg_dist.backend import calibration
from pyg_dist.errors import DataError


def once(run: Callable[[], object], *args: object, **kwargs: object) -> float:
    """Seconds of a call, in the place of the best of several with cold caches."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@pytest.mark.slow
def test_every_part_writes_its_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = {name: gpu_measure.TRIAL_SIZES["arxiv-like"] for name in ("arxiv-like", "products-like")}
    monkeypatch.setattr(gpu_measure, "TRIAL_SIZES", sizes)
    monkeypatch.setattr(calibration, "median_seconds", once)
    monkeypatch.setenv("PYG_DIST_REMEMBER_MIB", "inf")  # which the epochs change
    place, path = gpu_measure.Place.of("cpu"), tmp_path / "gpu.json"
    for part, run in (("spmm", gpu_spmm.run), ("bandwidth", gpu_bandwidth.run), ("epoch", gpu_epoch.run)):
        run(place, gpu_measure.Log(path, part))
    found = gpu_measure.read(path)
    assert found["spmm"]["summary"]["over torch, least"] > 0
    assert found["spmm"]["tiles of products"]["1 x 64 x 1"]["seconds"] > 0
    assert found["spmm"]["extremes"]["speed-up"] > 0
    assert set(found["bandwidth"]) == {
        "copy GB/s", "pack, 2 bits", "pack, 8 bits", "unpack and add, 2 bits", "unpack and add, 8 bits",
        "gather_rows", "norm_relu_dropout", "norm_relu_dropout, backward",
    }  # fmt: skip
    assert all("error" not in str(value) for part in found.values() for value in part.values())
    assert all(f"arxiv-like, gcn, {form}" in found["epoch"] for form in gpu_epoch.FORMS)
    assert found["epoch"]["summary"]["3x edge_index at 0.4 of its peak on arxiv-like"]["sage"]["speed-up"] > 0


@pytest.mark.parametrize("kind", [RuntimeError, DataError, TypeError, AssertionError, KeyError, MemoryError])
def test_a_variant_that_fails_ends_no_other(tmp_path: Path, kind: type[Exception]) -> None:
    log = gpu_measure.Log(tmp_path / "gpu.json", "part")

    def fails() -> None:
        raise kind("no room\nmore")

    log.attempt("large", fails)
    log.attempt("small", lambda: 3)
    found = gpu_measure.read(tmp_path / "gpu.json")["part"]
    assert found["small"] == 3
    assert found["large"]["error"].startswith(f"{kind.__name__}: ")
    assert "no room" in found["large"]["error"]


def test_a_way_a_width_or_a_graph_that_fails_ends_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CuSPARSE is looked for among what torch has loaded, which is nothing here."""
    products, draw = gpu_spmm.products, gpu_spmm.draw

    def spoilt(graph: Any, width: int, place: Any) -> dict[str, Callable[[], Any]]:
        if width == gpu_spmm.WIDTHS[0]:
            raise DataError("expected another width")
        x = torch.ones(2, 2)
        prepare = partial(cusparse.product, x, x, x, x, x, cusparse.ALGORITHMS["ALG1"])
        later = gpu_spmm.Later(prepare, lambda: None)
        return products(graph, width, place) | {"cuSPARSE ALG1": later}

    def spoilt_draw(size: Any, place: Any) -> Any:
        if size is gpu_measure.TRIAL_SIZES["reddit-like"]:
            raise MemoryError("no room")
        return draw(size, place)

    monkeypatch.setattr(gpu_spmm, "products", spoilt)
    monkeypatch.setattr(gpu_spmm, "draw", spoilt_draw)
    monkeypatch.setattr(calibration, "median_seconds", once)
    gpu_spmm.run(gpu_measure.Place.of("cpu"), gpu_measure.Log(tmp_path / "gpu.json", "spmm"))
    found = gpu_measure.read(tmp_path / "gpu.json")["spmm"]
    narrow, wide = gpu_spmm.WIDTHS[:2]
    assert found["reddit-like, graph"]["error"] == "MemoryError: no room"
    for graph in ("arxiv-like", "products-like"):
        assert found[f"{graph}, {narrow} columns"]["error"] == "DataError: expected another width"
        ways = found[f"{graph}, {wide} columns"]
        assert ways["cuSPARSE ALG1"].startswith("OSError: expected libcusparse among what torch has loaded")
        assert ways["pyg_dist float32"] > 0
        assert ways[gpu_spmm.TORCH] > 0
    assert found["summary"]["over torch, least"] > 0


def test_a_wrong_product_is_no_product() -> None:
    one = torch.ones(3, 2)
    gpu_spmm.expect(one + 1e-6, one)
    later = gpu_spmm.Later(lambda: lambda: None, lambda: gpu_spmm.expect(one, 2 * one))
    with pytest.raises(RuntimeError, match="expected equal products"):
        later()


class FakeGpu:
    """A stream and a clock: a launch takes the host 30 us, its work the device 5 us, once it has come to it."""

    def __init__(self) -> None:
        self.host = self.stream = 0.0
        self.launched = 0

    def queue(self, seconds: float) -> None:
        self.stream = max(self.stream, self.host) + seconds

    def launch(self) -> None:
        self.host += 30e-6
        self.queue(5e-6)
        self.launched += 1

    def synchronize(self) -> None:
        self.host = max(self.host, self.stream)

    def event(self, enable_timing: bool) -> FakeEvent:
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def record(self) -> None:
        self.gpu.queue(0)
        self.time = self.gpu.stream

    def synchronize(self) -> None:
        self.gpu.synchronize()

    def elapsed_time(self, end: FakeEvent) -> float:
        return 1000 * (end.time - self.time)


def test_gaps_of_the_host_do_not_count_for_ops_and_count_for_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.synchronize)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: gpu.queue(cycles / 2e9), raising=False)
    monkeypatch.setattr(gpu_measure.time, "perf_counter", lambda: gpu.host)
    place = gpu_measure.Place(torch.device("cuda"), is_trial=False)
    assert place.seconds(gpu.launch) == pytest.approx(5e-6)
    assert gpu.launched > 100  # several calls to a sample
    assert place.seconds(gpu.launch, is_queued=False) == pytest.approx(30e-6, rel=0.2)


def test_stock_forms_come_before_ours_is_laid_out_and_the_largest_graph_comes_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What ours keeps on the device would count for the others' peak memory."""
    seen: list[tuple[int, str, bool]] = []

    def measured(host: Any, laid_out: Any, model: str, form: str, size: gpu_measure.Size, place: Any) -> Any:
        seen.append((size.num_edges, form, laid_out is not None))
        return {"seconds": 1.0, "peak_mib": 1.0}

    monkeypatch.setattr(gpu_epoch, "measured", measured)
    monkeypatch.setattr(gpu_epoch, "DistributedData", lambda data: data)
    gpu_epoch.run(gpu_measure.Place.of("cpu"), gpu_measure.Log(tmp_path / "gpu.json", "epoch"))
    assert all(is_there == form.startswith("pyg_dist") for _, form, is_there in seen)
    edges = [num_edges for num_edges, *_ in seen]
    assert edges == sorted(edges)
    assert edges[-1] == gpu_measure.TRIAL_SIZES["products-like"].num_edges
    assert [is_there for num_edges, _, is_there in seen if num_edges == edges[0]] == 9 * [False] + 6 * [True]


def test_goals_are_summed_up() -> None:
    def taken(seconds: float, peak: float) -> dict[str, float]:
        return {"seconds": seconds, "peak_mib": peak}

    found: gpu_epoch.Found = {
        ("arxiv-like", "sage", "edge_index"): taken(8, 100),
        ("arxiv-like", "sage", "adj_t"): taken(4, 60),
        ("arxiv-like", "sage", "EdgeIndex"): taken(6, 40),
        ("arxiv-like", "sage", "pyg_dist"): taken(2, 30),
        ("reddit-like", "sage", "edge_index"): {"error": "OutOfMemoryError"},
        ("reddit-like", "sage", "EdgeIndex"): taken(9, 40),
        ("reddit-like", "sage", "pyg_dist"): taken(2, 20),
        ("products-like", "sage", "EdgeIndex"): taken(9, 40),
    }
    goal, mean = gpu_epoch.summary(found).values()
    assert goal == {"sage": {"speed-up": 4.0, "of its peak": 0.3}, "gcn": None, "gat": None}
    assert mean["speed-up"] == pytest.approx((2.0 * 4.5) ** 0.5)
    assert mean["of its peak"] == pytest.approx(0.5)
    assert mean["of"] == 2
