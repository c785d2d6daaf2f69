"""Constructors that copy a tensor without asking its class: of row tensors they get all rows, as ``.numpy()`` does.

``torch.tensor(x)``, ``torch.as_tensor(x, dtype=...)`` and ``torch.asarray(x, dtype=...)`` read the memory of ``x``
without ``__torch_function__``, ``__array__`` or iteration, so they would give one rank's rows. While distributed rows
are, Python functions of the same names wrap them. No operator of torch is replaced: a kernel in Python would give its
results a Python object, and then no other library could make tensors of its own class of them. Types, such as
``torch.LongTensor``, refuse (:mod:`pyg_dist.tensor.constructor_calls`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.sharding import living

Constructor = Callable[..., Any]


def _of_all_rows(stock: Constructor) -> Constructor:
    """``stock``, with all rows of a row tensor that it would copy."""

    @functools.wraps(stock)
    def wrapper(*args: Any, **options: Any) -> Any:
        if args and isinstance(args[0], RowTensor):
            args = (_copied(stock, args[0], options), *args[1:])
        elif options:
            for name in ("data", "obj"):
                if isinstance(options.get(name), RowTensor):
                    options[name] = _copied(stock, options[name], options)
        return stock(*args, **options)

    return wrapper


def _copied(stock: Constructor, x: RowTensor, options: dict[str, Any]) -> Any:
    """All rows; ``x`` itself, which ``as_tensor`` and ``asarray`` return where there is nothing to do."""
    dtype, device = options.get("dtype") or x.dtype, torch.device(options.get("device") or x.device)
    copies = stock is torch_stock["tensor"] or options.get("copy")
    return x.full_tensor() if copies or dtype != x.dtype or device != x.device else x


torch_stock: dict[str, Constructor] = {name: getattr(torch, name) for name in ("tensor", "as_tensor", "asarray")}
_WRAPPERS = {name: _of_all_rows(stock) for name, stock in torch_stock.items()}


def _add() -> None:
    torch_: Any = torch
    # Tables that torch fills once with its functions must have its own, whenever it fills them.
    torch_.utils._device._device_constructors()
    torch_.overrides.get_ignored_functions().update(_WRAPPERS.values())
    torch_.jit._builtins._get_builtin_table()
    for name, wrapper in _WRAPPERS.items():
        torch_.jit._builtins._register_builtin(wrapper, f"aten::{name}")
        setattr(torch, name, wrapper)


def _remove() -> None:
    for name, stock in torch_stock.items():
        setattr(torch, name, stock)
    if "torch._dynamo.variables.torch" in sys.modules:  # its tables are filled at its first use
        from torch._dynamo.trace_rules import clear_lru_cache
        from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

        clear_lru_cache()
        TorchInGraphFunctionVariable._get_handlers.cache_clear()


living.watch(_add, _remove)
