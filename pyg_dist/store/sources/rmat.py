"""R-MAT graphs of any size, generated while they are read, with planted labels: for experiments and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pyg_dist.errors import OptionError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.source import Attribute, EdgeChunk, FileSource, ReadRows

PREFIX = "rmat:"
_DEFAULTS = {"scale": 20, "edges": 16_000_000, "seed": 0, "features": 64, "classes": 16}

# Of the quadrants (0, 0), (0, 1), (1, 0), as the Graph500 benchmark sets them (https://graph500.org, kernel 0).
_A, _B, _C = 0.57, 0.19, 0.19
_STEPS = 1 << 16
"""Probabilities are multiples of one over this: 16 random bits decide one bit of both ends."""
_CHUNK, _ROWS = 1 << 20, 1 << 16
"""Edges and rows by generator: the graph does not depend on how many are read at a time."""


class RMat(FileSource):
    """``rmat:scale=22,edges=100000000,seed=0``: 2^scale nodes; Chakrabarti, Zhan and Faloutsos, 2004, without noise.

    ``x`` has ``features`` columns: the centre of the node's class and noise. The class is given by the leading bits of
    the id, which R-MAT's edges tend to share. A node in ten trains, one in ten validates, the others test.
    """

    num_edges: int

    def open(self) -> None:
        options = dict(_DEFAULTS)
        for part in filter(None, self.name.removeprefix(PREFIX).split(",")):
            name, _, value = part.partition("=")
            if name not in options or not value.isdecimal():
                raise OptionError(
                    f"Expected {PREFIX}{','.join(f'{k}={v}' for k, v in _DEFAULTS.items())}, each of them or not (got "
                    f"{part!r})"
                )
            options[name] = int(value)
        self.scale, self.num_edges, self.seed, self.features, self.classes = (options[name] for name in _DEFAULTS)
        if not 1 <= self.scale <= 40 or self.features < 1 or not 1 <= self.classes <= 2**self.scale:
            raise OptionError(
                f"Expected a scale from 1 to 40, a feature or more, at most a class per node (got {self.name})"
            )
        self.files, self.num_nodes = (), 2**self.scale
        self.nodes = (
            Attribute("x", "F32", (self.features,), self._x),
            Attribute("y", "I64", (), lambda num_bytes: (self._labels(*ids) for ids in self._ids())),
            *(
                Attribute(f"{name}_mask", "BOOL", (), self._mask(first, last))
                for name, first, last in (("train", 0, 1), ("val", 1, 2), ("test", 2, 10))
            ),
        )

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        """The edges in their order; ``size`` does not matter."""
        first, second, third = (round(p * _STEPS) for p in (_A, _A + _B, _A + _B + _C))
        for number, low in enumerate(range(0, self.num_edges, _CHUNK)):
            count = min(_CHUNK, self.num_edges - low)
            rng = np.random.Generator(np.random.SFC64([self.seed, 0, number]))
            source, target = np.zeros(_CHUNK, np.int64), np.zeros(_CHUNK, np.int64)
            for _ in range(self.scale):
                drawn = rng.integers(0, _STEPS, _CHUNK, np.uint16)
                is_low = drawn >= second
                source += source + is_low
                target += target + (((drawn >= first) & ~is_low) | (drawn >= third))
            yield EdgeChunk(source[:count], target[:count], {}, lambda place: self.name)

    def _ids(self) -> Iterator[tuple[int, int]]:
        for low in range(0, 2**self.scale, _ROWS):
            yield low, min(low + _ROWS, 2**self.scale)

    def _labels(self, low: int, high: int) -> Array:
        return np.arange(low, high) * self.classes >> self.scale

    def _x(self, num_bytes: int) -> Iterator[Array]:
        centres = np.random.default_rng([self.seed, 1]).standard_normal((self.classes, self.features), np.float32)
        for number, (low, high) in enumerate(self._ids()):
            noise = np.random.default_rng([self.seed, 2, number]).standard_normal(
                (high - low, self.features), np.float32
            )
            yield centres[self._labels(low, high)] + noise

    def _mask(self, first: int, last: int) -> ReadRows:
        """Nodes that draw a number from ``first`` to ``last - 1`` out of ten."""

        def rows(num_bytes: int) -> Iterator[Array]:
            for number, (low, high) in enumerate(self._ids()):
                drawn = np.random.default_rng([self.seed, 3, number]).integers(0, 10, high - low)
                yield (drawn >= first) & (drawn < last)

        return rows
