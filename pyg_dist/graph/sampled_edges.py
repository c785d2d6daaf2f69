"""The edges between sampled nodes: what both layouts' batches have."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import Group
from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.sample import Subset
from pyg_dist.tensor.sharding import RowSharding, lasting


class SampledEdges(RowSharding):
    """The edges between sampled nodes. They are counted when their number is first read (collective), and not before.

    Args:
        parent: the graph's edges.
        place: the local ones among them, int64 ``[e]``.
        parent_key: their keys in the graph, int64 ``[e]``.
        ranks: the ranks over which they lie.
        subset: the sample.
        position: which of the edges that a subset names each is; with repetitions it is the key, too.
    """

    counts_selections = False

    def __init__(
        self,
        parent: RowSharding,
        place: Tensor,
        parent_key: Tensor,
        ranks: Group,
        subset: Subset,
        position: Tensor | None = None,
    ) -> None:
        union, kept = subset.group, subset.kept
        key = position if position is not None and subset.repeats else parent_key
        first = 0 if union is None else union.index * parent.num_rng_keys
        super().__init__(ranks, "edge", 0, key + first if first else key)
        self.parent, self.place, self.parent_key = parent, place, parent_key
        self._union, self._least_keys = union, 0
        del self.size
        if kept is not None:
            assert position is not None
            self.__dict__.update(_position=position, size=kept.edge_id.numel())
            self._least_keys = kept.edge_id.numel()

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        """Number of edges over all ranks (collective at the first use)."""
        return sum(self.counts)

    def __repr__(self) -> str:
        return f"{self.num_local} sampled edges of this rank"

    @property
    def num_rng_keys(self) -> int:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding`."""
        return max(self.parent.num_rng_keys * (1 if self._union is None else self._union.index + 1), self._least_keys)

    @property
    def position(self) -> Tensor:
        """Where each edge stands among those of all ranks, which keep the graph's order (collective)."""
        return self._position

    @cached_property
    @lasting
    def _position(self) -> Tensor:
        mine = self.parent.position[self.place]
        if self._union is not None:
            mine = mine + self._union.index * self.parent.size
        return torch.searchsorted(self.group.gather_rows(mine, self.counts).sort().values, mine)


def refuse_other_weights() -> UnsupportedError:
    """The error of GCN's norm on a batch, with weights of which the rest of the graph is not known."""
    return UnsupportedError(
        "Expected edge weights of a batch to be an attribute of its graph, whose degrees GCN's norm needs (got other "
        "ones): put them into data before the loader is made"
    )


def refuse_learning_weights() -> UnsupportedError:
    """The error of GCN's norm on a batch, with weights that learn."""
    return UnsupportedError(
        "Expected constant edge weights in GCN's norm on a batch (got weights that learn): the degrees would need all "
        "of them; train on the whole graph, or normalize=False"
    )
