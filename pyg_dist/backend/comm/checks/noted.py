"""Noted things, which ranks must have alike: the values of a plain tensor, or a script's settings."""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from pyg_dist.errors import describe_values

# Values of a tensor that are kept, to distinguish rounding from another value.
_SAMPLE = 256

# Bytes from which on an expanded tensor is not written out to be digested.
_EXPANDED = 1 << 20

# What numpy does not have is looked at as what has the same bytes.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16}

_REMEDIES = {
    "tensor": "draw it after 'import pyg_dist' with the same seed on every rank, or make it a parameter or a buffer",
    "parameter": "load it and change it on every rank, none under is_main()",
    "gradient": "scale, clip and clear gradients on every rank, none under is_main()",
    "number": "draw it after 'import pyg_dist' with the same seed on every rank",
    "mask": "loop over a list of names, since a set has another order in each process",
    "loss": "make it of the same terms on every rank, none under is_main() or scaled by the rank",
    "model": "make it alike on every rank, and call train(), eval() and requires_grad_() on all, none under is_main()",
    "optimizer": "make it alike on every rank, and step schedulers on all, none under is_main()",
}

# The square root of the precision of float64, in which scripts compute their numbers.
_ROUNDING = torch.finfo(torch.float64).eps ** 0.5

Sample = tuple[torch.dtype, tuple[int, ...], NDArray[Any]] | dict[str, object]
"""Of a tensor, or of numbers: dtype, shape and some of the values. Else what is set, by name."""


class Note(ABC):
    """A thing that is noted, to be compared between ranks.

    Attributes:
        kind: what it is, a key of the remedies.
        digest: the same number in all processes that have the same.
    """

    __slots__ = ("digest", "kind")

    def __init__(self, kind: str, digest: int) -> None:
        self.kind, self.digest = kind, digest

    @property
    def words(self) -> str:
        """Its kind, with dtype and shape if it has some."""
        return self.kind

    @property
    def today(self) -> Note:
        """As it is now, where that can be seen."""
        return self

    @property
    @abstractmethod
    def sample(self) -> Sample:
        """Values by which ranks find out how far they differ."""

    @abstractmethod
    def difference(self, of_ranks: Mapping[int, Sample], others: str, line: str) -> str:
        """The error's line: what differs, on which ranks, and where."""

    def _difference(self, name: str, values: Mapping[int, object], line: str) -> str:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, value in values.items():
            ranks_by_value.setdefault(str(value), []).append(rank)
        got = f"{name} {describe_values(ranks_by_value)}".lstrip()
        return f"Expected the same {self.kind} on every rank (got {got}) at {line}: {_REMEDIES[self.kind]}"


class Values(Note):
    """A tensor at one version, of which all values are digested, or some.

    Attributes:
        reference: to the tensor; ``None`` where it may have changed since.
        version: torch's count of its changes in place; ``None`` where it does not count.
    """

    __slots__ = ("_dtype", "_is_whole", "_shape", "_values", "reference", "version")

    def __init__(
        self, kind: str, tensor: Tensor, reference: weakref.KeyedRef[int, Tensor] | None = None, is_whole: bool = True
    ) -> None:
        digest, self._values = digest_of(tensor, is_whole)
        super().__init__(kind, digest)
        self.reference, self.version = reference, None if tensor.is_inference() else tensor._version
        self._dtype, self._shape, self._is_whole = tensor.dtype, tuple(tensor.shape), is_whole

    @property
    def today(self) -> Values:
        """One rank may have looked before a change through ``.data``, which no version counts, another one after it."""
        tensor = None if self.reference is None else self.reference()
        if tensor is None or not self._is_whole or self.version is None or self.version != tensor._version:
            return self
        return Values(self.kind, tensor, self.reference)

    @property
    def sample(self) -> Sample:
        return self._dtype, self._shape, self._values

    @property
    def words(self) -> str:
        return f"{self.kind} {str(self._dtype)[6:]} {list(self._shape)}"

    def difference(self, of_ranks: Mapping[int, Sample], others: str, line: str) -> str:
        how = "of a step" if self.kind == "gradient" else "which met distributed rows"
        return (
            f"Expected the same {self.words} on every rank (got another on {others}), {how} at {line}: "
            f"{_REMEDIES[self.kind]}"
        )


