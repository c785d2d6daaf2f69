"""The table itself: nothing in it is untested, and a name stands for every function that torch has under it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import test_along
import test_batch_norm
import test_extremes
import test_full_tensor
import test_indexing
import test_layers
import test_losses
import test_pointwise
import test_products
import test_reductions
import test_scatter
import test_shapes
import test_vector_norms
import torch
from against_torch import functions_in_table

from pyg_dist.tensor.registry import TABLE, Function, functions, public_name

MODULES = (
    test_batch_norm, test_along, test_extremes, test_full_tensor, test_layers, test_losses, test_products,
    test_reductions, test_scatter, test_indexing, test_shapes, test_vector_norms,
)  # fmt: skip
# What is not compared there: the module that tests it, and how a script calls it where that is not its name.
ELSEWHERE = {
    "test_random": "dropout rand_like randn_like uniform_ normal_ exponential_ bernoulli bernoulli_ gumbel_softmax "
    "multinomial constant_ kaiming_uniform_ normal randint_like random_ log_normal_ cauchy_ geometric_ poisson rrelu "
    "rrelu_ alpha_dropout feature_alpha_dropout feature_dropout dropout1d dropout2d dropout3d _standard_gamma "
    "_sample_dirichlet _standard_gamma_grad _dirichlet_grad new",
    "test_gradients": "data grad backward __delete__",
    "test_hooks": "retain_grad register_post_accumulate_grad_hook register_hook",
    "test_cached_values": "__deepcopy__ __set__",
    "test_products": "t T H mH diag diagonal trace",
    "test_refusals": "__reduce_ex__ __dlpack__ __dlpack_device__ _is_view _base",
    "test_indexing": "cdist",
    "test_shapes": "grad_fn _has_compatible_shallow_copy_type",
    "test_full_tensor": "__repr__ __format__ _convert_indices_from_coo_to_csr",
    "test_attention_layers": "multi_head_attention_forward scaled_dot_product_attention",
    "test_assignment": "__setitem__",
    "test_sparse_matrix": "_sparse_mm",
}
SYNTAX = {
    "__deepcopy__": "deepcopy", "__reduce_ex__": "dumps", "__dlpack_device__": "from_dlpack", "__repr__": "repr",
    "__format__": "JoinedStr", "__delete__": "Delete", "__set__": "data",
    "multi_head_attention_forward": "MultiheadAttention", "_standard_gamma": "Gamma", "_sample_dirichlet": "Dirichlet",
    "_has_compatible_shallow_copy_type": "METADATA", "__setitem__": "__setitem__",
    "_sparse_mm": "mm",
}  # fmt: skip


def compared() -> set[Function]:
    """The functions that are compared with torch, each one under every name."""
    names = {name for module in MODULES for name in module.FORMS}
    names |= {*test_pointwise.NAMES, *test_shapes.METADATA}
    return {function for name in names for function in functions_in_table(name)}


def used_in(module: str) -> set[str]:
    """The names that the code of a test module uses, and the kinds of its expressions."""
    nodes = list(ast.walk(ast.parse(next(Path(__file__).parents[1].rglob(f"{module}.py")).read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {type(node).__name__ for node in nodes}


def test_every_entry_is_tested() -> None:
    """Most are compared with torch. The others (random, refused, of autograd) are used by the test that is named."""
    names = {public_name(function).rpartition(".")[2] for function in set(TABLE) - compared()}
    listed = {name for names in ELSEWHERE.values() for name in names.split()}
    assert names - test_pointwise.NEEDS_GPU == listed
    unused = [
        f"{name} in {module}"
        for module, names in ELSEWHERE.items()
        for name in names.split()
        if SYNTAX.get(name, name) not in used_in(module)
    ]
    assert not unused, f"not tested: {unused}"


def test_names() -> None:
    assert {torch.relu, torch.Tensor.relu, torch.nn.functional.relu} <= set(functions("relu"))
    assert list(functions("norm", namespaces=(torch.linalg,))) == [torch.linalg.norm]
    assert set(functions("__eq__")) == {torch.Tensor.__eq__}
    with pytest.raises(LookupError, match="torch has no function named 'rellu'"):
        list(functions("relu", "rellu"))
    assert public_name(torch.Tensor.shape.__get__) == "torch.Tensor.shape"
    assert public_name(torch.einsum) == "einsum"
