"""How a rank writes the nodes that it knows: by numbers that its edges and tables have, not by their ids."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.loader.in_edges import InEdges


@dataclass(frozen=True, eq=False)
class Columns:
    """A node's code is ``tree * columns + column`` on this rank, and ``tree * N + id`` among the ranks."""

    in_edges: InEdges
    num_nodes: int  # N
    has_trees: bool

    def split(self, code: Tensor) -> tuple[Tensor | None, Tensor]:
        """Trees and columns, given codes on this rank; ``None``: there is one tree."""
        return _split(code, self.in_edges.num_columns) if self.has_trees else (None, code)

    def codes(self, tree: Tensor | None, column: Tensor) -> Tensor:
        """Codes on this rank, given trees and columns."""
        return column if tree is None else tree * self.in_edges.num_columns + column

    def common(self, code: Tensor) -> Tensor:
        """Codes among the ranks, given those on this one."""
        tree, column = self.split(code)
        node = self.in_edges.node_of(column)
        return node if tree is None else tree * self.num_nodes + node

    def here(self, common: Tensor) -> Tensor:
        """Codes on this rank, given those among the ranks, of its own nodes."""
        if not self.has_trees:
            return self.in_edges.find(common)
        tree, node = _split(common, self.num_nodes)
        return self.codes(tree, self.in_edges.find(node))


def _split(code: Tensor, width: int) -> tuple[Tensor, Tensor]:
    tree = torch.div(code, width, rounding_mode="floor")
    return tree, code - tree * width
