"""What ranks must have alike, as it is noted and compared: a plain tensor's values, or what a script has set.

Each has a digest, which is the same number in all processes, a *sample*, which says how far the ranks are apart where
digests differ, and the words of the error.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

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
    "loss": "make it of the same terms on every rank, none under is_main() or scaled by the rank",
    "model": "make it alike on every rank, and call train(), eval() and requires_grad_() on all, none under is_main()",
    "optimizer": "make it alike on every rank, and step schedulers on all, none under is_main()",
}

# The square root of the precision of float64, in which scripts compute their numbers.
_ROUNDING = torch.finfo(torch.float64).eps ** 0.5

Sample = tuple[torch.dtype, tuple[int, ...], NDArray[Any]] | dict[str, Any]
"""Of a tensor, or of numbers: dtype, shape and some of the values. Else what is set, by name."""


class Values(NamedTuple):
    """A tensor at one version.

    Attributes:
        kind: what it is, a key of the remedies.
        reference: to the tensor; ``None`` where it may have changed since.
        version: torch's count of its changes in place; ``None`` where it does not count.
        dtype: of the tensor.
        shape: of the tensor.
        digest: of shape, dtype and all values, or some of them.
        values: some of the values.
        is_whole: whether the digest is of all.
    """

    kind: str
    reference: weakref.KeyedRef[int, Tensor] | None
    version: int | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: int
    values: NDArray[Any]
    is_whole: bool

    @staticmethod
    def of(
        kind: str, tensor: Tensor, reference: weakref.KeyedRef[int, Tensor] | None = None, is_whole: bool = True
    ) -> Values:
        """Those that a tensor has now."""
        version = None if tensor.is_inference() else tensor._version
        digest, values = digest_of(tensor, is_whole)
        return Values(kind, reference, version, tensor.dtype, tuple(tensor.shape), digest, values, is_whole)

    @property
    def today(self) -> Values:
        """With the digest of now, where the tensor is there.

        One rank may have looked before a change through ``.data``, which no version counts, and another one after it.
        """
        tensor = None if self.reference is None else self.reference()
        if tensor is None or not self.is_whole or self.version is None or self.version != tensor._version:
            return self
        return Values.of(self.kind, tensor, self.reference)

    @property
    def sample(self) -> Sample:
        """See the module."""
        return self.dtype, self.shape, self.values

    @property
    def words(self) -> str:
        """What it is."""
        return f"{self.kind} {str(self.dtype)[6:]} {list(self.shape)}"

    def difference(self, of_ranks: Mapping[int, Sample], others: str, line: str) -> str:
        """The error's line: what differs, on which ranks, and where."""
        how = "of a step" if self.kind == "gradient" else "which met distributed rows"
        return (
            f"Expected the same {self.words} on every rank (got another on {others}), {how} at {line}: "
            f"{_REMEDIES[self.kind]}"
        )


class Numbers(NamedTuple):
    """Python's numbers.

    Attributes:
        kind: what they are, a key of the remedies.
        given: the numbers.
        dtype: in which they were computed.
    """

    kind: str
    given: tuple[Any, ...]
    dtype: torch.dtype = torch.float64

    @property
    def digest(self) -> int:
        """Of all; each NaN has a hash of its own."""
        return hash(tuple([number if number == number else 0 for number in self.given]))

    @property
    def today(self) -> Numbers:
        """Themselves."""
        return self

    @property
    def sample(self) -> Sample:
        """See the module."""
        return self.dtype, (len(self.given),), np.array(self.given, np.float64)

    @property
    def words(self) -> str:
        """What they are."""
        return self.kind

    def difference(self, of_ranks: Mapping[int, Sample], others: str, line: str) -> str:
        """The error's line: the first number that differs, with the ranks that have it, and where."""
        values = [sample[2].tolist() for sample in of_ranks.values() if not isinstance(sample, dict)]
        by_place = zip_longest(*values, fillvalue="none")
        first = next(of_all for of_all in by_place if len({*map(repr, of_all)}) > 1)
        return _difference(self.kind, "", dict(zip(of_ranks, first, strict=True)), line)


class Settings(NamedTuple):
    """What a script has set: a model's names and modes, an optimizer's groups.

    Attributes:
        kind: what it is, a key of the remedies.
        digest: the same number in all processes.
        read: makes the values by their names.
    """

    kind: str
    digest: int
    read: Callable[[], dict[str, Any]]

    @property
    def today(self) -> Settings:
        """Itself."""
        return self

    @property
    def sample(self) -> Sample:
        """See the module."""
        return self.read()

    @property
    def words(self) -> str:
        """What it is."""
        return self.kind

    def difference(self, of_ranks: Mapping[int, Sample], others: str, line: str) -> str:
        """The error's line: the first value that differs, with the ranks that have it, and where."""
        settings = {rank: sample for rank, sample in of_ranks.items() if isinstance(sample, dict)}
        names = dict.fromkeys(name for of_rank in settings.values() for name in of_rank)
        values = ({rank: of_rank.get(name, "nothing") for rank, of_rank in settings.items()} for name in names)
        for name, by_rank in zip(names, values, strict=True):
            if not _are_close([*by_rank.values()]):
                return _difference(self.kind, name, by_rank, line)
        return _difference(self.kind, "", {rank: list(of_rank) for rank, of_rank in settings.items()}, line)


def _difference(kind: str, name: str, values: Mapping[int, Any], line: str) -> str:
    ranks_by_value: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_by_value.setdefault(str(value), []).append(rank)
    got = f"{name} {describe_values(ranks_by_value)}".lstrip()
    return f"Expected the same {kind} on every rank (got {got}) at {line}: {_REMEDIES[kind]}"


def digest_of_words(words: object) -> int:
    """Of numbers, strings, and tuples of them: ``hash`` of strings differs between processes."""
    return int(xxhash.xxh3_64_intdigest(repr(words).encode())) >> 1


def digest_of(tensor: Tensor, is_whole: bool = True) -> tuple[int, NDArray[Any]]:
    """Of shape, dtype and values, or of some of them; and some of the values."""
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


def _are_close(values: Sequence[Any]) -> bool:
    """Whether they are the same, or floating-point numbers that differ by rounding."""
    first = values[0]
    return len({repr(value) for value in values}) == 1 or all(
        isinstance(v, float) and isinstance(first, float) and math.isclose(v, first, rel_tol=_ROUNDING) for v in values
    )


Thing = Values | Numbers | Settings
"""What is noted."""
