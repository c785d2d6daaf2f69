"""The shape of the package and of its tests: imports, layouts behind their interface, tests that are found by name."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import pyg_dist

PACKAGE = Path(pyg_dist.__file__).parent if pyg_dist.__file__ else Path(next(iter(pyg_dist.__path__)))
ROOMS_OF_LAYOUTS = ("halo/", "grid/")
FACTORIES = ("data/layout_choice.py", "data/grid_data.py", "data/typed_layout.py")
PROTOCOLS = {"GraphProducts", "DistributedGraph", "EdgeView", "Operator", "SampledGraph"}


Modules = dict[str, list[ast.AST]]


@pytest.fixture(scope="module")
def modules() -> Modules:
    """The nodes of each module, by its path within the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): [*ast.walk(ast.parse(path.read_text()))] for path in paths}


@pytest.fixture(scope="module")
def classes(modules: Modules) -> set[str]:
    """The classes of both layouts (not of their plans): graphs, batches, shardings, tensors and edges."""
    rooms = [nodes for name, nodes in modules.items() if name.count("/") == 1 and name.startswith(ROOMS_OF_LAYOUTS)]
    return {node.name for nodes in rooms for node in nodes if isinstance(node, ast.ClassDef)}


def last_name(node: ast.AST) -> str:
    """Of a name, an attribute or what is imported; nothing of others."""
    if isinstance(node, ast.alias):
        return node.name.split(".")[-1]
    return str(getattr(node, "attr", getattr(node, "id", "")))


def questions(nodes: Iterable[ast.AST], classes: set[str]) -> list[str]:
    """Where code names a layout's class, in whatever way, or asks which class is behind a protocol."""
    found = []
    for node in nodes:
        words = {last_name(node)} & classes
        if isinstance(node, ast.Call) and last_name(node.func) in ("isinstance", "issubclass", "cast"):
            words = {*re.findall(r"\w+", ast.unparse(node))} & (classes | PROTOCOLS)
        if words:
            found.append(f"{getattr(node, 'lineno', '')} {ast.unparse(node)}")
    return found


def test_nobody_asks_which_layout_a_graph_has(modules: Modules, classes: set[str]) -> None:
    found = []
    for name, nodes in modules.items():
        if not name.startswith(ROOMS_OF_LAYOUTS) and name not in FACTORIES:
            found += [f"{name}:{question}" for question in questions(nodes, classes)]
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
def test_a_question_is_seen(source: str, classes: set[str]) -> None:
    assert questions(ast.walk(ast.parse(source)), classes)


def defines(package: str) -> bool:
    """Whether its ``__init__`` has functions or classes of its own."""
    tree = ast.parse((PACKAGE.parent / package.replace(".", "/") / "__init__.py").read_text())
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in tree.body)


def test_no_circle_of_imports() -> None:
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("pyg_dist")
    imported_by = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    # What a package's __init__ hands on is not a circle: it is imported after its modules, or with them.
    packages = {m for m in graph.modules if graph.find_children(m) and not defines(m)}
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
    "pyg_dist.cli.inputs",
    "pyg_dist.data.stored_graph",
    "pyg_dist.grid",
    "pyg_dist.plan.prices",
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


ROOT = Path(__file__).resolve().parents[1]


def modules_tested_by(test: Path) -> list[Path]:
    """Where the module or the package of ``tests/x/test_y.py`` may be."""
    folder, name = test.parent, test.stem.removeprefix("test_")
    names = {name, *(name.removeprefix(f"{part}_") for part in folder.parts)}
    found = [PACKAGE / folder / f"{name}.py" for name in names] + [PACKAGE / folder / name for name in names]
    return found + [PACKAGE / folder] * (name == folder.name)


def reasons() -> dict[str, str]:
    """The table of tests/README.md: the files of each folder that test no single module."""
    found: dict[str, str] = {}
    for line in (ROOT / "tests" / "README.md").read_text().splitlines():
        if line.startswith("| `"):
            folders, files, _ = line.strip("| ").split(" | ")
            for folder in re.findall(r"`(?:tests/)(.*?)/?`", folders):
                found[folder] = f"{found.get(folder, '')} {files}"
    return found


