"""Convs with their own messages, by blocks of targets: PyG's steps on some edges at a time, recomputed in the backward.

Each argument of ``message`` and ``aggregate`` has rows of sources, targets or edges. Both functions run on a block's
rows of each, forward without gradients and in the backward with them (:mod:`pyg_dist.halo.message_blocks`).

A trial on a few synthetic edges finds how many bytes an edge takes, which inputs the output depends on, and whether
blocks are possible. They are not if a function needs more than one target's edges at a time (batch norm,
``alpha.max()``), uses a tensor that learns and is no input, or stores state.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch_geometric.nn import MessagePassing

from pyg_dist.backend import ops
from pyg_dist.backend.session.generators import generator_states, set_generator_states
from pyg_dist.backend.session.settings import MESSAGE_MIB
from pyg_dist.backend.sparse.csr import Block, Place
from pyg_dist.conv.fast_paths import has_changed_step, is_hooked
from pyg_dist.conv.inputs import node_rows, place_of_nodes
from pyg_dist.errors import MixedRowsError
from pyg_dist.graph.edge_blocks import BlockEdges
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.layer_call import known_neighbour_rows, neighbour_rows
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.functions.moved_rows import MovedRows
from pyg_dist.tensor.row_tensor import local_tensors

_TRIAL_EDGES, _TRIAL_TARGETS = 64, 2

_MAX_MESSAGE_BYTES = 1 << 16
"""Assumed of a message before the trial: where all messages fit by this bound, no trial is needed."""

_PEAK_FACTOR = 2
"""Peak bytes over the bytes that autograd saves: each saved tensor may have a gradient."""

_BLOCK_BYTES = 64 << 20
"""A block's limit, so that its memory is used again. Processor time of an epoch of EdgeConv on the graph `small`, one
thread: 2.4 s, with 512 MiB 3.9 s, with 16 MiB 3.5 s (benchmarks/convs.py)."""


def reduce_messages(conv: MessagePassing, edges: Edges, size: object, given: dict[str, object]) -> Any:
    """The result of ``propagate``, by blocks (collective).

    ``None`` if all edges go at once: if messages fit into ``PYG_DIST_MESSAGE_MIB``, or blocks are not possible.
    """
    call = _Call.of(conv, edges, size, given) if _may_run(conv) else None
    if call is None:
        return None
    limit, most = MESSAGE_MIB.value() * 2**20, max(edges.rows.counts)  # the same on all ranks
    known = _bytes_of_edge.setdefault(conv, {})
    if known.get(call.signature, _MAX_MESSAGE_BYTES) * most <= limit:
        return None
    trial = call.try_out()
    known[call.signature] = 0 if trial is None else trial.num_bytes
    if trial is None or trial.num_bytes * most <= limit:
        return None
    out = call.run(trial.used, max(int(min(limit, _BLOCK_BYTES)) // trial.num_bytes, 1))
    if conv.stock.update is MessagePassing.update:
        return out
    collected = conv._collect(_names(conv, "update"), edges, _sizes(size), given)
    return conv.update(out, **conv.inspector.collect_param_data("update", collected))


_bytes_of_edge: weakref.WeakKeyDictionary[nn.Module, dict[object, int]] = weakref.WeakKeyDictionary()
"""By conv and shapes of its inputs; 0 if blocks are not possible."""


def _may_run(conv: MessagePassing) -> bool:
    """Whether no hook or replaced step could see that blocks are computed, and no parameter is lazy or distributed."""
    if has_changed_step(conv) or conv.decomposed_layers > 1:
        return False
    if any(is_hooked(part) for part in conv.modules() if part is not conv):
        return False
    return not any(is_lazy(p) or isinstance(p, RowTensor) for p in conv.parameters())


def _names(conv: MessagePassing, *steps: str) -> set[str]:
    """The arguments that steps of ``conv`` take from ``propagate``'s."""
    return set(conv.inspector.get_flat_param_names(steps, exclude=conv.special_args))


