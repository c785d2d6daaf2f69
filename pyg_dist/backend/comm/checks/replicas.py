"""Replicas compared: plain tensors and numbers in functions of rows, losses, and a script's settings.

Each plain tensor that is an operand beside rows is noted with a digest of its values (XXH3 of all bytes), computed once
for an object at one version. So are Python's numbers, and from above (:mod:`pyg_dist.graph.training_state`) a model's
names and modes, an optimizer's groups, the gradients of a step and the loss of a backward pass. The next small sum
carries the digest of all that its rank has noted since the last one, in the same messages: while ranks agree, nothing
more is sent. Where they do not, the ranks of the sum exchange what they have noted, and :func:`compare` names the first
that differs. So no sum, loss or metric is returned that another value went into on another rank.

Parameters change in each step. They are noted each time where no gradients are recorded, and in training about every
eighth time. Of each line of the script only what all ranks have noted there is compared: what needs no other rank, one
may do alone.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, deque
from typing import Any, Protocol

import torch
from torch import Tensor

from pyg_dist.backend import plain_json
from pyg_dist.backend.comm.checks.calls import Calls, line_in_words, user_line
from pyg_dist.backend.comm.checks.noted import Note, Numbers, Values, differ_by_rounding
from pyg_dist.backend.session.state import current
from pyg_dist.errors import AgreementError, describe_ranks

logger = logging.getLogger("pyg_dist")

# Far more than a script makes between two sums; the oldest go.
_MAX_NOTES = 1024

# Parameters that learn are noted before one in so many sums: an epoch of a small graph would be 1 % longer.
_PARAMETERS_EVERY = 8

# Sums that compare nothing after a warning of rounding, which they would only find again.
_REST = 64


class Ranks(Protocol):
    """The part of a :class:`~pyg_dist.backend.comm.group.Group` that is used here."""

    rank: int
    calls: Calls

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Every rank's bytes, by rank (collective)."""


class Noted:
    """This rank's notes since the last sum of all ranks. Not collective.

    Attributes:
        is_on: whether there is another rank to compare it with.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._values: dict[int, Values] = {}  # by id: tensors compare by value
        self._notes: deque[tuple[Note, str, int]] = deque(maxlen=_MAX_NOTES)  # with file and line
        self._numbers: set[tuple[tuple[object, ...], str, int]] = set()
        self._digest = 0
        self.num_rests = 0
        self._num_sums = 0
        self._notes_parameters = True

    def tensor(self, tensor: Tensor) -> None:
        """Note a plain tensor that is an operand beside rows.

        Exact for dense tensors in main memory. Those elsewhere, of classes with operators of their own, or under a
        tracer or a transform of ``torch.func`` are not noted.
        """
        if not _is_readable(tensor):
            return
        is_parameter = tensor.requires_grad and tensor.is_leaf
        if is_parameter and not self._notes_parameters and torch.is_grad_enabled():
            return
        version = None if tensor.is_inference() else tensor._version
        known = self._values.get(id(tensor))
        is_known = known is not None and known.reference is not None and known.reference() is tensor
        if known is None or not is_known:
            reference = weakref.KeyedRef(tensor, self._forget, id(tensor))
            known = Values("parameter" if is_parameter else "tensor", tensor, reference)
        elif known.kind == "parameter" or version is None or version != known.version:  # fused optimizers count none
            known = Values(known.kind, tensor, known.reference)
        self._values[id(tensor)] = known
        file, line, _ = user_line(3)
        self.add(known, file, line)

    def _forget(self, reference: weakref.KeyedRef[int, Tensor]) -> None:
        values = self._values.get(reference.key)
        if values is not None and values.reference is reference:
            del self._values[reference.key]

    def numbers(self, given: tuple[object, ...]) -> None:
        """Note the numbers that a function computes rows with: once for a line."""
        file, line, _ = user_line(2)
        if len(self._numbers) == _MAX_NOTES:
            self._numbers.clear()
        if (given, file, line) not in self._numbers:
            self._numbers.add((given, file, line))
            self.add(Numbers("number", given), file, line)

    def gradient(self, gradient: Tensor) -> None:
        """Note some of the values of a parameter's gradient."""
        if _is_readable(gradient):
            self.note(Values("gradient", gradient, is_whole=False))

    def loss(self, loss: Tensor) -> None:
        """Note a loss of all ranks' rows."""
        if loss.is_cpu and loss.is_floating_point():
            self.note(Numbers("loss", (loss.item(),), loss.dtype))

    def note(self, noted: Note) -> None:
        """Note it at the script's line."""
        file, line, _ = user_line(2)
        self.add(noted, file, line)

    def add(self, noted: Note, file: str, line: int) -> None:
        """Note it at a line of the script."""
        self._notes.append((noted, file, line))
        self._digest = hash((self._digest, noted.digest))

    def agree(self) -> None:
        """A sum of all ranks has shown that they have noted the same so far."""
        self._clear()
        self._num_sums += 1
        # A hash, since steps may have eight sums, and each must have its turn; of integers alike in all processes.
        self._notes_parameters = hash((self._num_sums,)) % _PARAMETERS_EVERY == 0

    def _clear(self) -> None:
        self._notes.clear()
        self._numbers.clear()
        self._digest = 0

    def digest(self) -> int:
        """A digest of all that this rank has noted since the last sum of all ranks; it is never -1."""
        if self.num_rests:
            self.num_rests -= 1
            self._clear()
        return self._digest

    def take(self) -> dict[tuple[str, str], list[tuple[int, Note]]]:
        """All that was noted, by kind and line, each with its place in the order of time."""
        by_line: dict[tuple[str, str], list[tuple[int, Note]]] = {}
        for place, (noted, file, line) in enumerate(self._notes):
            by_line.setdefault((noted.kind, line_in_words(file, line)), []).append((place, noted.today))
        self._clear()
        return by_line


