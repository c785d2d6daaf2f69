"""The tables of the reference that come from the code itself, so that they cannot be out of date.

    python docs/generated.py     writes them into the pages, and names the pages that changed

A table stands in its page between ``<!-- begin generated: NAME -->`` and ``<!-- end generated -->``, so a reader of the
files sees what the site shows. ``tests/docs/test_generated.py`` fails where a page is out of date.
"""

from __future__ import annotations

import inspect
import io
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch_geometric import nn as gnn

from pyg_dist import cli, conv
from pyg_dist.backend.session.settings import SETTINGS
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
from pyg_dist.conv.any_conv import distributed_class
from pyg_dist.conv.weighted_sum import sum_form
from pyg_dist.errors import UnsupportedError
from pyg_dist.tensor.functions.full_tensor import REFUSALS
from pyg_dist.tensor.registry import NAMESPACES, TABLE

REPOSITORY = Path(__file__).resolve().parent.parent
# Settings in words; test_generated.py fails where one is missing.
PURPOSES = {
    "PYG_DIST_ISA": "kernels: `baseline`, `avx2`, `avx512`; on AArch64 `baseline`, `sve256`, `sve512`; unset: the best",
    "PYG_DIST_PROJECT_FIRST": "`1`: linear maps before sums where both orders cost the same; changes the rounding",
    "PYG_DIST_REMEMBER_MIB": "largest aggregation that is kept, MiB per rank: of constant rows for later steps, and for"
    " derivatives, which else make it again (attention) or do without (sums: the linear map goes first); `0`: none",
    "PYG_DIST_MESSAGE_MIB": "a conv makes messages by blocks if they would take more, MiB per rank",
    "PYG_DIST_GRID_SUMS": "form of the grid's sums: `all_reduce` or `reduce_scatter`; unset: the planner's choice",
    "PYG_DIST_GRID_BLOCKS": "row blocks of the grid's aggregation; each block's sum overlaps with the next product",
    "PYG_DIST_STOCK_ELEMENTS": "on one process, convs run PyG's own code where edges times columns are at most this, "
    "an eighth of it where a kernel takes their steps; read once for a graph; `0`: never",
    "PYG_DIST_SPMM_FORM": "form of large sparse products, `plain` or `blocks`; unset: the faster one, by a trial",
    "PYG_DIST_MACHINE": "constants from `python -m pyg_dist bench`; unset: `machine.json` in the user's cache",
    "PYG_DIST_MACHINES": "the machine of each rank, for tests; unset: ranks with one host name and boot id share one",
    "PYG_DIST_SHARED_MIB": "a rank's memory for messages by gloo to ranks of its machine, taken as they need it; "
    "beyond it, or with `0`, they go by TCP",
    "PYG_DIST_LOCAL_BITS": "bits of a value in messages inside a machine, where messages between machines have `bits`",
    "PYG_DIST_STAGE": "`1`: copy all messages through host memory; `0`: only those that the process group cannot carry",
    "PYG_DIST_WIRE": "what carries messages of CPU tensors: `gloo` or `mpi`; `auto`: MPI under mpirun, else gloo",
    "PYG_DIST_MPI_PROGRESS": "large messages by MPI while Python computes: `none`: at MPI's next call; `thread`: "
    "one of the package's asks each millisecond; `library`: MPICH's and Intel MPI's own threads",
    "PYG_DIST_WATCH_SECONDS": "a rank that waits for others for so long ends the run, with the others' places",
    "PYG_DIST_LOG": "lowest level of log lines to write to stderr; `info`: the steps of a set-up with their times",
}


def functions() -> str:
    """A table of torch's functions by the module that implements them for row tensors."""
    names: dict[str, set[str]] = defaultdict(set)
    for function, handler in TABLE.items():
        if handler not in REFUSALS and (name := _public_name(function)) is not None:
            names[_origin(handler)].add(name)
    lines = ["| file in `pyg_dist/tensor/functions/` | what happens | functions |", "|---|---|---|"]
    for module in sorted(names):
        if not module.startswith("pyg_dist.tensor.functions."):
            continue
        summary = (inspect.getdoc(sys.modules[module]) or "").split("\n")[0].replace("``", "`").replace("|", "\\|")
        listed = ", ".join(f"`{name}`" for name in sorted(names[module], key=lambda name: (name.lower(), name)))
        lines.append(f"| `{module.rsplit('.', 1)[1]}` | {summary} | {listed} |")
    return "\n".join(lines)


def _public_name(function: Any) -> str | None:
    """Its name without its namespace; None for what a script does not call."""
    attribute = getattr(function, "__self__", None)
    if type(attribute).__name__ in ("getset_descriptor", "property"):
        name = attribute.__name__
    else:
        name = getattr(function, "__name__", None) or torch.overrides.resolve_name(function)
    if not isinstance(name, str) or (name.startswith("_") and not name.startswith("__")):
        return None
    is_setter = name in ("__set__", "__delete__", "__get__")
    return None if is_setter or not any(hasattr(space, name) for space in NAMESPACES) else name


