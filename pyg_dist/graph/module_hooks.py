"""Hooks on torch while distributed rows live: before each module's forward, an optimizer's step, a backward pass.

The first call of a model on distributed data broadcasts its parameters and buffers from rank 0, so models agree even
where each rank seeded its generator differently or loaded another checkpoint. What no hook can see (leaves that no
module owns, parameters that a lazy module or a script makes later) is made equal at its first function with rows:
:func:`pyg_dist.backend.autograd.replicated.copy_to_ranks`. In backward passes memory that is short is explained, and
losses are compared. The hooks slow every module, and make torch.compile warn.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch_geometric.nn import MessagePassing

from pyg_dist.backend import out_of_memory
from pyg_dist.backend.autograd.replicated import GatherRows, SumOverRanks, broadcast_from_main, refuse_transforms
from pyg_dist.backend.comm.checks.replicas import noted
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.session.state import current
from pyg_dist.errors import MixedRowsError, UnsupportedError, set_locator
from pyg_dist.graph import training_state
from pyg_dist.tensor.calling_code import COMPILED, EdgeHandle, remember_model, running_layer, who_needs_it
from pyg_dist.tensor.functions.layers import DistributedSyncBatchNorm
from pyg_dist.tensor.row_tensor import DerivedOperand, RowTensor
from pyg_dist.tensor.sharding import living

_autograd: Any = torch.autograd
_run = _autograd._engine_run_backward
_calls: dict[Any, Any] = {kind: kind.__call__ for kind in (torch.jit.ScriptFunction, torch._C.ScriptMethod)}
_hooks = ExitStack()  # removes them


class _Settled(weakref.WeakSet[nn.Module]):
    """The modules of a run whose parameters are the same on all ranks."""


def install() -> None:
    """Watch modules, optimizers and backward passes while distributed rows live; the second call does nothing."""
    living.watch(_add_hooks, _hooks.close)


def _add_hooks() -> None:
    _hooks.callback(nn.modules.module.register_module_forward_pre_hook(_before_forward).remove)
    note_step = register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: training_state.note_step(optimizer))
    _hooks.callback(note_step.remove)
    _hooks.callback(setattr, _autograd, "_engine_run_backward", _run)
    _autograd._engine_run_backward = _run_backward
    for kind, call in _calls.items():
        _hooks.callback(setattr, kind, "__call__", call)
        kind.__call__ = _refusing_rows(call)


def _refusing_rows(call: Callable[..., object]) -> Callable[..., object]:
    """``call`` of what torch.jit has compiled: torch asks few operands' classes there, and runs on this rank's rows."""

    def refusing(compiled: object, *args: object, **kwargs: object) -> object:
        if _is_distributed(args) or (kwargs and _is_distributed(kwargs)):
            raise MixedRowsError(COMPILED)
        return call(compiled, *args, **kwargs)

    return refusing


def _before_forward(module: nn.Module, args: tuple[object, ...]) -> None:
    if torch.compiler.is_compiling():  # the rest of this function cannot be traced
        if _is_distributed(args):
            raise UnsupportedError(_no_compile(module))
        return
    if torch._C._get_tracing_state() is not None and any(isinstance(arg, EdgeHandle) for arg in args):
        raise UnsupportedError(COMPILED)
    if module in current().of(_Settled):
        if (
            noted().is_on
            and _is_called_by_script()
            and (_is_distributed(args) or _is_distributed(_keyword_arguments()))
        ):
            training_state.note_model(module)
        return
    if not (_is_distributed(args) or _is_distributed(_keyword_arguments())):
        return
    if _is_compiled(module):
        raise UnsupportedError(_no_compile(module._orig_mod))
    if _is_stock_conv(module):
        is_of_scripts = type(module) in torch.jit._recursive.concrete_type_store.type_store
        raise UnsupportedError(
            f"{type(module).__name__} is a stock conv and got tensors or edges of a DistributedData: call "
            f"pyg_dist.distribute(model)"
            f"{' after torch.jit.script, which puts stock convs into the model that it compiles' * is_of_scripts}"
            f", which finds convs that are attributes or in an nn.ModuleList (not those in a plain list, or made in "
            f"forward), or use the plain Data"
        )
    refuse_transforms()
    remember_model(module)
    if noted().is_on:  # compared at once: models whose shapes differ would be broadcast by different calls
        training_state.note_model(module)
        world_group().barrier("model")
    broadcast_parameters(module)


def _is_called_by_script() -> bool:
    """Whether the module that the hook runs before is no part of another one whose forward runs."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename == _CALLS:
        frame = frame.f_back
    return frame.f_code.co_name != "forward"


