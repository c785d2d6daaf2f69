"""The benchmark runs on a tiny graph, and its graphs are what it says. Nothing here looks at a time."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look their annotations up
    spec.loader.exec_module(module)
    return module


@pytest.mark.timeout(300)  # it starts six Python processes, on a machine that may be busy
def test_epoch(tmp_path: Path) -> None:
    output = tmp_path / "epoch.json"
    command = [sys.executable, str(BENCHMARKS / "epoch.py"), "--graph", "tiny", "--models", "sage"]
    command += ["--rounds", "2", "--epochs", "1", "--warmup", "1", "--output", str(output)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr
    content = json.loads(output.read_text())
    assert content["machine"]["pyg_dist"]["isa"] in ("baseline", "avx2", "avx512")
    measured = content["results"]["sage"]
    assert list(measured) == ["stock PyG, edge_index", "stock PyG, adj_t", "pyg_dist, 1 rank", "pyg_dist, 2 ranks"]
    for name, measurement in measured.items():
        num_ranks = 2 if name.endswith("2 ranks") else 1
        assert len(measurement["seconds"]) == 2
        assert min(measurement["seconds"]) > 0
        assert len(measurement["peak_mib"]) == num_ranks
        assert all(a >= b > 0 for a, b in zip(measurement["peak_mib"], measurement["setup_mib"], strict=True))
        assert f"sage: {name} " in ended.stdout


def test_power_law() -> None:
    graphs = _module("graphs")
    size, data = graphs.SIZES["small"], graphs.load("small")
    assert (data.num_nodes, data.num_edges, data.num_features) == (size.num_nodes, size.num_edges, size.num_features)
    assert data.is_undirected()
    assert not data.has_self_loops()
    assert torch.unique(data.edge_index, dim=1).shape[1] == size.num_edges
    degree = torch.bincount(data.edge_index[1], minlength=size.num_nodes).sort(descending=True).values.float()
    # The expected degree of rank r is about c r^-0.6: a hundredth of the nodes hold (1/100)^0.4 of the ends.
    share = degree[: size.num_nodes // 100].sum() / degree.sum()
    assert 0.6 * 0.01**0.4 < share < 1.3 * 0.01**0.4
    assert torch.equal(graphs.load("small").edge_index, data.edge_index)
