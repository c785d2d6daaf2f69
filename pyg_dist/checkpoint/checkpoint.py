"""``save`` and ``load``: the state of a training run in a folder, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from pyg_dist.backend.session import generators, session
from pyg_dist.backend.session.agreement import raised_on_all_ranks, require_equal
from pyg_dist.checkpoint.manifest import PARTS, folder_of, numbers
from pyg_dist.checkpoint.reader import Checkpoint
from pyg_dist.checkpoint.writer import Writer
from pyg_dist.data import DistributedData
from pyg_dist.errors import OptionError, StoreError

T = TypeVar("T")


def save(
    path: str | Path,
    model: object,
    optimizer: object = None,
    scheduler: object = None,
    loader: object = None,
    keep: int = 3,
    **state: object,
) -> None:
    """Save a training run in a folder that all ranks see, complete or not at all (collective).

    Parameters and optimizer state are written once, by rank 0 or, if they are large, some by each rank; rows that are
    spread over ranks, such as those of a :class:`~pyg_dist.nn.NodeEmbedding` and their optimizer state, by the ranks
    that hold them. The generators of torch, NumPy and Python are saved, too. Files are safetensors and JSON, with
    digests. It does not matter how many ranks save and how many load.

    Args:
        path: the folder. Each checkpoint is a folder in it.
        model: a module, or whatever has ``state_dict()``; likewise the next three.
        optimizer: one; others go into ``state``.
        scheduler: of the learning rate.
        loader: of mini-batches: its position.
        keep: how many of the newest checkpoints stay.
        state: anything else by name: objects with ``state_dict()``, tensors, numbers, strings, lists and dicts of them.
            Of a ``DistributedData`` the parts are saved (:func:`parts`).

    Raises:
        OptionError: There is something else in ``state``.
        AgreementError: The ranks have different states.
        StoreError: It could not be written; the checkpoint before it is still there.

    Example:
        >>> from pyg_dist import checkpoint
        >>> optimizer = torch.optim.Adam(model.parameters())
        >>> checkpoint.save("run", model, optimizer, epoch=7)
        >>> checkpoint.load("run", model, optimizer)
        {'epoch': 7}
    """
    session.init()
    with closing(Writer(Path(path), positive("keep", keep))) as writer:
        writer.begin(named(state, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader))
        writer.wait()


def load(
    path: str | Path,
    model: object,
    optimizer: object = None,
    scheduler: object = None,
    loader: object = None,
    **state: object,
) -> dict[str, object]:
    """Load the newest checkpoint of a folder into the objects that were saved, and return plain values (collective).

    With as many ranks as saved it the losses go on bit for bit; with others, or another layout, parameters and
    optimizer state are the same bits. What is damaged is refused before anything is loaded.

    Args:
        path: as for :func:`save`.
        model: likewise.
        optimizer: likewise.
        scheduler: likewise.
        loader: likewise.
        state: by name, objects with ``load_state_dict()``, and tensors to overwrite. Everything else is returned.

    Raises:
        StoreError: There is no checkpoint, or it is damaged: the message names the file, and the tensor.
        DataError: It is of another model.
        AgreementError: The ranks see different checkpoints.

    Example:
        >>> from pyg_dist import checkpoint
        >>> embedding = pyg_dist.nn.NodeEmbedding(data, 8)
        >>> checkpoint.save("embeddings", embedding, best=0.5)
        >>> checkpoint.load("embeddings", embedding)
        {'best': 0.5}
    """
    session.init()
    checkpoint = newest(Path(path))
    if checkpoint is None:
        raise StoreError(f"Expected a checkpoint in {path} (got none): save one with pyg_dist.checkpoint")
    return load_into(checkpoint, named(state, model=model, optimizer=optimizer, scheduler=scheduler, loader=loader))


def load_into(checkpoint: Checkpoint, things: Mapping[str, object]) -> dict[str, object]:
    """See :func:`load` (collective)."""
    with raised_on_all_ranks():
        require_loadable(things, "leave it out, load returns it")
        states, drawn = checkpoint.read(things), checkpoint.generators()
    with raised_on_all_ranks((Exception,)):  # whatever the script's own things raise
        for name in sorted(things, key=lambda name: name != "loader"):  # it may refuse its position: nothing is loaded
            thing, value = things[name], states.pop(name)
            if isinstance(thing, Tensor) and isinstance(value, Tensor):
                with torch.no_grad():
                    thing.copy_(value)
            elif hasattr(thing, "load_state_dict"):
                thing.load_state_dict(value)
        generators.set_generator_states(drawn)
    return states


def newest(path: Path) -> Checkpoint | None:
    """The newest checkpoint in a folder, the same on all ranks (collective)."""
    with raised_on_all_ranks():
        number = max(numbers(path), default=0)
        found = Checkpoint(folder_of(path, number)) if number else None
    what = "none" if found is None else f"{found.path.name}, {found.manifest.digest}"
    require_equal({f"the newest checkpoint in {path}": what}, "give every rank the same folder")
    return found


def parts(path: str | Path, otherwise: T) -> Tensor | T:
    """The parts of the newest checkpoint's graph, for ``DistributedData(graph, partition=...)`` (collective).

    Methods that use several cores find other parts each time; with the same parts losses go on bit for bit.

    Args:
        path: as for :func:`save`, which was given the ``DistributedData``.
        otherwise: the result if there is no checkpoint, if other ranks saved it, or if it has no parts.

    Raises:
        StoreError: The checkpoint is damaged.

    Example:
        >>> from pyg_dist import checkpoint
        >>> checkpoint.save("parts", model, data=data)
        >>> again = DistributedData(KarateClub()[0], partition=checkpoint.parts("parts", "metis"))
        >>> checkpoint.parts("no-such-folder", "metis")
        'metis'
    """
    session.init()
    checkpoint = newest(Path(path))
    if checkpoint is None or checkpoint.manifest.num_ranks != session.world_size() or not checkpoint.has(PARTS):
        return otherwise
    with raised_on_all_ranks():
        found = checkpoint.tensor(PARTS)
    return found.to(torch.int64)


def named(state: Mapping[str, object], **given: object) -> dict[str, object]:
    """All things that are saved, by name."""
    return {name: thing for name, thing in given.items() if thing is not None} | dict(state)


def positive(name: str, value: int) -> int:
    """``value``, if it is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OptionError(f"Expected '{name}' to be a positive integer (got {value!r})")
    return value


def require_loadable(things: Mapping[str, object], remedy: str) -> None:
    """Refuse things that can be saved, but not loaded."""
    for name, thing in things.items():
        if not isinstance(thing, (Tensor, DistributedData)) and not hasattr(thing, "load_state_dict"):
            raise OptionError(
                f"Expected '{name}' to have load_state_dict, or to be a tensor (got {type(thing).__name__}): {remedy}"
            )
