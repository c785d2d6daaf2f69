"""PyG's transforms and loaders, which look at edges themselves: errors in them name them, not what they trip over."""

from __future__ import annotations

import sys
from types import FrameType

_GOT = "expects a whole graph (got a DistributedData, of which each rank holds a part)"


def who_needs_it() -> str:
    """The message of an error in a transform or the constructor of a loader of PyG's; nothing elsewhere.

    Nothing is recorded for it: the stack is searched when an error is made. Not collective.
    """
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
