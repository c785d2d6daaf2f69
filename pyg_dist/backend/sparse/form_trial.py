"""Which form of a product is faster on this machine: the first products of a pattern, width and dtype are timed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

from torch import Tensor

from pyg_dist.backend.ops import SpmmForm, SpmmWay

logger = logging.getLogger("pyg_dist")

Product = Callable[[SpmmWay], Tensor]

_FEWEST, _MOST = 3, 7
"""Samples of a way."""

_CLOSE = 1.15
"""Ways whose medians or fastest samples are no further apart take more samples than the fewest. On graph B with two
threads, width 256, three samples of which other processes disturbed two had chosen the form that takes 1.29 times as
long."""

_OTHER_PREFETCH_EDGES = 64
"""Narrow rows gain up to a sixth by it where they lie in huge pages, and lose a third elsewhere (PREFETCH_EDGES)."""


class FormTrial:
    """Times the forms in turn, the guessed one first, then the faster one with two prefetch distances.

    All have the same bits. Only products that training needs anyway are timed, but for the first one, whose memory is
    new. The smallest median is the fastest; a way that is clearly slower takes no further turn. Not collective: ranks
    may differ.

    ``forms`` begin with the guess, which is taken without a trial if it ``is_fixed``; ``product`` is what is
    multiplied, for the log.
    """

    def __init__(self, forms: Sequence[SpmmForm | None], is_fixed: bool = False, product: str = "") -> None:
        self._product, self._medians = product, dict[SpmmWay, float]()
        self._seconds: dict[SpmmWay, list[float]] = {SpmmWay(form): [] for form in forms}
        self._has_begun, self._compares_distances, self._is_over = False, False, is_fixed
        if len(forms) == 1 and not is_fixed:
            self._compare_distances()

    @property
    def is_over(self) -> bool:
        """Whether all samples have been taken."""
        return self._is_over

    def __str__(self) -> str:
        """The product, the way that is taken, and the median of each way that has been timed."""
        times = ", ".join(f"{_words(way)} {1e9 * seconds:.2f}" for way, seconds in self._medians.items())
        why = f"ns an entry: {times}" if times else "as set" if self._is_over else "guessed, not yet timed"
        return f"{self._product}: {_words(self.best)} ({why})"

    @property
    def best(self) -> SpmmWay:
        """The fastest so far; the first one before there are samples of all ways."""
        if not all(self._seconds.values()):
            return next(iter(self._seconds))
        return min(self._seconds, key=lambda way: median(self._seconds[way]))

    def run(self, product: Product, num_entries: int) -> Tensor:
        """A product, as one more sample; patterns of several sizes may share a trial."""
        if not self._has_begun:
            self._has_begun = True
            return product(self.best)
        way = min(self._seconds, key=lambda way: len(self._seconds[way]))
        taken = self._seconds[way]
        start = time.perf_counter()
        out = product(way)
        taken.append((time.perf_counter() - start) / max(num_entries, 1))
        self._decide()
        return out

    def _decide(self) -> None:
        """Leave out ways that are clearly slower; go on once one is left, or all have samples enough."""
        counts = {len(taken) for taken in self._seconds.values()}
        if len(counts) > 1 or min(counts) < _FEWEST:
            return
        best = self.best
        self._medians |= {way: median(taken) for way, taken in self._seconds.items()}
        limits = [(of, _CLOSE * of(self._seconds[best])) for of in (min, median)]
        close = {w: taken for w, taken in self._seconds.items() if any(of(taken) <= limit for of, limit in limits)}
        if len(close) > 1 and min(counts) < _MOST:
            self._seconds = close
            return
        self._seconds = {best: self._seconds[best]}
        if self._compares_distances:
            self._is_over = True
            logger.debug("product of %s", self)
        else:
            self._compare_distances()

    def _compare_distances(self) -> None:
        """The second half: the form is known. Its samples are taken anew, in the same minutes as the other's."""
        (way,) = self._seconds
        self._seconds = {way: [], way._replace(prefetch_edges=_OTHER_PREFETCH_EDGES): []}
        self._compares_distances = True


def _words(way: SpmmWay) -> str:
    return f"{way.form or 'plain'}, {way.prefetch_edges} ahead"
