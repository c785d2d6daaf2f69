"""Paths and links in the docs lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^( *)```.*?^\1```", re.M | re.S)


_URL = re.search(r'^Homepage = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.M)
assert _URL is not None
# The README stands on PyPI, too, where relative links lead nowhere.
REPOSITORY = f"{_URL[1]}/"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def paths(text: str) -> list[str]:
    """What is written as the path of a file or folder."""
    spans = re.findall(r"`([\w.][\w./-]*)`", _FENCED.sub("", text))
    return [span for span in spans if "/" in span and (span.endswith("/") or re.search(r"\.\w+$", span))]


def exists(path: str) -> bool:
    """From the repository's root, or from the package: pages on the code leave its name away."""
    return (ROOT / path).exists() or (ROOT / "pyg_dist" / path).exists()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_paths(page: Path) -> None:
    built = {"build/docs", "benchmarks/results/gpu.json"}  # the second where a GPU is
    missing = [path for path in paths(page.read_text()) if not exists(path) and path not in built]
    assert not missing, f"{name(page)} names what is not there: {missing}"


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks" / "REPORT.md"], ids=name)
def test_links(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", _FENCED.sub("", page.read_text()))
    inside = [re.sub(rf"^{re.escape(REPOSITORY)}(blob|tree)/main/", f"{ROOT}/", target) for target in targets]
    missing = [t for t in inside if not t.startswith(("http://", "https://")) and not (page.parent / t).exists()]
    assert not missing, f"{name(page)} links to what is not there: {missing}"


def test_the_readme_has_absolute_links() -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text())
    assert [t for t in targets if not t.startswith("https://")] == []
    files = [t.removeprefix(REPOSITORY) for t in targets if t.startswith(REPOSITORY)]
    assert len(files) > 20
    for kind, path in (file.split("/main/") for file in files):
        assert (ROOT / path.split("#")[0]).is_dir() == (kind == "tree"), path


def test_a_missing_file_is_noticed() -> None:
    text = "`pyg_dist/no_such_file.py`, `backend/session/session.py`\n```text\n`a/b.py`\n```\n"
    assert [path for path in paths(text) if not exists(path)] == ["pyg_dist/no_such_file.py"]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
