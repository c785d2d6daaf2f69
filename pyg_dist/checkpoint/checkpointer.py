"""``Checkpointer``: a loop over epochs that saves, goes on where a run has ended, and stops when it is asked to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pyg_dist.backend.session import generators, session
from pyg_dist.backend.session.leaving import stop_requested
from pyg_dist.checkpoint.checkpoint import load_into, named, newest, positive
from pyg_dist.checkpoint.writer import Writer

T = TypeVar("T")

_NEXT, _STATE = "$next", "$state"


class Checkpointer:
    """Saves a training run while it goes on, and goes on with it. Collective.

    A thread writes, so that training waits only for a copy in memory. If a rank is asked to stop (SIGTERM, SIGUSR1 or
    Ctrl-C), all ranks save after the same step, and the loop ends as after its last epoch.

    Args:
        path: the folder, as for :func:`~pyg_dist.checkpoint.save`; ``None``: nothing is saved or loaded.
        every: epochs from one checkpoint to the next. The last one is always saved.
        keep: how many of the newest checkpoints stay.
        model: as for :func:`~pyg_dist.checkpoint.save`, likewise the next four.
        optimizer: see there.
        scheduler: see there.
        loader: see there.
        things: see there; what has ``state_dict()``, and tensors.

    Attributes:
        state: a dict for numbers and strings of the script's, saved with the rest and there again after a restart.

    Raises:
        OptionError: ``every`` or ``keep`` is not a positive integer.
        StoreError: The newest checkpoint is damaged, or one could not be written.

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
        *,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        loader: Any = None,
        **things: Any,
    ) -> None:
        session.init()
        self.state: dict[str, Any] = {}
        self._every = positive("every", every)
        self._things = named(things, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        self._writer = None if path is None else Writer(Path(path), positive("keep", keep))
        self._next: int | None = None  # the epoch to go on with
        self._epoch = 0  # that goes on
        self._is_stopped = False  # within an epoch
        last = None if self._writer is None else newest(self._writer.path)
        if last is not None:
            left = load_into(last, self._things)
            self._next = left.get(_NEXT)
            self.state.update(left.get(_STATE, {}))
        self._drawn = generators.generator_states()

    def epochs(self, *bounds: int) -> Iterator[int]:
        """The epochs of ``range(*bounds)`` that are still to come; each is complete when the next is asked for.

        Example:
            >>> from pyg_dist.checkpoint import Checkpointer
            >>> list(Checkpointer(None, model=model).epochs(1, 4))
            [1, 2, 3]
        """
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
            is_last = self._is_stopped or following not in epochs or self._stops()
            is_due = (following - range(*bounds).start) // epochs.step % self._every == 0
            if (is_last or is_due) and not self._is_stopped:
                self._save(following)
        if self._writer is not None:
            self._writer.wait()

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """The batches of an epoch. If a rank is asked to stop, all save after the same batch, and go on with the next.

        Args:
            loader: the one that is saved, with its position in ``state_dict()["step"]``.

        Example:
            >>> from pyg_dist.checkpoint import Checkpointer
            >>> from pyg_dist.loader import UniformVertexLoader
            >>> loader = UniformVertexLoader(data, batch_size=17)
            >>> checkpointer = Checkpointer("batches", model=model, loader=loader)
            >>> [batch.num_nodes for epoch in checkpointer.epochs(1) for batch in checkpointer.batches(loader)]
            [17, 17]
        """
        position: Any = loader
        for batch in loader:
            yield batch
            is_within = self._writer is not None and position.state_dict()["step"] % len(position) != 0
            if is_within and self._stops():
                self._is_stopped = True
                self._save(self._epoch)
                return

    def _stops(self) -> bool:
        """Whether a rank has been asked to stop (collective)."""
        return self._writer is not None and stop_requested()

    def _save(self, following: int) -> None:
        """Begin to save, to go on with the epoch ``following`` (collective)."""
        assert self._writer is not None
        self._writer.begin({**self._things, _NEXT: following, _STATE: self.state})
