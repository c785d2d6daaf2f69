"""What a release promises: examples that run after README's install, workflows of what exists, versions of tags."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest

if sys.version_info < (3, 11):
    pytest.skip("tomllib came with Python 3.11", allow_module_level=True)
import tomllib

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def imported(path: Path) -> set[str]:
    """Packages that a script imports when it starts; those inside of functions are for some options only."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names)


def needed(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[; ]", name)[0].lower().replace("_", "-") for name in requirements}


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_import_what_the_readme_installs(example: Path) -> None:
    table = project()["project"]
    extras = table["optional-dependencies"]
    installed = needed(table["dependencies"] + extras["examples"]) | {"pyg-dist"}
    installed |= needed(extras["ogb"]) if example.stem == "ogbn_products" else set()
    installed |= needed(extras["trainers"]) if example.stem.startswith("with_") else set()
    beside = {path.stem for path in EXAMPLES}
    distributions = packages_distributions()
    for name in imported(example) - beside:
        found = {d.lower().replace("_", "-") for d in distributions.get(name, [name])}
        assert found & installed, f"{example.name} imports {name}"


def test_the_readme_installs_the_extra_of_the_examples() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "pip install '.[examples]'" in readme.partition("## Install")[2].partition("##")[0]


def test_building_needs_no_torch() -> None:
    assert not {"torch"} & needed(project()["build-system"]["requires"])
    headers = re.findall(r"#include <(torch/.*)>", "\n".join(p.read_text() for p in (ROOT / "csrc").rglob("*.h")))
    headers += re.findall(r"#include <(torch/.*)>", "\n".join(p.read_text() for p in (ROOT / "csrc").rglob("*.cpp")))
    assert headers
    assert [h for h in headers if not (ROOT / "third_party/torch/include" / h).is_file()] == []


def test_the_headers_are_those_of_the_oldest_torch() -> None:
    """The claim, the headers, what they are asked to show, and what a workflow installs."""
    text = (ROOT / "third_party/torch/include/torch/headeronly/version.h").read_text()
    major, minor = (int(re.findall(rf"define TORCH_VERSION_{part} (\d+)", text)[0]) for part in ("MAJOR", "MINOR"))
    assert f"torch>={major}.{minor}" in project()["project"]["dependencies"]
    assert f"TORCH_TARGET_VERSION=0x{major:02x}{minor:02x}000000000000" in (ROOT / "CMakeLists.txt").read_text()
    assert f"torch=={major}.{minor}." in (ROOT / "constraints-oldest.txt").read_text()


def test_workflows_name_what_exists() -> None:
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    for path in re.findall(r"(?:tests|examples)/[\w./]+\w", text):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"cross", "test", "check", "docs", "demo"} <= set(re.findall(r"make ([a-z]+)", text)) <= targets
    assert "constraints-oldest.txt" in text


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, *sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))], ids=lambda p: p.name
)
def test_workflows_are_yaml(path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    content = yaml.safe_load(path.read_text())
    assert content[
        "jobs" if path.parent.name == "workflows" else "blank_issues_enabled" if path.stem == "config" else "body"
    ]


def test_versions_come_from_tags(tmp_path: Path) -> None:
    scm = pytest.importorskip("setuptools_scm")
    if shutil.which("git") is None:
        pytest.skip("needs git")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)

    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def version() -> str:
        return str(scm.get_version(tmp_path, fallback_version=project()["tool"]["setuptools_scm"]["fallback_version"]))

    assert version() == "0.0.0"
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    git("tag", "v3.1.4")
    assert version() == "3.1.4"
    git("commit", "-qm", "second", "--allow-empty")
    assert version().startswith("3.1.5.dev1+g")
