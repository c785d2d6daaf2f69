"""The files of ``pyg_dist.save_graph``: a safetensors file whose header gives the place of each tensor in the graph."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_dist.errors import DAMAGED, DataError, refusing
from pyg_dist.store.attributes import dense_and_plain
from pyg_dist.store.format import ShardWriter, TensorSpec, as_storage, spec_of, sync
from pyg_dist.store.graph_input import GraphInput, read_graph, read_hetero
from pyg_dist.store.manifest import to_json
from pyg_dist.store.source import is_plain

GRAPH, TYPES, EDGE_INDEX = "pyg_dist graph", "pyg_dist graph with types", "edge_index"
"""The entries of a file's header, of a graph with one type and with several; the tensor of edges."""


def save_graph(data: Data | HeteroData, path: str | Path) -> None:
    """Write a graph for ``python -m pyg_dist partition``; nothing is pickled. Not collective: one rank calls it.

    Edges, nodes and attributes are those that :class:`~pyg_dist.DistributedData` would read; the file appears whole.

    Args:
        data: ``Data`` or ``HeteroData`` with ``edge_index`` or a sparse ``adj_t``.
        path: the file, a name that ends in ``.safetensors``.

    Raises:
        DataError: The graph is not valid, or an attribute is neither a tensor nor plain (what JSON has).

    Example:
        >>> pyg_dist.save_graph(KarateClub()[0], "karate.safetensors")
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise DataError(f"Expected a name that ends in .safetensors (got {path.name!r}): rename it")
    if not path.parent.is_dir():
        raise DataError(f"Expected a folder that exists (got {path.parent}): make it, or choose another one")
    if isinstance(data, HeteroData):
        hetero = read_hetero(data, allow_nan=True, warn=False)
        described = {key: _described(graph, f"{key}/") for key, graph in hetero.pieces().items()}
        tensors = {name: tensor for found, _ in described.values() for name, tensor in found.items()}
        content: dict[str, object] = {"types": list(hetero.num_nodes), "relations": list(hetero.relations)}
        content["pieces"] = {key: piece for key, (_, piece) in described.items()}
        metadata = {TYPES: to_json(content)}
    else:
        tensors, content = _described(read_graph(data, allow_nan=True, warn=False))
        metadata = {GRAPH: to_json(content)}
    if "__metadata__" in tensors:
        raise DataError(
            "Expected no tensor named '__metadata__', which the file's header has itself (got one): rename it"
        )
    new = path.with_name(path.name + ".new")
    writer = ShardWriter(new, {name: spec_of(t) for name, t in tensors.items()}, metadata)
    for name, tensor in tensors.items():
        writer.append({name: as_storage(tensor.detach().cpu().contiguous())})
    writer.close()
    os.replace(new, path)
    sync(path.parent)


def _described(graph: GraphInput, prefix: str = "") -> tuple[dict[str, Tensor], dict[str, object]]:
    """The tensors of a graph, whose names get a prefix, and their description for the header."""
    others, plain = dense_and_plain(graph.other_attributes)
    for name, value in plain.items():
        if not is_plain(value):
            raise DataError(
                f"Expected '{name}' to be a tensor or what JSON has (got {type(value).__name__}): delete it"
            )
    tensors: dict[str, Tensor] = {EDGE_INDEX: graph.edge_index, **graph.node_attributes, **graph.edge_columns, **others}
    return {prefix + name: tensor for name, tensor in tensors.items()}, {
        "num_nodes": graph.num_nodes,
        "graph": graph.form,
        "node_attributes": list(graph.node_attributes),
        "edge_attributes": list(graph.edge_columns),
        "other_tensors": list(others),
        "other": plain,
    }


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A saved file, opened by safetensors, which maps it; its pages are dropped with the last tensor."""
    import safetensors

    expected, kinds = f"a graph of pyg_dist.save_graph in {path}", (*DAMAGED, safetensors.SafetensorError)
    with refusing(DataError, expected, "save it again", *kinds), safetensors.safe_open(path, "pt") as file:
        yield file


def specs_of(file: Any) -> dict[str, TensorSpec]:
    """Types and shapes by name."""
    found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    return {name: TensorSpec(one.get_dtype(), tuple(one.get_shape())) for name, one in found.items()}


def require_rows(specs: Mapping[str, TensorSpec], content: Mapping[str, Any]) -> None:
    """Check the sizes of a graph's tensors against each other."""
    edges = specs[EDGE_INDEX]
    if edges.dtype != "I64" or len(edges.shape) != 2 or edges.shape[0] != 2:
        raise ValueError(f"edge_index of {edges.dtype} {list(edges.shape)}")
    for kind, size in (("node_attributes", int(content["num_nodes"])), ("edge_attributes", edges.shape[1])):
        if any(specs[name].shape[0] != size for name in content[kind]):
            raise ValueError("attributes of another number of rows")
