"""The tables of the reference that come from the code, and those by hand that have to name all of it."""

from __future__ import annotations

import importlib.util
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from pyg_dist import DistributedData
from pyg_dist.backend.session.settings import SETTINGS
from pyg_dist.data.options import PARTITIONS

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def generated() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generated", DOCS / "generated.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_functions(generated: ModuleType) -> None:
    table = generated.functions()
    for file, function in (
        ("pointwise", "sigmoid"),
        ("losses", "cross_entropy"),
        ("indexing", "__getitem__"),
        ("random", "dropout"),
        ("shapes", "T"),
    ):
        line = next(line for line in table.splitlines() if line.startswith(f"| `{file}` |"))
        assert f"`{function}`" in line
        assert line.count(" | ") == 2  # no cell is broken by a bar
    assert len(re.findall(r"`\w+`", table)) > 500  # what the README says


def test_convs(generated: ModuleType) -> None:
    lines = {line.split("`")[1]: line for line in generated.convs().splitlines()[2:]}
    assert len(lines) > 50
    assert "`DistributedGCNConv` | yes | tiles |" in lines["GCNConv"]
    assert "by `distribute` | yes | whole rows |" in lines["EdgeConv"]
    for name in ("GATConv", "TAGConv", "ChebConv", "FAConv", "SignedConv"):
        assert "by `distribute` | " in lines[name]
        assert lines[name].endswith("| tiles |")
    for refused in ("GravNetConv", "DynamicEdgeConv"):
        assert "raises `UnsupportedError`" in lines[refused]
        assert lines[refused].endswith(" |  |  |")


def test_settings(generated: ModuleType) -> None:
    """Each setting has its purpose in words, and none is left that is gone."""
    assert set(generated.PURPOSES) == {setting.name for setting in SETTINGS}
    assert all(f"| `{setting.name}` |" in generated.settings() for setting in SETTINGS)


def test_commands(generated: ModuleType) -> None:
    page = generated.commands()
    assert {"plan", "simulate", "bench", "doctor"} <= set(re.findall(r"^## (\w+)$", page, re.M))
    assert "--ranks-per-node" in page
    assert str(Path.home()) not in page


def test_options() -> None:
    page = (DOCS / "reference" / "options.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", page, re.M)
    parameters = list(inspect.signature(DistributedData).parameters.values())[1:]
    assert documented == [(p.name, repr(p.default).replace("'", '"')) for p in parameters]


def test_partitions() -> None:
    """Both pages name every method, and no other."""
    (row,) = re.findall(r"^\| `partition` .*$", (DOCS / "reference" / "options.md").read_text(), re.M)
    assert set(re.findall(r'"([\w-]+)"', row)) == set(PARTITIONS)
    how_to = (DOCS / "how-to" / "partition-layout-bits.md").read_text()
    assert all(f'| `"{method}"` |' in how_to for method in PARTITIONS)


def section(name: str) -> tuple[Path, str]:
    """The page that has a table, and the table as it stands there."""
    begin, end = f"<!-- begin generated: {name} -->", "<!-- end generated -->"
    (page,) = (page for page in DOCS.rglob("*.md") if begin in page.read_text())
    return page, page.read_text().partition(begin)[2].partition(end)[0]


@pytest.mark.parametrize("name", ["functions", "convs", "settings", "commands"])
def test_the_pages_have_the_tables(generated: ModuleType, name: str) -> None:
    if not is_pinned("torch") or not is_pinned("torch_geometric"):
        pytest.skip("the tables are those of the versions in constraints.txt")
    page, table = section(name)
    stale = f"{page.relative_to(DOCS)} is out of date: python docs/generated.py"
    assert table.split() == generated.TABLES[name]().split(), stale  # words: argparse breaks lines by its version


def is_pinned(package: str) -> bool:
    """Whether the installed version is that of ``constraints.txt``."""
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (DOCS.parent / "constraints.txt").read_text(), re.M))
    return version(package).partition("+")[0] == pins[package]


def test_every_table_has_a_page(generated: ModuleType) -> None:
    marked = re.findall(r"<!-- begin generated: (\w+) -->", "".join(page.read_text() for page in DOCS.rglob("*.md")))
    assert sorted(marked) == sorted(generated.TABLES)


def test_only_tables_are_replaced(generated: ModuleType) -> None:
    stale = "before\n<!-- begin generated: settings -->\nold\n<!-- end generated -->\nafter\n"
    filled = generated.fill(stale)
    assert filled.startswith("before\n<!-- begin generated: settings -->\n")
    assert filled.endswith("\n<!-- end generated -->\nafter\n")
    assert "PYG_DIST_ISA" in filled
    assert "old" not in filled
    assert generated.fill(filled) == filled
