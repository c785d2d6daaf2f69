"""First values: the first call of a model on distributed data broadcasts its parameters and buffers from rank 0.

So models agree even where each rank seeded its generator differently or loaded another checkpoint. A hook that torch
runs before every module's forward sees the calls; it is there only while distributed rows are, since it slows every
module and makes torch.compile warn. What it cannot see (leaves that no module owns, parameters that a
lazy module or a script makes later) is made equal when it first meets rows:
:func:`pyg_dist.backend.autograd.replicated.copy_to_ranks`.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_geometric.nn import MessagePassing

from pyg_dist.backend import backward_pass
from pyg_dist.backend.autograd import broadcast
from pyg_dist.backend.comm.checks.replicas import noted
from pyg_dist.backend.comm.group import world_group
from pyg_dist.errors import UnsupportedError, set_locator
from pyg_dist.graph import training_state
from pyg_dist.graph.edges import Edges
from pyg_dist.tensor.functions.batch_norm import DistributedSyncBatchNorm
from pyg_dist.tensor.layer_names import remember_model, running_layer
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.sharding import living
from pyg_dist.tensor.whole_graph import who_needs_it

_settled: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_hooks: list[Any] = []


def install() -> None:
    """Watch all modules' forwards while distributed rows are alive; the second call does nothing."""
    set_locator(running_layer, who_needs_it)
    living.watch(_add_hook, _remove_hook)


def _add_hook() -> None:
    if not _hooks:
        _hooks.append(nn.modules.module.register_module_forward_pre_hook(_before_forward))
        _hooks.append(register_optimizer_step_pre_hook(_before_step))
        backward_pass.watch(True)


def _remove_hook() -> None:
    while _hooks:
        _hooks.pop().remove()
    backward_pass.watch(False)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    training_state.note_step(optimizer)


def _before_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
    if torch.compiler.is_compiling():  # the rest of this function cannot be traced
        if _is_distributed(args):
            raise UnsupportedError(_no_compile(module))
        return
    if module in _settled:
        if noted.is_on and _is_called_by_script() and (_is_distributed(args) or _is_distributed(_keyword_arguments())):
            training_state.note_model(module)
        return
    if not (_is_distributed(args) or _is_distributed(_keyword_arguments())):
        return
    if _is_compiled(module):
        raise UnsupportedError(_no_compile(module._orig_mod))
    if _is_stock_conv(module):
        raise UnsupportedError(
            f"{type(module).__name__} is a stock conv and got tensors or edges of a DistributedData: call "
            f"pyg_dist.distribute(model), which finds convs that are attributes or in an nn.ModuleList (not "
            f"those in a plain list, or made in forward), or use the plain Data"
        )
    remember_model(module)
    if noted.is_on:  # compared at once: models whose shapes differ would be broadcast by different calls
        training_state.note_model(module)
        world_group().meet("model")
    broadcast_parameters(module)


def _is_called_by_script() -> bool:
    """Whether the module that the hook runs before is no part of another one whose forward runs."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == _CALLS:
        frame = frame.f_back
    return frame.f_code.co_name != "forward"


_CALLS = nn.Module._call_impl.__code__.co_filename


def _keyword_arguments() -> tuple[Any, ...]:
    """Those of the call that the hook runs before: torch passes only positional ones on to hooks for all modules."""
    calling = sys._getframe(2).f_locals.get("kwargs")
    return tuple(calling.values()) if isinstance(calling, dict) else ()


def _is_distributed(arg: Any) -> bool:
    """Whether there is a distributed thing in ``arg``: a tensor, a handle, a whole graph."""
    if isinstance(arg, (tuple, list)):
        return any(_is_distributed(item) for item in arg)
    if isinstance(arg, dict):
        return any(_is_distributed(item) for item in arg.values())
    if isinstance(arg, (RowTensor, nn.Module)):
        return isinstance(arg, RowTensor)
    return isinstance(arg, Edges) or getattr(type(arg), "is_distributed", False) is True


def _is_stock_conv(module: nn.Module) -> bool:
    return isinstance(module, MessagePassing) and not getattr(module, "is_distributed", False)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod")  # asking for torch's class would import all of its compiler


def _no_compile(module: Any) -> str:
    name = type(module).__name__.removeprefix("Distributed")
    return f"torch.compile of {name} cannot trace tensors or edges of a DistributedData: run it eagerly"


def broadcast_parameters(module: nn.Module) -> None:
    """Broadcast the parameters and buffers of ``module`` and of its parts from rank 0, once (collective)."""
    tensors = []
    for part in module.modules():
        if type(part) is nn.SyncBatchNorm:
            if part is module:  # whose own forward is under way
                raise UnsupportedError(
                    "SyncBatchNorm got distributed rows, and its own code asks for a GPU: call "
                    "pyg_dist.distribute(norm), or use BatchNorm1d, which has the statistics of all ranks' rows"
                )
            part.__class__ = DistributedSyncBatchNorm
        if part not in _settled:
            tensors += [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        if not (_is_stock_conv(part) or _is_compiled(part)):  # those are looked at, and refused, when they are called
            _settled.add(part)
    broadcast.broadcast_from_main(
        [t for t in tensors if not isinstance(t, RowTensor) and not is_lazy(t)], world_group()
    )
