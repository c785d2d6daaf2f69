"""Graphs for tests: the real ones of the optional folder ``../shared/data``, as PyG ``Data``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

MASKS = ("train_mask", "val_mask", "test_mask")


def load_npz(path: str | Path, split: int = 0, seed: int = 0) -> Data:
    """Return the graph of an ``.npz`` file: x [N, F] float32, edge_index [2, E] int64, y [N] int64, masks [N] bool.

    An undirected graph is stored with one direction of each edge. What a file lacks is made up from ``seed``: 32 normal
    features, the octile of the in-degree as label, a 60/20/20 split of the labelled nodes.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "meta"}
    num_nodes = int(arrays["num_nodes"])
    rng = np.random.default_rng(seed)
    edge_index = torch.from_numpy(arrays["edge_index"].astype(np.int64))
    if bool(arrays["undirected"]):
        edge_index = to_undirected(edge_index, num_nodes=num_nodes)
    x = _features(arrays, num_nodes, rng)
    y = arrays["y"].astype(np.int64) if "y" in arrays else _degree_octiles(edge_index[1].numpy(), num_nodes)
    masks = {name: torch.from_numpy(mask) for name, mask in _masks(arrays, y, split, rng).items()}
    return Data(x=torch.from_numpy(x), edge_index=edge_index, y=torch.from_numpy(y), num_nodes=num_nodes, **masks)


def _features(arrays: dict[str, Any], num_nodes: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if "x" in arrays:
        return arrays["x"].astype(np.float32)
    if "x_indptr" not in arrays:
        return rng.standard_normal((num_nodes, 32), dtype=np.float32)
    columns, pointers = arrays["x_indices"], arrays["x_indptr"]
    values = arrays.get("x_data", np.ones(columns.size, np.float32))
    return scipy.sparse.csr_matrix((values, columns, pointers), tuple(arrays["x_shape"])).toarray().astype(np.float32)


def _degree_octiles(targets: np.ndarray[Any, Any], num_nodes: int) -> np.ndarray[Any, Any]:
    degree = np.bincount(targets, minlength=num_nodes)
    return np.searchsorted(np.quantile(degree, np.arange(1, 8) / 8), degree).astype(np.int64)


def _masks(
    arrays: dict[str, Any], y: np.ndarray[Any, Any], split: int, rng: np.random.Generator
) -> dict[str, np.ndarray[Any, Any]]:
    if MASKS[0] in arrays:
        return {name: np.atleast_2d(arrays[name])[split if arrays[name].ndim == 2 else 0] for name in MASKS}
    nodes = rng.permutation(np.flatnonzero(y >= 0))
    chosen = np.split(nodes, [int(0.6 * nodes.size), int(0.8 * nodes.size)])
    masks = {name: np.zeros(y.size, bool) for name in MASKS}
    for name, ids in zip(MASKS, chosen, strict=True):
        masks[name][ids] = True
    return masks
