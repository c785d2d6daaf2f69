"""A graph in an ``.npz`` file, as far as planning needs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from pyg_dist.errors import DataError
from pyg_dist.partition.edge_list import as_edges, check_ends


class GraphFile(NamedTuple):
    """What a plan needs of a graph.

    Attributes:
        edge_index: int64 ``[2, E]``, both directions.
        num_nodes: N.
        train_mask: bool ``[N]``, if there is one.
        num_features: columns of x, if there is one.
        num_classes: of y, if it has classes.
    """

    edge_index: Tensor
    num_nodes: int
    train_mask: Tensor | None
    num_features: int | None
    num_classes: int | None


def read_npz(path: Path) -> GraphFile:
    """Read a graph in an ``.npz`` file; its features stay on disk.

    Raises:
        DataError: It is not such a file, or its edges lie between other nodes.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            names = ("num_nodes", "edge_index", "undirected", "train_mask", "y", "x_shape")
            arrays: dict[str, Any] = {name: file[name] for name in names if name in file}
            shape = tuple(arrays["x_shape"]) if "x_shape" in arrays else file["x"].shape if "x" in file else ()
        edge_index = torch.from_numpy(arrays["edge_index"].astype(np.int64))
        num_nodes = int(arrays["num_nodes"])
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile) as error:
        raise DataError(f"Expected {path} to be .npz with num_nodes and edge_index [2, E] (got: {error})") from error
    edge_index = as_edges(edge_index)
    check_ends(edge_index, num_nodes, "edge_index")
    if bool(arrays.get("undirected", False)):
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        # A reversed edge that was there already, and a loop, count once.
        key = torch.unique(edge_index[0] * num_nodes + edge_index[1])
        edge_index = torch.stack([key // num_nodes, key % num_nodes])
    mask = arrays.get("train_mask")
    if mask is not None:
        mask = torch.from_numpy(mask if mask.ndim == 1 else mask[0])
    labels = arrays.get("y")
    is_classes = labels is not None and labels.size > 0 and np.issubdtype(labels.dtype, np.integer)
    num_classes = max(int(labels.max()) + 1, 1) if is_classes and labels is not None else None
    return GraphFile(edge_index, num_nodes, mask, int(shape[1]) if len(shape) == 2 else None, num_classes)


def read_parts(path: str) -> Tensor:
    """A part for each node, from an ``.npy`` file."""
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, TypeError, EOFError) as error:
        raise DataError(f"Expected {path} to be .npy with a part per node (got: {error})") from error
