"""Plain tensors that meet distributed rows: every rank must have the same values, and sums find where one has not.

Each plain tensor that meets rows is noted with a digest of its values (XXH3 of all bytes), which is computed once for
an object at one version. The next small sum carries the digest of all that its rank has noted since the last one, in
the same messages (:meth:`~pyg_dist.backend.comm.tagged.TaggedMessages.all_reduce_with`): while ranks agree, nothing
more is sent. Where they do not, the ranks of the sum exchange what they have noted, and :func:`compare` names the first
tensor that differs. So no sum, loss or metric is returned that another value went into on another rank.

Parameters change in each step. They are noted each time where no gradients are recorded, and in training about every
eighth time. Of each line of the script only what all ranks have noted there is compared: what needs no other rank, one
may do alone.
"""

from __future__ import annotations

import logging
import pickle
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from pyg_dist.backend.comm.calls import Calls, line_in_words, user_line
from pyg_dist.errors import AgreementError, describe_ranks

logger = logging.getLogger("pyg_dist")

# Far more than meet rows between two sums; the oldest go.
_MAX_MEETINGS = 1024

# Values of a tensor that are kept, to distinguish rounding from another value.
_SAMPLE = 256

# Bytes from which on an expanded tensor is not written out to be digested.
_EXPANDED = 1 << 20

# Parameters that learn are noted before one in so many sums: an epoch of a small graph would be 1 % longer.
_PARAMETERS_EVERY = 8

# Sums that compare nothing after a warning of rounding, which they would only find again.
_REST = 64

# What numpy does not have is looked at as what has the same bytes.
_AS_INTEGERS = {1: torch.uint8, 2: torch.int16}


class Ranks(Protocol):
    """What is needed of a :class:`~pyg_dist.backend.comm.group.Group`."""

    rank: int
    calls: Calls

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's bytes, by rank (collective)."""


class _Known(NamedTuple):
    """A tensor: a reference to it, what it is, and whether it is a leaf that learns."""

    reference: weakref.KeyedRef[int, Tensor]
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_parameter: bool


class _Values(NamedTuple):
    """A tensor at one version.

    Attributes:
        tensor: which one.
        version: torch's count of its changes in place; ``None`` where it does not count.
        digest: of shape, dtype and all values.
        sample: some of the values.
    """

    tensor: _Known
    version: int | None
    digest: int
    sample: NDArray[Any]


class _Noted:
    """What this rank has noted since the last sum of all ranks."""

    def __init__(self) -> None:
        self._values: dict[int, _Values] = {}  # by id: tensors compare by value
        self.restart()

    def restart(self) -> None:
        """See :func:`restart`."""
        self.meetings: deque[tuple[_Values, str, int]] = deque(maxlen=_MAX_MEETINGS)  # with the user's file and line
        self.num_rests = 0
        self._num_sums = 0
        self._notes_parameters = True

    def add(self, tensor: Tensor) -> None:
        """See :func:`meet`."""
        if not self._notes_parameters and tensor.requires_grad and tensor.is_leaf and torch.is_grad_enabled():
            return
        version = None if tensor.is_inference() else tensor._version
        values = self._values.get(id(tensor))
        if values is None or values.tensor.reference() is not tensor:
            reference = weakref.KeyedRef(tensor, self._forget, id(tensor))
            known = _Known(reference, tensor.dtype, tuple(tensor.shape), tensor.is_leaf and tensor.requires_grad)
            values = self._values[id(tensor)] = _Values(known, version, *_digest(tensor))
        elif values.tensor.is_parameter or version is None or version != values.version:  # fused optimizers count none
            values = self._values[id(tensor)] = _Values(values.tensor, version, *_digest(tensor))
        file, line, _ = user_line(3)
        self.meetings.append((values, file, line))

    def _forget(self, reference: weakref.KeyedRef[int, Tensor]) -> None:
        values = self._values.get(reference.key)
        if values is not None and values.tensor.reference is reference:
            del self._values[reference.key]

    def agree(self) -> None:
        """See :func:`agree`."""
        self.meetings.clear()
        self._num_sums += 1
        # A hash, since steps may have eight sums, and each must have its turn; of integers alike in all processes.
        self._notes_parameters = hash((self._num_sums,)) % _PARAMETERS_EVERY == 0

    def digest(self) -> int:
        """See :func:`digest`."""
        if self.num_rests:
            self.num_rests -= 1
            self.meetings.clear()
        return hash(tuple([values.digest for values, _, _ in self.meetings]))

    def take(self) -> dict[str, list[tuple[int, _Values]]]:
        """All that was noted, by line, each with its place in the order of time.

        With today's digests, where the tensors are there: one rank may have looked before a change through ``.data``,
        which no version counts, and another one after it.
        """
        by_line: dict[str, list[tuple[int, _Values]]] = {}
        for place, (values, file, line) in enumerate(self.meetings):
            tensor = values.tensor.reference()
            if tensor is not None and values.version is not None and values.version == tensor._version:
                values = _Values(values.tensor, values.version, *_digest(tensor))
            by_line.setdefault(line_in_words(file, line), []).append((place, values))
        self.meetings.clear()
        return by_line


_noted = _Noted()


