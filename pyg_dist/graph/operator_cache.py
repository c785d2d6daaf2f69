"""Operators made from constant edge weights, kept while these live and do not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pyg_dist.backend.ops.memory import trim_after
from pyg_dist.tensor.row_tensor import RowTensor, version_of
from pyg_dist.tensor.sharding import lasting

T = TypeVar("T")

# Convs of one script over one graph have a few sets of weights among them; drawn ones of the last steps count, too.
_MOST_WEIGHTS = 8


@dataclass(eq=False)
class _Entry(Generic[T]):
    weight: weakref.ref[RowTensor] | None
    version: int | None
    operator: T | None  # None: the weight is gone, and its place is not

    def is_of(self, weight: RowTensor | None) -> bool:
        return (None if self.weight is None else self.weight()) is weight and self.operator is not None

    def forget_dead(self) -> None:
        if self.weight is not None and self.weight() is None:
            self.operator = None


class OperatorCache(Generic[T]):
    """What was built from weights, by a key and these weights.

    Building may be collective, so the decision must fall alike on every rank: by the identity of the tensor object and
    its version, never by addresses, which are all zero on a rank without edges.

    Args:
        num_entries: of the operators, roughly.
    """

    def __init__(self, num_entries: int) -> None:
        self._num_entries = num_entries
        self._kept: dict[Hashable, list[_Entry[T]]] = {}

    @lasting
    def get(self, key: Hashable, weight: RowTensor | None, build: Callable[[], T]) -> T:
        """The operator for ``key`` and ``weight``, built where there is none, or where the weights have changed.

        Args:
            key: what else it depends on.
            weight: constant weights, or ``None``. Where torch does not count their changes, nothing is kept.
            build: makes it.
        """
        version = None if weight is None else version_of(weight)
        # The latest used ones. Those of weights that are gone keep their places: when Python finds out that they are
        # gone differs by rank, and which places are given up must not.
        places = self._kept.setdefault(key, [])
        for kept in places:
            kept.forget_dead()
        for kept in places:
            if kept.is_of(weight) and kept.version == version and (weight is None or version is not None):
                places.append(places.pop(places.index(kept)))
                return kept.operator  # type: ignore[return-value]
        operator = build()
        trim_after(self._num_entries, each_step=True)  # weights may be drawn in each step
        if weight is None or version is not None:
            new = _Entry(None if weight is None else weakref.ref(weight), version, operator)
            self._kept[key] = [*(kept for kept in places if not kept.is_of(weight)), new][-_MOST_WEIGHTS:]
        return operator