def noted() -> Noted:
    """This rank's."""
    return current().of(Noted)


def _is_readable(tensor: Tensor) -> bool:
    is_dense = tensor.is_cpu and tensor.layout is torch.strided
    is_own = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    is_traced = torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active()
    return is_dense and is_own and not is_traced


def compare(group: Ranks) -> None:
    """Find what differs in what the ranks of a group have noted (collective, where their digests differ).

    Values that differ by rounding alone, on processors of different kinds or with other numbers of threads, are warned
    of; then some sums compare nothing.

    Raises:
        AgreementError: On every rank, naming the first that differs.
    """
    mine = noted().take()
    lists = _gathered(group, {line: [(place, thing.digest) for place, thing in notes] for line, notes in mine.items()})
    differing = []
    for key, first in lists[0].items():
        of_all = [of_rank.get(key, ()) for of_rank in lists]
        if all(len(notes) == len(first) for notes in of_all):
            for k, ((place, _), *_) in enumerate(zip(*of_all, strict=True)):
                digests = [notes[k][1] for notes in of_all]
                if len(set(digests)) > 1:
                    differing.append((place, key[1], mine[key][k][1], others(digests, group)))
    if not differing:
        return
    differing.sort(key=lambda found: found[0])
    samples = _gathered(group, [thing.sample for _, _, thing, _ in differing])
    for of_ranks, (_, line, thing, differ) in zip(zip(*samples, strict=True), differing, strict=True):
        if not differ_by_rounding(of_ranks):
            raise AgreementError(thing.difference(dict(zip(group.calls.ranks, of_ranks, strict=True)), differ, line))
    noted().num_rests = _REST
    if group.rank == 0:
        _, line, thing, differ = differing[0]
        logger.warning(
            "the %s that met distributed rows at %s differs by rounding on %s: the ranks compute it with other numbers "
            "of threads, or on other processors",
            thing.words, line, differ,
        )  # fmt: skip


def _gathered(group: Ranks, value: object) -> list[Any]:
    return [plain_json.from_bytes(content) for content in group.gather_bytes(plain_json.to_bytes(value))]


def others(digests: list[int], group: Ranks) -> str:
    """The ranks that have another value than most."""
    ((usual, _),) = Counter(digests).most_common(1)  # the first of equals
    return describe_ranks([group.calls.ranks[place] for place, other in enumerate(digests) if other != usual])
