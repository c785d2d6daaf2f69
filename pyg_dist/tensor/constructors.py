"""Constructors that copy a tensor without asking its class: of row tensors they get all rows, as ``.numpy()`` does.

``torch.tensor(x)`` and its kin read the memory of ``x`` without ``__torch_function__``, ``__array__`` or iteration, so
they would give one rank's rows. What they call can be met one floor down: ``torch.as_tensor`` and ``torch.asarray``
convert by ``aten::to.device``, which Python's ``x.to(...)`` hardly uses; ``torch.LongTensor(x)`` and its like by
``aten::alias``. Our kernels of the two gather a row tensor and do for all others what torch's do. They know from
torch's own switch whether a handler has asked for the local rows. ``torch.tensor`` detaches first, too common a call to
stand behind: a Python function of the same name wraps it.

All of this is there only while distributed rows are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from pyg_dist.tensor.row_tensor import RowTensor, local_tensors
from pyg_dist.tensor.sharding import living

# In inference mode, tensors skip autograd's keys.
_KEYS = ("AutogradCPU", "CPU")

_libraries: list[Any] = []
_tensor: Any = torch.tensor


def _is_asked_for_all_rows(x: Tensor) -> bool:
    return isinstance(x, RowTensor) and torch._C._is_torch_function_enabled()


def _to_device(
    x: Tensor,
    device: torch.device,
    dtype: torch.dtype,
    non_blocking: bool = False,
    copy: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Tensor:
    """``aten::to.device``, which gives ``x`` itself where there is nothing to do."""
    if _is_asked_for_all_rows(x) and (copy or x.dtype != dtype or x.device != device):
        x = x.full_tensor()  # type: ignore[attr-defined]
    options = {"dtype": dtype, "device": device, "non_blocking": non_blocking, "copy": copy}
    with local_tensors():
        return torch.ops.aten.to.dtype_layout(x, **options, memory_format=memory_format)  # type: ignore[no-any-return]


def _alias(x: Tensor) -> Tensor:
    """``aten::alias``."""
    if _is_asked_for_all_rows(x):
        x = x.full_tensor()  # type: ignore[attr-defined]
    with local_tensors():
        # The derivative of expand, unlike that of view, passes a gradient of this shape on as it is. A view of it
        # could not be added to in place: the engine would make a new tensor of each sum.
        return x.expand(x.shape) if x.layout is torch.strided else x.clone()


@functools.wraps(_tensor)
def _tensor_of_all_rows(data: Any, **options: Any) -> Tensor:
    return _tensor(data.full_tensor() if isinstance(data, RowTensor) else data, **options)  # type: ignore[no-any-return]


def _add() -> None:
    torch_: Any = torch
    # Tables that torch fills once with its functions must not find ours.
    torch_.utils._device._device_constructors()
    torch_.jit._builtins._get_builtin_table()
    torch_.jit._builtins._register_builtin(_tensor_of_all_rows, "aten::tensor")
    library = torch_.library.Library("aten", "IMPL")
    for key in _KEYS:
        library.impl("to.device", _to_device, key)
        library.impl("alias", _alias, key)
    _libraries.append(library)
    torch_.tensor = _tensor_of_all_rows


def _remove() -> None:
    torch_: Any = torch
    torch_.tensor = _tensor
    while _libraries:
        _libraries.pop()._destroy()


living.watch(_add, _remove)
