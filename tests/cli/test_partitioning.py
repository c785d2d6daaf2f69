"""The command ``partition``: comparisons, parts that others take, refusals in one line."""

from __future__ import annotations

import json
import multiprocessing.spawn
import os
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest
import torch
from random_graphs import random_graph

from pyg_dist.cli import main
from pyg_dist.cli.partitioning import measured
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.partition import partition
from pyg_dist.plan.parts import METHODS
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.npz"
    np.savez(path, num_nodes=60, edge_index=random_graph(60, 500).edge_index.numpy(), undirected=False)
    return path


def test_largest_senders_of_both_exchanges() -> None:
    """Three nodes point at one on another rank: each sends its row, or all of them one sum."""
    edge_index = torch.tensor([[1, 2, 3], [0, 0, 0]])
    parts, model = torch.tensor([0, 1, 1, 1]), Model.of_layers(4, 3, None, None)
    line = measured(edge_index, parts, 2, "given", 0.0, model, Machine())
    assert (line.largest_post_sender, line.largest_sender) == (3, 1)


def test_compares_every_method(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["partition", str(graph_file), "--parts", "3", "5", "--compare", "--epsilon", "0.1"]
    picture = tmp_path / "rows.svg"
    assert main([*command, "--json", "--plot", str(picture)]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert {(line["parts"], line["method"]) for line in lines} == {(p, m) for p in (3, 5) for m in METHODS}
    edge_index = random_graph(60, 500).edge_index
    for line in lines:
        if line["method"] in ("random", "metis"):
            parts = partition(edge_index, 60, line["parts"], line["method"], epsilon=0.1)
            plan = Plan.of(edge_index, parts, line["parts"])
            assert (line["volume"], line["hybrid"]) == (plan.rows["post"], plan.rows["hybrid"])
            assert line["messages"] == plan.messages / line["parts"]
            assert line["most_messages"] == max(s.messages for s in plan.sizes)
        if line["method"] == "random":
            assert line["volume_over_random"] == line["hybrid_over_random"] == 1
    assert picture.read_text().count("cover") >= 1
    assert main(["partition", str(graph_file), "--parts", "3", "--model", "metis", "stream"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert "hybrid" in header
    assert [row.split()[1] for row in rows] == ["metis", "stream"]


@pytest.mark.parametrize("place", ["behind the graph", "behind the parts"])
def test_writes_parts_that_plan_takes(
    graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    out = tmp_path / "parts.npy"
    first, last = ([str(out)], []) if place == "behind the graph" else ([], [str(out)])
    options = ["--model", "cover", "--seed", "3"]
    assert main(["partition", str(graph_file), *first, *options, "--json", "--parts", "4", *last]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert np.load(out).shape == (60,)
    assert main(["plan", str(graph_file), "--ranks", "4", "--partition", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]["hybrid"] == line["hybrid"]


def test_reverses_are_added(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edge_index = random_graph(60, 500).edge_index
    both = torch.unique(torch.cat([edge_index, edge_index.flip(0)], dim=1), dim=1)
    assert main(["partition", str(graph_file), "--parts", "4", "--model", "random", "--undirected", "--json"]) == 0
    (line,) = json.loads(capsys.readouterr().out)
    assert line["volume"] == Plan.of(both, partition(both, 60, 4, "random"), 4).rows["post"]


def test_a_budget_keeps_the_best(
    graph_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(forked_python.executable()))
    command = ["partition", str(graph_file), "--parts", "4", "--model", "random", "--json"]
    assert main(command) == 0
    assert main([*command, "--time-budget", "1"]) == 0
    once, best = (json.loads(line)[0] for line in capsys.readouterr().out.splitlines())
    assert best["hybrid"] < once["hybrid"]  # of some hundred random ones


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--parts", "0"], "numbers from 1 (got 0)"),
        (["--parts", "-2"], "numbers from 1 (got -2)"),
        (["--parts", "four", "5"], "numbers from 1 (got four 5)"),
        (["--parts", "61"], "at most a part for each of 60 nodes (got 61"),
        (["--parts", "4", "--model", "metiss"], "(got 'metiss')"),
        (["--parts", "4", "--epsilon", "-0.1"], "'epsilon' to be a positive number (got -0.1)"),
        (["--parts", "4", "--epsilon", "nan"], "(got nan)"),
        (["--parts", "4", "--memory", "1KiB"], "which takes about"),
        (["--parts", "4", "--model", "cover", "--solver", "kahypar"], "solver='mt-kahypar' with partition='cover'"),
        (["--parts", "4", "--solver", "kahypar", "--preset", "quality"], "no preset with solver='kahypar'"),
        (["--parts", "4", "--time-budget", "0"], "time budget above 0"),
        (["--parts", "4", "--model", "stochastic", "--theta", "0"], "theta > 0"),
        (["--parts", "4", "--model", "stochastic", "--delta", "1"], "delta < 1"),
        (["--parts", "4", "--model", "stochastic", "--batch-size", "0"], "batches of one node or more"),
        (["--parts", "4", "--compare", "--model", "metis"], "--compare or --model (got both)"),
        (["--parts", "4", "5", "{folder}/parts.npy"], "one number of parts and one method"),
        (["--parts", "4", "{folder}/missing/parts.npy"], "folder that exists"),
        (["--parts", "4", "--force"], "with the folder of a store"),
        (["--parts", "4", "--seed", str(2**70)], "integer of 64 bits"),
        (["--parts", "4", "--plot", "rows.xyz"], "ends in .png, .svg, .pdf"),
        (["{folder}/store", "--parts", "4", "--time-budget", "5"], "--time-budget without a store"),
        (["{folder}/store", "--parts", "4", "--model", "metiss"], "(got 'metiss')"),
        (["{folder}/store", "--parts", "4", "--layout", "grid", "--tiles", "1000", "1000"], "at most 16,384 tiles"),
    ],
)
def test_refused_in_one_line(
    graph_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    filled = [argument.format(folder=graph_file.parent) for argument in arguments]
    assert main(["partition", str(graph_file), *filled]) == 1
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1, message
    assert not list(graph_file.parent.glob("*.npy"))
    assert not (graph_file.parent / "store").exists()


def test_files_that_are_no_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken.npz"
    broken.write_bytes(b"PK\x03\x04 nothing")
    for path in (broken, tmp_path / "missing.npz"):
        assert main(["partition", str(path), "--parts", "4"]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_a_store_is_made_by_any_method(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: dict[str, Any] = {}
    for method in ("cover", "stream"):
        out = tmp_path / method
        assert main(["partition", str(graph_file), str(out), "--parts", "4", "--model", method, "--json"]) == 0
        rows[method] = json.loads(capsys.readouterr().out)["rows"]
        (parts := tmp_path / f"{method}.npy").unlink(missing_ok=True)
        assert main(["partition", str(graph_file), str(parts), "--parts", "4", "--model", method, "--json"]) == 0
        measured = json.loads(capsys.readouterr().out)[0]
        if method == "stream":  # the same passes, over a file or in memory
            assert measured["volume"] == rows[method]["post"]
