"""Every public name has an example in its docstring, and the examples run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from launching import run_script

import pyg_dist
import pyg_dist.checkpoint
import pyg_dist.conv
import pyg_dist.nn
from pyg_dist import DistributedData, errors
from pyg_dist.data.hetero import DistributedHeteroData
from pyg_dist.grid.plan.plan import GridPlan
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.loader import BatchLoader, LinkNeighborLoader, NeighborLoader, UniformVertexLoader
from pyg_dist.partition import partition
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.tensor import RowTensor

API = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "api.md").read_text()
MODULES = [pyg_dist, pyg_dist.checkpoint, pyg_dist.conv, pyg_dist.nn]
NAMES = {name: getattr(module, name) for module in MODULES for name in module.__all__ if name != "__version__"}
NAMES |= {c.__name__: c for c in (GridPlan, Machine, Model, Plan, RowTensor, UniformVertexLoader)}
NAMES |= {c.__name__: c for c in (BatchLoader, NeighborLoader, LinkNeighborLoader, DistributedHeteroData)}
NAMES["partition"] = partition
METHODS = {
    RowTensor: ("from_local", "to_local", "full_tensor"),
    DistributedData: ("open", "subgraph", "to"),
    Plan: ("of", "save", "load"),
    pyg_dist.checkpoint.Checkpointer: ("epochs", "batches"),
    UniformVertexLoader: ("state_dict", "load_state_dict"),
}
# Raised where a rank, a message, memory or an installation fails, which no example does.
FAILURES = {
    *("NotFiniteError", "OutOfMemoryError", "RankFailedError", "ConnectionLostError", "DivergenceError"),
    *("MissingPackageError", "LibraryNotBuiltError"),
}
ERRORS = {name: found for name, found in vars(errors).items() if name.endswith("Error") and not name.startswith("_")}
PUBLIC = {
    **NAMES,
    **{f"{class_.__name__}.{name}": getattr(class_, name) for class_, names in METHODS.items() for name in names},
    **{f"errors.{name}": error for name, error in ERRORS.items() if name not in FAILURES},
}

# In a process of its own: DistributedData installs hooks.
SCRIPT = """
import doctest, sys
from datetime import timedelta
import torch
import torch.nn.functional as F
from torch_geometric.datasets import KarateClub
from torch_geometric.nn.models import GraphSAGE

import pyg_dist
from test_docstrings import PUBLIC

pyg_dist.init(timeout=timedelta(minutes=30))  # as the example of init does, which may not differ
data = pyg_dist.DistributedData(KarateClub()[0])
model = pyg_dist.distribute(GraphSAGE(34, 16, num_layers=2, out_channels=4))
names = {"torch": torch, "F": F, "KarateClub": KarateClub, "pyg_dist": pyg_dist, "data": data, "model": model}
names["errors"] = pyg_dist.errors
parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
for name, thing in PUBLIC.items():
    runner.run(parser.get_doctest(thing.__doc__, {**names, **PUBLIC}, name, None, None))
failed, tried = runner.summarize()
print(f"tried {tried}")
sys.exit(failed > 0)
"""


@pytest.mark.parametrize("name", PUBLIC)
def test_there_is_an_example(name: str) -> None:
    assert "\n>>> " in inspect.cleandoc(PUBLIC[name].__doc__).replace("    >>> ", ">>> ")


def test_all_documented_names_are_tried() -> None:
    """What docs/reference/api.md lists, the errors' module aside."""
    documented = re.findall(r"auto(?:function|class):: ([\w.]+)", API)
    assert len(documented) > 20
    assert {name.rpartition(".")[2] for name in documented} <= set(PUBLIC)
    assert set(ERRORS) > FAILURES


def test_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(__file__).parents[1]}")
    script = tmp_path / "examples.py"
    script.write_text(SCRIPT)
    ended = run_script("ranks", 1, script)
    assert ended.codes == [0], ended.stdout + ended.stderr
    assert int(ended.stdout.split("tried ")[1]) > 90
