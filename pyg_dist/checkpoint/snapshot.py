"""A state at a step, as a checkpoint will have it: its description, and the tensors that this rank is to write."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyg_dist.backend import host, plain_json
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session import generators
from pyg_dist.backend.session.agreement import digest, raise_together, require_equal
from pyg_dist.backend.session.state import current
from pyg_dist.checkpoint.manifest import PARTS, Rows
from pyg_dist.data import DistributedData
from pyg_dist.errors import OptionError
from pyg_dist.store.format import dtype_name, is_storable
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.sharding import RowSharding

LARGE_BYTES = 1 << 28
"""If the tensors that are equal on all ranks are larger together, all ranks share in writing them."""


@dataclass
class Snapshot:
    """A state, as this rank holds it. The tensors are the script's own until :meth:`copy`."""

    state: dict[str, object] = field(default_factory=dict)  # JSON of the states by name
    texts: list[str] = field(default_factory=list)  # the entries of ``state`` as they are written
    generators: dict[str, object] = field(default_factory=dict)  # JSON of the generators' states
    tensors: dict[str, Tensor] = field(default_factory=dict)  # equal on all ranks; those that this rank writes
    rows: dict[str, Rows] = field(default_factory=dict)  # tensors whose rows are spread over ranks
    # this rank's rows of these, their numbers and first columns, unless a lower rank has the same rows
    pieces: dict[str, Tensor] = field(default_factory=dict)
    holders: set[int] = field(default_factory=set)  # the ranks that have pieces

    def keep_share(self, rank: int, num_ranks: int) -> None:
        """Drop the tensors that other ranks write: rank 0 writes all, unless they are :data:`LARGE_BYTES` or more."""
        total, before, mine = sum(tensor.nbytes for tensor in self.tensors.values()), 0, {}
        for name, tensor in self.tensors.items():
            if before * (num_ranks if total > LARGE_BYTES else 1) // (total + 1) == rank:
                mine[name] = tensor
            before += tensor.nbytes
        self.tensors = mine

    def copy(self) -> None:
        """Copy the tensors into memory of their own: the script may go on."""
        self.tensors = {name: _copy(tensor) for name, tensor in self.tensors.items()}
        self.pieces = {name: _copy(tensor) for name, tensor in self.pieces.items()}


@dataclass
class Description:
    """The JSON of a state, which is valid while the state has the same tensors, numbers and strings."""

    content: object  # JSON
    text: str  # its entry in the manifest, with the name
    replicas: dict[str, Tensor]  # the tensors that are equal on all ranks, by name
    spread: dict[str, RowTensor]  # those whose rows are spread over ranks
    _state: object  # its dicts and lists are copies

    @staticmethod
    def of(name: str, state: object, taken: Set[str]) -> Description:
        """Describe a state; its tensors get names that are not ``taken``."""
        replicas, spread = dict[str, Tensor](), dict[str, RowTensor]()

        def note(name: str, tensor: Tensor) -> str:
            while name in taken or name in replicas or name in spread:
                name += "'"
            if is_lazy(tensor):
                raise OptionError(f"Expected a tensor with a shape as '{name}' (got a lazy one): call the model before")
            if isinstance(tensor, RowTensor):
                spread[name] = tensor
            else:
                replicas[name] = tensor
            return name

        content = encode(name, state, note)
        return Description(
            content, f"{json.dumps(name)}: {json.dumps(content)}", replicas, spread, _with_own_containers(state)
        )

    def holds(self, state: object) -> bool:
        """Whether it describes this state, too: it has the same tensors, and equal numbers and strings."""
        try:
            return bool(state == self._state)
        except Exception:  # comparing two tensors that are different objects
            return False


