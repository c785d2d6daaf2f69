r"""The price of a training step in the halo layout, by the plan's counts and a machine's constants.

Rank r takes w_r seconds of a core; in each exchange e it makes n calls, which send m messages with b bytes in all:

.. math::
    w_r = sparse_r + dense_r + streams_r + quantize_r + \sum_e \left( n c + m l + \frac{b}{B} \right)

c, l and B are measured: where ranks share cores, or each machine has one rank, processor time of all threads, those
that receive among them, else what elapses. A machine with k cores needs W seconds at least, and no more if ranks may be
interrupted (McNaughton, 1959). Its link is busy for L in an exchange, of which h are hidden behind work that waits for
no message by the link:

.. math::
    T = \max_{machines} \left( W + \sum_e \max(0, L_e - h_e) \right), \quad
    W = \max \left( \max_r w_r, \frac{1}{k} \sum_r w_r \right)

The price is the larger of two: of a rank with the mean work of its machine, and of each rank by itself. A hop of two
levels waits for another rank, which works meanwhile: on shared cores it costs no more than its messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from pyg_dist.backend.ops.quantize import is_packed, row_bytes
from pyg_dist.halo.plan.sizes import machine_of_rank
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price, reduction_seconds

ELEMENT_BYTES = 4  # float32

_ENTRY_BYTES = 4 + 4  # of a pattern: int32 column and place
_ROW_BYTES = 8  # of a pattern: where the row begins


class HaloLoad(NamedTuple):
    """The work and traffic of one rank in one aggregation."""

    nodes: float  # nodes owned
    entries: float  # rows that are read and added
    rows_inside: float  # rows sent to ranks on the same machine
    rows_between: float  # rows sent to ranks on other machines
    messages_inside: float  # messages to ranks on the same machine
    messages_between: float  # messages to ranks on other machines
    levels: int = 1  # two where what crosses machines goes by agents: its rows alone are quantized
    local_entries: float = 0.0  # of the entries, those that no message is waited for with; 0: it is not known
    rows_made: float = 0.0  # rows that packing writes, and that what arrives is added to

    def bits_inside(self, bits: int) -> int:
        """Bits of a value in the messages inside a machine, where between machines it is ``bits``."""
        return bits if self.levels == 1 else 32


def sent_by_rank(rows: Tensor, ranks_per_node: int) -> list[tuple[int, int, int, int]]:
    """By rank, rows and messages as :class:`HaloLoad` has them, of the rows that each rank sends each: ``[P, P]``.

    A message for each pair of ranks with rows. Ranks lie on machines in their order, ``ranks_per_node`` on each.
    """
    machine = machine_of_rank(len(rows), ranks_per_node)
    is_inside = machine[:, None] == machine
    columns = (rows * is_inside, rows * ~is_inside, (rows > 0) & is_inside, (rows > 0) & ~is_inside)
    return list(zip(*(column.sum(1).tolist() for column in columns), strict=True))


class ExchangeCounts(NamedTuple):
    """Rows that one aggregation sends by post, rows and sums by the chosen exchange, and weights, of all ranks."""

    post: int
    sums: int
    weights: int


def sends_weights(counts: ExchangeCounts, forward: int, backward: int, weight: int, learns: bool) -> bool:
    """Whether a product with weights that learn sends fewer bytes by the chosen exchange than by post.

    By the chosen exchange the weights are sent, and rows and sums, and the gradients of both come back, whatever
    learns beside the weights. By post rows are sent, whose gradients come back if they learn.

    ``forward``, ``backward`` and ``weight`` are bytes of a row, of its gradient, and of a weight, as of its gradient;
    ``learns``: whether the rows need a gradient.
    """
    by_rows = counts.post * (forward + backward * learns)
    return counts.sums * (forward + backward) + counts.weights * 2 * weight < by_rows


def exchange_seconds(load: HaloLoad, width: int, machine: Machine, num_ranks: int, bits: int = 32) -> float:
    r"""The messages of one aggregation of ``width`` columns on one rank, one after another, without overlap.

    .. math::
        T_i = \sum_j \left( \frac{Comm^{i,j}}{BW} + L \right)

    Source: SuperGCN, eq. 2, and eq. 5 with ``bits`` (the parameters travel in the same message); bandwidth and latency
    inside and between machines apart. Pairs of ranks without traffic cost nothing.
    """
    if not load.messages_inside + load.messages_between:
        return 0.0
    inside = _inside_seconds(load, width, machine, num_ranks, bits)
    return inside + _link_seconds(load, width, machine, num_ranks, bits)[0]


def _inside_seconds(load: HaloLoad, width: int, machine: Machine, num_ranks: int, bits: int) -> float:
    """The part of the exchange's seconds that needs a core: messages inside a machine, and all calls."""
    size = row_bytes(width, ELEMENT_BYTES, load.bits_inside(bits))
    inside = machine.send_seconds(load.rows_inside * size, load.messages_inside, num_ranks, True)
    calls = 1 if load.levels == 1 else 5  # inside, rows and sums between, to agents, from agents
    return machine.turns(num_ranks) * (calls * machine.call_seconds + inside)


