"""The shape of the package: no circles of imports, and nobody asks which layout a graph has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import pyg_dist

PACKAGE = Path(pyg_dist.__file__).parent if pyg_dist.__file__ else Path(next(iter(pyg_dist.__path__)))
ROOMS_OF_LAYOUTS = ("layout/halo/", "layout/grid/")


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def test_nobody_asks_which_layout_a_graph_has() -> None:
    found = []
    for path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        if name.startswith(ROOMS_OF_LAYOUTS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
            if asks and re.search(r"\b(Halo|Grid)Graph\b|\bDistributedGraph\b|\bTileTensor\b", ast.unparse(node)):
                found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def test_no_circle_of_imports() -> None:
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("pyg_dist")
    imported_by = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # What a package's __init__ offers to others is not a circle: it is imported after its modules, or with them.
    packages = {module for module in graph.modules if graph.find_children(module)}
    remaining = {m: {i for i in found if i not in packages} for m, found in imported_by.items() if m not in packages}
    while True:
        imported = set().union(*remaining.values())
        apart = [m for m, found in remaining.items() if not found & remaining.keys() or m not in imported]
        if not apart:
            break
        for module in apart:
            del remaining[module]
    assert sorted(remaining) == []
