"""A graph as far as planning needs it, from any input of the command ``partition``, in memory."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dist.cli.conversion import read_parts, train_mask_of
from pyg_dist.cli.graph_options import say_what_was_read
from pyg_dist.cli.grid_conversion import model_columns
from pyg_dist.store.sources import Reading, open_source
from pyg_dist.store.spool import spool

__all__ = ["PlannedGraph", "read_parts", "read_planned_graph"]

_MEMORY = 4 << 30


class PlannedGraph(NamedTuple):
    """What a plan needs of a graph.

    Attributes:
        edge_index: int64 ``[2, E]``, both directions.
        num_nodes: N.
        train_mask: bool ``[N]``, if there is one; of several splits, the first.
        num_features: columns of x, if there is one.
        num_classes: of y, if it has classes.
    """

    edge_index: Tensor
    num_nodes: int
    train_mask: Tensor | None
    num_features: int | None
    num_classes: int | None


def read_planned_graph(graph: str | Path, undirected: bool = False, reading: Reading = Reading()) -> PlannedGraph:  # noqa: B008
    """Read the edges of an input; its features stay on disk.

    Args:
        graph: see :func:`~pyg_dist.store.sources.open_source`.
        undirected: add the reverse of each edge.
        reading: how to read it; attributes that do not fit are left out, with a warning.

    Raises:
        DataError: It is no such input, or its edges lie between other nodes.
    """
    source = open_source(str(graph), replace(reading, is_strict=False))
    info = source.info()
    with tempfile.TemporaryDirectory(prefix="pyg_dist") as folder:
        edges = spool(source, Path(folder) / "spool", undirected, _MEMORY, lambda count: None)
        say_what_was_read(source, edges)
        edge_index = edges.edge_index()
    mask = train_mask_of(info)
    if mask is not None and mask.dim() == 2:
        mask = mask[:, 0].contiguous()
    num_features, num_classes = model_columns(info)
    if mask is not None:
        mask = mask.to(torch.bool)
    return PlannedGraph(edge_index, edges.num_nodes, mask, num_features, num_classes)
