"""Which form of a product is faster on this machine: the first products of a pattern, width and dtype are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from pyg_dist.backend.ops import SpmmForm, SpmmWay

Product = Callable[[SpmmWay], Tensor]

_OTHER_PREFETCH_EDGES = 64
"""Narrow rows gain up to a sixth by it where they lie in huge pages, and lose a third elsewhere (PREFETCH_EDGES)."""


class FormTrial:
    """Times the forms in turn, the guessed one first, then the faster one with a longer prefetch distance.

    All have the same bits. Only products that training needs anyway are timed. Not collective: ranks may differ.

    Args:
        forms: to choose from; the one to begin with first.
        num_samples: of each; none: the first one stays.
    """

    def __init__(self, forms: Sequence[SpmmForm | None], num_samples: int = 3) -> None:
        self._seconds: dict[SpmmWay, list[float]] = {SpmmWay(form): [] for form in forms}
        self._num_samples, self._num_ways = num_samples, len(forms) + (num_samples > 0)

    @property
    def is_over(self) -> bool:
        """Whether all samples have been taken."""
        return len(self._seconds) == self._num_ways and self._has_all

    @property
    def _has_all(self) -> bool:
        return all(len(taken) >= self._num_samples for taken in self._seconds.values())

    @property
    def best(self) -> SpmmWay:
        """The fastest so far; the first one before there are samples of all forms."""
        sampled = {way: min(taken) for way, taken in self._seconds.items() if taken}
        if len(sampled) < min(len(self._seconds), self._num_ways - 1):
            return next(iter(self._seconds))
        return min(sampled, key=lambda way: sampled[way]) if sampled else next(iter(self._seconds))

    def run(self, product: Product, num_entries: int) -> Tensor:
        """A product, as one more sample; patterns of several sizes may share a trial."""
        if self._has_all:
            self._seconds[self.best._replace(prefetch_edges=_OTHER_PREFETCH_EDGES)] = []
        way = min(self._seconds, key=lambda way: len(self._seconds[way]))
        start = time.perf_counter()
        out = product(way)
        self._seconds[way].append((time.perf_counter() - start) / max(num_entries, 1))
        return out
