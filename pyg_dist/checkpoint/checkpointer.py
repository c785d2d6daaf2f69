"""``Checkpointer``: a loop over epochs that saves, goes on where a run has ended, and stops when it is asked to."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session import generators, launch, session
from pyg_dist.backend.session.leaving import stop_requested
from pyg_dist.backend.session.state import current
from pyg_dist.checkpoint.checkpoint import load_into, named, newest, positive, require_loadable
from pyg_dist.checkpoint.memory import MachineMemory
from pyg_dist.checkpoint.writer import Writer
from pyg_dist.errors import OptionError

T = TypeVar("T")

_LOOK_SECONDS = 0.1
"""Between two looks for a request to stop, each of which is a message."""

_NEXT, _STEPS, _STATE = "$next", "$steps", "$state"


class Checkpointer:
    """Saves a training run at intervals, and resumes it. Collective.

    A thread writes, so that training waits only for a copy in memory. If a rank is asked to stop (SIGTERM, SIGUSR1 or
    Ctrl-C), all ranks save after the same step, at most a tenth of a second or a step later, and the loop ends as after
    its last epoch.

    A *step* is a batch of :meth:`batches`, and the end of each epoch. The newest states are kept in the machines'
    memory (``/dev/shm``, two in turn), from where a run that is started again goes on if they are newer than what is
    on the disk. Rows that are spread over ranks have a copy on the next machine, so that one machine may be lost.

    Args:
        path: the folder, as for :func:`~pyg_dist.checkpoint.save`; ``None``: nothing is saved or loaded.
        every: epochs from one checkpoint to the next. The last one is always saved.
        keep: how many of the newest checkpoints stay.
        memory: steps from one state kept in memory to the next, 0: none. By default 1 where torchrun starts failed
            ranks again (``--max-restarts``), else 0.
        model: as for :func:`~pyg_dist.checkpoint.save`, likewise the next four.
        optimizer: see there.
        scheduler: see there.
        loader: see there.
        things: see there; objects with ``state_dict()``, and tensors.

    Attributes:
        state: a dict for numbers and strings of the script's, saved with the rest and there again after a restart.

    Raises:
        OptionError: ``every`` or ``keep`` is not a positive integer, ``memory`` is none.
        StoreError: The newest checkpoint is damaged, one could not be written, or another run saves in the folder.

    Example:
        >>> from pyg_dist.checkpoint import Checkpointer
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> checkpointer = Checkpointer("epochs", every=2, model=model, optimizer=optimizer)
        >>> for epoch in checkpointer.epochs(3):
        ...     checkpointer.state["last"] = epoch
        >>> resumed = Checkpointer("epochs", every=2, model=model, optimizer=optimizer)
        >>> list(resumed.epochs(5)), resumed.state
        ([3, 4], {'last': 2})
    """

    def __init__(
        self,
        path: str | Path | None,
        every: int = 1,
        keep: int = 3,
        memory: int | None = None,
        *,
        model: object,
        optimizer: object = None,
        scheduler: object = None,
        loader: object = None,
        **things: object,
    ) -> None:
        session.init()
        self.state: dict[str, object] = {}
        self._every = positive("every", every)
        self._things = named(things, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        require_loadable(self._things, "put what else is saved into the Checkpointer's state")
        self._writer = None if path is None else Writer(Path(path), positive("keep", keep))
        self._memory: MachineMemory | None = None
        if memory is None:
            memory = int(launch.num_restarts(os.environ) > 0)
        self._memory_every = memory if memory == 0 else positive("memory", memory)
        self._num_steps = 0  # of the run so far
        self._next: int | None = None  # the epoch to go on with
        self._epoch = 0  # the present one
        self._has_begun = self._is_stopped = False  # whether there was a loop; whether it has ended within an epoch
        # Steps since the last look for a request to stop, the time of that look, and steps from one look to the next.
        self._num_unseen, self._looked, self._look_after = 0, time.monotonic(), 0
        if self._writer is not None:
            self._load(self._writer.path)
        self._drawn = generators.generator_states()

    def _load(self, path: Path) -> None:
        """Go on from the newest state, on the disk or in memory (collective)."""
        found = newest(path)
        self._num_steps = 0 if found is None else found.number(_STEPS)
        if self._memory_every:
            self._memory = MachineMemory(path)
            current().close_at_end(self._memory)
            found = self._memory.newest(self._num_steps) or found
        if found is None:
            return
        left: dict[str, Any] = load_into(found, self._things)
        if self._memory is not None:
            self._memory.forget_restored()
        self._next, self._num_steps = left.get(_NEXT), left.get(_STEPS, 0)
        self.state.update(left.get(_STATE, {}))

    def epochs(self, *bounds: int) -> Iterator[int]:
        """The epochs of ``range(*bounds)`` that are still to come; each is complete when the next is asked for.

        Raises:
            OptionError: There was a loop before, which a loaded checkpoint would go on with.

        Example:
            >>> from pyg_dist.checkpoint import Checkpointer
            >>> list(Checkpointer(None, model=model).epochs(1, 4))
            [1, 2, 3]
        """
        if self._has_begun:
            raise OptionError(
                "Expected one loop over epochs of a Checkpointer (got a second one): make another, with its own folder"
            )
        self._has_begun = True
        epochs = range(*bounds)
        if self._next is not None:
            generators.set_generator_states(self._drawn)  # whatever the script has drawn since it was loaded
            epochs = range(self._next, epochs.stop, epochs.step)
        is_last = self._stops()
        for self._epoch in epochs:
            if is_last:
                break
            yield self._epoch
            if self._writer is None:
                continue
            following = self._epoch + epochs.step
            is_last = self._is_stopped or following not in epochs
            is_due = (following - range(*bounds).start) // epochs.step % self._every == 0
            if not is_last:
                is_last = self._ends_step(following)
            if (is_last or is_due) and not self._is_stopped:
                self._save(following)
        if self._writer is not None:
            self._writer.wait()
        if self._memory is not None:
            self._memory.close(is_over=True)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of an epoch. If a rank is asked to stop, all save after the same batch, and go on with the next.

        Args:
            loader: one that is saved, with its position in ``state_dict()["step"]``.

        Raises:
            OptionError: It is not among the things that are saved.

        Example:
            >>> from pyg_dist.checkpoint import Checkpointer
            >>> from pyg_dist.loader import UniformVertexLoader
            >>> loader = UniformVertexLoader(data, batch_size=17)
            >>> checkpointer = Checkpointer("batches", model=model, loader=loader)
            >>> [batch.num_nodes for epoch in checkpointer.epochs(1) for batch in checkpointer.batches(loader)]
            [17, 17]
        """
        position: Any = loader
        if not any(thing is loader for thing in self._things.values()):
            raise OptionError(
                "Expected a loader that is saved (got another one): pass it to the Checkpointer, loader=..."
            )
        for batch in loader:
            yield batch
            is_within = self._writer is not None and position.state_dict()["step"] % len(position) != 0
            if is_within and self._ends_step(self._epoch):
                self._is_stopped = True
                self._save(self._epoch)
                return

    def _stops(self) -> bool:
        """Whether a rank has been asked to stop (collective where ranks ask: not after each of many short steps)."""
        self._num_unseen += 1
        if self._writer is None or self._num_unseen < self._look_after:
            return False
        now = time.monotonic()
        of_step = int(1e6 * (now - self._looked) / self._num_unseen)
        self._look_after = int(1e6 * _LOOK_SECONDS) // max(1, *world_group().gather_counts(of_step))
        self._looked, self._num_unseen = now, 0
        return stop_requested()

    def _ends_step(self, following: int) -> bool:
        """Keep the state in memory if it is time; then whether a rank has been asked to stop (collective)."""
        self._num_steps += 1
        if self._memory is not None and self._num_steps % self._memory_every == 0:
            self._memory.keep(self._num_steps, self._all(following))
        return self._stops()

    def _save(self, following: int) -> None:
        assert self._writer is not None
        self._writer.begin(self._all(following))

    def _all(self, following: int) -> dict[str, object]:
        return {**self._things, _NEXT: following, _STEPS: self._num_steps, _STATE: self.state}
