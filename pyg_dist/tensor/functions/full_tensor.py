"""Functions that need every row: they gather (collective), and the result is plain and equal on every rank.

Constructors gather, too, since they copy a tensor without asking its class, or make a sparse one of it. What could
only give one rank's rows is refused with the remedy. Functions that are not in the table raise a general error
(:mod:`pyg_dist.tensor.row_tensor`).
``repr`` is here as well: it shows the local rows and gathers nothing.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from pyg_dist.backend.autograd.replicated import NO_TRANSFORMS
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.ops.late_errors import raise_found
from pyg_dist.backend.pickling import refuse
from pyg_dist.errors import MixedRowsError, PygDistError, UnsupportedError
from pyg_dist.tensor.calling_code import EdgeHandle
from pyg_dist.tensor.registry import Function, implements
from pyg_dist.tensor.row_tensor import RowTensor, global_shape, local_tensors
from pyg_dist.tensor.sharding import living


@implements(
    "tolist", "item", "numpy", "__array__", "__array_wrap__", "__bool__", "__int__", "__float__", "__index__",
    "__contains__", "__reversed__", "unique", "unique_consecutive", "bincount", "histc",
    "_convert_indices_from_coo_to_csr",
)  # fmt: skip
def on_full_tensor(function: Function, *args: object, **kwargs: object) -> object:
    """Apply the function to all rows, in the original order. What a device has found until then is raised."""
    result = function(*map(_full, args), **{name: _full(value) for name, value in kwargs.items()})
    raise_found()
    return result


_DISTRIBUTED = (RowTensor, EdgeHandle)


def _full(value: object) -> object:
    if isinstance(value, _DISTRIBUTED):
        return value.full_tensor()
    return tuple(map(_full, value)) if type(value) is tuple else value  # x[rows, 0] has a tuple for an index


@implements("__repr__", "__format__")
def representation(function: Function, x: RowTensor, *_: object, **__: object) -> str:
    """Global shape and local values; no communication, so one rank alone may print."""
    with local_tensors():
        local = x.as_subclass(Tensor)
        return f"{type(x).__name__}(shape={list(global_shape(x))}, local rows {x._sharding.num_local}: {local!r})"


Constructor = Callable[..., object]

# ``torch.tensor(x)``, ``torch.as_tensor(x, dtype=...)`` and ``torch.asarray(x, dtype=...)`` read the memory of ``x``
# without ``__torch_function__``, so they would give one rank's rows. While there are distributed rows, functions of the
# same names wrap them. No operator is replaced: a kernel in Python would give its results a Python object, and no other
# library could then make tensors of its own class of them. Types such as ``torch.LongTensor`` refuse (`calling_code`).


def _of_all_rows(stock: Constructor) -> Constructor:
    """``stock``, with all rows of a row tensor, or all edges, that it would copy."""

    @functools.wraps(stock)
    def wrapper(*args: object, **options: Any) -> Any:
        if args and isinstance(args[0], _DISTRIBUTED):
            args = (_copied(stock, args[0], options), *args[1:])
        elif options:
            for name in ("data", "obj"):
                if isinstance(options.get(name), _DISTRIBUTED):
                    options[name] = _copied(stock, options[name], options)
        return stock(*args, **options)

    return wrapper


def _copied(stock: Constructor, x: RowTensor | EdgeHandle, options: dict[str, Any]) -> Tensor:
    """All rows; ``x`` itself, which ``as_tensor`` and ``asarray`` return where there is nothing to do."""
    dtype, device = options.get("dtype") or x.dtype, torch.device(options.get("device") or x.device)
    copies = stock is torch_stock["tensor"] or options.get("copy")
    return x.full_tensor() if copies or dtype != x.dtype or device != x.device else x


def _of_all_parts(stock: Constructor) -> Constructor:
    """``stock``, with all rows of each row tensor that it would read."""

    @functools.wraps(stock)
    def wrapper(*args: object, **options: Any) -> object:
        return on_full_tensor(stock, *args, **options)

    return wrapper


def _new_tensor(like: Tensor, *args: object, **options: Any) -> Any:
    """``new_tensor``, with all rows of the row tensor that it would copy; of ``like`` it takes dtype and device."""
    like = like if type(like) is Tensor else like.new_empty(0)
    return on_full_tensor(torch_stock["new_tensor"], like, *args, **options)


def _without_rows(stock: Constructor, error: type[PygDistError], message: str) -> Constructor:
    """``stock``, which would hand on this rank's rows: to a transform of functions, or to another library."""

    @functools.wraps(stock)
    def wrapper(x: object, *args: object) -> object:
        if isinstance(x, EdgeHandle) or (isinstance(x, RowTensor) and not x._sharding.is_on_one_rank):
            raise error(message)
        return stock(x, *args)

    return wrapper


