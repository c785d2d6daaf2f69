"""``BatchLoader``: the batches that a :class:`Sampler` draws, in advance where possible, restartable."""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from functools import partial
from typing import Any, Protocol

import torch
from torch_geometric.data import Data, HeteroData

from pyg_dist.backend.session.agreement import require_equal
from pyg_dist.backend.session.rendezvous import running_mpi
from pyg_dist.data import batch as batches_of_one_type
from pyg_dist.errors import OptionError
from pyg_dist.graph.sample import Subset, TypedSubset
from pyg_dist.loader.prefetch import Prefetcher


class Sampler(Protocol):
    """Chooses the nodes, and maybe the edges, of each step's batch; the whole interface that :class:`BatchLoader` uses.

    Subsets are functions of :attr:`options` and the step: the same on any number of ranks, and again after a restart.
    """

    @property
    def num_steps(self) -> int:
        """Steps of an epoch; steps are counted over all epochs."""

    @property
    def options(self) -> dict[str, object]:
        """The values that determine the subsets, by name: equal on every rank, and part of ``state_dict``."""

    @property
    def sends(self) -> bool:
        """Whether :meth:`sample` sends messages: then it is collective, and all ranks draw the same steps in one order.

        Its messages use a group of their own (:func:`~pyg_dist.backend.session.agreement.group_of_thread`).
        """

    def sample(self, step: int) -> Subset | TypedSubset:
        """The subset of a step. A thread calls it while another step trains.

        A sampler may also have ``prepare(step)``, which draws a part of the next ``sample(step)`` in advance: the
        thread calls it after it has made the batch before.
        """


class BatchLoader:
    """Iterates over the subgraphs that a sampler draws, each a ``DistributedData``: the factory of every loader.

    A batch has the attributes of ``data``, those of its subset, and ``n_id`` and ``e_id``: ``t[batch.n_id]`` selects
    the batch's rows of any node tensor of ``data``, with gradients and without communication. The numbers of steps
    continue over epochs. An iteration ends with its epoch; after a ``break`` the next one continues.

    Args:
        data: the graph; a plain ``Data`` in one process, for samplers that name the edges.
        sampler: a :class:`Sampler`.
        prefetch: whether a thread makes the next batch while this one trains. It lasts over epochs, until a ``break``,
            the end of the session, or of the loader. Not where the sampler sends messages and MPI is for one thread.

    Making it is collective. Drawing batches is where the sampler sends messages; using them is.

    Example:
        >>> loader = BatchLoader(data, UniformVertexLoader(data, batch_size=17).sampler)
        >>> next(iter(loader)).num_nodes
        17
    """

    def __init__(self, data: Data | HeteroData, sampler: Sampler, prefetch: bool = True) -> None:
        require_equal({f"option {k}": str(v) for k, v in sampler.options.items()}, "give every rank the same sampler")
        device = partial(torch.device, "cpu")
        if is_distributed(data):
            cutter_of(data).ready(data)
            device = partial(getattr, data, "_device")
        self.data, self.sampler = data, sampler
        self.prefetch = bool(prefetch) and not (sampler.sends and _is_mpi_of_one_thread())
        self._step, self._loop = 0, object()
        # Not self, which would be a cycle: the thread ends with the last reference to the loader.
        ahead = getattr(sampler, "prepare", None) if sampler.sends else None
        self._batches = Prefetcher(partial(batch_of, data, sampler), device, sampler.sends, ahead)

    def __len__(self) -> int:
        return self.sampler.num_steps

    def __iter__(self) -> Iterator[Any]:
        last, loop = (self._step // len(self) + 1) * len(self), object()
        self._loop = loop
        try:
            while self._step < last:
                yield self._take()  # not held here: the caller's is the last reference
                if self._loop is not loop:
                    raise OptionError(
                        f"Expected one loop over a {type(self).__name__} at a time (got another one before this one's "
                        f"end): both would share its steps; make a loader for each"
                    )
        except GeneratorExit:  # a break: there may be no next step
            self._batches.stop()
            raise

    def __deepcopy__(self, memo: object) -> BatchLoader:
        return copy(self)  # its steps are its own; the graph and the thread are not copied

    def _take(self) -> object:
        """The batch of the next step; the one after it is begun."""
        batch = self._batches.take(self._step)
        self._step += 1
        if self.prefetch:
            self._batches.begin(self._step)
        return self._finished(batch)

    def _finished(self, batch: object) -> object:
        """The batch with the attributes that learn."""
        if is_distributed(self.data):
            cutter_of(self.data).add_learning(self.data, batch)
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The next step, and the options that determine the samples.

        Example:
            >>> loader = UniformVertexLoader(data, batch_size=17, input_nodes=data.train_mask)
            >>> batch = next(iter(loader))
            >>> loader.state_dict()["step"]
            1
        """
        return {"step": self._step, **self.sampler.options}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continue from a state, bit for bit (not collective; every rank loads the same state).

        Raises:
            OptionError: The state is of a loader with other options or another number of nodes.

        Example:
            >>> loader = UniformVertexLoader(data, batch_size=17, input_nodes=data.train_mask)
            >>> batch, state = next(iter(loader)), loader.state_dict()
            >>> resumed = UniformVertexLoader(data, batch_size=17, input_nodes=data.train_mask)
            >>> resumed.load_state_dict(state)
            >>> next(iter(resumed)).n_id.tolist() == next(iter(loader)).n_id.tolist()
            True
        """
        if not isinstance(state, dict):
            raise OptionError(f"Expected the dict of state_dict() (got {type(state).__name__})")
        mine = self.sampler.options
        differing = [name for name, value in mine.items() if state.get(name) != value]
        step = state.get("step")
        if differing or not isinstance(step, int) or step < 0:
            name = differing[0] if differing else "step"
            raise OptionError(
                f"Expected the state of a loader with the same options (got {name}={state.get(name)!r}"
                f"{f' for {mine[name]!r}' if name in mine else ''}): make the loader as it was"
            )
        self._step = step


def is_distributed(data: Data | HeteroData) -> bool:
    """Whether ``data`` is spread over ranks."""
    return bool(getattr(data, "is_distributed", False))


def cutter_of(data: Data | HeteroData) -> Any:
    """The module whose functions cut batches from a graph of one type, or of several."""
    if not isinstance(data, HeteroData):
        return batches_of_one_type
    from pyg_dist.data import hetero  # imported only for graphs with types

    return hetero


def batch_of(data: Data | HeteroData, sampler: Sampler, step: int) -> Any:
    """The batch of a step, without attributes that learn (collective where the sampler sends messages)."""
    subset, cutter = sampler.sample(step), cutter_of(data)
    return cutter.induced(data, subset) if is_distributed(data) else cutter.plain_batch(data, subset)


def _is_mpi_of_one_thread() -> bool:
    """Whether MPI runs without MPI_THREAD_MULTIPLE, so that two threads may not send at once."""
    mpi = running_mpi()
    return mpi is not None and bool(mpi.Query_thread() < mpi.THREAD_MULTIPLE)
