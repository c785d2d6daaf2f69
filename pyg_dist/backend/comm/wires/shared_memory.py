"""Large messages within a machine: they lie in memory of the sender that the receiver reads, too.

The wire carries only the place, under the tag of the call: order, comparison and errors are the wire's. A rank's memory
is a file without a name (Linux), which ends with the process. Readers say by a pipe which places they have read, which
are then used again; the pipe also orders reads and writes. A message that finds no place goes by the wire.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import weakref
from array import array
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import memmove

import torch
from torch import Tensor

from pyg_dist.backend.session.settings import SHARED_MIB

NO_PLACE = -1
"""Where a message lies that comes by the wire."""

# By TCP a smaller one takes as long as a word that says where it lies (benchmarks/shared_memory.py).
_LEAST_BYTES = 1 << 19
_MESSAGES_OF_LATE = 1 << 8
_WORDS = 1 << 9  # that a pipe takes whole: at most a page
_CLOSED = -1  # no file: who still waits for a message gets an error, and no other file of that number is written to
_SIGN = 16  # bytes at the start of a rank's memory, by which others know that they have opened the right one


class SharedMemory:
    """A session's memory for messages: this rank's own, and its view of the other ranks'.

    Attributes:
        of_rank: the memory of each rank that reads this one's messages, and whose messages this one reads.
        least_bytes: of a message that goes this way, alike on all ranks.
    """

    def __init__(self) -> None:
        self.least_bytes = _LEAST_BYTES
        self.of_rank: dict[int, PeerMemory] = {}
        self._own: OwnMemory | None = None

    def open(self, machine_of: Sequence[int], rank: int, gather: Callable[[bytes], list[bytes]]) -> None:
        """Make this rank's memory and open that of the others of its machine; collective, by ``gather``.

        Two ranks of which one may not open the other's, as in two containers, send all messages by the wire.
        """
        if len(set(machine_of)) == len(machine_of):
            return
        self._own, opened = OwnMemory.made(), dict[int, PeerMemory]()
        for other, address in enumerate(gather(b"" if self._own is None else self._own.address)):
            if self._own is not None and address and other != rank and machine_of[other] == machine_of[rank]:
                with suppress(OSError, ValueError):
                    opened[other] = PeerMemory(address, self._own)
        opens = gather(bytes(other in opened for other in range(len(machine_of))))
        for other, theirs in opened.items():
            if opens[other][rank]:
                self.of_rank[other] = theirs
            else:
                theirs.close()

    def empty(self, num_bytes: int) -> Tensor | None:
        """Bytes to write a message to, which others then read where it is; None: there are none, or it is small."""
        if self._own is None or not self.of_rank:
            return None
        if num_bytes < self.least_bytes:
            self._own.note()
            return None
        return self._own.empty(num_bytes)

    def close(self) -> None:
        """Let go of all memory."""
        for other in self.of_rank.values():
            other.close()
        if self._own is not None:
            self._own.close()
        self.of_rank, self._own, self.least_bytes = {}, None, _LEAST_BYTES


class OwnMemory:
    """A rank's memory for messages. Its pages take memory from their first use on.

    Attributes:
        address: by which another process of the user opens it.
    """

    def __init__(self, num_bytes: int) -> None:
        self._file = os.memfd_create("pyg_dist")
        try:
            os.truncate(self._file, num_bytes)
            self._content = mmap.mmap(self._file, num_bytes)
            self._read, self._readers_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):  # as where the address space is limited
            os.close(self._file)
            raise
        sign = secrets.token_bytes(_SIGN)
        os.pwrite(self._file, sign, 0)
        self.address = array("q", (os.getpid(), self._file, self._readers_end, num_bytes)).tobytes() + sign
        self._first, self._size = torch.frombuffer(self._content, dtype=torch.uint8).data_ptr(), num_bytes
        self._free = [(mmap.PAGESIZE, num_bytes)]  # by their starts, none beside another
        self._used: list[int] = []  # starts of places in use, ascending
        self._ends, self._uses = dict[int, int](), dict[int, int]()  # by start
        self._left: deque[int] = deque()  # of tensors that are gone
        self._num_messages, self._recent_end = 0, 0  # of late: how many, and the highest end
        self._end = 0  # of pages in memory
        self._lock = threading.Lock()

    @staticmethod
    def made() -> OwnMemory | None:
        """Memory of as many bytes as the setting allows; None where the system has none to share."""
        num_bytes = int(min(SHARED_MIB.value(), 1 << 20)) << 20
        if num_bytes and hasattr(os, "memfd_create"):
            with suppress(OSError, ValueError):
                return OwnMemory(num_bytes)
        return None

    def empty(self, num_bytes: int) -> Tensor | None:
        """A tensor of bytes in it, whose place is free again when it is gone and has been read."""
        place = self._take(num_bytes)
        if place == NO_PLACE:
            return None
        view = memoryview(self._content)[place : place + num_bytes]
        weakref.finalize(view, self._left.append, place).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def place(self, address: int, num_bytes: int) -> int:
        """Where another rank reads these bytes, once: where they are, or else a copy; ``NO_PLACE``: nowhere."""
        place = address - self._first
        if 0 <= place < self._size:
            with self._lock:
                self._take_back()
                self._uses[self._start(place)] += 1
            return place
        place = self._take(num_bytes)
        if place != NO_PLACE:
            memmove(self._first + place, address, num_bytes)
        return place

    def address_of(self, place: int) -> int:
        """Where a place is in this process."""
        return self._first + place

    def _start(self, place: int) -> int:
        return self._used[bisect_right(self._used, place) - 1]

    def _take(self, num_bytes: int) -> int:
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._take_back()
            for k, (low, high) in enumerate(self._free):
                if high - low >= size:
                    self._free[k : k + 1] = [(low + size, high)] if high - low > size else []
                    insort(self._used, low)
                    self._ends[low], self._uses[low] = low + size, 1
                    self._recent_end, self._end = max(self._recent_end, low + size), max(self._end, low + size)
                    self._num_messages += 1
                    if self._num_messages >= _MESSAGES_OF_LATE:
                        self._give_back()
                    return low
        return NO_PLACE

    def note(self) -> None:
        """A message goes another way, as it is small: give memory back that is not used any more."""
        self._num_messages += 1
        if self._num_messages >= _MESSAGES_OF_LATE:
            with self._lock:
                self._take_back()
                self._give_back()

    def _give_back(self) -> None:
        """Give back memory that messages have not used of late, as after a set-up: low places are taken first."""
        kept = max([self._recent_end, mmap.PAGESIZE, *self._ends.values()])
        if kept < self._end and hasattr(mmap, "MADV_REMOVE"):
            with suppress(OSError):  # the system does not know it
                self._content.madvise(mmap.MADV_REMOVE, kept, self._end - kept)
            self._end = kept
        self._num_messages, self._recent_end = 0, 0

    def _take_back(self) -> None:
        """The places that others have read, and those of tensors that are gone."""
        read = array("q")
        with suppress(BlockingIOError):
            while True:
                read.frombytes(os.read(self._read, mmap.PAGESIZE))
        while self._left:
            read.append(self._left.popleft())
        for place in read:
            start = self._start(place)
            self._uses[start] -= 1
            if not self._uses[start]:
                self._free_place(start)

    def _free_place(self, start: int) -> None:
        end = self._ends.pop(start)
        del self._uses[start], self._used[bisect_right(self._used, start) - 1]
        k = bisect_right(self._free, (start, end))
        if k < len(self._free) and self._free[k][0] == end:
            end = self._free.pop(k)[1]
        if k and self._free[k - 1][1] == start:
            k, start = k - 1, self._free.pop(k - 1)[0]
        self._free.insert(k, (start, end))

    def close(self) -> None:
        """Let go of it; others keep what they have opened."""
        for file in (self._file, self._read, self._readers_end):
            os.close(file)
        self._read = _CLOSED


class PeerMemory:
    """Another rank's memory, as this one reads it, and this one's own, as it is read there."""

    def __init__(self, address: bytes, own: OwnMemory) -> None:
        process, file, pipe, num_bytes = array("q", address[:-_SIGN])
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        try:
            if os.pread(opened, _SIGN, 0) != address[-_SIGN:]:
                raise ValueError("another process has that number here")
            self._content = torch.frombuffer(mmap.mmap(opened, num_bytes), dtype=torch.uint8)
        finally:
            os.close(opened)
        self._pipe = os.open(f"/proc/{process}/fd/{pipe}", os.O_WRONLY | os.O_NONBLOCK)
        self._words, self._lock = array("q"), threading.Lock()  # places that have been read, not yet said
        self.own = own

    def read(self, place: int, address: int, num_bytes: int) -> None:
        """Copy its message from a place to an address, and say so."""
        memmove(address, self._content.data_ptr() + place, num_bytes)
        with self._lock, suppress(BrokenPipeError, BlockingIOError):  # it has ended; the pipe is full, and said later
            self._words.append(place)
            while self._words:
                sent = os.write(self._pipe, self._words[:_WORDS].tobytes())
                del self._words[: sent // self._words.itemsize]

    def close(self) -> None:
        """Let go of it."""
        os.close(self._pipe)
        self._pipe = _CLOSED
