"""What a checkpoint will have, copied at a step; training goes on while a thread writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pyg_dist.backend import plain_json
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session import generators
from pyg_dist.backend.session.agreement import digest, raise_together, require_equal
from pyg_dist.backend.session.state import current, is_main
from pyg_dist.checkpoint.manifest import PARTS, Rows
from pyg_dist.data import DistributedData
from pyg_dist.errors import OptionError
from pyg_dist.store.format import dtype_name, is_storable
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.sharding import RowSharding


@dataclass
class Snapshot:
    """A state, as this rank holds it.

    Attributes:
        state: JSON of the states by name.
        tensors: those that are the same on all ranks; on rank 0, which writes them.
        rows: the tensors whose rows are spread over ranks.
        pieces: this rank's rows of these, their numbers and first columns, unless a rank before it has the same ones.
        names: of all tensors.
        generators: their states.
    """

    state: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Rows] = field(default_factory=dict)
    pieces: dict[str, Tensor] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    generators: list[Any] = field(default_factory=generators.generator_states)


def state_of(thing: Any) -> Any:
    """What is saved of a thing: its ``state_dict()``, of a model with rows as they are spread, or the thing itself."""
    if isinstance(thing, nn.Module):
        return thing.state_dict(keep_vars=True)
    return thing.state_dict() if hasattr(thing, "state_dict") else thing


def encode(name: str, thing: Any, take: Callable[[str, Tensor], str]) -> Any:
    """The JSON of what is saved of a thing; ``take`` is given its tensors, and returns a name for each.

    Raises:
        OptionError: There is something in it that is neither plain nor a tensor.
    """

    def foreign(name: str, value: Any) -> dict[str, Any]:
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


def take(things: Mapping[str, Any], failure: Exception | None = None) -> Snapshot:
    """Copy the state of ``things`` into memory (collective, one small sum where no rows are spread in a new way).

    Args:
        things: what is saved, by name.
        failure: of this rank so far, which all ranks raise.

    Raises:
        OptionError: There is something in it that is neither plain nor a tensor.
        AgreementError: The ranks have different states; values of tensors are not compared.
    """
    snapshot, spread, parts, mine = Snapshot(), dict[str, RowTensor](), None, "0"
    try:
        for name, thing in things.items():
            if isinstance(thing, DistributedData):
                parts, snapshot.state[name] = thing.plan.parts, thing.plan.hash
            else:
                snapshot.state[name] = encode(name, thing, partial(_note, snapshot, spread))
        mine = digest(json.dumps(snapshot.state))
    except OptionError as caught:
        failure = failure or caught
    everyone = world_group().gather_counts(-1 if failure else int(mine[:15], 16))
    if -1 in everyone:
        raise_together(failure)
    if len(set(everyone)) > 1:
        require_equal({"state": mine}, "give every rank's checkpoint the same")
    if parts is not None and is_main():
        snapshot.tensors[PARTS] = _copy(parts)
    shardings: dict[RowSharding, int] = {}
    for name, tensor in spread.items():
        rows, local = tensor._sharding, tensor.to_local()
        of = Rows(dtype_name(local.dtype), tuple(tensor.shape), shardings.setdefault(rows, len(shardings)))
        snapshot.rows[name] = of
        if _is_first_with(rows):
            snapshot.pieces[name] = _copy(local)
            snapshot.pieces[of.positions] = rows.position
            snapshot.pieces[of.first_column] = torch.tensor(rows.first_column)
    return snapshot


def _note(snapshot: Snapshot, spread: dict[str, RowTensor], name: str, tensor: Tensor) -> str:
    """Take a tensor by a name that no other one has."""
    while name in snapshot.names:
        name += "'"
    snapshot.names.add(name)
    if isinstance(tensor, RowTensor):
        spread[name] = tensor
    elif is_main():
        snapshot.tensors[name] = _copy(tensor)
    return name


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()


class _First(WeakKeyDictionary[RowSharding, bool]):
    """Whether this rank is the first one with its rows and columns of a distribution."""


def _is_first_with(rows: RowSharding) -> bool:
    """Whether no rank before this one has the same rows and columns (collective at the first use)."""
    known = current().of(_First)
    if rows not in known:
        place = digest(f"{digest(rows.position)} from {rows.first_column}")[:15] if rows.num_local else "0"
        everyone = world_group().gather_counts(int(place, 16))
        known[rows] = bool(rows.num_local) and everyone.index(int(place, 16)) == current().rank
    return known[rows]