_EXPORTED = "A {} cannot be exported: use .full_tensor() (all rows, collective) or .to_local()"
_TRANSFORMED = {
    "_add_batch_dim": torch._functorch.vmap, "_wrap_for_grad": torch._functorch.eager_transforms,
    "_wrap_functional_tensor": torch._functorch.eager_transforms,
}  # fmt: skip
_OWNERS: dict[str, Any] = {"new_tensor": Tensor, **_TRANSFORMED}
_WRAPPERS: dict[str, Constructor] = {
    **{name: _of_all_rows(getattr(torch, name)) for name in ("tensor", "as_tensor", "asarray")},
    **{
        name: _of_all_parts(getattr(torch, name))
        for name in (f"sparse_{layout}_tensor" for layout in ("compressed", "csr", "csc", "bsr", "bsc"))
    },
    "new_tensor": functools.wraps(Tensor.new_tensor)(_new_tensor),
    **{
        name: _without_rows(getattr(owner, name), UnsupportedError, NO_TRANSFORMS)
        for name, owner in _TRANSFORMED.items()
    },
}
torch_stock: dict[str, Constructor] = {name: getattr(_OWNERS.get(name, torch), name) for name in _WRAPPERS}


_to_dlpack = torch.to_dlpack
_exports_no_rows = _without_rows(_to_dlpack, MixedRowsError, _EXPORTED.format("tensor of distributed rows"))


def stand_for_constructor(name: str, wrapper: Constructor) -> None:
    """While there are distributed rows, ``wrapper`` is ``torch.<name>``."""
    torch_stock[name], _WRAPPERS[name] = getattr(torch, name), wrapper


def _add() -> None:
    # Tables that torch fills once with its functions must have its own, whenever it fills them.
    torch.utils._device._device_constructors()
    torch.overrides.get_ignored_functions().update([*_WRAPPERS.values(), _exports_no_rows])
    torch.jit._builtins._get_builtin_table()
    for name, wrapper in _WRAPPERS.items():
        if name not in _OWNERS:
            torch.jit._builtins._register_builtin(wrapper, f"aten::{name}")
        setattr(_OWNERS.get(name, torch), name, wrapper)


def _remove() -> None:
    for name, stock in torch_stock.items():
        owner = _OWNERS.get(name, torch)
        setattr(owner, name, stock) if owner is not Tensor else delattr(owner, name)  # which inherits it
    if "torch._dynamo.variables.torch" in sys.modules:  # its tables are filled at its first use
        from torch._dynamo.trace_rules import clear_lru_cache
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        clear_lru_cache()
        TorchInGraphFunctionVariable._get_handlers.cache_clear()


living.watch(_add, _remove)
for _owner in (torch, torch.utils.dlpack):
    living.watch(
        *(functools.partial(setattr, _owner, "to_dlpack", function) for function in (_exports_no_rows, _to_dlpack))
    )

_torch_save = torch.save


def _is_replaceable(path: Path) -> bool:
    """Whether another file may take its place: a file with one name, which this process may write to."""
    return path.is_file() and path.stat().st_nlink == 1 and os.access(path, os.W_OK)


@functools.wraps(_torch_save)
def _save(obj: object, f: Any, *args: Any, **options: Any) -> None:
    """All ranks of a script save to one path, and load from it: each writes a file of its own, which replaces it."""
    path = Path(os.path.realpath(f)) if isinstance(f, (str, os.PathLike)) else None
    if path is None or world_group().size == 1 or (path.exists() and not _is_replaceable(path)):
        _torch_save(obj, f, *args, **options)
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix=f".{path.name[:64]}.", dir=path.parent)
    except OSError:  # nothing can be made beside it
        _torch_save(obj, f, *args, **options)
        return
    with folder as name:
        own = Path(name) / path.name  # which torch writes into the file
        _torch_save(obj, own, *args, **options)
        with suppress(FileNotFoundError):
            shutil.copymode(path, own)
        own.replace(path)


living.watch(*(functools.partial(setattr, torch, "save", function) for function in (_save, _torch_save)))


@implements("__reduce_ex__")
def pickle(function: Function, x: RowTensor, *_: object, **__: object) -> object:
    """A file, or another process, would have the rows of one rank only."""
    return refuse(
        MixedRowsError(
            f"A {type(x).__name__} cannot be pickled, sent to another process or copied by copy.copy: each rank "
            f"holds some of its rows; save or send .full_tensor(), load with num_workers=0, or use copy.deepcopy"
        )
    )


@implements("_is_view", "_base.__get__")
def trace(function: Function, x: RowTensor, *_: object, **__: object) -> NoReturn:
    """``torch.compile`` reads these first when it traces a tensor."""
    raise MixedRowsError(
        f"A {type(x).__name__} has no _base, and torch.compile cannot trace it: what it sees are one rank's "
        f"rows; compile functions of plain tensors"
    )


@implements("__dlpack__", "__dlpack_device__")
def export(function: Function, x: RowTensor, *_: object, **__: object) -> NoReturn:
    """Another library would see the rows of one rank only."""
    raise MixedRowsError(_EXPORTED.format(type(x).__name__))


REFUSALS = (pickle, trace, export)
