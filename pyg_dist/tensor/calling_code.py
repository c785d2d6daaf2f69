"""The code that calls the package: errors name the layer, the transform or the constructor that a script runs.

Nothing is recorded: the stack is searched when an error is made.
"""

from __future__ import annotations

import builtins
import dis
import sys
import sysconfig
import weakref
from collections.abc import Iterator
from functools import lru_cache
from itertools import dropwhile, takewhile
from traceback import walk_stack
from types import CodeType, FrameType

import torch
from torch import nn

from pyg_dist.backend.pickling import OfThisRun

_NAMES = {"new", "Tensor", *(kind.__name__ for kind in torch._tensor_classes)}


def is_constructor_call(frame: FrameType) -> bool:
    """Whether what runs in ``frame`` is a call of one of these constructors."""
    code, place = frame.f_code, frame.f_lasti
    if code.co_code[place + 1] == 2:  # the number of arguments: `isinstance` has two, these have one
        return False
    name = _called(code, place)
    if not name or name in _NAMES:
        return bool(name)
    names = (frame.f_locals, frame.f_globals, vars(builtins))
    value = next((known[name] for known in names if name in known), None)
    return isinstance(value, type(torch.LongTensor)) or (isinstance(value, type) and issubclass(value, torch.Tensor))


@lru_cache(maxsize=1024)
def _called(code: CodeType, place: int) -> str:
    """The name that the instruction at ``place`` calls with one argument; ``""`` where it calls none."""
    before = list(dis.get_instructions(code))
    before = before[: next(k for k, i in enumerate(before) if i.offset == place) + 1]
    call = before.pop()
    if not call.opname.startswith("CALL") or (call.arg != 1 and call.opname != "CALL_FUNCTION_EX"):
        return ""
    if before[-1].opname == "PRECALL":
        before.pop()
    depth = 0  # of the stack, read backwards: 1 where the argument has been put there
    while before and depth < 1:
        instruction = before.pop()
        depth += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
    while before and before[-1].opname in ("PUSH_NULL", "CACHE", "EXTENDED_ARG"):
        before.pop()
    is_named = bool(before) and before[-1].opname.startswith("LOAD_") and isinstance(before[-1].argval, str)
    return before[-1].argval if is_named else ""


_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember_model(model: nn.Module) -> None:
    """Remember that a script has called ``model`` on distributed data: its layers are named by their path."""
    _models.add(model)


def name_of(layer: nn.Module) -> str:
    """One line: ``'encoder.convs.1' (SAGEConv(64, 64, aggr=mean))``: its path in the outermost model, and itself."""
    text = repr(layer)
    kind = text if "\n" not in text else type(layer).__name__.removeprefix("Distributed")
    paths = [path for model in list(_models) for path, part in model.named_modules() if part is layer and path]
    return f"{max(paths, key=lambda path: path.count('.'))!r} ({kind})" if paths else kind


def _frames() -> Iterator[FrameType]:
    """The running frames, innermost first."""
    return (found for found, _ in walk_stack(sys._getframe(1)))


def running_layer() -> str:
    """Where the caller is, for the end of an error: ``" (in 'attn' (MultiheadAttention(...)) of GPSConv)"``, or ""."""
    layers, is_in_metric = list[nn.Module](), False
    for frame in _frames():  # a list of them would keep all that they hold alive
        if frame.f_code is nn.Module._call_impl.__code__:
            layers.append(frame.f_locals["self"])
        is_in_metric |= frame.f_globals.get("__name__") == "torchmetrics.metric"
    of = f" of {type(layers[-1]).__name__}" if layers and layers[-1] is not layers[0] else ""
    text = f" (in {name_of(layers[0])}{of})" if layers else ""
    return f"{text}; {_TO_METRICS}" if is_in_metric else text


_TO_METRICS = "a metric of torchmetrics that keeps rows, or is given all of them, needs sync_on_compute=False"
_GOT = "expects a whole graph (got a DistributedData, of which each rank holds a part)"


