"""Input graphs of the examples, as a PyG ``Data`` each: no download."""

from __future__ import annotations

import numpy as np
import scipy.sparse
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import NearestNeighbors
from torch_geometric.data import Data
from torch_geometric.utils import from_scipy_sparse_matrix, to_undirected


def digits(num_neighbors: int = 10, train_share: float = 0.1, seed: int = 0) -> Data:
    """Return scikit-learn's 1797 handwritten digits: a node per 8 x 8 image, linked to its nearest neighbours.

    ``x`` has the 64 pixels in [0, 1], ``y`` the digit. A tenth of the nodes trains, another tenth validates.
    """
    images, labels = load_digits(return_X_y=True)
    # A search tree, since the default search breaks ties as the number of threads has it.
    neighbors = NearestNeighbors(n_neighbors=num_neighbors, algorithm="kd_tree").fit(images)
    edge_index, _ = from_scipy_sparse_matrix(neighbors.kneighbors_graph())
    num_nodes = labels.size
    data = Data(
        x=torch.from_numpy(images / 16).float(),
        edge_index=to_undirected(edge_index, num_nodes=num_nodes),
        y=torch.from_numpy(labels),
    )
    order = torch.randperm(num_nodes, generator=torch.Generator().manual_seed(seed))
    num_train = round(train_share * num_nodes)
    splits = order.split([num_train, num_train, num_nodes - 2 * num_train])
    for name, nodes in zip(("train_mask", "val_mask", "test_mask"), splits, strict=True):
        data[name] = torch.zeros(num_nodes, dtype=torch.bool).index_fill_(0, nodes, True)
    return data


def read_npz(path: str, seed: int = 0) -> Data:
    """Return the graph in a NumPy archive.

    ``edge_index`` ``[2, E]`` integers (where ``undirected`` is true, each edge stands there once); ``y`` ``[N]``
    integers, -1 where there is no label; ``x`` ``[N, F]``, or its CSR form ``x_indptr``, ``x_indices``, ``x_shape`` and
    ``x_data`` (left out: all ones); boolean ``train_mask``, ``val_mask`` and ``test_mask`` ``[N]`` (of several splits,
    ``[splits, N]``, the first is taken), or else they are drawn, 60/20/20.
    """
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    y = torch.from_numpy(arrays["y"].astype(np.int64))
    if "x" in arrays:
        x = arrays["x"]
    else:
        columns = arrays["x_indices"]
        values = arrays.get("x_data", np.ones(columns.size, np.float32))
        x = scipy.sparse.csr_matrix((values, columns, arrays["x_indptr"]), tuple(arrays["x_shape"])).toarray()
    edge_index = torch.from_numpy(arrays["edge_index"].astype(np.int64))
    if arrays.get("undirected", False):
        edge_index = to_undirected(edge_index, num_nodes=y.numel())
    data = Data(x=torch.from_numpy(x).float(), edge_index=edge_index, y=y)
    names = ("train_mask", "val_mask", "test_mask")
    if names[0] in arrays:
        masks = [torch.from_numpy(arrays[name] if arrays[name].ndim == 1 else arrays[name][0]) for name in names]
    else:
        labelled = (y >= 0).nonzero().view(-1)
        nodes = labelled[torch.randperm(labelled.numel(), generator=torch.Generator().manual_seed(seed))]
        bounds = [round(0.6 * nodes.numel()), round(0.8 * nodes.numel())]
        none = torch.zeros(y.numel(), dtype=torch.bool)
        masks = [none.index_fill(0, part, True) for part in nodes.tensor_split(bounds)]
    for name, mask in zip(names, masks, strict=True):
        data[name] = mask
    return data