def test_a_test_is_found_by_the_name_of_its_module() -> None:
    tests = [path.relative_to(ROOT / "tests") for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    others = {test for test in tests if not any(path.exists() for path in modules_tested_by(test))}
    listed = {folder: re.findall(r"`(\w+)`", files) for folder, files in reasons().items()}
    whole = {folder for folder, files in reasons().items() if files.strip() == "all"}
    names = {Path(folder) / f"test_{name}.py" for folder, files in listed.items() for name in files}
    unknown = {test for test in others - names if test.parts[0] not in whole}
    assert unknown == set(), "rename these by their module, or give the folder's reason in tests/README.md"
    assert names - set(tests) == set(), "tests/README.md lists files that are not there"
    assert names - others == set(), "tests/README.md lists files that have a module of their name"


def test_benchmarks_and_examples_import_what_is_there() -> None:
    missing = []
    for path in [*sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "pyg_dist":
                module = importlib.import_module(node.module or "")
                for name in (alias.name for alias in node.names):
                    if not hasattr(module, name) and importlib.util.find_spec(f"{node.module}.{name}") is None:
                        missing.append(f"{path.name}:{node.lineno} {node.module}.{name}")
    assert missing == []


def test_factories_name_their_device(modules: Modules) -> None:
    """Of torch's there, ``torch.set_default_device`` would decide where a plan lies; layers follow it."""
    factories = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "ones"}
    factories |= {"rand", "randint", "randn", "randperm", "tensor", "zeros"}
    found = [
        f"{name}:{node.lineno} {ast.unparse(node)}"
        for name, nodes in modules.items()
        if not name.startswith("nn/")
        for node in nodes
        if isinstance(node, ast.Call) and last_name(node.func) in factories and ast.unparse(node.func)[:6] == "torch."
        if not {"device", None} & {keyword.arg for keyword in node.keywords}
    ]
    assert not found, f"take pyg_dist.backend.host's, or name the device: {found}"


def test_generic_named_tuples_are_made_by_python_3_10(modules: Modules) -> None:
    """It has none of its own, and type checkers do not say so."""
    makers = {f"{path}": names for path, nodes in modules.items() if (names := generic_named_tuples(nodes))}
    assert makers
    assert {maker for names in makers.values() for maker in names} == {"typing_extensions"}, makers


def generic_named_tuples(nodes: Iterable[ast.AST]) -> list[str]:
    """The module that each one's ``NamedTuple`` is imported from."""
    imported = {a.name: n.module for n in nodes if isinstance(n, ast.ImportFrom) and n.module for a in n.names}
    bases = [[last_name(b) for b in node.bases] for node in nodes if isinstance(node, ast.ClassDef)]
    return [imported["NamedTuple"] for names in bases if "NamedTuple" in names and len(names) > 1]


def undocumented(modules: Modules) -> list[str]:
    """Public methods without a docstring whose names no class that others implement or inherit from explains.

    Of ``forward`` the docstring of the class speaks.
    """
    classes = [(file, node) for file, nodes in modules.items() for node in nodes if isinstance(node, ast.ClassDef)]
    bases = {ast.unparse(base).split("[")[0].split(".")[-1] for _, node in classes for base in node.bases}
    interfaces = bases | {node.name for _, node in classes if "Protocol" in map(ast.unparse, node.bases)}
    methods = [(file, of, node) for file, of in classes for node in of.body if isinstance(node, ast.FunctionDef)]
    explained = {node.name for _, of, node in methods if of.name in interfaces and ast.get_docstring(node)}
    return [
        f"{file}:{node.lineno} {of.name}.{node.name}"
        for file, of, node in methods
        if not of.name.startswith("_") and not node.name.startswith("_")
        if not ast.get_docstring(node) and node.name not in explained
        if node.name != "forward" or not ast.get_docstring(of)
    ]


def test_methods_say_what_they_do(modules: Modules) -> None:
    assert undocumented(modules) == []
    without = ast.parse("class New:\n    def unheard_of(self): ...")
    assert undocumented({"new.py": [*ast.walk(without)]}) == ["new.py:2 New.unheard_of"]
