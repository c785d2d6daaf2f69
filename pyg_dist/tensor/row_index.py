"""``RowIndex``: an edge tensor of node ids, by which rows of node tensors can be fetched."""

from __future__ import annotations

from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor


class RowIndex(EdgeTensor):
    """A node's global id for each edge; ``x[index]`` of a node tensor is one row for each edge."""

    def fetch(self, x: NodeTensor) -> EdgeTensor:
        """The row of ``x`` for each edge; differentiable (collective where rows lie on other ranks).

        Shapes:
            - x: ``[N, ...]``
            - output: ``[E, ...]``
        """
        raise NotImplementedError(f"{type(self).__name__}.fetch")

    def add_up(self, values: EdgeTensor) -> NodeTensor:
        """The sum of the values of each node's edges: the transpose of :meth:`fetch` (collective likewise).

        Shapes:
            - values: ``[E, ...]``
            - output: ``[N, ...]``
        """
        raise NotImplementedError(f"{type(self).__name__}.add_up")
