"""The benchmark runs on a tiny graph, and its graphs are what it says. Nothing here looks at a time."""

from __future__ import annotations

import json
import os
import time
import unittest.mock
from pathlib import Path

import foreign_load
import measure
import numpy as np
import power_law
import pytest
import resident_memory
import torch
from launching import run_script
from workers import Pools

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
def test_convs(tmp_path: Path) -> None:
    output = tmp_path / "convs.json"
    for conv in ("gat", "tag"):  # the second run keeps what the first has found
        options = ("--graph", "tiny", "--convs", conv, "--rounds", "1", "--warmup", "0", "--retakes", "0")
        ended = run_script("ranks", 1, BENCHMARKS / "convs.py", *options, "--output", str(output))
        assert ended.codes == [0], ended.stderr
    content = json.loads(output.read_text())
    assert list(content) == ["tiny gat", "tiny tag"]
    ours = ["pyg_dist, 1 rank", "pyg_dist, 2 ranks"]
    assert list(content["tiny gat"]["results"]) == ["stock PyG, edge_index", *ours]
    tag = ["stock PyG, edge_index", "stock PyG, adj_t", *ours, "pyg_dist, no edges"]
    assert list(content["tiny tag"]["results"]) == tag
    assert all(entry["ratios"]["pyg_dist, 1 rank"]["speed_up"] > 0 for entry in content.values())


def test_epoch(tmp_path: Path) -> None:
    output = tmp_path / "epoch.json"
    options = ("--graph", "tiny", "--models", "sage", "--rounds", "2", "--epochs", "1", "--retakes", "0")
    options += ("--only", "stock PyG, edge_index", "2 ranks")
    ended = run_script("ranks", 1, BENCHMARKS / "epoch.py", *options, "--output", str(output))
    assert ended.codes == [0], ended.stderr
    content = json.loads(output.read_text())
    assert content["machine"]["pyg_dist"]["isa"] in ("baseline", "avx2", "avx512")
    measured = content["results"]["sage"]
    assert list(measured) == ["stock PyG, edge_index", "pyg_dist, 2 ranks"]
    for name, measurement in measured.items():
        num_ranks = 2 if name.endswith("2 ranks") else 1
        assert len(measurement["seconds"]) == 2
        assert min(measurement["seconds"]) > 0
        assert len(measurement["peak_mib"]) == num_ranks
        assert all(a > b > 0 for a, b in zip(measurement["peak_mib"], measurement["imports_mib"], strict=True))
        assert min(content["ratios"]["sage"][name].values()) > 0
        assert f"sage: {name} " in ended.stdout
    assert content["ratios"]["sage"]["stock PyG, edge_index"] == {"speed_up": 1.0, "memory": 1.0}


@unittest.mock.patch.dict(os.environ)  # what a variant sets ends with the body
def epochs_of_every_variant(model: str) -> dict[str, float | None]:
    import epoch

    return {variant.name: variant.make(*variant.arguments)() for variant in epoch.variants("tiny", model, [])}


@pytest.mark.parametrize("model", ["sage", "gcn"])
def test_every_variant(workers: Pools, model: str) -> None:
    (losses,) = workers(1).run(epochs_of_every_variant, model)
    assert losses.pop("dense products") is None
    assert list(losses)[:2] == ["stock PyG, edge_index", "stock PyG, adj_t"]
    ours = ["pyg_dist, 1 rank", *(f"pyg_dist, 1 rank, {how}" for how in ("fused modules", "nothing remembered"))]
    assert list(losses)[2:] == [*ours, "pyg_dist, 2 ranks"]
    assert max(losses.values()) - min(losses.values()) < 0.5, "which only masks of dropout tell apart"


def test_disturbed_turns_are_repeated() -> None:
    schedule = measure.Schedule(max_foreign=0.1, num_retakes=2, pause_seconds=0.0)

    def counted(*shares: float) -> tuple[float, int]:
        turns = iter([measure.Turn(share, 10.0 + share) for share in shares])
        turn, num_retaken = measure.least_disturbed(lambda: next(turns), schedule)
        assert next(turns, None) is None
        assert turn.seconds == 10.0 + turn.foreign
        return turn.foreign, num_retaken

    assert counted(0.1) == (0.1, 0)
    assert counted(0.5, 0.0) == (0.0, 1)
    assert counted(0.5, 0.3, 0.4) == (0.3, 2)  # then the least disturbed one counts
    assert counted(-1.0) == (-1.0, 0)  # a system that does not tell


def test_foreign_load() -> None:
    if foreign_load._busy_seconds() is None:
        pytest.skip("needs /proc/stat")
    with foreign_load.watched() as load:
        start = time.process_time()
        while time.process_time() < start + 0.5:
            pass
    assert load.busy_seconds > 0.4
    share = load.foreign_share
    load.own_seconds = 0.4
    assert load.foreign_share == pytest.approx(share - 0.4 / (load.elapsed_seconds * os.cpu_count()))
    load.own_seconds = 1e9
    assert load.foreign_share == 0


def test_resident_memory() -> None:
    block = np.ones(8 << 20)  # 64 MiB
    assert resident_memory.peak_mib() >= resident_memory.current_mib() > 64
    del block
    assert resident_memory.peak_mib() > resident_memory.current_mib() + 60
    resident_memory.forget_peak()
    if Path("/proc/self/clear_refs").exists():
        assert resident_memory.peak_mib() < resident_memory.current_mib() + 4


def test_power_law() -> None:
    size, data = power_law.SIZES["small"], power_law.load("small")
    assert (data.num_nodes, data.num_edges, data.num_features) == (size.num_nodes, size.num_edges, size.num_features)
    assert data.is_undirected()
    assert not data.has_self_loops()
    assert torch.unique(data.edge_index, dim=1).shape[1] == size.num_edges
    degree = torch.bincount(data.edge_index[1], minlength=size.num_nodes).sort(descending=True).values.float()
    # The expected degree of rank r is about c r^-0.6: a hundredth of the nodes hold (1/100)^0.4 of the ends.
    share = degree[: size.num_nodes // 100].sum() / degree.sum()
    assert 0.6 * 0.01**0.4 < share < 1.3 * 0.01**0.4
    assert torch.equal(power_law.load("small").edge_index, data.edge_index)