def _link_seconds(load: HaloLoad, width: int, machine: Machine, num_ranks: int, bits: int) -> tuple[float, float]:
    """The seconds of messages between machines; and how many of them take a core from other work.

    The system copies and splits CPU messages as it does inside a machine; what a GPU sends needs no core.
    """
    num_bytes = load.rows_between * row_bytes(width, ELEMENT_BYTES, bits)
    link = machine.send_seconds(num_bytes, load.messages_between, num_ranks, False)
    core = machine.send_seconds(num_bytes, load.messages_between, num_ranks, True) * machine.turns(num_ranks)
    return link, min(link, core) if machine.device == "cpu" else 0.0


def quantize_seconds(load: HaloLoad, width: int, machine: Machine, num_ranks: int, bits: int) -> float:
    """Quantizing what is sent and dequantizing as much, one pass each (SuperGCN, eq. 4); rows as they are cost none."""
    if not is_packed(width, ELEMENT_BYTES, bits):
        return 0.0
    rows = load.rows_between + load.rows_inside * (load.levels == 1)
    num_bytes = 2 * rows * (width * ELEMENT_BYTES + row_bytes(width, ELEMENT_BYTES, bits))
    return machine.turns(num_ranks) * num_bytes / machine.quantize_rate


def pre_quantize_seconds(load: HaloLoad, width: int, machine: Machine, num_ranks: int, bits: int) -> float:
    """The normalisation before a quantized exchange, if there is one: a pass over the rank's rows (SuperGCN, eq. 3)."""
    if bits >= 16 or not load.messages_inside + load.messages_between:
        return 0.0
    return machine.turns(num_ranks) * load.nodes * width * ELEMENT_BYTES / machine.stream_rate


def halo_price(
    model: Model, loads: Sequence[HaloLoad], machine: Machine, num_ranks: int, bits: tuple[int, int] = (32, 32)
) -> Price:
    """A training step, forward and backward, on the machine that it takes longest (see above).

    The narrower side of a layer is aggregated; a constant input is, whatever its width, and its sums are remembered.

    ``loads`` are those of every rank, or of those that stand for all, counted with the machine's ``ranks_per_node``;
    ``bits`` of a number in the messages forward and backward (SuperGCN, eq. 3-6).
    """
    on_each, alone = min(machine.ranks_per_node, num_ranks), machine
    means: list[HaloLoad] = []
    if machine.turns(num_ranks) > 1 and len(loads) == num_ranks:  # ranks of a machine share its cores' time
        for first in range(0, num_ranks, on_each):
            of_machine = zip(*loads[first : first + on_each], strict=True)
            mean = HaloLoad(*(sum(numbers) / on_each for numbers in of_machine))
            means.append(mean._replace(levels=loads[0].levels))
        alone = replace(machine, cores=on_each)
    prices = [_price(model, load, machine, num_ranks, bits) for load in means]
    prices += [_price(model, load, alone, num_ranks, bits) for load in loads]
    return max(prices, key=lambda price: price.seconds)


def _price(model: Model, load: HaloLoad, machine: Machine, num_ranks: int, bits: tuple[int, int]) -> Price:
    turns = machine.turns(num_ranks)
    sparse = flops = messages = quantize = 0.0
    streams = float(model.update_bytes)
    for layer in model.layers():
        directions = bits if layer.learns else () if layer.is_cached else bits[:1]
        aggregated = min(layer.in_channels, layer.out_channels) if layer.learns else layer.in_channels
        of_matrix = 2.0 * load.nodes * layer.in_channels * layer.out_channels  # flops
        for number, direction in enumerate(directions):
            sparse += machine.spmm_seconds(load.entries, load.nodes + load.rows_made, aggregated)
            messages += exchange_seconds(load, aggregated, machine, num_ranks, direction)
            # While the link's messages travel: local edges, those inside, the root once forward, twice back.
            meanwhile = turns * machine.spmm_seconds(load.local_entries, 0, aggregated)
            meanwhile += turns * (model.num_matrices - 1) * (1 + number) * of_matrix / machine.gemm_rate
            meanwhile += _inside_seconds(load, aggregated, machine, num_ranks, direction)
            link, core = _link_seconds(load, aggregated, machine, num_ranks, direction)
            messages -= min(meanwhile, link - core)
            quantize += quantize_seconds(load, aggregated, machine, num_ranks, direction)
            quantize += pre_quantize_seconds(load, aggregated, machine, num_ranks, direction)
        flops += of_matrix * model.num_matrices * (3 if layer.learns else 2)
        streams += model.activation_passes * load.nodes * layer.out_channels * model.element_size
    messages += reduction_seconds(model, machine, num_ranks)
    return Price(
        turns * sparse, turns * flops / machine.gemm_rate, turns * streams / machine.stream_rate, messages, quantize
    )


def memory_bytes(
    nodes: int, edges: int, entries: int, slots: int, model: Model, cut_entries: int = 0, cut_rows: int = 0
) -> int:
    """An estimate of what one rank holds in training.

    The patterns and their transposes, what is cut out of them for each neighbour's message, a row and its gradient per
    node and width, the largest buffers, and the weights with their gradients and Adam's state.

    ``nodes`` and ``edges`` are owned, ``entries`` those of all patterns, ``slots`` rows sent and received in one
    aggregation, ``cut_entries`` and ``cut_rows`` those of all pieces that messages are added by.
    """
    patterns = (2 * entries + cut_entries) * _ENTRY_BYTES + (2 * nodes + cut_rows) * _ROW_BYTES + 8 * (nodes + edges)
    rows = 2 * nodes * sum(model.widths) + slots * max(model.widths)
    return patterns + model.element_size * (rows + 4 * model.num_weights)
