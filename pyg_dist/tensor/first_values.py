"""Equal first values: the first call of a model on row tensors broadcasts its parameters and buffers from rank 0.

So models agree even where each rank seeded its generator differently or loaded another checkpoint. A hook that torch
runs before every module's forward sees the calls.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from pyg_dist.backend.axis import Axis
from pyg_dist.errors import UnsupportedError
from pyg_dist.tensor.row_tensor import RowTensor

_settled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hooks: list[Any] = []


def install() -> None:
    """Watch all modules' forwards; the second call does nothing."""
    if not _hooks:
        _hooks.append(nn.modules.module.register_module_forward_pre_hook(_before_forward))


def _before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
    if module in _settled:
        return
    rows = next((a._rows for a in _flat(args) if isinstance(a, RowTensor)), None)
    if rows is None:
        return
    if isinstance(module, MessagePassing) and not getattr(module, "is_distributed", False):
        raise UnsupportedError(
            f"{type(module).__name__} is a stock conv and got a {rows.kind} tensor of a DistributedData: use "
            f"pyg_dist.conv.Distributed{type(module).__name__} where it exists, or the plain Data"
        )
    settle(module, rows.axis)


def _flat(args: Iterable[Any]) -> Iterable[Any]:
    for arg in args:
        if isinstance(arg, (tuple, list)):
            yield from arg
        else:
            yield arg


def settle(module: nn.Module, axis: Axis) -> None:
    """Broadcast the parameters and buffers of ``module`` from rank 0, once (collective)."""
    ready: list[Tensor] = []
    for part in module.modules():
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if any(is_lazy(t) for t in own):
            _settle_when_materialised(part, axis)
        elif part not in _settled:
            ready += [t for t in own if not isinstance(t, RowTensor)]
        if not isinstance(part, MessagePassing) or getattr(part, "is_distributed", False):
            _settled.add(part)  # stock convs are looked at, and refused, when they are called
    _broadcast(ready, axis)


def _settle_when_materialised(lazy: nn.Module, axis: Axis) -> None:
    """Broadcast once the module's own pre-hook, registered before this one, has drawn its parameters."""

    def once(module: nn.Module, args: tuple[Any, ...]) -> None:
        handle.remove()
        _broadcast([*module.parameters(recurse=False), *module.buffers(recurse=False)], axis)

    handle = lazy.register_forward_pre_hook(once)


def _broadcast(tensors: list[Tensor], axis: Axis) -> None:
    """One message per dtype and device."""
    if axis.size == 1:
        return
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():  # shared weights once
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    with torch.no_grad():
        for group in groups.values():
            flat = axis.broadcast_(torch.cat([t.detach().reshape(-1) for t in group]))
            for tensor, values in zip(group, flat.split([t.numel() for t in group]), strict=True):
                tensor.copy_(values.view_as(tensor))
