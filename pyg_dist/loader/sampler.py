"""The seam of mini-batches: a sampler says which nodes, and which of their edges, the batch of a step has."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from pyg_dist.graph.sample import Subset

P = TypeVar("P")


class Sampler(Protocol[P]):
    """What :class:`~pyg_dist.loader.BatchLoader` needs of a sampler; this protocol is the whole of it.

    Subsets are functions of :attr:`options` and the step: the same on every rank of a data group, however many ranks
    there are, and the same again after a restart.
    """

    @property
    def num_steps(self) -> int:
        """Steps of an epoch; steps are counted over all epochs."""

    @property
    def options(self) -> dict[str, Any]:
        """What the subsets follow from, by name: equal on every rank, and part of ``state_dict``."""

    def prepare(self, step: int) -> P:
        """What needs messages, on the main thread: ranks call it alike, one step ahead (collective)."""

    def sample(self, step: int, prepared: P) -> Subset:
        """The subset of a step. It sends nothing, and changes nothing: a thread runs it while a step trains."""
