"""Which form of a product is faster on this machine: the first products of a pattern, width and dtype try both."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from pyg_dist.backend.ops import SpmmForm

Product = Callable[[SpmmForm], Tensor]


class FormTrial:
    """Samples of both forms in turn, the guessed one first; then the one with the least time for good.

    Both have the same bits. What is timed are products that somebody asked for. Not collective: ranks may differ.

    Args:
        guess: the form to begin with.
        num_samples: of each form; none: the guess stays.
    """

    def __init__(self, guess: SpmmForm, num_samples: int = 3) -> None:
        other: SpmmForm = "plain" if guess == "blocks" else "blocks"
        self._seconds: dict[SpmmForm, list[float]] = {guess: [], other: []}
        self._num_samples = num_samples

    @property
    def is_over(self) -> bool:
        """Whether all samples have been taken."""
        return all(len(taken) >= self._num_samples for taken in self._seconds.values())

    @property
    def best(self) -> SpmmForm:
        """The fastest form so far; the guess before there are samples of both."""
        if not all(self._seconds.values()):
            return next(iter(self._seconds))
        return min(self._seconds, key=lambda form: min(self._seconds[form]))

    def run(self, product: Product) -> Tensor:
        """A product, as one more sample."""
        form = min(self._seconds, key=lambda form: len(self._seconds[form]))
        start = time.perf_counter()
        out = product(form)
        self._seconds[form].append(time.perf_counter() - start)
        return out
