"""Terms of the field lead to the file that does it: the table of docs/developers/where.md, and a grep for them."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "developers" / "where.md").read_text()
TERMS = {
    "cached aggregation": "pyg_dist/graph/caches.py",
    "dropout": "pyg_dist/tensor/functions/random.py",
    "GCN norm": "pyg_dist/graph/gcn_norm.py",
    "gradient all-reduce": "pyg_dist/backend/autograd/gradient_bucket.py",
    "overlap": "pyg_dist/halo/operator.py",
    "point-to-point or all-to-all": "pyg_dist/backend/comm/transport.py",
    "redistribute": "pyg_dist/backend/comm/redistribution.py",
    "sharding spec": "pyg_dist/tensor/sharding.py",
    "x[mask]": "pyg_dist/tensor/functions/indexing.py",
}


@functools.cache
def first_lines() -> dict[str, str]:
    """The first docstring line of each file of the package, in small letters."""
    files = sorted((ROOT / "pyg_dist").rglob("*.py"))
    found = {file: ast.get_docstring(ast.parse(file.read_text())) or "" for file in files}
    return {str(f.relative_to(ROOT)): text.split("\n")[0].lower() for f, text in found.items()}


@pytest.mark.parametrize("term", TERMS)
def test_a_term_leads_to_its_file(term: str) -> None:
    assert [file for file, line in first_lines().items() if line.startswith(term.lower())] == [TERMS[term]]


def test_the_page_has_the_same_files() -> None:
    table = PAGE.partition("## Found by their docstring")[2].partition("## ")[0]
    assert dict(re.findall(r"^\| `([^`]+)` \| `([^`]+)`", table, re.M)) == TERMS
