"""What commands read of an input graph, and what they say of it; a graph in memory, as far as planning needs it."""

from __future__ import annotations

import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import as_parts
from pyg_dist.store.source import SourceInfo
from pyg_dist.store.sources import Reading, Source, open_source
from pyg_dist.store.spool import Spool, spool

_MEMORY = 4 << 30


class PlannedGraph(NamedTuple):
    """What a plan needs of a graph."""

    edge_index: Tensor  # int64 ``[2, E]``, both directions
    num_nodes: int  # N
    train_mask: Tensor | None  # bool ``[N]``, if there is one; of several splits, the first
    num_features: int | None  # columns of x, if there is one
    num_classes: int | None  # of y, if it has classes


def read_planned_graph(graph: str | Path, undirected: bool = False, reading: Reading = Reading()) -> PlannedGraph:  # noqa: B008
    """Read the edges of an input; its features stay on disk.

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


def say_what_was_read(source: Source, edges: Spool) -> None:
    """A line on stderr about a file that does not describe itself, and warnings of what is probably meant otherwise."""
    if source.understood:
        isolated = f" ({edges.num_isolated:,} without an edge)" if edges.num_isolated else ""
        weights = "weights" if edges.attributes else "no weights"
        counts = f"{edges.num_nodes:,} nodes{isolated}, {edges.num_edges:,} edges, {weights}"
        tqdm.write(f"{source.name}: {source.understood}; {counts}", file=sys.stderr)
        if edges.least_id == 1 and edges.num_isolated and source.reading.first_id is None:
            warnings.warn(
                f"ids in {source.name} begin at 1, so node 0 has no edge: if they are counted from 1, --first-id 1",
                stacklevel=2,
            )
    for name, count in edges.nan.items():
        warnings.warn(count.warning(name, "edge", edges.num_edges), stacklevel=2)


def read_parts(path: str) -> Tensor:
    """A part for each node, from an ``.npy`` file."""
    try:
        return as_parts(np.load(path, allow_pickle=False))
    except (ValueError, TypeError, EOFError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"Expected {path} to be .npy with a part per node (got: {error})") from error


def train_mask_of(info: SourceInfo) -> Tensor | None:
    """The training nodes, bool ``[N]`` or ``[N, K]``, if the input has them."""
    for attribute in info.nodes:
        if attribute.name == "train_mask" and attribute.dtype == "BOOL" and len(attribute.shape) < 2:
            return torch.from_numpy(np.concatenate(list(attribute.rows(1 << 22))))
    return None


def model_columns(info: SourceInfo) -> tuple[int | None, int | None]:
    """Columns of x and classes of y, as ``DistributedData`` sees them."""
    in_channels = out_channels = None
    for attribute in info.nodes:
        if attribute.name == "x" and len(attribute.shape) == 1:
            in_channels = attribute.shape[0]
        if attribute.name == "y" and attribute.dtype in ("I64", "I32", "I16", "I8", "U8"):
            largest = [int(rows.max()) for rows in attribute.rows(1 << 22) if rows.size]
            out_channels = max(max(largest) + 1, 1) if largest else None
    return in_channels, out_channels
