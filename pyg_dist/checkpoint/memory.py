"""The newest states in the machines' memory, from which ranks that are started again go on.

Each machine has a folder for the run in ``/dev/shm``. Its first rank writes there the tensors that are equal on all
ranks, each rank its rows, and a rank of the next machine a copy of these. A file is a *record*
(:mod:`~pyg_dist.checkpoint.record`). There are two of each, written in turn.

No message says that a state is complete. A step of training has a sum of all ranks, so a rank writes over its second
newest record only when all have written their newest: there is always a state that all have. Started again,
the ranks look for the newest state of which every part is on some machine (:func:`newest_complete`), send each machine
the parts that it lacks, and write them as a checkpoint, which is read like any other.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.comm.topology import machines
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.session.agreement import one_line, raised_on_all_ranks
from pyg_dist.backend.session.settings import MACHINES
from pyg_dist.checkpoint.manifest import LOCK, STATE, Manifest, Rows, rows_of, run_of
from pyg_dist.checkpoint.reader import Checkpoint
from pyg_dist.checkpoint.record import HEAD, Record, described, mapped, read_record
from pyg_dist.checkpoint.snapshot import Description, take
from pyg_dist.checkpoint.writer import write_shard
from pyg_dist.errors import StoreError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.folder import explained_disk_errors, replace_text
from pyg_dist.store.manifest import FILE

logger = logging.getLogger("pyg_dist")


class Part(NamedTuple):
    """A part of a state that a machine has in its memory."""

    number: int  # steps of the run until then
    attempt: str  # names a start of the run, which may reach the same step several times
    kind: str  # ``"state"``, or such as ``"rows-00003"``
    holders: list[int]  # the ranks whose rows belong to the state
    slot: int  # 0 or 1: which of the two files


def newest_complete(found: Sequence[Sequence[Part]]) -> dict[str, Part]:
    """The parts of the newest state of which all are there, by kind; none if there is no such state.

    ``found`` has the parts that each rank has found, the same on all ranks.
    """
    states: dict[tuple[int, str], dict[str, Part]] = {}
    for part in (part for parts in found for part in parts):
        states.setdefault((part.number, part.attempt), {})[part.kind] = part
    for _, parts in sorted(states.items(), reverse=True):
        if STATE in parts and all(rows_of(rank) in parts for rank in parts[STATE].holders):
            return {kind: parts[kind] for kind in (STATE, *map(rows_of, parts[STATE].holders))}
    return {}


class MachineMemory:
    """The states of a run in the memory of this rank's machine (collective).

    Args:
        path: the folder of the run's checkpoints, which has the run's name.
    """

    def __init__(self, path: Path) -> None:
        self._world, self._machine_of = world_group(), machines()
        self._rank = self._world.rank
        self._is_first = self._machine_of.index(self._machine_of[self._rank]) == self._rank
        words = json.dumps([run_of(path), secrets.token_hex(8)]) if self._rank == 0 else ""
        run, self._attempt = json.loads(self._world.gather_bytes(words.encode())[0])
        given = MACHINES.value()  # several machines that are emulated on one
        machine = "" if given is None else f"-{given[self._rank]}"
        self.folder = _base() / f"pyg_dist-{os.getuid()}-{run}{machine}"
        self._slots: dict[str, int] = {}  # the next one of each kind
        self._records: dict[str, Record] = {}  # by the names of their files
        self._known: dict[str, Description] = {}
        self._is_off = False
        with raised_on_all_ranks():
            if self._is_first:
                _remove_leftovers()
                _make_private(self.folder, path)

    def newest(self, above: int) -> Checkpoint | None:
        """The newest complete state, if it has more than ``above`` steps; :meth:`forget_restored` removes its files.

        Raises:
            StoreError: There is no room for it.
        """
        mine = [part for part in self._parts() if part.number > above] if self._is_first else []
        told = self._world.gather_bytes(json.dumps(mine).encode())
        found = [[Part(*part) for part in json.loads(parts)] for parts in told]
        chosen = newest_complete(found)
        if not chosen:
            return None
        with raised_on_all_ranks((OSError, StoreError)):
            self._fetch(chosen, found)
            if self._is_first:
                with explained_disk_errors(self.folder, "free memory, or give the Checkpointer memory=0"):
                    self._restore(chosen)
        with raised_on_all_ranks():
            checkpoint = Checkpoint(self._restored)
        here = found[self._machine_of.index(self._machine_of[self._rank])]
        self._slots = {kind: 1 - _same(here, part).slot for kind, part in chosen.items()}
        return checkpoint

    def forget_restored(self) -> None:
        """Remove the files that :meth:`newest` has written."""
        if self._is_first:
            shutil.rmtree(self._restored, ignore_errors=True)

    def keep(self, number: int, things: Mapping[str, object]) -> None:
        """Write the state of ``things`` after ``number`` steps; raises as :func:`~pyg_dist.checkpoint.snapshot.take`.

        Where there is no room, this rank warns once and keeps no more states.
        """
        snapshot = take(things, self._is_first, known=self._known)
        holders = sorted(snapshot.holders)
        head = {"number": number, "attempt": self._attempt, "holders": holders}
        has_others = bool(holders) and len(set(self._machine_of)) > 1
        if self._is_first and not self._is_off:
            rows = {name: [r.dtype, r.shape, r.sharding] for name, r in snapshot.rows.items()}
            whole = {**head, "num_ranks": self._world.size, "generators": snapshot.generators, "rows": rows}
            self._write(STATE, {HEAD: described(whole, snapshot.texts), **snapshot.tensors})
        mine: Array | None = None
        if snapshot.pieces and (has_others or not self._is_off):
            mine = self._write(rows_of(self._rank), {HEAD: described(head, ()), **snapshot.pieces})
        if has_others:
            self._copy_to_next(mine, holders)

    def close(self, is_over: bool = False) -> None:
        """Close the files, and remove them where the run ``is_over``. Not collective."""
        self._records.clear()
        if is_over and self._is_first:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _restored(self) -> Path:
        return self.folder / "checkpoint"

    def _write(self, kind: str, tensors: Mapping[str, Tensor], is_copy: bool = False) -> Array:
        """Write a record over the older of its two files; ``is_copy``: a whole record of another rank."""
        slot = self._slots.get(kind, 0)
        self._slots[kind] = 1 - slot
        name = f"{kind}.{slot}"
        record = self._records.get(name)
        if record is None or not record.fits(tensors):
            record = self._records[name] = Record(partial(self._mapped, name), tensors, is_copy)
        record.write(tensors.values())
        return record.content

    def _mapped(self, name: str, size: int) -> Array:
        """A mapped file; where there is no room for it, memory of this process, from which copies are sent."""
        if not self._is_off:
            try:
                return mapped(self.folder / name, size)
            except OSError as error:
                logger.warning(
                    "rank %d keeps no states in memory from here on: %s; a restart goes on from the disk",
                    self._rank, one_line(error),
                )  # fmt: skip
            self._is_off = True
            for file in (name, *self._records):
                (self.folder / file).unlink(missing_ok=True)
            self.close()
        return np.empty(size, np.uint8)

    def _copy_to_next(self, mine: Array | None, holders: Sequence[int]) -> None:
        """Send this rank's record to a rank of the next machine, and write those that come (collective)."""
        sent = torch.from_numpy(np.empty(0, np.uint8) if mine is None else mine)
        sizes, place, senders = self._world.gather_counts(len(sent)), 0, []
        for rank in holders:
            if self._next_to(rank) == self._rank:
                senders.append((rank, place, place + sizes[rank]))
                place += sizes[rank]
        out = host.empty(place, dtype=torch.uint8)
        receivers = [] if mine is None else [(self._next_to(self._rank), 0, len(sent))]
        Transport(self._world).to_neighbours(sent, receivers, senders, out).wait()
        for rank, low, high in senders if not self._is_off else ():
            self._write(rows_of(rank), {"": out[low:high]}, is_copy=True)

    def _next_to(self, rank: int) -> int:
        """The rank of the next machine that has a copy of a rank's rows."""
        machine_of = self._machine_of
        own = [other for other, machine in enumerate(machine_of) if machine == machine_of[rank]]
        following = (machine_of[rank] + 1) % (max(machine_of) + 1)
        there = [other for other, machine in enumerate(machine_of) if machine == following]
        return there[own.index(rank) % len(there)]

    def _parts(self) -> list[Part]:
        """The parts that this machine has, checked by their digests."""
        parts = []
        for path in sorted(self.folder.glob("*.[01]")):
            if (told := read_record(path)) is not None:
                head = told[0]
                parts.append(Part(head["number"], head["attempt"], path.stem, head["holders"], int(path.suffix[1:])))
        return parts

    def _fetch(self, chosen: Mapping[str, Part], found: Sequence[Sequence[Part]]) -> None:
        """Send the parts that some machines lack to all (collective)."""
        firsts = {self._machine_of.index(machine) for machine in self._machine_of}
        for part in chosen.values():
            have = [rank for rank, parts in enumerate(found) if any(p[:3] == part[:3] for p in parts)]
            if firsts <= set(have):
                continue
            source = have[0]
            is_source = self._rank == source
            content = np.fromfile(self._path_of(_same(found[source], part)), np.uint8) if is_source else np.empty(0)
            size = max(self._world.gather_counts(len(content)))
            whole = torch.from_numpy(content) if is_source else host.empty(size, dtype=torch.uint8)
            self._world.broadcast_(whole, source)
            if self._rank in firsts - set(have):
                self._path_of(part).write_bytes(whole.numpy().data)

    def _path_of(self, part: Part) -> Path:
        return self.folder / f"{part.kind}.{part.slot}"

    def _restore(self, chosen: Mapping[str, Part]) -> None:
        """Write the parts as a checkpoint."""
        shutil.rmtree(self._restored, ignore_errors=True)
        self._restored.mkdir()
        shards, head = {}, dict[str, Any]()
        mine = self._parts()
        for kind, part in chosen.items():
            told = read_record(self._path_of(_same(mine, part)))
            if told is None:
                raise StoreError(f"Expected '{kind}' as it was written in {self.folder}: free memory, and start again")
            shards[kind] = write_shard(self._restored, kind, told[1])
            head = head or told[0]
        rows = {name: Rows(dtype, tuple(shape), sharding) for name, (dtype, shape, sharding) in head["rows"].items()}
        manifest = Manifest(head["num_ranks"], head["state"], head["generators"], rows, shards)
        replace_text(self._restored / FILE, manifest.to_json())


def _same(here: Sequence[Part], part: Part) -> Part:
    """The same part in a machine's own slot; ``part`` itself where the machine does not have it."""
    return next((p for p in here if p[:3] == part[:3]), part)


def _base() -> Path:
    """The folder whose files are in memory; that of temporary files where the system has none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


def _make_private(folder: Path, of: Path) -> None:
    """Make a folder that only this user can read, with a file that names the folder of checkpoints."""
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    (folder / "path").write_text(str(of.absolute()))


def _remove_leftovers() -> None:
    """Remove states of this user's runs whose folders of checkpoints are gone, or belong to other runs now."""
    for folder in _base().glob(f"pyg_dist-{os.getuid()}-*"):
        try:
            text = (folder / "path").read_text()
        except OSError:
            continue
        path = Path(text)
        if text and path.parent.exists() and (not (path / LOCK).exists() or run_of(path) not in folder.name):
            shutil.rmtree(folder, ignore_errors=True)
