"""Reading a checkpoint: its tensors are compared with those to load into, read and checked, and only then loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pyg_dist.backend import host, plain_json
from pyg_dist.backend.session import generators
from pyg_dist.checkpoint.manifest import STATE, Manifest, Rows
from pyg_dist.checkpoint.snapshot import encode
from pyg_dist.errors import DAMAGED, DataError, StoreError, refusing
from pyg_dist.store.format import TensorSpec, as_torch, storage_dtype
from pyg_dist.store.reader import ShardReader
from pyg_dist.tensor import RowTensor


class _Piece(NamedTuple):
    """Rows of a shard that this rank needs."""

    key: str  # of the shard
    source: Tensor  # their numbers in the shard, int64
    target: Tensor  # their numbers on this rank, int64
    first: int  # the shard's first column


class Checkpoint:
    """A complete checkpoint on the disk. Nothing here is collective."""

    def __init__(self, path: Path) -> None:
        self.path, self.manifest = path, Manifest.load(path)
        self._reader = ShardReader(path, self.manifest.shards)
        shards = self.manifest.shards.items()
        self._shard_of = {name: key for key, shard in shards if key.startswith(STATE) for name in shard.tensors}

    def read(self, things: Mapping[str, object]) -> dict[str, object]:
        """The states, by name, checked; rows are spread as those of ``things``.

        Raises:
            DataError: A thing has other tensors than were saved.
            StoreError: The checkpoint is damaged.
        """
        targets = self._targets(things)
        pieces: dict[int, list[_Piece]] = {}

        def tensor_of(kind: str, name: str) -> Tensor:
            if kind != "$tensor":
                raise ValueError(f"{kind!r} is no kind of value")
            if name not in self.manifest.rows:
                return self.tensor(name)
            rows, target = self.manifest.rows[name], targets(name)
            if not isinstance(target, RowTensor) or tuple(target.shape) != rows.shape:
                there = "nothing" if target is None else f"{type(target).__name__} of shape {list(target.shape)}"
                raise DataError(
                    f"Expected rows of shape {list(rows.shape)} to load '{name}' of {self.path} into (got {there}): "
                    f"give load all that was saved"
                )
            if rows.sharding not in pieces:
                pieces[rows.sharding] = list(self._pieces(rows, target))
            return self._rows(name, rows, target, pieces[rows.sharding])

        with self._explained("states"):
            return {name: plain_json.decode(state, tensor_of) for name, state in self.manifest.state.items()}

    def generators(self) -> list[object]:
        """The states of the generators."""
        with self._explained("states of generators"):
            return generators.from_arrays(
                plain_json.decode(self.manifest.generators, lambda _, name: self.tensor(name))
            )

    def tensor(self, name: str) -> Tensor:
        """A tensor that is equal on all ranks."""
        return self._reader.tensor(self._shard_of.get(name, STATE), name)

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._shard_of

    def number(self, name: str) -> int:
        """A number among the states, 0 where there is none."""
        found = self.manifest.state.get(name)
        return found if isinstance(found, int) else 0

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        remedy = "load takes the one before it"
        expected = f"the {what} of a checkpoint in {self.path}"
        with refusing(StoreError, expected, f"remove its folder: {remedy}", *DAMAGED):
            try:
                yield
            except StoreError as error:
                if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
                    raise  # the files may be good
                raise StoreError(f"{error.message}; or remove the folder {self.path}: {remedy}") from error
            finally:
                self._reader.close()

    def _targets(self, things: Mapping[str, object]) -> Callable[[str], Tensor | None]:
        """Gives the tensor that a saved tensor is loaded into, by name; for an optimizer's state its parameter."""
        found, parameters = dict[str, Tensor](), dict[str, Tensor]()

        def note(name: str, tensor: Tensor) -> str:
            found[name] = tensor
            return name

        for name, thing in things.items():
            if name not in self.manifest.state:
                raise DataError(
                    f"Expected '{name}' in the checkpoint {self.path} (got {', '.join(self.manifest.state)}): leave it "
                    f"out, or load a checkpoint that has it"
                )
            if hasattr(thing, "param_groups"):
                groups = [group["params"] for group in thing.param_groups]
                self._require_groups(name, list(map(len, groups)))
                of_all = (parameter for group in groups for parameter in group)
                parameters |= {f"{name}.state.{k}": parameter for k, parameter in enumerate(of_all)}
            elif isinstance(thing, (Tensor, nn.Module)):
                encode(name, thing, note)
                saved = {known for known in self._specs() if known.startswith(f"{name}.")}
                for other in sorted(saved - found.keys()):
                    raise self._other_tensor(other, "nothing", self._specs()[other])
        for name, tensor in found.items():
            spec = self._specs().get(name)
            if not is_lazy(tensor) and (spec is None or spec.shape != tuple(tensor.shape)):
                raise self._other_tensor(name, str(list(tensor.shape)), spec)
        return lambda name: found.get(name, parameters.get(name.rpartition(".")[0]))

    def _require_groups(self, name: str, wanted: list[int]) -> None:
        """Refuse the state of an optimizer with other parameters."""
        with self._explained("states"):
            state: Any = self.manifest.state[name]
            found = [len(group["params"]) for group in state["param_groups"]]
        if found != wanted:
            raise DataError(
                f"Expected {wanted} parameters by group as '{name}' in the checkpoint {self.path} (got {found}): make "
                f"the optimizer as it was saved"
            )

    def _specs(self) -> dict[str, TensorSpec]:
        rows = {name: TensorSpec(rows.dtype, rows.shape) for name, rows in self.manifest.rows.items()}
        return {name: self.manifest.shards[key].tensors[name] for name, key in self._shard_of.items()} | rows

    def _other_tensor(self, name: str, wanted: str, spec: TensorSpec | None) -> DataError:
        there = "nothing" if spec is None else f"{list(spec.shape)}"
        return DataError(
            f"Expected {wanted} as '{name}' in the checkpoint {self.path} (got {there}): make the model as it was saved"
        )

    def _pieces(self, rows: Rows, target: RowTensor) -> Iterator[_Piece]:
        """The rows that this rank needs, of all shards with this sharding."""
        mine, order = target._sharding.ordered_position
        for key, shard in self.manifest.shards.items():
            if rows.positions in shard.tensors and len(mine):
                there = self._reader.tensor(key, rows.positions)
                place = torch.searchsorted(mine, there).clamp_(max=len(mine) - 1)
                source = (mine[place] == there).nonzero().view(-1)
                if len(source):
                    first = int(self._reader.tensor(key, rows.first_column))
                    yield _Piece(key, source, order[place[source]], first)

    def _rows(self, name: str, rows: Rows, target: RowTensor, pieces: list[_Piece]) -> RowTensor:
        """This rank's rows of a tensor, put together from shards."""
        like, first = target.to_local(), target._sharding.first_column
        local = as_torch(np.zeros(tuple(like.shape), storage_dtype(rows.dtype)), rows.dtype)
        is_there = host.zeros(like.shape[:2], dtype=torch.bool)
        for piece in pieces:
            self._reader.check(piece.key, name)
            file = self._reader.file(piece.key)
            found = as_torch(file.rows(name)[piece.source.numpy()], rows.dtype)
            if found.dim() == 1:
                local[piece.target], is_there[piece.target] = found, True
                continue
            low, high = max(first, piece.first), min(first + like.shape[1], piece.first + found.shape[1])
            if low < high:
                local[piece.target, low - first : high - first] = found[:, low - piece.first : high - piece.first]
                is_there[piece.target, low - first : high - first] = True
            file.release()
        if not is_there.all():
            raise StoreError(
                f"Expected all {rows.shape[0]} rows of '{name}' in {self.path} (some are in no file): save it again"
            )
        return RowTensor.from_local(local.to(like.device), target._sharding)
