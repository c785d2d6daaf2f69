"""``save_graph``: a PyG ``Data`` as one safetensors file, which the command ``partition`` reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor
from torch_geometric.data import Data

from pyg_dist.errors import DataError
from pyg_dist.store.graph_input import EDGE_INDEX, METADATA, read_graph


def save_graph(data: Data, path: str | Path) -> None:
    """Write a graph for ``python -m pyg_dist partition``; nothing is pickled. Not collective: one rank calls it.

    Edges, nodes and attributes are those that :class:`~pyg_dist.DistributedData` would read; the file appears whole.

    Args:
        data: homogeneous ``Data`` with ``edge_index`` or a sparse ``adj_t``.
        path: the file, a name that ends in ``.safetensors``.

    Raises:
        DataError: The graph is not valid, or an attribute is neither a tensor nor plain (what JSON has).

    Example:
        >>> pyg_dist.save_graph(KarateClub()[0], "karate.safetensors")
    """
    from pyg_dist.store.format import TensorSpec, as_storage, dtype_name
    from pyg_dist.store.source import is_plain
    from pyg_dist.store.writer import ShardWriter, sync

    path = Path(path)
    if path.suffix != ".safetensors":
        raise DataError(f"Expected a name that ends in .safetensors (got {path.name!r}): rename it")
    graph = read_graph(data, allow_nan=True, warn=False)
    others = {name: value for name, value in graph.other_attributes.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in graph.other_attributes.items() if name not in others}
    for name, value in plain.items():
        if not is_plain(value):
            raise DataError(
                f"Expected '{name}' to be a tensor or what JSON has (got {type(value).__name__}): delete it"
            )
    tensors: dict[str, Tensor] = {EDGE_INDEX: graph.edge_index, **graph.node_attributes, **graph.edge_columns, **others}
    content: dict[str, Any] = {
        "num_nodes": graph.num_nodes,
        "graph": {"key": graph.graph_key, "loop_rule": graph.loop_rule},
        "node_attributes": list(graph.node_attributes),
        "edge_attributes": list(graph.edge_columns),
        "other_tensors": list(others),
        "other": plain,
    }
    specs = {name: TensorSpec(dtype_name(t.dtype), tuple(t.shape)) for name, t in tensors.items()}
    new = path.with_name(path.name + ".new")
    writer = ShardWriter(new, specs, {METADATA: json.dumps(content)})
    for name, tensor in tensors.items():
        writer.write_whole(name, as_storage(tensor.detach().cpu().contiguous()))
    writer.close()
    os.replace(new, path)
    sync(path.parent)