def _sizes(size: Any) -> list[int | None]:
    return [None, None] if size is None else list(size)


@dataclass(frozen=True)
class _Input:
    """A tensor of which each block takes its rows."""

    place: Place  # whether it has rows of sources, targets or edges
    value: Tensor  # as the conv has given it
    name: str | None = None  # the steps' argument; ``None`` for rows of nodes, which the steps get as ``_i`` and ``_j``
    stand_in: Tensor | None = None  # a meta tensor for rows of nodes, by which ``propagate`` finds a block's rows
    dim: int = 0  # the dimension of the rows in the steps; in ``value`` it is 0


class _Trial(NamedTuple):
    """The findings of a run on synthetic edges."""

    num_bytes: int  # that autograd saves: of all edges (of one run), or per edge (the difference of two runs)
    used: set[int]  # the inputs and parameters that the output depends on, by index, inputs first


@dataclass
class _Call:
    """One call of ``propagate``."""

    conv: MessagePassing
    edges: Edges
    size: object
    given: dict[str, object]  # the arguments of ``message`` and ``aggregate``, with stand-ins for tensors of nodes
    inputs: list[_Input]  # tensors with rows of nodes or edges, and plain ones that learn
    parameters: list[Tensor]  # of the conv, those that learn
    autocast: partial[torch.autocast]  # makes the present autocast context again, in the backward
    state: dict[nn.Module, dict[str, Any]] = field(default_factory=dict)  # attributes of the conv and its submodules

    @staticmethod
    def of(conv: MessagePassing, edges: Edges, size: object, given: dict[str, object]) -> _Call | None:
        """The call; ``None`` if an argument cannot be cut into blocks."""
        names = _names(conv, "message", "aggregate")
        values: dict[str, object] = {}
        inputs: list[_Input] = []
        for base in sorted({name[:-2] for name in names if name.endswith(("_i", "_j"))} & given.keys()):
            pair = given[base]
            # A single tensor has rows of the end that it is read at; sources and targets may be different nodes.
            alone = [pair if base + suffix in names else None for suffix in ("_j", "_i")]
            ends = pair if isinstance(pair, (tuple, list)) else alone
            stand_ins: list[Any] = list(ends)
            for end, suffix in enumerate(("_j", "_i")):
                x = ends[end] if len(ends) == 2 else None
                if isinstance(x, Tensor):
                    x = node_rows(conv, edges.graph, x, end)
                    dim = x.place if type(x) is MovedRows else 0
                    if place_of_nodes(conv, x) != dim:
                        return None
                    rows = x.of if dim else x.to_rows()
                    stand_ins[end] = torch.empty(x.shape, dtype=rows.dtype, device="meta")
                    if base + suffix in names:
                        inputs.append(_Input("target" if end else "source", rows, None, stand_ins[end], dim))
            values[base] = tuple(stand_ins)
            if base in names:  # rows of all nodes
                return None
        for name in sorted(names & given.keys() - values.keys()):
            value = values[name] = given[name]
            own, dim = (value.of, value.place) if type(value) is MovedRows else (value, 0)
            if isinstance(own, EdgeTensor) and own._sharding is edges.rows:
                inputs.append(_Input("edge", own, name, dim=dim))
            elif isinstance(value, Tensor) and value.requires_grad and not isinstance(own, RowTensor):
                inputs.append(_Input("all", value, name))
            elif isinstance(own, (RowTensor, tuple, list)):
                return None
        if any(i.value.requires_grad and i.value.dtype not in ops.FLOATS for i in inputs):
            return None
        parameters = [p for p in conv.parameters() if p.requires_grad]
        kind = edges.graph.device.type
        # Without autocast's cache: it would give a block the cast parameters of another block.
        autocast = partial(
            torch.autocast, kind, dtype=torch.get_autocast_dtype(kind), enabled=torch.is_autocast_enabled(kind),
            cache_enabled=False,
        )  # fmt: skip
        call = _Call(conv, edges, size, values, inputs, parameters, autocast)
        call.state = {part: _state_of(part) for part in conv.modules()}
        return call

    @property
    def signature(self) -> Any:
        shapes = ((i.place, i.dim, i.value.shape[1:], i.value.dtype, i.value.requires_grad) for i in self.inputs)
        return self.conv.training, torch.is_grad_enabled(), *self.autocast.keywords.values(), *shapes

    def run(self, used: set[int], max_edges: int) -> Any:
        edges, tensors = self.edges, [self._local(i) for i in self.inputs]
        for p in self.conv.parameters():
            if not p.requires_grad:
                edges.rows.copy_to_ranks(p)
        for k, p in enumerate(self.parameters, len(tensors)):
            tensors.append(("all", edges.rows.copy_to_ranks(p) if k in used else p))
        inputs = [(place, x if k in used else x.detach()) for k, (place, x) in enumerate(tensors)]

        neighbour_id = cache(lambda: edges.graph.neighbour_id)

        def reduce(block: Block, pieces: list[Tensor]) -> Tensor:
            return self._reduce(BlockEdges.of_block(edges, block, neighbour_id), pieces)

        out = edges.graph.reduce_by_blocks(edges, inputs, reduce, max_edges, self.conv)
        rows = NodeTensor.from_local(out, edges.graph.targets)
        is_batch = any(own.dim for own in self.inputs)
        return MovedRows.make(rows, self.conv.node_dim % rows.dim() if is_batch else 0)

    def _local(self, given: _Input) -> tuple[Place, Tensor]:
        """Where a block finds the rows of an input, and the rows (collective for integers of sources)."""
        x = given.value
        if not isinstance(x, RowTensor):
            return given.place, self.edges.rows.copy_to_ranks(x)
        if given.place == "source":
            known = known_neighbour_rows(x, self.edges.graph)
            if known is None and x.dtype not in ops.FLOATS:
                known = neighbour_rows(x, self.edges.graph)
            if known is not None:
                return "neighbour", known
        return given.place, x.to_local()

    def _reduce(self, edges: BlockEdges, pieces: Sequence[Tensor], is_trial: bool = False) -> Tensor:
        """Run ``message`` and ``aggregate`` on a block's pieces of inputs and parameters."""
        conv, given = self.conv, dict(self.given)
        of_inputs, of_parameters = pieces[: len(self.inputs)], pieces[len(self.inputs) :]
        for own, piece in zip(self.inputs, of_inputs, strict=True):
            if own.place == "all":
                given[own.name] = piece  # type: ignore[index]
                continue
            rows = MovedRows.make(EdgeTensor.from_local(piece, edges.rows), own.dim)
            if own.stand_in is None:
                given[own.name] = rows  # type: ignore[index]
            else:
                edges.pieces[id(own.stand_in), int(own.place == "target")] = rows
        with self.autocast(), self._as_it_was(of_parameters, is_trial):
            collected = conv._collect(_names(conv, "message", "aggregate"), edges, _sizes(self.size), given)
            messages = conv.message(**conv.inspector.collect_param_data("message", collected))
            out = conv.aggregate(messages, **conv.inspector.collect_param_data("aggregate", collected))
        out = out.of if type(out) is MovedRows else out
        if not isinstance(out, NodeTensor) or out._sharding is not edges.graph.targets:
            raise MixedRowsError(f"Expected {conv.stock.__name__}.aggregate to give a row for each node (got others)")
        return out.to_local()

    @contextmanager
    def _as_it_was(self, of_parameters: Sequence[Tensor], is_trial: bool) -> Iterator[None]:
        """Context in which the conv has the state of the call, and these parameters; its changes are undone."""
        now = {part: _state_of(part) for part in self.state}
        replaced = {id(p): piece for p, piece in zip(self.parameters, of_parameters, strict=True)}
        before = {}
        for part, state in self.state.items():
            own = {name: replaced.get(id(p), p) for name, p in state["_parameters"].items()}
            before[part] = {**state, "_parameters": own}
            if is_trial:
                before[part]["_buffers"] = {n: b if b is None else b.clone() for n, b in part._buffers.items()}
            _replace(part, before[part])
        try:
            yield
            if is_trial and any(_has_changed(part, state) for part, state in before.items()):
                raise MixedRowsError("Messages were expected to leave nothing behind (got a module that they change)")
        finally:
            for part, state in now.items():
                _replace(part, state)

    def try_out(self) -> _Trial | None:
        """Run the steps on synthetic edges, equal on all ranks; ``None`` if blocks are not possible. Not collective."""
        drawn = generator_states()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                few, more = (self._try_out(k * _TRIAL_EDGES) for k in (1, 2))
        except Exception:  # whatever a step raises when given something that it was not made for
            return None
        finally:
            set_generator_states(drawn)
        if few is None or more is None:
            return None
        return _Trial(_PEAK_FACTOR * max((more.num_bytes - few.num_bytes) // _TRIAL_EDGES, 1), few.used)

    def _try_out(self, num_edges: int) -> _Trial | None:
        """One run; ``None`` if a message is still referenced afterwards, or a tensor that learns is no input."""
        edges = BlockEdges.made_up(self.edges, num_edges, _TRIAL_TARGETS)
        rows = weakref.ref(edges.rows)
        trial = self._saved_by_autograd(edges, num_edges)
        del edges
        return trial if rows() is None else None

    def _saved_by_autograd(self, edges: BlockEdges, num_edges: int) -> _Trial | None:
        pieces = [i.value.detach() if i.place == "all" else _made_up(i.value, num_edges) for i in self.inputs]
        of_parameters = [p.detach() for p in self.parameters]
        learns = [*(i.value.requires_grad for i in self.inputs), *(True for _ in of_parameters)]
        pieces = [x.requires_grad_(needed) for x, needed in zip([*pieces, *of_parameters], learns, strict=True)]
        kept: dict[int, torch.UntypedStorage] = {}  # by address: kept alive, so that no address is used twice

        def keep(x: Tensor) -> None:
            with local_tensors():
                storage = x.untyped_storage()
                kept[storage.data_ptr()] = storage

        with saved_tensors_hooks(keep, lambda _: None):  # type: ignore[arg-type, return-value]
            out = self._reduce(edges, pieces, is_trial=True)
        used = _leaves(out, pieces)
        if used is None:
            return None
        for x in pieces[: len(self.inputs)]:
            keep(x)
        return _Trial(sum(storage.nbytes() for storage in kept.values()), used)


def _state_of(part: nn.Module) -> dict[str, object]:
    """The attributes of a module, with copies of its dicts of parameters, buffers and submodules."""
    state = dict(vars(part))
    return state | {name: dict(state[name]) for name in ("_parameters", "_buffers", "_modules")}


def _replace(part: nn.Module, state: dict[str, object]) -> None:
    vars(part).clear()
    vars(part).update(state)


def _has_changed(part: nn.Module, state: dict[str, object]) -> bool:
    now = vars(part)
    is_same = now.keys() == state.keys() and all(now[name] is value for name, value in state.items())
    return not is_same or any(b is not None and b._version > 0 for b in part._buffers.values())


def _made_up(like: Tensor, num_edges: int) -> Tensor:
    """Synthetic rows: ones, or zeros for integers, which may be indices."""
    shape = (num_edges, *like.shape[1:])
    with local_tensors():
        return torch.full(shape, 1 if like.is_floating_point() else 0, dtype=like.dtype, device=like.device)


def _leaves(out: Tensor, pieces: Sequence[Tensor]) -> set[int] | None:
    """The indices of the pieces that ``out`` depends on; ``None`` if it depends on another tensor that learns."""
    known, used = {id(piece): k for k, piece in enumerate(pieces)}, set()
    seen: set[Node | None] = {None}
    nodes = [out.grad_fn]
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        assert node is not None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if id(leaf) not in known:
                return None
            used.add(known[id(leaf)])
        nodes += [following for following, _ in node.next_functions]
    return used