def meet(tensor: Tensor) -> None:
    """Note a plain tensor that meets rows of several ranks. Not collective.

    Exact for dense tensors in main memory. Those elsewhere, of classes with operators of their own, or under a tracer
    or a transform of ``torch.func`` are not noted.
    """
    is_dense = tensor.is_cpu and tensor.layout is torch.strided
    is_own = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    is_traced = torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active()
    if is_dense and is_own and not is_traced:
        _noted.add(tensor)


def digest() -> int:
    """Of all that this rank has noted since the last sum of all ranks, -1 never. Not collective."""
    return _noted.digest()


def agree() -> None:
    """A sum of all ranks has shown that they have noted the same so far. Not collective."""
    _noted.agree()


def restart() -> None:
    """Begin anew, as all ranks do with a session. Not collective."""
    _noted.restart()


def compare(group: Ranks) -> None:
    """Find what differs in what the ranks of a group have noted (collective, where their digests differ).

    Values that differ by rounding alone, on processors of different kinds or with other numbers of threads, are warned
    of; then some sums compare nothing.

    Raises:
        AgreementError: On every rank, naming the first tensor whose values differ.
    """
    mine = _noted.take()
    lists = _gathered(group, {line: [(place, values.digest) for place, values in met] for line, met in mine.items()})
    differing = []
    for line, first in lists[0].items():
        met_by_all = [of_rank.get(line, ()) for of_rank in lists]
        if all(len(met) == len(first) for met in met_by_all):
            for k, ((place, _), *_) in enumerate(zip(*met_by_all, strict=True)):
                digests = [met[k][1] for met in met_by_all]
                if len(set(digests)) > 1:
                    differing.append((place, line, mine[line][k][1], others(digests, group)))
    if not differing:
        return
    differing.sort(key=lambda found: found[0])
    samples = _gathered(group, [(v.tensor.dtype, v.tensor.shape, v.sample) for _, _, v, _ in differing])
    for of_ranks, (_, line, values, differ) in zip(zip(*samples, strict=True), differing, strict=True):
        if not _differ_by_rounding(of_ranks):
            raise AgreementError(_message(values.tensor, line, differ))
    _noted.num_rests = _REST
    if group.rank == 0:
        _, line, values, differ = differing[0]
        logger.warning(
            "the %s that met distributed rows at %s differs by rounding on %s: the ranks compute it with other numbers "
            "of threads, or on other processors",
            _words(values.tensor), line, differ,
        )  # fmt: skip


def _gathered(group: Ranks, value: Any) -> list[Any]:
    return [pickle.loads(content) for content in group.gather_bytes(pickle.dumps(value))]


def _digest(tensor: Tensor) -> tuple[int, NDArray[Any]]:
    """Of shape, dtype and values; and some of the values."""
    array = _array(tensor)
    if not array.flags.c_contiguous:
        if array.nbytes > _EXPANDED:  # what is expanded counts once
            array = array[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in array.strides)]
        array = np.ascontiguousarray(array)
    sample = array.reshape(-1)[:: 1 + array.size // _SAMPLE].copy()
    if tensor.dtype == torch.bfloat16:
        sample = (sample.astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return hash((xxhash.xxh3_64_intdigest(array.data), tensor.shape, array.dtype.num)), sample


def _array(tensor: Tensor) -> NDArray[Any]:
    """The values, in place where they can be. Checkpointing that counts operators must not see any but ``detach``."""
    try:
        return tensor.detach().numpy()
    except (RuntimeError, TypeError):  # not numpy's dtype, or bits of negation that numpy does not have
        with torch._C._DisableTorchDispatch():
            plain = tensor.detach().resolve_conj().resolve_neg()
            as_integers = plain.is_floating_point() and plain.element_size() in _AS_INTEGERS
            return (plain.view(_AS_INTEGERS[plain.element_size()]) if as_integers else plain).numpy()


def _differ_by_rounding(samples: Sequence[tuple[torch.dtype, tuple[int, ...], NDArray[Any]]]) -> bool:
    """Whether values differ by less than the square root of the dtype's precision, relative to the largest."""
    dtype, shape, first = samples[0]
    is_alike = all((d, s, v.shape) == (dtype, shape, first.shape) for d, s, v in samples)
    if not is_alike or first.dtype.kind not in "fc":
        return False
    if all(np.array_equal(first, sample, equal_nan=True) for _, _, sample in samples):
        return len(first) == np.prod(shape)  # -0.0 and 0.0; else the difference is outside of the sample
    tolerance = torch.finfo(dtype).eps ** 0.5
    scale = np.abs(first[np.isfinite(first)]).max(initial=0)
    return all(np.allclose(sample, first, rtol=0, atol=tolerance * scale, equal_nan=True) for _, _, sample in samples)


def others(digests: list[int], group: Ranks) -> str:
    """The ranks that have another value than most."""
    ((usual, _),) = Counter(digests).most_common(1)  # the first of equals
    return describe_ranks([group.calls.ranks[place] for place, other in enumerate(digests) if other != usual])


def _words(tensor: _Known) -> str:
    return f"{'parameter' if tensor.is_parameter else 'tensor'} {str(tensor.dtype)[6:]} {list(tensor.shape)}"


def _message(tensor: _Known, line: str, others: str) -> str:
    remedy = (
        "load it and change it on every rank, none under is_main()"
        if tensor.is_parameter
        else "draw it after 'import pyg_dist' with the same seed on every rank, or make it a parameter or a buffer"
    )
    return (
        f"Expected the same {_words(tensor)} on every rank (got another on {others}), which met distributed rows at "
        f"{line}: {remedy}"
    )
