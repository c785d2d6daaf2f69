"""Where ranks meet under mpirun: a store that rank 0 keeps and the others ask by MPI, so that no socket is opened."""

from __future__ import annotations

import itertools
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

Reply = Callable[[object], object]

_REQUEST = 0  # the tag of requests; an answer's is chosen by who asks
_FIRST_SECONDS, _LONGER, _LONGEST = 1e-4, 2.0, 0.05  # between two looks for a message


class MpiStore(dist.Store):
    """A store for the ranks of ``COMM_WORLD`` (collective). A thread of rank 0 answers: several threads call MPI.

    ``timeout`` is that of waits for keys that do not say how long.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        from mpi4py import MPI

        comm: Any = MPI.COMM_WORLD.Dup()
        self._seconds, self._comm, self._byte = timeout.total_seconds(), comm, MPI.BYTE
        self._num_tags, self._has_ended = comm.Get_attr(MPI.TAG_UB), MPI.Is_finalized
        self._numbers, self._sending, self._leaving = itertools.count(), threading.Lock(), list[tuple[Any, bytes]]()
        self._table = _Table() if self._comm.Get_rank() == 0 else None
        self._thread = threading.Thread(target=self._serve, name="pyg_dist store", daemon=True)
        if self._table is not None:
            self._thread.start()

    def close(self) -> None:
        """Ask nothing more. Rank 0 answers until no other rank asks, as MPI itself waits for all ranks at its end."""
        if self._has_ended():
            return
        if self._table is None:
            self._ask("leave")
        else:
            self._thread.join()

    def set(self, key: str, value: str | bytes) -> None:
        """See :class:`torch.distributed.Store`, also below."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """For each key its value."""
        self._ask("set", keys, [_to_text(value) for value in values])

    def get(self, key: str) -> bytes:
        """Waits for the key."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Waits for all keys."""
        return [value.encode("latin-1") for value in self._ask("get", keys)]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for all keys."""
        self._ask("get", keys, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all are there."""
        return bool(self._ask("check", keys))

    def add(self, key: str, value: int) -> int:
        """Returns the total."""
        return int(self._ask("add", [key], [value]))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Returns what the key has then."""
        return str(self._ask("compare_set", [key], [_to_text(expected), _to_text(desired)])).encode("latin-1")

    def deleteKey(self, key: str) -> bool:  # so torch calls delete_key of a store in Python
        """Returns whether it was there."""
        return bool(self._ask("delete", [key]))

    def clone(self) -> MpiStore:
        """Threads that share one store do not wait for each other."""
        return self

    def _ask(
        self, what: str, keys: Sequence[str] = (), values: Sequence[str | int] = (), timeout: timedelta | None = None
    ) -> Any:
        if self._has_ended():
            raise dist.DistStoreError("Expected MPI to run (got MPI.Finalize() before the script's end)")
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        if self._table is not None:
            answers = queue.SimpleQueue[object]()
            self._table.ask(what, keys, values, answers.put)
            try:
                return answers.get(timeout=seconds)
            except queue.Empty:
                raise _overdue(keys, seconds) from None
        tag = 1 + next(self._numbers) % self._num_tags
        self._send(0, _REQUEST, [tag, what, list(keys), list(values)])
        return self._receive(0, tag, keys, seconds)[1]

    def _send(self, peer: int, tag: int, content: object) -> None:
        encoded = json.dumps(content).encode()
        with self._sending:
            self._leaving = [(request, memory) for request, memory in self._leaving if not request.Test()]
            self._leaving.append((self._comm.Isend([encoded, self._byte], peer, tag), encoded))

    def _receive(self, peer: int, tag: int, keys: Sequence[str] = (), seconds: float = math.inf) -> tuple[int, Any]:
        from mpi4py import MPI

        status, end, pause = MPI.Status(), time.monotonic() + seconds, _FIRST_SECONDS
        while (message := self._comm.Improbe(peer, tag, status)) is None:
            if time.monotonic() > end:
                raise _overdue(keys, seconds)
            time.sleep(pause)
            pause = min(_LONGER * pause, _LONGEST)
            if MPI.Is_finalized():  # by the script's main thread: this one ends
                raise SystemExit
        encoded = bytearray(status.Get_count(self._byte))
        message.Recv([encoded, self._byte])
        return status.Get_source(), json.loads(encoded)

    def _serve(self) -> None:
        from mpi4py import MPI

        assert self._table is not None
        num_others = self._comm.Get_size() - 1
        while num_others:
            rank, (tag, what, keys, values) = self._receive(MPI.ANY_SOURCE, _REQUEST)
            num_others -= what == "leave"
            self._table.ask(what, keys, values, partial(self._send, rank, tag))


class _Table:
    """The keys and their values, which several threads ask for; who asks for one that is not there waits."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[Sequence[str], Reply]]] = {}  # by the first key that is not there
        self._lock = threading.RLock()

    def ask(self, what: str, keys: Sequence[str], values: Sequence[Any], reply: Reply) -> None:
        """Do what is asked; ``reply`` is called with the answer, at once or when the keys are there."""
        with self._lock:
            if what == "get":
                self._reply_when_there(keys, reply)
                return
            answer: object = None
            if what == "set":
                for key, value in zip(keys, values, strict=True):
                    self._set(key, value)
            elif what == "add":
                answer = int(self._values.get(keys[0], "0")) + values[0]
                self._set(keys[0], str(answer))
            elif what == "compare_set":
                expected, desired = values
                answer = self._values.get(keys[0], expected)
                if self._values.get(keys[0], "") == expected:
                    answer = desired
                    self._set(keys[0], desired)
            elif what == "delete":
                answer = self._values.pop(keys[0], None) is not None
            elif what == "check":
                answer = all(key in self._values for key in keys)
            reply(answer)

    def _set(self, key: str, value: str) -> None:
        self._values[key] = value
        for keys, reply in self._waiting.pop(key, []):
            self._reply_when_there(keys, reply)

    def _reply_when_there(self, keys: Sequence[str], reply: Reply) -> None:
        missing = next((key for key in keys if key not in self._values), None)
        if missing is None:
            reply([self._values[key] for key in keys])
        else:
            self._waiting.setdefault(missing, []).append((keys, reply))


def _to_text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


def _overdue(keys: Sequence[str], seconds: float) -> dist.DistStoreError:
    return dist.DistStoreError(f"Expected the keys {', '.join(keys)} within {seconds:g} s (got no word of them)")