def _origin(handler: Any) -> str:
    while hasattr(handler, "func"):  # functools.partial
        handler = handler.func
    return str(handler.__module__)


def convs() -> str:
    """A table of PyG's message-passing convs, and what becomes of each."""
    compared, refused, on_grid = _of_tests()
    lines = ["| conv | what runs | compared with stock PyG in the tests | on the grid |", "|---|---|---|---|"]
    for name, class_ in _convs_of_pyg():
        has_own_class = class_ in (DistributedSAGEConv.__base__, DistributedGCNConv.__base__)
        has_tiles = has_own_class or sum_form(class_) is not None or re.search(rf'"{name}\b', on_grid) is not None
        takes = _what_runs(name, class_, refused)
        raises = takes.startswith("raises")
        is_compared = "" if raises else "yes" if re.search(rf"\b{name}\b", compared) else "no"
        takes_types = {"edge_index_dict", "hyperedge_index"} & inspect.signature(class_.forward).parameters.keys()
        where = "" if raises else "tiles" if has_tiles else "no" if takes_types else "whole rows"
        lines.append(f"| `{name}` | {takes} | {is_compared} | {where} |")
    return "\n".join(lines)


def _convs_of_pyg() -> Iterator[tuple[str, Any]]:
    for name in sorted(gnn.conv.__all__):
        class_ = getattr(gnn, name, None)
        if inspect.isclass(class_) and issubclass(class_, gnn.MessagePassing) and class_ is not gnn.MessagePassing:
            yield name, class_


def _of_tests() -> tuple[str, str, str]:
    """The text of the tests that compare convs with stock PyG, of those that raise when called, of those on tiles."""
    compared, refused, on_grid = "", "", ""
    tests = REPOSITORY / "tests"
    for file in (*sorted((tests / "conv").rglob("*.py")), *(tests / "data").glob("test_h*.py")):
        before, _, rest = file.read_text().partition("\nREFUSED")
        cases, _, after = rest.partition("\n}")
        compared += before + after
        on_grid += before.partition("\nON_THE_GRID")[2].partition("\n}")[0]
        refused += "".join(line for line in cases.splitlines() if "cannot be distributed as it is called here" in line)
    return compared, refused, on_grid


def _what_runs(name: str, class_: Any, refused: str) -> str:
    try:
        distributed = distributed_class(class_)
    except UnsupportedError as error:
        return f"raises `UnsupportedError`: {error.message.split(', ')[0].removeprefix(name).strip()}"
    if re.search(rf"\b{name}\b", refused):
        return "raises `UnsupportedError` when called"
    return f"`{distributed.__name__}`" + ("" if hasattr(conv, distributed.__name__) else ", by `distribute`")


def settings() -> str:
    """A table of the environment variables."""
    lines = ["| variable | default | what it does | allowed | equal on all ranks |", "|---|---|---|---|---|"]
    for setting in SETTINGS:
        default = f"`{setting.default}`" if setting.default else "unset"
        equal = "yes, checked" if setting.must_agree else "no"
        lines.append(f"| `{setting.name}` | {default} | {PURPOSES[setting.name]} | {setting.expected} | {equal} |")
    return "\n".join(lines)


def commands() -> str:
    """The help of each command, as it prints itself."""
    names = re.search(r"{([\w,]+)}", _help())
    assert names is not None
    return "\n\n".join(f"## {name}\n\n```text\n{_help(name)}\n```" for name in names[1].split(","))


def _help(*command: str) -> str:
    printed = io.StringIO()
    with patch.dict(os.environ, COLUMNS="100"), redirect_stdout(printed), suppress(SystemExit):
        cli.main([*command, "--help"])
    home = re.escape(str(Path.home()))
    return re.sub(rf"{home}\S*machine\.json", "machine.json in the user's cache folder", printed.getvalue()).strip()


TABLES: dict[str, Callable[[], str]] = {
    "functions": functions,
    "convs": convs,
    "settings": settings,
    "commands": commands,
}
_SECTION = re.compile(r"(<!-- begin generated: (\w+) -->\n).*?(\n<!-- end generated -->)", re.S)


def fill(text: str) -> str:
    """``text`` with its tables as the code has them now."""
    return _SECTION.sub(lambda section: f"{section[1]}\n{TABLES[section[2]]()}\n{section[3]}", text)


def write() -> None:
    """Bring the tables of all pages up to date."""
    for page in sorted((REPOSITORY / "docs").rglob("*.md")):
        text = page.read_text()
        if (filled := fill(text)) != text:
            page.write_text(filled)
            print(page.relative_to(REPOSITORY))


if __name__ == "__main__":
    write()
