"""``isinstance(edge_index, Tensor)`` in a script: it is False for the handle, so a branch would be skipped."""

from __future__ import annotations

import ast
import linecache
import sysconfig
from functools import cache
from types import FrameType
from typing import TypeVar

import torch

from pyg_dist.errors import UnsupportedError
from pyg_dist.tensor.calling_code import function_that_needs_all_edges, of_whole_graphs

T = TypeVar("T")

_UNLESS_TENSOR = ("coalesce", "sort_edge_index", "spmm")  # these end in `raise NotImplementedError`, or in a ValueError
_TAKE_NUMBER = ("add_self_loops", "add_remaining_self_loops")  # these work where they are told the number of nodes
_ADJ_T = (
    "torch_geometric.utils.spmm expects a sparse tensor (got edges of a DistributedData, of which each rank holds a "
    "part): write adj_t @ x, its sum"
)

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib"))


def answer(class_: T, frame: FrameType) -> T:
    """``class_``, what ``__class__`` is, if the line of ``frame`` does not ask whether edges are a ``Tensor``.

    ``isinstance(edge_index, Tensor)`` is False for the handle, so a script's branch would be skipped. Python calls no
    code of an object whose type is tested, except that ``isinstance`` reads ``__class__`` where the type does not
    match. That cannot return ``Tensor``: torch's C++ tests in the same way, and would read memory where there is none.

    Raises:
        UnsupportedError: It does; or PyG asks edges alone for the number of nodes, or would end in a bare error.
    """
    asker = frame.f_back if frame.f_code is torch.is_tensor.__code__ and frame.f_back else frame
    module = str(asker.f_globals.get("__name__"))
    if module.startswith("torch_geometric.") and asker.f_code.co_name == "maybe_num_nodes":
        takes_number = asker.f_back is not None and asker.f_back.f_code.co_name in _TAKE_NUMBER
        raise UnsupportedError(
            of_whole_graphs()
            or ("" if takes_number else function_that_needs_all_edges(asker))
            or "Expected the number of nodes beside the edge_index of a DistributedData, whose largest number no rank "
            "knows: pass num_nodes=data.num_nodes, or apply it to the input, before DistributedData"
        )
    if module.startswith("torch_geometric.utils.") and _fails_unless_tensor(asker):
        raise UnsupportedError(
            _ADJ_T if asker.f_code.co_name == "spmm" else of_whole_graphs() or function_that_needs_all_edges(asker)
        )
    if module.partition(".")[0] not in ("torch", "torch_geometric", "pyg_dist"):
        name = _asked_name(asker.f_code.co_filename, asker.f_lineno)
        if name:
            raise UnsupportedError(
                f"{asker.f_code.co_filename}:{asker.f_lineno} asks whether {name} is a Tensor, and that of a "
                f"DistributedData is a handle, for which this branch would be skipped: ask whether it is no "
                f"SparseTensor, or {name}.is_sparse"
            )
    return class_


def _fails_unless_tensor(asker: FrameType) -> bool:
    """Whether a function of PyG's raises an error that says nothing where an ``edge_index`` is no tensor."""
    line = linecache.getline(asker.f_code.co_filename, asker.f_lineno)
    return asker.f_code.co_name in _UNLESS_TENSOR or line.lstrip().startswith("assert isinstance(")


@cache
def _asked_name(file: str, line: int) -> str:
    """What a question for ``Tensor`` in this line of a script's own code is about, if it is called after edges."""
    if file.startswith(_INSTALLED):
        return ""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # a notebook's cell with commands
        return ""
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and node.args and node.lineno <= line <= (node.end_lineno or line)):
            continue
        question = _last_name(node.func)
        asked = ast.unparse(node.args[0])
        kinds = {_last_name(kind) for kind in ast.walk(ast.Tuple([*node.args[1:]], ast.Load()))}
        is_asked_for_tensor = question == "is_tensor" or (question == "isinstance" and "Tensor" in kinds)
        if is_asked_for_tensor and any(word in asked.lower() for word in ("edge", "adj")):
            return asked
    return ""


def _last_name(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