_OURS = {
    "NeighborLoader": "NeighborLoader for mini-batches",
    "LinkNeighborLoader": "LinkNeighborLoader for mini-batches",
    "ShaDowKHopSampler": "NeighborLoader(data, [num_neighbors] * depth, disjoint=True, subgraph_type='induced')",
    **dict.fromkeys(
        ("ClusterData", "ClusterLoader", "RandomNodeLoader"),
        "UniformVertexLoader(data, batch_size, cover=True, rescale=False)",
    ),
    **dict.fromkeys(
        ("GraphSAINTSampler", "GraphSAINTNodeSampler", "GraphSAINTEdgeSampler", "GraphSAINTRandomWalkSampler"),
        "UniformVertexLoader(data, batch_size), whose sums are unbiased, too",
    ),
}
"""Our loader that comes nearest to each of PyG's."""


COMPILED = (
    "torch.jit compiles for plain tensors (got tensors or edges of a DistributedData): call the module or function "
    "itself, which torch.jit has not compiled"
)


class EdgeHandle(OfThisRun, torch.Tensor):
    """Base of ``edge_index`` whose edges lie on several ranks."""

    def full_tensor(self) -> torch.Tensor:
        """All edges in the input's order, int64 ``[2, E]``, on every rank (collective)."""
        raise NotImplementedError(f"{type(self).__name__}.full_tensor")  # by each kind of edges


def who_needs_it() -> str:
    """The message of an error in a transform, a function of edges or a loader's constructor of PyG's, else nothing."""
    refusal = of_whole_graphs()
    of_pyg = [*takewhile(_is_of_pyg, dropwhile(lambda frame: not _is_of_pyg(frame), _frames()))]
    called = of_pyg[-1] if of_pyg else None  # which the script knows
    if refusal or called is None or not _is_of_pyg(called, "utils."):
        return refusal
    if called.f_code.co_name == "spmm":
        return "torch_geometric.utils.spmm takes no adj_t of a DistributedData: write adj_t @ x, its sum"
    if not any(issubclass(type(value), EdgeHandle) for value in called.f_locals.values()):
        return ""
    return (
        f"torch_geometric.utils.{called.f_code.co_name} needs all edges, and each rank holds only its own: give it "
        f"edge_index.full_tensor(), all edges, or apply it to the graph before DistributedData"
    )


def of_whole_graphs() -> str:
    """As :func:`who_needs_it`, for transforms and loaders alone, whose code would read one rank's edges."""
    loader = ""
    for frame in _frames():
        name = frame.f_code.co_name
        if frame.f_globals.get("__name__") == "torch_geometric.utils._trim_to_layer":
            return _TRIMMED
        asker = type(frame.f_locals.get("self")) if name in ("forward", "__init__") else object
        if name == "forward" and asker.__module__.startswith("torch_geometric.transforms."):
            return f"T.{asker.__name__} {_GOT}: apply it to the Data, before DistributedData"
        if name == "__init__" and asker.__module__.startswith("torch_geometric.loader."):
            loader = asker.__name__  # the outermost one is what the script knows
    ours = _OURS.get(loader, "UniformVertexLoader for mini-batches")
    return f"{loader} {_GOT}: use pyg_dist.loader.{ours}" if loader else ""


def how_to_draw_alike() -> str:
    """The remedy for ranks that draw other rows."""
    seeded = "seed the generator that draws it, or draw it after pyg_dist.init()"
    for frame in _frames():
        if frame.f_code.co_name == "collate_fn" and type(frame.f_locals.get("self")).__name__ == "RandomNodeLoader":
            return f"use pyg_dist.loader.{_OURS['RandomNodeLoader']}, or {seeded}"
    return seeded


def _is_of_pyg(frame: FrameType, package: str = "") -> bool:
    return str(frame.f_globals.get("__name__")).startswith(f"torch_geometric.{package}")


_TRIMMED = (
    "Expected whole batches on several ranks (got hops to trim): leave out num_sampled_nodes_per_hop and "
    "num_sampled_edges_per_hop, or trim_to_layer; out[:batch.batch_size] is the same"
)

INSTALLED = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib"))
