"""The site builds without a warning: links between pages, headings, docstrings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import forked_python
import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.slow
def test_site(tmp_path: Path) -> None:
    for package in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'pyg-dist[docs]'")
    if sys.version_info < (3, 11):
        pytest.skip("the pinned Sphinx needs Python 3.11")
    command = [
        forked_python.executable(),
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        str(DOCS),
        str(tmp_path),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    functions = (tmp_path / "reference" / "functions.html").read_text()
    assert "cross_entropy" in functions
    api = (tmp_path / "reference" / "api.html").read_text()
    assert "DistributedSAGEConv" in api
    assert ":class:" not in api  # every role was understood