_CALLS = nn.Module._call_impl.__code__.co_filename


def _keyword_arguments() -> tuple[object, ...]:
    """Keyword arguments of the call that the hook runs before: torch gives hooks for all modules the others alone."""
    calling = sys._getframe(2).f_locals.get("kwargs")
    return tuple(calling.values()) if isinstance(calling, dict) else ()


def _is_distributed(arg: object) -> bool:
    """Whether there is a distributed thing in ``arg``: a tensor, a handle, a whole graph."""
    if isinstance(arg, dict):
        arg = [*arg.values()]
    if isinstance(arg, (tuple, list)):  # which may be long
        return not _PLAIN.issuperset(map(type, arg)) and any(map(_is_distributed, arg))
    if isinstance(arg, (RowTensor, nn.Module)):
        return isinstance(arg, RowTensor)
    return isinstance(arg, (EdgeHandle, DerivedOperand)) or getattr(type(arg), "is_distributed", False) is True


_PLAIN = frozenset((Tensor, nn.Parameter, int, float, bool, str, type(None)))


def _is_stock_conv(module: nn.Module) -> bool:
    return isinstance(module, MessagePassing) and not getattr(module, "is_distributed", False)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod")  # asking for torch's class would import all of its compiler


def _no_compile(module: object) -> str:
    name = type(module).__name__.removeprefix("Distributed")
    return f"torch.compile of {name} cannot trace tensors or edges of a DistributedData: run it eagerly"


def broadcast_parameters(module: nn.Module) -> None:
    """Broadcast the parameters and buffers of ``module`` and of its parts from rank 0, once (collective)."""
    tensors, settled = [], current().of(_Settled)
    for part in module.modules():
        if type(part) is nn.SyncBatchNorm:
            if part is module:  # whose own forward is under way
                raise UnsupportedError(
                    "SyncBatchNorm got distributed rows, and its own code asks for a GPU: call "
                    "pyg_dist.distribute(norm), or use BatchNorm1d, which has the statistics of all ranks' rows"
                )
            part.__class__ = DistributedSyncBatchNorm
        own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        # A lazy module draws all of its own anew at its first call, a bias as well, which copy_to_ranks makes equal.
        if part not in settled and not any(map(is_lazy, own)):
            tensors += own
        if not (_is_stock_conv(part) or _is_compiled(part)):  # those are looked at, and refused, when they are called
            settled.add(part)
    broadcast_from_main([t for t in tensors if not isinstance(t, RowTensor)], world_group())


def _run_backward(outputs: Sequence[Any], *args: object, **options: object) -> object:
    is_outermost = torch._C._current_graph_task_id() == -1  # else it is one of checkpointing's
    losses = [x for x in outputs if _is_of_all_ranks(x)] if is_outermost and noted().is_on else []
    try:
        gradients = _run(outputs, *args, **options)
    except (RuntimeError, MemoryError) as error:  # of the engine's own functions: no Python runs there
        if next(_first_own_functions(outputs), None) is not None:  # else it is somebody else's
            out_of_memory.explain(error, out_of_memory.IN_BACKWARD)
        raise
    for loss in losses:
        noted().loss(loss)
    return gradients


def _is_of_all_ranks(output: object) -> bool:
    """Whether an output is a number that is made of sums over all ranks' rows, or of all rows, and of no other rows.

    One of this rank's rows, ``out.to_local().sum()``, may differ between ranks.
    """
    if type(output) is not Tensor or output.numel() != 1:
        return False
    maps = [getattr(node, "map", None) for node in _first_own_functions([output])]
    of_all = [isinstance(a, GatherRows) or (isinstance(a, SumOverRanks) and a.is_of_rows) for a in maps]
    return bool(of_all) and all(of_all)


def _first_own_functions(outputs: Any) -> Iterator[object]:
    """The functions of this package, and scripts' of rows, that the engine comes to first.

    It starts from tensors, or from edges of its graph.
    """
    nodes = [getattr(output, "node", None) or output.grad_fn for output in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if issubclass(getattr(node, "_forward_cls", object), LocalFunction) or hasattr(node, "row_records"):
            yield node
            continue
        following = {inner for inner, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        nodes += following


set_locator(running_layer, who_needs_it)
