"""What the commands print: at most 120 columns, one family of units, the worst ranks, a line for each rank count."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from random_graphs import random_graph

from pyg_dist.cli import main, planning
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.pricing.base import WIDTH, aligned, fold
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model

PLAN = ["plan", "{graph}", "--partition", "random"]
COMMANDS = [
    [*PLAN, "--ranks", "1"],
    [*PLAN, "--ranks", "4", "--widths", "16", "100", "--bits", "4", "32"],
    [*PLAN, "--ranks", "64", "--ranks-per-node", "4", "--widths", "100"],
    [*PLAN, "--ranks", "8", "--layout", "grid"],
    [*PLAN, "--ranks", "8", "--layout", "auto", "--model", "9", "100"],
    [*PLAN, "--ranks", "1", "2", "4", "8", "64", "--model", "9", "100"],
    ["partition", "{graph}", "--parts", "2", "40", "--model", "random", "metis-cut"],
    "simulate --nodes 100000 --edges 2000000 --features 100 --bits 32 2 --ranks 16 8192".split(),
    ["doctor"],
]


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "graph.pt"
    torch.save(random_graph(300, 3000).to_dict(), path)
    return path


def printed(capsys: pytest.CaptureFixture[str], command: list[str], graph: Path) -> str:
    names = {"graph": graph, "store": graph.with_name("store")}
    assert main([word.format(**names) for word in command]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words[:1] + words[4:7]))
def test_widths(graph_file: Path, capsys: pytest.CaptureFixture[str], command: list[str]) -> None:
    lines = printed(capsys, command, graph_file).splitlines()
    assert lines
    # A path is never broken, and those of tests are long.
    assert [line for line in lines if len(line) > WIDTH and str(graph_file.parent) not in line] == []
    assert not any(re.search(r"\d (MB|GB|KB|kB)\b", line) for line in lines)


@pytest.mark.parametrize("layout", ["halo", "grid"])
def test_widths_of_stores(graph_file: Path, capsys: pytest.CaptureFixture[str], layout: str) -> None:
    tiles = ["--tiles", "4", "4"] if layout == "grid" else []
    for command in (
        ["partition", "{graph}", "{store}", "--parts", "3", "--layout", layout, *tiles],
        ["doctor", "--store", "{store}"],
    ):
        lines = printed(capsys, command, graph_file).replace(str(graph_file.parent), "").splitlines()
        assert lines
        assert max(map(len, lines)) <= WIDTH


def test_fold() -> None:
    text = "word " * 60
    assert max(len(line) for line in fold(text).splitlines()) <= WIDTH
    assert fold(text).split() == text.split()
    assert fold("short\n\n  kept") == "short\n\n  kept"
    assert fold("x" * 200) == "x" * 200


def test_aligned_cuts_the_elastic_column() -> None:
    lines = aligned([["a", "layer", "b"], ["1", "name " * 40, "9" * 60]], left=(1,), elastic=1)
    assert max(map(len, lines)) == WIDTH
    assert lines[1].startswith("1  name ")
    assert lines[1].endswith("...  " + "9" * 60)


def test_the_worst_ranks_are_shown(capsys: pytest.CaptureFixture[str], graph_file: Path) -> None:
    out = printed(capsys, [*PLAN, "--ranks", "64"], graph_file)
    plan_json = json.loads(printed(capsys, [*PLAN, "--ranks", "64", "--json"], graph_file))
    shown = [int(line.split()[0]) for line in out.splitlines() if re.match(r" *\d+( +[\d,]+){8}$", line)]
    assert len(shown) == 16
    assert "+48" in out
    assert plan_json["rows_sent"].index(max(plan_json["rows_sent"])) in shown
    assert plan_json["work"].index(max(plan_json["work"])) in shown


def test_several_numbers_of_ranks(capsys: pytest.CaptureFixture[str], graph_file: Path) -> None:
    command = [*PLAN, "--ranks", "8", "1", "2", "--widths", "7", "16", "--json"]
    found = json.loads(printed(capsys, command, graph_file))
    assert [one["ranks"] for one in found["plans"]] == [1, 2, 8]
    assert found["plans"][0]["speedup"] == 1
    assert found["width"] == 16
    for one in found["plans"]:
        command = [*PLAN, "--ranks", str(one["ranks"]), "--widths", "16", "--json"]
        alone = json.loads(printed(capsys, command, graph_file))
        assert one["seconds"] == pytest.approx(alone["predicted_seconds"])
        assert one["memory_bytes"] == max(alone["memory_bytes"])
        assert one["sent_bytes"] == alone["bytes"]["16"]


def test_advice() -> None:
    def line(ranks: int, seconds: float) -> planning.RankCount:
        return planning.RankCount(ranks, "halo", seconds, 8 / seconds, 1, 1, 1.0)

    text = planning.advice([line(1, 8.0), line(2, 4.5), line(8, 3.0), line(64, 2.0)])
    assert text == "fastest: 64 ranks (4.0 times as fast as one); the most that are used at least half: 2"


def test_pages_are_self_contained(graph_file: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for ranks in (["4"], ["64"], ["1", "2", "4"]):
        page = tmp_path / "page.html"
        out = printed(capsys, [*PLAN, "--ranks", *ranks, "--html", str(page)], graph_file)
        text = page.read_text()
        assert "<svg" in text
        assert out.splitlines()[0].split(",")[0] in text
        links = [link for link in re.findall(r'(?:src|href)="([^"]*)"', text) if not link.startswith(("#", "data:"))]
        assert links == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1", "2", "--save", "p"], "Expected --save with one number of ranks (got 2)"),
        (["--ranks", "1", "0"], "at least one part each (got 0)"),
        (["--ranks", "1", "--html", "nowhere/p.html"], "Expected --html in a folder that exists"),
    ],
)
def test_mistakes(graph_file: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str) -> None:
    assert main(["plan", str(graph_file), *options]) == 1
    assert message in capsys.readouterr().err


def test_plans_print_themselves() -> None:
    graph = random_graph(40, 200)
    plan = Plan.of(graph.edge_index, torch.arange(40) % 3, 3)
    assert str(plan) == plan.describe()
    assert "predicted" not in str(plan)
    assert "predicted" in plan.describe(machine=Machine(), model=Model.of_layers(40, 200, 5, 4))
