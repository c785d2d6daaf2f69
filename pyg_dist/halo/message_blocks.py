"""Messages of edges by blocks of targets, with autograd: the backward makes them again, block by block.

All in-edges of a target are in its block, so what is made of a target's messages is a function of its block alone, and
nothing has a row for every edge. Blocks of targets whose sources are all local run while the halo's messages are in
flight; in the backward the others come first, and their gradients are in flight while those run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.local_function import Context, LocalFunction, differentiable_gradients
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.session.generators import generator_states, set_generator_states
from pyg_dist.backend.sparse.csr import CSR, Block, Place, Run
from pyg_dist.backend.timing import phase
from pyg_dist.halo.transfer import HaloTransfer


@dataclass(frozen=True)
class MessageBlocks:
    """The edges of one rank, and what is made of them."""

    csr: CSR  # targets by neighbours: local rows, then halo slots
    num_sources: int  # local rows of sources, m
    num_inner: int  # so many targets come first whose sources are all local
    max_edges: int  # of a block, if it has more than one target
    places: tuple[Place, ...]  # of each input
    # send each input's rows to the halo; ``None``: it has none there, or is there already
    maps: tuple[HaloTransfer | None, ...]
    run: Run  # every block draws alike from the generators of torch, NumPy and Python

    @property
    def num_targets(self) -> int:
        """The number of this rank's targets."""
        return self.csr.num_rows

    def block(self, low: int, high: int) -> Block:
        """All in-edges of the targets from ``low`` to ``high``, exclusive."""
        first, last = (int(self.csr.on_host.rowptr[target]) for target in (low, high))
        degree = self.csr.rowptr[low : high + 1].diff()
        target = torch.repeat_interleave(degree, output_size=last - first)
        device = self.csr.device
        if self.csr.place is None:
            place = torch.arange(self.csr.first + first, self.csr.first + last, device=device)
        else:
            place = on_device(self.csr.place, device)[first:last].long()
        return Block(low, high, self.csr.col[first:last].long(), target, place)

    def cut(self, low: int, high: int) -> Iterator[Block]:
        """The blocks of some targets; an empty one where a rank has no targets: it, too, takes part."""
        rowptr = self.csr.on_host.rowptr
        while low < high:
            fits = int(torch.searchsorted(rowptr, rowptr[low] + self.max_edges, right=True)) - 1
            following = min(max(fits, low + 1), high)
            yield self.block(low, following)
            low = following
        if self.num_targets == 0:
            yield self.block(0, 0)

    def pieces(self, block: Block, inputs: Sequence[Tensor]) -> list[Tensor]:
        """A block's piece of each input, which has its halo; differentiable."""
        return [_piece(x, place, block) for x, place in zip(inputs, self.places, strict=True)]

    def start(self, inputs: Sequence[Tensor]) -> list[Pending[Tensor] | None]:
        """Send the rows that other ranks need (collective)."""
        return [None if m is None else m.start(_flat(x)) for m, x in zip(self.maps, inputs, strict=True)]

    def with_halos(self, inputs: Sequence[Tensor], halos: Sequence[Tensor | None]) -> list[Tensor]:
        """The inputs with the rows that have arrived behind them."""
        return [
            x if halo is None else torch.cat([x, halo.view(halo.shape[0], *x.shape[1:])])
            for x, halo in zip(inputs, halos, strict=True)
        ]

    def reduce_at_once(self, inputs: Sequence[Tensor]) -> Tensor:
        """Everything as one block, in torch's functions, differentiable to any order (collective)."""
        halos = [None if m is None else apply(m, _flat(x)) for m, x in zip(self.maps, inputs, strict=True)]
        whole = self.block(0, self.num_targets)
        return self.run(whole, self.pieces(whole, self.with_halos(inputs, halos)))


