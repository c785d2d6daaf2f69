"""The collective calls of a group, in order: what every rank must do alike, and where this rank stands.

Each call has a number in its group's sequence, a kind, a dtype, a size and the user's line that leads to it. All of it
is mixed into the call's *tag*, which is the tag of its messages
(:mod:`~pyg_dist.backend.comm.wires.point_to_point`). Messages of different calls therefore never meet: ranks that
diverge wait, and :mod:`~pyg_dist.backend.session.divergence` looks at what is noted here and says why. Wires without
tags: :mod:`~pyg_dist.backend.session.divergence`.
"""

from __future__ import annotations

import linecache
import os
import sys
import tempfile
from collections import deque
from functools import cache
from types import FrameType
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch

from pyg_dist.backend.session.state import current
from pyg_dist.errors import LaunchError

_TAG_BITS = 0x7FFFFFFF
"""gloo's point-to-point messages have tags of 31 bits."""

# More than the calls whose messages are in flight at the same time: ranks are never further apart in one group.
_NUM_RECENT = 16

# Far more than a step's calls in one group.
_MAX_UNTAGGED = 4096

_MAX_CODE = 60
"""Characters of a source line that a message shows."""

_OURS = ("pyg_dist", "torch", "torch_geometric")
_THROUGH = ("contextlib", "functools")
_TEMPORARY = tempfile.gettempdir() + os.sep
_FX = "<eval_with_key>"


class _FileIds(dict[str, int]):
    """0: not the user's. Else a number that is the same on every rank: files may lie in different folders."""


@cache
def _id(word: object) -> int:
    return crc32(str(word).encode())


class Call(NamedTuple):
    """One collective call, as every rank must make it."""

    number: int  # in the sequence of its group, from 1
    kind: str  # what it does: a sum, an exchange ...
    dtype: torch.dtype | None  # of its elements, if it says
    size: int  # elements, or elements of a row where numbers of rows differ between ranks
    file: str  # of the user's line; empty where there is none, as in threads of autograd
    line: int

    @property
    def what(self) -> str:
        """Its kind, and the size and dtype of its tensor, in words."""
        values = "" if self.dtype is None else f" of {self.size} {str(self.dtype).removeprefix('torch.')}"
        return f"{self.kind}{values}"


# A named tuple takes longer to make, and nearly none is ever looked at.
_Plain = tuple[int, str, torch.dtype | None, int, str, int]


class Calls:
    """The sequence of calls of one group. Not collective.

    Attributes:
        ranks: the global numbers of the group's ranks.
        name: of the sequence, equal on all of them; a run may have several groups of the same ranks.
        number: how many there have been.
        recent: the last of them, the fields of :class:`Call`.
        order: a hash of all tags of calls on wires without tags, 0 while there were none.
        untagged: these calls, since the last comparison.
    """

    def __init__(self, ranks: tuple[int, ...], name: str = "", standing: Standing | None = None) -> None:
        self.ranks, self.standing = ranks, standing or current().of(Standing)
        self.name = f"{','.join(map(str, ranks))}{name}"
        self.number = 0
        self.recent: deque[_Plain] = deque(maxlen=_NUM_RECENT)
        self.order = 0
        self.untagged: deque[_Plain] = deque(maxlen=_MAX_UNTAGGED)
        self._id = crc32(self.name.encode())

    def next(self, kind: str, dtype: torch.dtype | None = None, size: int = 0, has_tag: bool = True) -> int:
        """Number and note a call of the user's line that leads here; returns its tag, which messages may not have."""
        self.number = number = self.number + 1
        file, line, file_id = user_line(2)
        self.standing.last = call = number, kind, dtype, size, file, line
        self.recent.append(call)
        ids = _id(kind), _id(dtype)
        tag = hash((self._id, number, ids, size, file_id, line)) & _TAG_BITS  # of integers: the same in all processes
        if not has_tag:
            self.order = hash((self.order, tag))
            self.untagged.append(call)
        return tag


def user_line(depth: int = 1) -> tuple[str, int, int]:
    """The innermost line of the user's from frame ``depth`` on: file, line, number of the file. Else ``("", 0, 0)``."""
    frame: FrameType | None = sys._getframe(depth)
    file_ids = current().of(_FileIds)
    while frame is not None:
        file = frame.f_code.co_filename
        try:
            file_id = file_ids[file]
        except KeyError:
            file_id = _file_id(frame)
            if file != "<string>":  # the code of dataclasses, and of `python -c`
                file_ids[file] = file_id
        if file_id:
            return file, frame.f_lineno, file_id
        frame = frame.f_back
    return "", 0, 0


def users_line() -> str:
    """The user's line that leads here, ``"train.py:41"``; empty where there is none."""
    file, line, _ = user_line(2)
    return f"{os.path.basename(file)}:{line}" if file else ""


def line_in_words(file: str, line: int) -> str:
    """``train.py:41 `print(x.sum())` ``."""
    if not file:
        return "an unknown line"
    source = linecache.getline(file, line).strip()
    cut = source if len(source) <= _MAX_CODE else f"{source[:_MAX_CODE]} ..."
    return f"{os.path.basename(file)}:{line}{f' `{cut}`' if cut else ''}"


def message_tag(tag: int, num_bytes: int) -> int:
    """The tag of a message of so many bytes in the call with ``tag``."""
    return hash((tag, num_bytes)) & _TAG_BITS


def _file_id(frame: FrameType) -> int:
    """Whether a frame is the user's: see :class:`_FileIds`."""
    file = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__", ""))
    root = module.partition(".")[0]
    # PyG writes the propagate() of each conv, and the forward() of each Sequential, into a file of a random name;
    # torch.fx numbers the code that it writes, to_hetero's, too.
    is_by_pyg = file.startswith(_TEMPORARY) and os.path.basename(file).startswith(f"{module}_")
    is_generated = is_by_pyg or file.startswith(_FX)
    is_user = root not in _OURS and root not in _THROUGH and not is_generated
    return crc32(os.path.basename(file).encode()) | 1 if is_user else 0


class Wait(NamedTuple):
    """A wait of this rank: for a call of a sequence, and for some ranks of its group, or all."""

    calls: Calls
    number: int
    peers: tuple[int, ...] | None = None

    @property
    def call(self) -> Call | None:
        """The call, unless many have been made since."""
        return next((Call(*call) for call in self.calls.recent if call[0] == self.number), None)


class Standing:
    """Where this rank stands in a run: the one note that the rest of the package writes and a watch reads."""

    def __init__(self) -> None:
        self.wait: Wait | None = None
        self.last: _Plain | None = None  # call in any group
        self.sequences: dict[str, Calls] = {}  # by name

    def sequence(self, ranks: tuple[int, ...], name: str = "") -> Calls:
        """The calls of a group, of which there is one object."""
        calls = Calls(ranks, name, self)
        return self.sequences.setdefault(calls.name, calls)


def _refuse_in_child() -> None:
    if current().of(Standing).sequences:
        Calls.next = _refused  # type: ignore[assignment,method-assign]


def _refused(calls: Calls, *_: object, **__: object) -> NoReturn:
    raise LaunchError(
        "Expected calls of all ranks in the processes that have joined the run (got one in a process that a rank has "
        "forked, such as a loader's worker): load with num_workers=0, or give workers plain tensors, .full_tensor()"
    )


# A forked process shares its parent's connections, and has none of the threads that serve them.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_in_child)
