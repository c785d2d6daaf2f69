"""PyG's transforms, loaders and functions that read all edges: errors in them name them.

What they trip over (``torch.stack``, an assertion) says nothing to who called them.
"""

from __future__ import annotations

import sys
from types import FrameType

from pyg_dist.backend.pickling import OfThisRun

_GOT = "expects a whole graph (got a DistributedData, of which each rank holds a part)"


class EdgeHandle(OfThisRun):
    """Base of what stands for edges that lie on several ranks."""


def who_needs_it() -> str:
    """The message of an error in a transform, a function of edges or a loader's constructor of PyG's, else nothing.

    Nothing is recorded for it: the stack is searched when an error is made. Not collective.
    """
    return of_whole_graphs() or function_that_needs_all_edges(sys._getframe(1))


def of_whole_graphs() -> str:
    """:func:`who_needs_it` of transforms and loaders alone: they hand edges to code that looks at one rank's."""
    loader = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        asker = type(frame.f_locals.get("self")) if name in ("forward", "__init__") else object
        if name == "forward" and asker.__module__.startswith("torch_geometric.transforms."):
            return f"T.{asker.__name__} {_GOT}: apply it to the Data, before DistributedData"
        if name == "__init__" and asker.__module__.startswith("torch_geometric.loader."):
            loader = asker.__name__  # the outermost one is what the script knows
        frame = frame.f_back
    return f"{loader} {_GOT}: use pyg_dist.loader.UniformVertexLoader for mini-batches" if loader else ""


def function_that_needs_all_edges(inner: FrameType | None) -> str:
    """The message of an error in a function of PyG's that a script gave a distributed ``edge_index``, else nothing.

    Args:
        inner: where the error is made.
    """
    while inner is not None and not _is_of_pyg(inner):
        inner = inner.f_back
    outer = inner
    while outer is not None and _is_of_pyg(outer):  # the outermost one is what the script knows
        inner, outer = outer, outer.f_back
    if inner is None or not _is_of_pyg(inner, "utils."):
        return ""
    if not any(issubclass(type(value), EdgeHandle) for value in inner.f_locals.values()):
        return ""
    return (
        f"torch_geometric.utils.{inner.f_code.co_name} needs all edges, and each rank holds only its own: give it "
        f"edge_index.full_tensor(), all edges, or apply it to the graph before DistributedData"
    )


def _is_of_pyg(frame: FrameType, room: str = "") -> bool:
    return str(frame.f_globals.get("__name__")).startswith(f"torch_geometric.{room}")