def _with_own_containers(state: object) -> object:
    """The same leaves in other dicts, lists and tuples."""
    if isinstance(state, Mapping):
        return {key: _with_own_containers(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        copied = [_with_own_containers(value) for value in state]
        return copied if isinstance(state, list) else tuple(copied)
    return state


def state_of(thing: object) -> object:
    """The ``state_dict()`` of a thing, where a model's rows stay spread; or the thing itself."""
    if isinstance(thing, nn.Module):
        return thing.state_dict(keep_vars=True)
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def encode(name: str, thing: object, take: Callable[[str, Tensor], str]) -> object:
    """The JSON of a thing's state; ``take`` is called with a name for each tensor, and returns the one to use.

    Raises:
        OptionError: There is something in it that is neither plain nor a tensor.
    """

    def foreign(name: str, value: object) -> object:
        if isinstance(value, (np.integer, np.floating, np.bool_)):
            return value.item()
        if not isinstance(value, Tensor):
            raise OptionError(
                f"Expected numbers, strings, tensors, and lists and dicts of them in '{name}' (got "
                f"{type(value).__name__}): a checkpoint has no pickles, give it the state_dict() of an object"
            )
        if value.layout != torch.strided or not is_storable(value.dtype):
            raise OptionError(
                f"Expected a dense tensor of numbers in '{name}' (got {value.dtype}, {value.layout}): convert it"
            )
        return {"$tensor": take(name, value)}

    return plain_json.encode(state_of(thing), foreign, name)


def take(
    things: Mapping[str, object],
    is_writer: bool,
    failure: Exception | None = None,
    known: dict[str, Description] | None = None,
) -> Snapshot:
    """The state of ``things`` (collective where it compares, and for a sharding that is new).

    Unless the states are ``known``, the ranks compare theirs by one small message: names, plain values, dtypes and
    shapes, not the values of tensors.

    Args:
        things: the objects to save, by name.
        is_writer: whether this rank writes tensors that are equal on all ranks.
        failure: of this rank so far, which all ranks raise.
        known: descriptions of the last states of these things, which are updated; empty the first time.

    Raises:
        OptionError: There is something in it that is neither plain nor a tensor.
        AgreementError: The ranks have different states.
    """
    snapshot, spread, parts, names = Snapshot(), dict[str, RowTensor](), None, set[str]()
    compares, known = not known, {} if known is None else known
    try:
        for name, thing in things.items():
            if isinstance(thing, DistributedData):
                parts = thing.plan.parts
            state = thing.plan.hash if isinstance(thing, DistributedData) else state_of(thing)
            # Plain values of the script are described each time: 1 and True are equal, but not in JSON.
            said = known.get(name) if hasattr(thing, "state_dict") else None
            if said is None or not (said.holds(state) and names.isdisjoint([*said.replicas, *said.spread])):
                said = known[name] = Description.of(name, state, names)
            snapshot.state[name] = said.content
            snapshot.texts.append(said.text)
            names.update(said.replicas, said.spread)
            spread.update(said.spread)
            if is_writer:
                snapshot.tensors.update(said.replicas)
    except OptionError as caught:
        failure = failure or caught
    if compares:
        tensors = [t for said in known.values() for t in (*said.replicas.values(), *said.spread.values())]
        _require_alike([snapshot.state, [f"{t.dtype} {[*t.shape]}" for t in tensors]], failure)
    elif failure is not None:
        raise failure
    if is_writer:

        def note(name: str, array: object) -> dict[str, object]:
            snapshot.tensors[name] = torch.from_numpy(np.asarray(array))
            return {"$tensor": name}

        arrays = generators.to_arrays(generators.generator_states())
        snapshot.generators = plain_json.encode(arrays, note, "$generators")
        if parts is not None:
            snapshot.tensors[PARTS] = parts
    shardings: dict[RowSharding, int] = {}
    for name, tensor in spread.items():
        rows, local = tensor._sharding, tensor.to_local()
        of = Rows(dtype_name(local.dtype), tuple(tensor.shape), shardings.setdefault(rows, len(shardings)))
        snapshot.rows[name] = of
        holders = _holders(rows)
        snapshot.holders |= holders
        if current().rank in holders:
            snapshot.pieces[name] = local
            snapshot.pieces[of.positions] = rows.position
            snapshot.pieces[of.first_column] = host.tensor(rows.first_column)
    return snapshot


def _require_alike(state: object, failure: Exception | None) -> None:
    """Raise on all ranks unless they have the same state, or if one has failed (collective)."""
    mine = digest(json.dumps(state))
    everyone = world_group().gather_counts(-1 if failure else int(mine[:15], 16))
    if -1 in everyone:
        raise_together(failure)
    if len(set(everyone)) > 1:
        require_equal({"state": mine}, "give every rank's checkpoint the same")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class _Holders(WeakKeyDictionary[RowSharding, frozenset[int]]):
    """The ranks that write the rows of a sharding: of ranks with the same rows and columns, the lowest."""


def _holders(rows: RowSharding) -> frozenset[int]:
    """See :class:`_Holders` (collective at the first use of a sharding)."""
    known = current().of(_Holders)
    if rows not in known:
        place = digest(f"{digest(rows.position)} from {rows.first_column}")[:15] if rows.num_local else "0"
        everyone = world_group().gather_counts(int(place, 16))
        known[rows] = frozenset(k for k, place in enumerate(everyone) if place and everyone.index(place) == k)
    return known[rows]