class _ReduceByBlocks(LocalFunction[Tensor]):
    """Inputs and halos are kept; the generators' states are, too: each block draws in them, forward and backward."""

    @staticmethod
    def forward(ctx: Context, a: MessageBlocks, *inputs: Tensor) -> Tensor:
        states, out = generator_states(), None

        def reduce(targets: tuple[int, int], rows: Sequence[Tensor]) -> None:
            nonlocal out
            for block in a.cut(*targets):
                set_generator_states(states)
                reduced = a.run(block, a.pieces(block, rows))
                if out is None:
                    out = reduced.new_empty(a.num_targets, *reduced.shape[1:])
                out[block.low : block.high] = reduced

        pending = a.start(inputs)
        with phase("aggregate"):
            reduce((0, a.num_inner), inputs)
        halos = _arrived(pending)
        with phase("aggregate"):
            reduce((a.num_inner, a.num_targets), a.with_halos(inputs, halos))
        if any(ctx.needs_input_grad):
            ctx.set_materialize_grads(False)
            ctx.a, ctx.states = a, states
            ctx.save_for_backward(*inputs, *halos)
        assert out is not None
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        a: MessageBlocks = ctx.a
        saved = ctx.saved_tensors  # once: a checkpoint recomputes them at each reading, and refuses a second one
        inputs, halos = saved[: len(a.places)], saved[len(a.places) :]
        needs = ctx.needs_input_grad[1:]
        if grad is None:
            return None, *[None] * len(needs)
        now = generator_states()
        try:
            if torch.is_grad_enabled():  # with create_graph, torch differentiates again
                set_generator_states(ctx.states)
                return None, *differentiable_gradients(lambda own: (a.reduce_at_once(own),), inputs, needs, (grad,))
            rows = a.with_halos(inputs, halos)
            found = _Gradients(a, rows, needs)

            def add(targets: tuple[int, int]) -> None:
                with phase("aggregate"):
                    for block in a.cut(*targets):
                        set_generator_states(ctx.states)
                        found.add(block, grad[block.low : block.high])

            add((a.num_inner, a.num_targets))
            pending = found.send_back()
            add((0, a.num_inner))
        finally:
            set_generator_states(now)
        return None, *found.with_returned(_arrived(pending), inputs)


class _Gradients:
    """The gradients by the inputs, halos behind them, block by block; ``None`` where none is needed."""

    def __init__(self, a: MessageBlocks, rows: Sequence[Tensor], needs: Sequence[bool]) -> None:
        self._a, self._rows = a, rows
        self._wanted = [k for k, needed in enumerate(needs) if needed]
        pairs = zip(rows, needs, strict=True)
        self._sums = [x.new_zeros(x.shape, dtype=ops.sum_dtype(x)) if needed else None for x, needed in pairs]

    def add(self, block: Block, grad: Tensor) -> None:
        """Add the gradients of a block, whose messages are made again."""
        pieces = [piece.detach() for piece in self._a.pieces(block, self._rows)]
        wanted = [pieces[k].requires_grad_() for k in self._wanted]
        with torch.enable_grad():
            out = self._a.run(block, pieces)
        found = torch.autograd.grad(out, wanted, grad, allow_unused=True)
        for k, gradient in zip(self._wanted, found, strict=True):
            if gradient is not None:  # a block may have no edges
                self._add(k, block, gradient)

    def _add(self, k: int, block: Block, gradient: Tensor) -> None:
        sums, place = self._sums[k], self._a.places[k]
        assert sums is not None
        gradient = gradient.to(sums.dtype)
        if place in ("source", "neighbour"):
            ops.scatter_add_rows(sums, block.source, gradient)
        elif place == "target":
            rowptr = self._a.csr.rowptr[block.low : block.high + 1]
            each = torch.arange(block.target.numel(), dtype=torch.int32, device=gradient.device)
            ops.spmm_csr(rowptr - rowptr[0], each, gradient, out=sums[block.low : block.high])
        elif place == "edge":
            sums.index_copy_(0, block.place, gradient)
        else:
            sums += gradient

    def send_back(self) -> list[Pending[Tensor] | None]:
        """Send the gradients of halo slots, to which no other block adds (collective)."""
        m = self._a.num_sources
        return [
            None if way is None or sums is None else way.transposed.start(_flat(sums[m:].to(rows.dtype)))
            for way, sums, rows in zip(self._a.maps, self._sums, self._rows, strict=True)
        ]

    def with_returned(self, all_returned: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients by the inputs, with those that have arrived from other ranks."""
        found: list[Tensor | None] = []
        for x, sums, returned in zip(inputs, self._sums, all_returned, strict=True):
            own = None if sums is None else sums[: x.shape[0]] if x.dim() else sums
            if own is not None and returned is not None:
                own += returned.view(x.shape)
            found.append(None if own is None else own.to(x.dtype))
        return found


def _piece(x: Tensor, place: Place, block: Block) -> Tensor:
    if place in ("source", "neighbour"):
        return x.index_select(0, block.source)
    if place == "target":
        return x[block.low : block.high].index_select(0, block.target)
    return x.index_select(0, block.place) if place == "edge" else x


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(rows.shape[0], rows.shape[1:].numel())


def _arrived(pending: Sequence[Pending[Tensor] | None]) -> list[Tensor | None]:
    return [None if messages is None else messages.wait() for messages in pending]


def reduce_by_blocks(a: MessageBlocks, inputs: Sequence[Tensor]) -> Tensor:
    """The output of each target, made of the messages to it; exact but for coded messages, collective both ways.

    Differentiable by all inputs of a floating type; twice by a pass that makes all messages at once.

    Shapes: inputs ``[m, ...]`` for ``"source"``, ``[n, ...]`` for ``"target"``, ``[m + h, ...]`` for ``"neighbour"``,
    ``[e, ...]`` for ``"edge"``, any for ``"all"``; output ``[n, ...]``.
    """
    return _ReduceByBlocks.apply(a, *inputs)
