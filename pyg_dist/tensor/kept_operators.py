"""Operators made from constant edge weights, kept while these live and do not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pyg_dist.tensor.row_tensor import RowTensor, version_of
from pyg_dist.tensor.rows import lasting

T = TypeVar("T")

# Convs of one script over one graph have a few sets of weights among them.
_MOST_WEIGHTS = 4


@dataclass(frozen=True)
class _Kept(Generic[T]):
    weight: weakref.ref[RowTensor] | None
    version: int | None
    operator: T

    def is_of(self, weight: RowTensor | None) -> bool:
        return (None if self.weight is None else self.weight()) is weight

    @property
    def is_dead(self) -> bool:
        return self.weight is not None and self.weight() is None


class KeptOperators(Generic[T]):
    """What was built from weights, by a key and these weights.

    Building may be collective, so the decision must fall alike on every rank: by the identity of the tensor object and
    its version, never by addresses, which are all zero on a rank without edges.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, list[_Kept[T]]] = {}

    @lasting
    def get(self, key: Hashable, weight: RowTensor | None, build: Callable[[], T]) -> T:
        """The operator for ``key`` and ``weight``, built where there is none, or where the weights have changed.

        Args:
            key: what else it depends on.
            weight: constant weights, or ``None``. Where torch does not count their changes, nothing is kept.
            build: makes it.
        """
        version = None if weight is None else version_of(weight)
        alive = [kept for kept in self._kept.get(key, ()) if not kept.is_dead]
        for kept in alive:
            if kept.is_of(weight) and kept.version == version and (weight is None or version is not None):
                return kept.operator
        operator = build()
        if weight is None or version is not None:
            new = _Kept(None if weight is None else weakref.ref(weight), version, operator)
            others = [kept for kept in alive if not kept.is_of(weight)]
            self._kept[key] = [*others, new][-_MOST_WEIGHTS:]
        return operator
