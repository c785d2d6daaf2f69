"""The convs that a plan is priced for, and prices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from pyg_dist.errors import OptionError
from pyg_dist.pricing.machine import Machine

Conv = Literal["gcn", "sage"]
Input = Literal["remembered", "new", "learns"]
"""The input of the first layer: a constant whose sums are kept from an earlier step, as in full-batch training from the
second epoch on; a constant whose sums are new, as in the first epoch or a mini-batch; an embedding."""

LAYERS, WIDTH = 3, 128
"""The default model, since the data does not determine one: that of Plexus' experiments (6.2)."""


class Layer(NamedTuple):
    """One conv."""

    in_channels: int  # columns that come in
    out_channels: int  # columns that go out
    learns: bool  # whether the input needs a gradient
    is_cached: bool  # whether the sums of its neighbours are known


@dataclass(frozen=True)
class Model:
    """A stack of convs on a graph, as far as costs go.

    Attributes:
        num_nodes: N.
        num_entries: stored entries of the adjacency matrix, self loops included.
        widths: columns of the input, of every hidden layer, and of the output.
        conv: the kind of all layers.
        element_size: bytes of a number.
        message_size: bytes of a number in the messages of the grid's two big sums (sums that are kept are never narrow,
            which is not counted).
        input: the input of the first layer, one of :data:`Input`.
        num_orders: node orders of the grid, 1 or 2.
        activation_passes: how often a layer's output is read or written beside its products. Bias and ReLU do so 8
            times, there and back; see `NORM_PASSES` and `DROPOUT_PASSES`.

    Example:
        >>> Model.of_layers(num_nodes=34, num_edges=156, in_channels=34, out_channels=4, layers=(2, 16)).widths
        (34, 16, 4)
        >>> wide = Model.of_layers(34, 156, 34, 4, layers=(3, 1024))
        >>> data.plan.price(wide).seconds > data.plan.price().seconds
        True
    """

    num_nodes: int
    num_entries: int
    widths: tuple[int, ...]
    conv: Conv = "gcn"
    element_size: int = 4
    message_size: int = 4
    input: Input = "remembered"
    num_orders: int = 2
    activation_passes: int = 8

    @staticmethod
    def of_layers(
        num_nodes: int,
        num_edges: int,
        in_channels: int | None,
        out_channels: int | None,
        layers: tuple[int, int] | None = None,
        conv: Conv = "gcn",
        message_size: int = 4,
    ) -> Model:
        """The model of ``layers`` = (number of layers, hidden columns); None is (:data:`LAYERS`, :data:`WIDTH`).

        Raises:
            OptionError: ``layers`` is not two positive integers.
        """
        given = (LAYERS, WIDTH) if layers is None else layers
        is_pair = isinstance(given, (tuple, list)) and len(given) == 2
        if not is_pair or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in given):
            raise OptionError(
                f"Expected model to be (number of layers, hidden width), such as (3, 128) (got {layers!r})"
            )
        depth, hidden = given
        widths = (in_channels or hidden, *[hidden] * (depth - 1), out_channels or hidden)
        return Model(num_nodes, num_nodes + num_edges, widths, conv, message_size=message_size)

    def __str__(self) -> str:
        name = {"gcn": "GCN", "sage": "GraphSAGE"}[self.conv]
        return f"{len(self.widths) - 1}-layer {name}, columns {' '.join(str(width) for width in self.widths)}"

    def layers(self) -> Iterator[Layer]:
        """Each conv in turn."""
        for number, (in_channels, out_channels) in enumerate(pairwise(self.widths)):
            is_first = number == 0
            learns, is_cached = not is_first or self.input == "learns", is_first and self.input == "remembered"
            yield Layer(in_channels, out_channels, learns, is_cached)

    @property
    def num_matrices(self) -> int:
        """Weight matrices of a layer."""
        return 1 if self.conv == "gcn" else 2

    @property
    def num_weights(self) -> int:
        """Numbers in the parameters, which every rank holds."""
        return sum(b * (self.num_matrices * a + 1) for a, b in pairwise(self.widths))

    @property
    def update_bytes(self) -> int:
        """Bytes that Adam reads and writes: weight, gradient and two moments, each there and back, and temporaries."""
        return 12 * self.num_weights * self.element_size

    def gradient_bytes(self, num_ranks: int) -> int:
        """Bytes that a rank sends in the sum of the weights' gradients, by a ring (Plexus, 4.2)."""
        return 2 * (num_ranks - 1) * self.num_weights * self.element_size // num_ranks


NORM_PASSES, DROPOUT_PASSES = 17, 19
"""Passes that take as long as a LayerNorm, and as dropout with its draws, forward and back: 2.6 and 2.9 ms for 4,096
rows of 256 float32, one thread of a Zen 4."""


def memory_range(num_bytes: Sequence[int]) -> str:
    """The smallest and largest memory of all ranks, in words."""
    low, high = min(num_bytes) / 2**20, max(num_bytes) / 2**20
    return f"{high:,.1f} MiB" if f"{low:,.1f}" == f"{high:,.1f}" else f"{low:,.1f} to {high:,.1f} MiB"


@dataclass(frozen=True)
class Price:
    """Seconds of a training step on the slowest rank, by kind of work.

    Attributes:
        sparse: products with the adjacency matrix.
        dense: products with weights.
        streams: copies, element-wise functions, the optimizer.
        messages: between ranks.
        quantize: to fewer bits and back.
    """

    sparse: float
    dense: float
    streams: float
    messages: float
    quantize: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.sparse + self.dense + self.streams + self.messages + self.quantize

    def __str__(self) -> str:
        share = {name: value / self.seconds for name, value in vars(self).items() if value > 0.005 * self.seconds}
        return f"{self.seconds:.3g} s ({', '.join(f'{name} {part:.0%}' for name, part in share.items())})"


def reduction_seconds(model: Model, machine: Machine, num_ranks: int) -> float:
    """The sums over all ranks of a step: the weights' gradients and the loss, by halving and doubling.

    Of gradients each rank of a machine sends its share to other machines.
    """
    on_each = min(machine.ranks_per_node, num_ranks)

    def send_seconds(ranks: int, share: int, is_inside: bool) -> float:
        messages = 4 * math.ceil(math.log2(ranks))
        return machine.send_seconds(model.gradient_bytes(ranks) / share, messages, num_ranks, is_inside)

    inside = 0.0 if num_ranks == 1 else send_seconds(on_each, 1, True) + 2 * machine.call_seconds
    return machine.turns(num_ranks) * inside + send_seconds(math.ceil(num_ranks / on_each), on_each, False)
