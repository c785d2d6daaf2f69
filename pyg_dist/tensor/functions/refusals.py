"""What row tensors refuse, with the reason and the way out.

Functions that are not in the table are refused too, with a general message (:mod:`pyg_dist.tensor.row_tensor`). What
torch does not dispatch cannot be refused: ``docs/architecture.md`` lists it.
"""

from __future__ import annotations

from typing import Any, NoReturn

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.registry import Function, implements


@implements("__reduce_ex__")
def pickle(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """A file would hold one rank's rows, and nothing of the others."""
    raise MixedRowsError(
        f"A {type(args[0]).__name__} cannot be pickled or copied by copy.copy: each rank holds some of its rows; "
        f"save .full_tensor(), or use copy.deepcopy"
    )


@implements("_is_view", "_base.__get__")
def trace(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """The first thing that torch.compile asks a tensor for."""
    raise MixedRowsError(
        f"A {type(args[0]).__name__} has no _base, and torch.compile cannot trace it: what it sees are one rank's "
        f"rows; compile functions of plain tensors"
    )


@implements("__dlpack__", "__dlpack_device__")
def export(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Another library would take one rank's rows for all."""
    raise MixedRowsError(
        f"A {type(args[0]).__name__} cannot be exported: use .full_tensor() (all rows, collective) or .to_local()"
    )
