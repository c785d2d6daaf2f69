"""The table itself: nothing in it is untested, and a name stands for every function that torch has under it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import test_batch_norm
import test_columns
import test_extremes
import test_gathers
import test_layers
import test_losses
import test_norms
import test_pointwise
import test_products
import test_reductions
import test_selection
import test_shapes
import torch
from against_torch import functions_in_table

from pyg_dist.tensor.registry import TABLE, Function, functions, public_name

MODULES = (
    test_batch_norm, test_columns, test_extremes, test_gathers, test_layers, test_losses, test_norms, test_products,
    test_reductions, test_selection, test_shapes,
)  # fmt: skip
# What scripts write for functions that they do not call by name.
SYNTAX = {
    "__format__": 'f"{x}"', "__repr__": "repr(x)", "__reduce_ex__": "pickle.dumps(", "__deepcopy__": "copy.deepcopy(",
    "__dlpack_device__": "from_dlpack(", "__delete__": "del ",
}  # fmt: skip


def compared() -> set[Function]:
    """The functions that are compared with torch, each one under every name."""
    names = {name for module in MODULES for name in module.FORMS}
    names |= {*test_pointwise.NAMES, *test_shapes.METADATA}
    return {function for name in names for function in functions_in_table(name)}


def test_every_entry_is_tested() -> None:
    """Most are compared with torch. The others (random, refused, of autograd, of a GPU) are named by some test."""
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
    others = {public_name(function): function for function in set(TABLE) - compared()}
    assert len(others) < 60, "most functions are compared with torch"
    names = {full: full.rpartition(".")[2] for full in others}
    missing = [full for full, name in names.items() if not re.search(rf"{re.escape(SYNTAX.get(name, name))}", text)]
    assert not missing, f"not tested: {sorted(missing)}"


def test_names() -> None:
    assert {torch.relu, torch.Tensor.relu, torch.nn.functional.relu} <= set(functions("relu"))
    assert list(functions("norm", namespaces=(torch.linalg,))) == [torch.linalg.norm]
    assert set(functions("__eq__")) == {torch.Tensor.__eq__}
    with pytest.raises(LookupError, match="torch has no function named 'rellu'"):
        list(functions("relu", "rellu"))
    assert public_name(torch.Tensor.shape.__get__) == "torch.Tensor.shape"
    assert public_name(torch.einsum) == "einsum"