class Numbers(Note):
    """Python's numbers, and the dtype in which they were computed."""

    __slots__ = ("_dtype", "_given")

    def __init__(self, kind: str, given: tuple[object, ...], dtype: torch.dtype = torch.float64) -> None:
        super().__init__(kind, hash(tuple([x if x == x else 0 for x in given])))  # each NaN has a hash of its own
        self._given, self._dtype = given, dtype

    @property
    def sample(self) -> Sample:
        return self._dtype, (len(self._given),), np.array(self._given, np.float64)

    def difference(self, of_ranks: Mapping[int, Sample], others: str, line: str) -> str:
        """The first number that differs, with the ranks that have it."""
        values = [sample[2].tolist() for sample in of_ranks.values() if not isinstance(sample, dict)]
        by_place = zip_longest(*values, fillvalue="none")
        first = next(of_all for of_all in by_place if len({*map(repr, of_all)}) > 1)
        return self._difference("", dict(zip(of_ranks, first, strict=True)), line)


class Settings(Note):
    """A script's settings: a model's names and modes, an optimizer's groups; ``read`` makes the values by name."""

    __slots__ = ("_read",)

    def __init__(self, kind: str, digest: int, read: Callable[[], dict[str, object]]) -> None:
        super().__init__(kind, digest)
        self._read = read

    @property
    def sample(self) -> Sample:
        return self._read()

    def difference(self, of_ranks: Mapping[int, Sample], others: str, line: str) -> str:
        """The first value that differs, with the ranks that have it."""
        settings = {rank: sample for rank, sample in of_ranks.items() if isinstance(sample, dict)}
        for name in dict.fromkeys(name for of_rank in settings.values() for name in of_rank):
            by_rank = {rank: of_rank.get(name, "nothing") for rank, of_rank in settings.items()}
            if not _are_close([*by_rank.values()]):
                return self._difference(name, by_rank, line)
        return self._difference("", {rank: list(of_rank) for rank, of_rank in settings.items()}, line)


def digest_of_words(words: object) -> int:
    """A digest of numbers, strings, and tuples of them: ``hash`` of strings differs between processes."""
    return int(xxhash.xxh3_64_intdigest(repr(words).encode())) >> 1


def digest_of(tensor: Tensor, is_whole: bool = True) -> tuple[int, NDArray[Any]]:
    """A digest of shape, dtype and all values, or some; and some of the values."""
    array = _array(tensor)
    if not array.flags.c_contiguous:
        if array.nbytes > _EXPANDED:  # what is expanded counts once
            array = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
        array = np.ascontiguousarray(array)
    sample = array.reshape(-1)[:: 1 + array.size // _SAMPLE].copy()
    digested = array if is_whole else sample
    if tensor.dtype == torch.bfloat16:
        sample = (sample.astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return hash((xxhash.xxh3_64_intdigest(digested.data), tensor.shape, array.dtype.num)), sample


def _array(tensor: Tensor) -> NDArray[Any]:
    """The values, in place where they can be. Checkpointing that counts operators must not see any but ``detach``."""
    try:
        return tensor.detach().numpy()
    except (RuntimeError, TypeError):  # not numpy's dtype, or bits of negation that numpy does not have
        with torch._C._DisableTorchDispatch():
            plain = tensor.detach().resolve_conj().resolve_neg()
            as_integers = plain.is_floating_point() and plain.element_size() in _AS_INTEGERS
            return (plain.view(_AS_INTEGERS[plain.element_size()]) if as_integers else plain).numpy()


def differ_by_rounding(samples: Sequence[Sample]) -> bool:
    """Whether values differ by less than the square root of the dtype's precision, relative to the largest."""
    settings = [sample for sample in samples if isinstance(sample, dict)]
    tensors = [sample for sample in samples if not isinstance(sample, dict)]
    if settings:
        names = {name for sample in settings for name in sample}
        return not tensors and all(_are_close([sample.get(name) for sample in settings]) for name in names)
    dtype, shape, first = tensors[0]
    is_alike = all((d, s, v.shape) == (dtype, shape, first.shape) for d, s, v in tensors)
    if not is_alike or first.dtype.kind not in "fc":
        return False
    if all(np.array_equal(first, v, equal_nan=True) for _, _, v in tensors):
        return len(first) == np.prod(shape)  # -0.0 and 0.0; else the difference is outside of the sample
    tolerance = torch.finfo(dtype).eps ** 0.5
    scale = np.abs(first[np.isfinite(first)]).max(initial=0)
    return all(np.allclose(v, first, rtol=0, atol=tolerance * scale, equal_nan=True) for _, _, v in tensors)


def _are_close(values: Sequence[object]) -> bool:
    """Whether they are the same, or floating-point numbers that differ by rounding."""
    first = values[0]
    return len({repr(value) for value in values}) == 1 or all(
        isinstance(v, float) and isinstance(first, float) and math.isclose(v, first, rel_tol=_ROUNDING) for v in values
    )
