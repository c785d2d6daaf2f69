"""The shape of the package: no circles of imports, a short import, and nobody asks which layout a graph has."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pyg_dist

PACKAGE = Path(pyg_dist.__file__).parent if pyg_dist.__file__ else Path(next(iter(pyg_dist.__path__)))
ROOMS_OF_LAYOUTS = ("halo/", "grid/")
FACTORIES = (
    "data/halo_data.py",
    "data/grid_data.py",
    "data/stored_graph.py",
    "data/stored_grid.py",
)
PROTOCOLS = {"GraphProducts", "DistributedGraph", "EdgeView", "Operator", "SampledGraph"}


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py"))


def classes_of_layouts() -> set[str]:
    """The classes of both layouts (not of their plans): graphs, batches, shardings, tensors and edges."""
    trees = [ast.parse(path.read_text()) for room in ROOMS_OF_LAYOUTS for path in (PACKAGE / room).glob("*.py")]
    return {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def questions(source: str, classes: set[str]) -> list[str]:
    """Where code names a layout's class, in whatever way, or asks which class is behind a protocol."""
    found = []
    for node in ast.walk(ast.parse(source)):
        words: set[str] = set()
        if isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
            words = {ast.unparse(node).split(".")[-1].split(" ")[0]} & classes
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in (
            "isinstance",
            "issubclass",
            "cast",
        ):
            words = {*re.findall(r"\w+", ast.unparse(node))} & (classes | PROTOCOLS)
        if words:
            found.append(f"{getattr(node, 'lineno', '')} {ast.unparse(node)}")
    return found


def test_nobody_asks_which_layout_a_graph_has() -> None:
    classes, found = classes_of_layouts(), []
    for path in modules():
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(ROOMS_OF_LAYOUTS) and name not in FACTORIES:
            found += [f"{name}:{question}" for question in questions(path.read_text(), classes)]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "Batch = HaloBatch | GridBatch",
        "@of.register\ndef _(graph: GridGraph, sample): ...",
        "cast('GridGraph', graph)",
        "isinstance(graph.node_sharding, sharding.GridNodes)",
        "isinstance(graph, (int, DistributedGraph))",
        "type(graph) is HaloGraph",
        "from pyg_dist.grid.graph import GridGraph as Any",
    ],
)
def test_a_question_is_seen(source: str) -> None:
    assert questions(source, classes_of_layouts())


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


LOADED_LATER = (
    "matplotlib",
    "mpi4py",
    "networkx",
    "pandas",
    "pyarrow",
    "pymetis",
    "safetensors",
    "scipy",
    "pyg_dist.cli.commands",
    "pyg_dist.data.stored_graph",
    "pyg_dist.grid",
    "pyg_dist.plan.auto",
    "pyg_dist.plan.simulate",
    "pyg_dist.cli.page",
    "pyg_dist.store.folder",
    "pyg_dist.store.sources",
)
"""What some scripts need, of other packages and of this one: the first call that needs it loads it."""


def test_a_plain_import_loads_what_every_script_needs() -> None:
    code = """if True:
        import inspect, json, sys
        import torch_geometric
        before, files = set(sys.modules), len(inspect.modulesbyfile)
        import pyg_dist
        reachable = [hasattr(pyg_dist, name) for name in ("conv", "nn")]
        print(json.dumps([sorted(set(sys.modules) - before), len(inspect.modulesbyfile) - files, reachable]))
    """
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    loaded, files_looked_up, reachable = json.loads(run.stdout)
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{later}." for later in LOADED_LATER))] == []
    assert "pyg_dist.halo.graph" in loaded
    assert all(reachable)
    # torch.library.register_fake looks up the files of all modules, which takes as long as all else.
    assert files_looked_up == 0
