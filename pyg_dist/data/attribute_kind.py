"""What the rows of an attribute stand for."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from pyg_dist.errors import DataError


def belongs_to(name: str, value: Tensor, num_nodes: int, num_edges: int) -> Literal["node", "edge"] | None:
    """Whether ``value`` has a row for each node, or for each edge; ``None``: neither, it is the same on every rank.

    By its number of rows, and by its name where both numbers fit. A name with "index" holds ids, not rows.

    Raises:
        DataError: PyG's name for something of nodes or edges, and another number of rows.
    """
    size = value.shape[0]
    both = {num_nodes: f"{num_nodes} rows, one per node", num_edges: f"{num_edges} rows, one per edge"}
    of_edges = {num_edges: both[num_edges]}
    named = {"x": {num_nodes: f"{num_nodes} rows, one per node"}, "edge_attr": of_edges, "edge_weight": of_edges}
    allowed = named.get(name, both if name.endswith("mask") else None)
    if allowed is not None and size not in allowed:
        raise DataError(
            f"Expected '{name}' to have {', or '.join(allowed.values())} (got shape {list(value.shape)}): "
            f"rebuild it for this graph"
        )
    if "index" in name:
        return None
    if size == num_edges and ("edge" in name or num_edges != num_nodes):
        return "edge"
    return "node" if size == num_nodes else None
