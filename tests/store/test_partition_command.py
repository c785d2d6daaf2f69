"""``partition``, ``plan`` and ``doctor --store`` as people call them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from stored_graphs import skewed_graph
from workers import Pools

from pyg_dist import DistributedData, save_graph
from pyg_dist.cli import main
from pyg_dist.store.manifest import Manifest


@pytest.fixture
def graph(tmp_path: Path) -> str:
    save_graph(skewed_graph(), tmp_path / "graph.safetensors")
    return str(tmp_path / "graph.safetensors")


@pytest.mark.parametrize("model", ["random", "metis", "stream", "parts.npy"])
def test_the_stores_plan_is_the_graphs(
    tmp_path: Path, graph: str, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    out = str(tmp_path / "store")
    if model == "parts.npy":
        model = str(tmp_path / model)
        np.save(model, np.arange(200) % 4)
    assert main(["partition", graph, out, "--parts", "4", "--model", model, "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["num_nodes"], written["num_edges"], written["ranks"]) == (200, 1500, 4)
    assert main(["plan", out, "--ranks", "4", "--json"]) == 0
    stored = json.loads(capsys.readouterr().out)
    assert main(["plan", graph, "--ranks", "4", "--json", "--partition", model, "--ranks-per-node", "1"]) == 0
    planned = json.loads(capsys.readouterr().out)
    for key in ("rows", "nodes", "edges", "inner", "work", "rows_sent", "messages", "hash"):
        assert stored[key] == planned[key], key
    assert main(["doctor", "--store", out]) == 0
    assert "all as the manifest says" in capsys.readouterr().out


def test_a_grid_store(tmp_path: Path, graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "store")
    grid = ["--layout", "grid", "--tiles", "2", "3", "--mesh", "2", "1", "2"]
    assert main(["partition", graph, out, "--parts", "4", *grid]) == 0
    capsys.readouterr()
    assert main(["plan", out, "--ranks", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mesh"] == {"data": 1, "z": 2, "x": 2, "y": 1}
    assert sum(key.startswith("tile-0") for key in Manifest.load(Path(out)).shards) == 6
    assert main(["plan", out, "--ranks", "4", "--layout", "halo"]) == 1
    assert f"Expected --layout grid, for which the store {out} was written (got halo)" in capsys.readouterr().err


def test_a_wrong_mesh_leaves_nothing_behind(tmp_path: Path, graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "store"
    assert main(["partition", graph, str(out), "--parts", "4", "--layout", "grid", "--mesh", "3", "1", "1"]) == 1
    assert "Expected a mesh of 4 ranks" in capsys.readouterr().err
    assert not out.exists()


def opened_with_nan(path: str) -> None:
    with pytest.warns(UserWarning, match=r"'x' is NaN at 2 of 200 nodes, the first one node 7 .entries: 3."):
        DistributedData.open(path)


@pytest.mark.parametrize("layout", ["halo", pytest.param("grid", marks=pytest.mark.slow)])
def test_nan_features_are_told_when_a_store_is_opened(workers: Pools, tmp_path: Path, layout: str) -> None:
    nan, out = skewed_graph(), tmp_path / "store"
    nan.x[[7, 130, 130], [0, 1, 2]] = float("nan")
    save_graph(nan, tmp_path / "nan.safetensors")
    assert main(["partition", str(tmp_path / "nan.safetensors"), str(out), "--parts", "1", "--layout", layout]) == 0
    workers(1).run(opened_with_nan, str(out))


def test_the_plan_of_other_numbers_of_ranks(tmp_path: Path, graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "store")
    assert main(["partition", graph, out, "--parts", "4", "--model", "random"]) == 0
    capsys.readouterr()
    for ranks in (1, 3):
        assert main(["plan", out, "--ranks", str(ranks), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["ranks"], sum(found["nodes"]), sum(found["edges"])) == (ranks, 200, 1500)
        assert (found["rows"]["hybrid"] == 0) == (ranks == 1)
    for ranks, words in ((5, "--parts 5 --force"), (0, "one rank or more")):
        assert main(["plan", out, "--ranks", str(ranks)]) == 1
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert words in error
    for option in (
        ["--save", "p"],
        ["--bits", "4"],
        ["--partition", "random"],
        ["--model", "2", "8"],
        ["--undirected"],
    ):
        assert main(["plan", out, "--ranks", "4", *option]) == 1
        assert f"Expected no {option[0]} with a store (got one)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "0"], "part"),
        (["--parts", "201"], "200 nodes"),
        (["--parts", "2", "--memory", "1MiB"], "--memory"),
        (["--parts", "2", "--memory", "much"], "much"),
        (["--parts", "2", "--model", "magic"], "magic"),
        (["--parts", "2", "--model", "missing.npy"], "missing.npy"),
        (["--parts", "2", "--epsilon", "-1"], "epsilon"),
        (["--parts", "2", "--resume", "--force"], "--resume or --force"),
        (["--parts", "2", "--undirected"], "edge_"),
        (["--parts", "2", "--layout", "grid", "--tiles", "0", "1"], "--tiles"),
        (["--parts", "2", "--layout", "grid", "--model", "magic"], "--model"),
        (["--parts", "2", "--mesh", "2", "1", "1"], "--mesh"),
        (["--parts", "2", "--plot", "a.txt"], "--plot"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path, graph: str, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert main(["partition", graph, str(tmp_path / "store"), *arguments]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error
    assert not (tmp_path / "store" / "manifest.json").exists()


@pytest.mark.parametrize("layout", ["halo", "grid"])
def test_names_of_attributes(tmp_path: Path, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    """Those of a store's own columns are refused, any other will do."""
    for name, size in (("node_id", 200), ("source", 1500), ("target", 1500), ("edge_id", 1500), ("is_post", 1500)):
        data, file = skewed_graph(), tmp_path / f"{name}.safetensors"
        data[name] = torch.arange(size)
        save_graph(data, file)
        assert main(["partition", str(file), str(tmp_path / "store"), "--parts", "2", "--layout", layout]) == 1
        kind = "node" if size == 200 else "edge"
        assert f"Expected no {kind} attribute '{name}', which stores have themselves" in capsys.readouterr().err
    data = skewed_graph()
    data["self"], data["edges / all"] = torch.arange(200), torch.arange(1500)
    save_graph(data, tmp_path / "g.safetensors")
    out = str(tmp_path / "store")
    assert main(["partition", str(tmp_path / "g.safetensors"), out, "--parts", "1", "--layout", layout]) == 0
    opened = DistributedData.open(out)
    assert torch.equal(opened["self"].full_tensor(), data["self"])
    assert torch.equal(opened["edges / all"].full_tensor(), data["edges / all"])
    assert torch.equal(opened.edge_index.full_tensor(), data.edge_index)
