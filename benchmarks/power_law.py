"""Power-law graphs for benchmarks, by name, as a PyG ``Data`` each.

An endpoint of an edge is drawn with P(node of rank r) ~ r^-0.6, or edges by the recursive model R-MAT with Graph500's
probabilities, whose hubs are larger. Ids are permuted at random, and each edge stands there once in both directions,
without self loops.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

EXPONENT = 0.6


@dataclass(frozen=True)
class PowerLaw:
    """Sizes of a generated graph; ``num_edges`` counts both directions. R-MAT drops the copies of an edge."""

    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int
    seed: int
    rmat: bool = False


SIZES = {
    "tiny": PowerLaw(300, 3_000, 16, 4, seed=1),  # for the test of the benchmark itself
    "small": PowerLaw(20_000, 300_000, 128, 40, seed=2),
    "A": PowerLaw(170_000, 2_300_000, 128, 40, seed=11),  # the size of ogbn-arxiv with both directions
    "B": PowerLaw(400_000, 12_000_000, 100, 47, seed=22),  # ogbn-products with a sixth of its nodes
    "hubs": PowerLaw(1 << 14, 1_600_000, 128, 40, seed=5, rmat=True),
    "C": PowerLaw(58_000, 14_000_000, 256, 41, seed=33),  # Reddit with a quarter of its nodes
}


def load(name: str) -> Data:
    """Return the graph of that name, or the one in the archive ``name``.

    A generated graph has normal features, random labels, and half of the nodes in ``train_mask``. An archive has
    ``edge_index`` ``[2, E]``, ``x`` ``[N, F]``, ``y`` ``[N]`` and ``train_mask`` (or ``train``) ``[N]``. What it lacks
    of the last three is random; with ``undirected`` its edges stand there in one direction.
    """
    return _read(Path(name)) if name.endswith(".npz") else generate(SIZES[name])


def generate(size: PowerLaw) -> Data:
    """Return the graph of these sizes; the same one every time."""
    rng = np.random.default_rng(size.seed)
    permutation = rng.permutation(size.num_nodes)
    low, high = (_recursive_links if size.rmat else _links)(size, rng)
    source, target = permutation[np.concatenate([low, high])], permutation[np.concatenate([high, low])]
    order = np.lexsort((source, target))
    x = rng.standard_normal((size.num_nodes, size.num_features), dtype=np.float32)
    return Data(
        x=torch.from_numpy(x),
        edge_index=torch.from_numpy(np.stack([source[order], target[order]])),
        y=torch.from_numpy(rng.integers(0, size.num_classes, size.num_nodes)),
        train_mask=torch.from_numpy(rng.random(size.num_nodes) < 0.5),
    )


def _links(size: PowerLaw, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of ``num_edges / 2`` different links, the lower rank first."""
    cumulative = np.cumsum(np.arange(1, size.num_nodes + 1) ** -EXPONENT)
    wanted = size.num_edges // 2
    keys = np.empty(0, np.int64)  # low * num_nodes + high
    while keys.size < wanted:
        draws = rng.random((2, wanted - keys.size + 1000)) * cumulative[-1]
        ends = np.sort(np.searchsorted(cumulative, draws), axis=0)
        ends = ends[:, ends[0] != ends[1]]
        keys = np.union1d(keys, ends[0] * size.num_nodes + ends[1])
    return np.divmod(rng.choice(keys, wanted, replace=False), size.num_nodes)


def _recursive_links(size: PowerLaw, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of different links, of ``num_edges / 2`` drawn by R-MAT (Chakrabarti et al., 2004)."""
    ends = np.zeros((2, size.num_edges // 2), np.int64)
    for _ in range(size.num_nodes.bit_length() - 1):
        quadrant = np.searchsorted([0.57, 0.76, 0.95], rng.random(ends.shape[1]), side="right")
        ends = 2 * ends + np.stack([quadrant // 2, quadrant % 2])
    low, high = np.sort(ends[:, ends[0] != ends[1]], axis=0)
    low, high = np.divmod(np.unique(low * size.num_nodes + high), size.num_nodes)
    return low, high


def _read(path: Path) -> Data:
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    edge_index = torch.from_numpy(arrays["edge_index"].astype(np.int64))
    num_nodes = int(arrays["num_nodes"]) if "num_nodes" in arrays else arrays["x"].shape[0]
    if "undirected" in arrays and bool(arrays["undirected"]):
        edge_index = to_undirected(edge_index, num_nodes=num_nodes)
    rng = np.random.default_rng(0)
    x = arrays["x"] if "x" in arrays else rng.standard_normal((num_nodes, 32), dtype=np.float32)
    y = arrays["y"] if "y" in arrays else rng.integers(0, 8, num_nodes)
    mask = next((arrays[name] for name in ("train_mask", "train") if name in arrays), rng.random(num_nodes) < 0.5)
    return Data(
        x=torch.from_numpy(x).float(),
        edge_index=edge_index,
        y=torch.from_numpy(y.astype(np.int64)),
        train_mask=torch.from_numpy(mask if mask.ndim == 1 else mask[0]),
    )
