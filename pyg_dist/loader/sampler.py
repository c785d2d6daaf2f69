"""The seam of mini-batches: a sampler says which nodes, and which of their edges, the batch of a step has."""

from __future__ import annotations

from typing import Protocol

from pyg_dist.graph.sample import Subset, TypedSubset


class Sampler(Protocol):
    """What :class:`~pyg_dist.loader.BatchLoader` needs of a sampler; this protocol is the whole of it.

    Subsets are functions of :attr:`options` and the step: the same however many ranks there are, and the same again
    after a restart.
    """

    @property
    def num_steps(self) -> int:
        """Steps of an epoch; steps are counted over all epochs."""

    @property
    def options(self) -> dict[str, object]:
        """What the subsets follow from, by name: equal on every rank, and part of ``state_dict``."""

    @property
    def sends(self) -> bool:
        """Whether :meth:`sample` sends messages: it is collective then, and all ranks draw the same steps in one order.

        It has a group for them alone (:func:`~pyg_dist.backend.session.agreement.group_of_thread`).
        """

    def sample(self, step: int) -> Subset | TypedSubset:
        """The subset of a step. It changes nothing: a thread runs it while a step trains.

        A sampler may have ``prepare(step)``, too, which draws some of what the next ``sample(step)`` returns: the
        thread calls it when it has made the batch of the step before.
        """
