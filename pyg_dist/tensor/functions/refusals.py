"""Functions that row tensors refuse, with the reason and the remedy.

Functions that are not in the table raise as well, with a general message (:mod:`pyg_dist.tensor.row_tensor`). What
torch does not dispatch cannot be refused: ``docs/architecture.md`` lists it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pyg_dist.backend.pickling import refuse
from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.registry import Function, implements


@implements("__reduce_ex__")
def pickle(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A file, or another process, would have the rows of one rank only."""
    return refuse(
        MixedRowsError(
            f"A {type(args[0]).__name__} cannot be pickled, sent to another process or copied by copy.copy: each rank "
            f"holds some of its rows; save or send .full_tensor(), load with num_workers=0, or use copy.deepcopy"
        )
    )


@implements("_is_view", "_base.__get__")
def trace(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """``torch.compile`` reads these first when it traces a tensor."""
    raise MixedRowsError(
        f"A {type(args[0]).__name__} has no _base, and torch.compile cannot trace it: what it sees are one rank's "
        f"rows; compile functions of plain tensors"
    )


@implements("__dlpack__", "__dlpack_device__")
def export(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Another library would see the rows of one rank only."""
    raise MixedRowsError(
        f"A {type(args[0]).__name__} cannot be exported: use .full_tensor() (all rows, collective) or .to_local()"
    )
