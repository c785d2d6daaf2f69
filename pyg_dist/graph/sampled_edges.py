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
        kept_key: their keys among the edges that a subset names, int64 ``[e]``; with repetitions these stand for them.
    """

    counts_selections = False

    def __init__(
        self,
        parent: RowSharding,
        place: Tensor,
        parent_key: Tensor,
        ranks: Group,
        subset: Subset,
        kept_key: Tensor | None = None,
    ) -> None:
        group, kept = 0 if subset.group is None else subset.group.index, subset.kept
        key, num_keys = parent_key, parent.num_rng_keys
        if kept is not None and kept_key is not None and kept.repeats:
            key, num_keys = kept_key, kept.num_keys
        super().__init__(ranks, "edge", 0, key + group * num_keys if group else key)
        self.parent, self.place, self.parent_key = parent, place, parent_key
        self._kept_key, self._subset, self._num_keys = kept_key, subset, num_keys * (group + 1)
        del self.size

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        """Number of edges over all ranks (collective at the first use)."""
        return sum(self.counts)

    def __repr__(self) -> str:
        return f"{self.num_local} sampled edges of this rank"

    @property
    def num_rng_keys(self) -> int:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding`."""
        return self._num_keys

    @cached_property
    @lasting
    def position(self) -> Tensor:
        """Where each edge stands among those of all ranks, which keep the graph's order (collective)."""
        kept, mine, num_keys = self._subset.kept, self._kept_key, self.parent.size
        if kept is None or mine is None:
            mine = self.parent.position[self.place]
        else:
            num_keys = kept.num_keys
        if self._subset.group is not None:
            mine = mine + self._subset.group.index * num_keys
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
