"""``python -m pyg_dist``."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pytest
import torch
from graphs import load_npz
from random_graphs import random_graph

import pyg_dist
from pyg_dist.cli import main
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.pricing.machine import Machine


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    graph = random_graph(40, 200)
    path = tmp_path / "graph.npz"
    np.savez(path, num_nodes=40, edge_index=graph.edge_index.numpy().astype(np.int32), undirected=False)
    return path


def test_plan_as_json(graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = torch.arange(40) % 3
    np.save(tmp_path / "parts.npy", parts.numpy())
    saved = tmp_path / "plan.safetensors"
    options = ["--partition", str(tmp_path / "parts.npy"), "--widths", "7", "3", "--json", "--save", str(saved)]
    assert main(["plan", str(graph_file), "--ranks", "3", *options, "--bits", "4", "32"]) == 0
    assert Plan.load(saved).bits == tuple(json.loads(capsys.readouterr().out)["bits"]) == (4, 32)
    assert main(["plan", str(graph_file), "--ranks", "3", *options]) == 0
    numbers = json.loads(capsys.readouterr().out)
    plan = Plan.of(random_graph(40, 200).edge_index, parts, 3, partition="parts.npy")
    assert numbers == plan.to_dict((7, 3))
    assert Plan.load(saved, numbers["hash"]) == plan


def test_plan_as_a_table(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(graph_file), "--ranks", "2", "--exchange", "post", "--partition", "random"]) == 0
    assert "random partition, post exchange" in capsys.readouterr().out


def test_plan_of_mini_batches(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of all nodes is the graph; a smaller one has its share of pairs, about."""
    found = {}
    for size in (40, 20):
        options = ["--ranks", "4", "--data-groups", "2", "--batch-size", str(size), "--partition", "random"]
        assert main(["plan", str(graph_file), *options, "--widths", "8", "--json"]) == 0
        found[size] = json.loads(capsys.readouterr().out)
    whole, sampled = found[40], found[40]["mini_batches"]
    assert whole["ranks"] == 2
    assert (sampled["steps"], found[20]["mini_batches"]["steps"]) == (1, 1)
    assert sampled["edges"] == sum(whole["edges"]) == 200
    assert sampled["rows"] == whole["rows"]["hybrid"]
    assert sampled["bytes"]["8"] == 32 * sampled["rows"]
    half = found[20]["mini_batches"]
    assert 0.1 < half["edges"] / 200 < 0.5  # 0.24 on average
    assert half["rows"] < sampled["rows"]
    assert 0 < half["seconds"] <= sampled["seconds"]
    assert main(["plan", str(graph_file), *options]) == 0
    out = capsys.readouterr().out
    assert "mini-batches of 20 of 40 nodes, 2 data groups of 2 ranks: means of 5 sampled batches" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{graph}", "--ranks", "2", "--batch-size", "41"], "--batch-size between 2 and the 40 nodes (got 41)"),
        (["nothing.npz", "--ranks", "2", "4", "--batch-size", "9"], "one number of ranks"),
        (["nothing.npz", "--ranks", "2", "--layout", "auto", "--batch-size", "9"], "--batch-size with --layout halo"),
        (["nothing.npz", "--ranks", "2", "--data-groups", "2"], "--data-groups with --batch-size"),
        (["nothing.npz", "--ranks", "3", "--data-groups", "2", "--batch-size", "9"], "2 groups of 3 ranks"),
        (["nothing.npz", "--ranks", "2"], "nothing.npz"),
        (["{graph}", "--ranks", "0"], "at least one part"),
        (["{graph}", "--ranks", "2", "--partition", "metiss"], "metiss"),
        ([__file__, "--ranks", "2"], "Expected .npz"),
        (["{graph}", "--ranks", "41"], "at most a rank for each of 40 nodes (got 41 ranks)"),
        (["nothing.npz", "--ranks", "2", "--plot", "g.xyz"], "ends in .png, .svg, .pdf (got 'g.xyz')"),
        (["nothing.npz", "--ranks", "2", "--plot", "nowhere/g.svg"], "in a folder that exists (got nowhere)"),
        (["nothing.npz", "--ranks", "2", "--widths", "8", "0"], "of one column or more (got 0)"),
        (
            ["nothing.npz", "--ranks", "2", "--layout", "grid", "--save", "p"],
            "--save with --layout halo or auto (got grid)",
        ),
        (["nothing.npz", "--ranks", "2", "--layout", "grid", "--bits", "4"], "--bits with --layout halo (got grid)"),
        (
            ["nothing.npz", "--ranks", "2", "--layout", "grid", "--exchange", "post"],
            "--exchange with --layout halo (got grid",
        ),
        (
            ["nothing.npz", "--ranks", "2", "4", "--layout", "auto", "--exchange", "pre"],
            "--exchange with --layout halo (got",
        ),
        (["nothing.npz", "--ranks", "2", "--bits", "4", "4", "4"], "one number or two"),
        (
            ["nothing.npz", "--ranks", "2", "--layout", "grid", "--partition", "p.npy"],
            "parts of a .npy file with --layout halo or auto (got grid)",
        ),
        (["nothing.npz", "--ranks", "2", "--save", "nowhere/plan"], "--save in a folder that exists (got nowhere)"),
        (["nothing.npz", "--ranks", "2", "--seed", str(2**70)], "an integer of 64 bits"),
        (["{empty}", "--ranks", "2"], "Expected an .npz file"),
        (["{outside}", "--ranks", "2", "--partition", "{parts}"], "Expected node ids in [0, 3)"),
        (["{outside}", "--ranks", "2", "--layout", "grid"], "Expected node ids in [0, 3)"),
    ],
)
def test_mistakes_are_one_line(
    graph_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    paths = {"graph": graph_file, **{name: tmp_path / f"{name}.npz" for name in ("empty", "outside")}}
    paths["parts"] = tmp_path / "parts.npy"
    paths["empty"].touch()
    np.savez(paths["outside"], num_nodes=3, edge_index=np.array([[0, 2], [1, -1]]))
    np.save(paths["parts"], np.array([0, 1, 1]))
    assert main(["plan", *(o.format(**paths) for o in options)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["cora", "tolokers"])
def test_reads_graphs_as_the_tests_do(shared_data: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Undirected files hold one direction of each edge."""
    path = shared_data / f"{name}.npz"
    assert main(["plan", str(path), "--ranks", "2", "--partition", "random", "--json"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["edges"]) == load_npz(path).num_edges


PEAK = """
import resource, sys
from pyg_dist.cli import main
main(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.slow
def test_512_ranks(shared_data: Any) -> None:
    path = str(shared_data / "soc_slashdot0902.npz")
    options = ["--ranks", "512", "--ranks-per-node", "1"]  # METIS is tried once
    command = [forked_python.executable(), "-c", PEAK, "plan", path, *options, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    plan = json.loads(ended.stdout)
    assert plan["ranks"] == 512
    assert sum(plan["edges"]) == 948_464
    assert int(ended.stderr.splitlines()[-1]) < 2 * 2**20, "KiB"


@pytest.mark.parametrize("layout", ["grid", "auto"])
def test_every_mesh_is_printed(graph_file: Path, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "4", "--layout", layout, "--partition", "random", "--model", "2", "16"]
    assert main(["plan", str(graph_file), *options]) == 0
    out = capsys.readouterr().out
    assert sum("reduce_scatter" in line and "plan" not in line for line in out.splitlines()) >= 6
    assert out.count("nearest cube") == 2
    assert "2-layer GCN, columns 16 16 16" in " ".join(out.split())
    assert "constants: " in out
    assert ("layout='auto': " in out) == (layout == "auto")


def test_grid_as_json(graph_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "64", "--layout", "grid", "--widths", "8", "--json"]
    assert main(["plan", str(graph_file), *options]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert numbers["ranks"] == len(numbers["edges"]) == len(numbers["memory_bytes"]) == 64
    assert sum(numbers["nodes"]) >= 40
    assert len(numbers["candidates"]) == 2 * 28
    best = min(numbers["candidates"], key=lambda c: c["predicted_seconds"])
    assert numbers["predicted_seconds"] == best["predicted_seconds"]
    assert {k: v for k, v in numbers["mesh"].items() if k != "data"} == best["mesh"]


def test_a_mesh_is_drawn_and_no_plan_of_it_saved(
    graph_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where ``auto`` takes the grid; of the two forms of the sums only the one that is set is priced."""
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYG_DIST_GRID_SUMS", "all_reduce")
    machine = Machine(intra_latency=1e3, inter_latency=0.0, call_seconds=0.0, ranks_per_node=64, cores=64)
    constants = machine.save(tmp_path / "machine.json")
    options = ["--ranks", "16", "--machine", str(constants), "--plot", str(tmp_path / "mesh.svg")]
    assert main(["plan", str(graph_file), "--layout", "grid", *options]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "mesh.svg").exists()
    assert "all_reduce" in out
    assert "reduce_scatter" not in out
    assert "memory of a rank, about: " in out
    assert main(["plan", str(graph_file), "--layout", "auto", "--save", str(tmp_path / "plan"), *options]) == 1
    assert "Expected a halo plan to save" in capsys.readouterr().err


def test_auto_takes_the_cheaper_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where messages cost and bytes do not: few partners on a mesh of 64 ranks, few messages to one neighbour."""
    graph, machine = tmp_path / "graph.npz", Machine(intra_latency=1.0, call_seconds=0.0, ranks_per_node=64, cores=64)
    np.savez(graph, num_nodes=600, edge_index=random_graph(600, 9000).edge_index.numpy(), undirected=False)
    constants = machine.save(tmp_path / "machine.json")
    for ranks, layout in ((2, "halo"), (64, "grid")):
        options = ["--layout", "auto", "--partition", "random", "--machine", str(constants), "--json"]
        assert main(["plan", str(graph), "--ranks", str(ranks), *options]) == 0
        numbers = json.loads(capsys.readouterr().out)
        best = min(numbers["candidates"], key=lambda c: c["predicted_seconds"])
        assert numbers["layout"] == best["layout"] == layout
        assert {c["layout"] for c in numbers["candidates"]} == {"halo", "grid"}


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_constants_of_a_device(
    command: str, graph_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those measured here of GPUs, else those assumed; a file's are of its own device."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("PYG_DIST_MACHINE", raising=False)
    arguments = {
        "plan": [str(graph_file), "--ranks", "2", "--partition", "random"],
        "simulate": ["--nodes", "1000", "--edges", "9000", "--features", "8", "--ranks", "16", "--layers", "3"],
    }[command]

    def told(*options: str) -> str:
        assert main([command, *arguments, *options]) == 0
        return capsys.readouterr().out

    assumed = told("--device", "cuda")
    assert assumed != told("--device", "cpu") == told()
    measured = replace(Machine.default("cuda"), stream_rate=1e8, call_seconds=0.5, source="measured").save()
    assert measured == tmp_path / "pyg_dist/machine.cuda.json"
    assert told("--device", "cuda") not in (assumed, told())
    assert told("--device", "cuda") == told("--machine", str(measured))
    assert main([command, *arguments, "--machine", str(measured), "--device", "cpu"]) == 1
    assert "Expected constants of cpu for --device cpu (got those of cuda)" in capsys.readouterr().err


def test_simulate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    graph = ["simulate", "--nodes", "1000000", "--edges", "30000000", "--features", "100"]
    options = ["--ranks", "16", "64", "--layers", "3", "--widths", "50", "--bits", "2"]
    assert main([*graph, *options, "--plot", str(tmp_path / "speedup.svg")]) == 0
    out = capsys.readouterr().out
    assert "1,000,000 nodes, 30,000,000 edges (rows by edge: SuperGCN, Table 5)" in out
    assert "halo int2" in out
    assert (tmp_path / "speedup.svg").read_text().count("int2") >= 1
    given = ["--classes", "10", "--halo-rows", "500000", "16", "--growth", "0.5", "--json"]
    assert main([*graph, *options, *given]) == 0
    numbers = json.loads(capsys.readouterr().out)
    epochs = numbers["models"][0]["epochs"]
    assert [line["owned_and_halo_nodes"] for line in epochs] == [1_500_000, 2_000_000]
    assert all(line["exchange_speedup"]["2"]["model"] > 1 for line in epochs)
    assert main([*graph, "--ranks", "1", "16", *options[3:]]) == 0
    table = capsys.readouterr().out.split("\nranks ")[1].splitlines()
    ends = [[match.end() for match in re.finditer(r"\S+", line)][:8] for line in table[1:3]]
    assert ends[0] == ends[1]  # one rank has no exchange, but the columns
    for wrong, message in (
        (["--ranks", "0"], "positive numbers"),
        (["--classes", "0"], "positive numbers"),
        (["--halo-rows", "5", "0"], "positive numbers"),
        (["--plot", str(tmp_path / "speedup.xyz")], "ends in .png, .svg, .pdf (got 'speedup.xyz')"),
    ):
        assert main([*graph, *wrong]) == 1
        assert message in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"pyg_dist {pyg_dist.__version__}\n"


def test_a_reader_that_stops_reading(graph_file: Path) -> None:
    """``doctor --json | head``: no traceback."""
    command = [forked_python.executable(), "-m", "pyg_dist", "doctor", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == 128 + signal.SIGPIPE


def test_saved_plans_may_be_read_by_whom_the_umask_says(graph_file: Path, tmp_path: Path) -> None:
    saved, other = tmp_path / "plan", tmp_path / "other"
    other.touch()
    assert main(["plan", str(graph_file), "--ranks", "2", "--partition", "random", "--save", str(saved)]) == 0
    assert saved.stat().st_mode == other.stat().st_mode
