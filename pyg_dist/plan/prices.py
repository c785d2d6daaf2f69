"""Predicted costs of training in each layout: of a graph at hand, by exchange and mesh; of another, by its statistics.

From statistics the halo layout is priced for even parts that exchange with every other one (SuperGCN, eq. 2; with fewer
bits eq. 3-6), with the rows that :class:`GraphStatistics` extrapolates; the grid for the cheapest of all meshes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pyg_dist.errors import OptionError
from pyg_dist.grid.plan.cost import FORMS, Candidate, price_of
from pyg_dist.grid.plan.mesh_shape import MeshShape, Sums, meshes, nearest_cube
from pyg_dist.halo.plan.cost import HaloLoad, exchange_seconds, halo_price, quantize_seconds
from pyg_dist.halo.plan.cover import EXCHANGES, ExchangeKind
from pyg_dist.halo.plan.levels import Hierarchy, LevelCounts
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Conv, Model, Price


@dataclass(frozen=True)
class HaloCandidate:
    """One exchange of the halo layout, with its price."""

    exchange: ExchangeKind
    price: Price  # predicted, for a step
    two_levels: bool = False  # whether ranks of a machine share rows from other machines

    @property
    def seconds(self) -> float:
        """Predicted, for a step."""
        return self.price.seconds

    def __str__(self) -> str:
        return f"halo, {self.exchange} exchange{' in two levels' * self.two_levels}"

    def to_dict(self) -> dict[str, object]:
        return {
            "layout": "halo", "exchange": self.exchange, "levels": 1 + self.two_levels,
            "predicted_seconds": self.seconds,
        }  # fmt: skip


def halo_candidates(
    edge_index: Tensor,
    parts: Tensor,
    num_ranks: int,
    model: Model,
    machine: Machine,
    hierarchy: Hierarchy = "auto",
    bits: tuple[int, int] = (32, 32),
) -> list[HaloCandidate]:
    """Every exchange with these parts, in its cheaper levels, the cheapest first; of equal prices, hybrid.

    Not collective, O(E log E) time.
    """
    counts = LevelCounts.of(edge_index, parts, num_ranks, machine.ranks_per_node)

    def candidate(exchange: ExchangeKind) -> HaloCandidate:
        chosen = counts.chosen(exchange, hierarchy, model, machine, bits)
        return HaloCandidate(exchange, chosen.price(model, machine, bits), chosen.two_levels)

    kinds = sorted(EXCHANGES, key=lambda kind: kind != "hybrid")
    return sorted(map(candidate, kinds), key=lambda c: c.seconds)


def reasons(halo: Sequence[HaloCandidate], grid: Sequence[Candidate], model: Model, machine: Machine) -> str:
    """One line about the choice of layout="auto": the cheapest of each layout, their prices, and the assumptions."""
    best, other = f"{halo[0]}, {halo[0].price} a step", f"{grid[0]}, {grid[0].price} a step"
    if grid[0].seconds < halo[0].seconds:
        best, other = other, best
    return f"layout='auto': {best}; the other layout's best: {other}. Priced for a {model}; constants: {machine.source}"


GROWTH = 0.40
"""Exponent of the rows sent with the number of ranks, measured on scientific graphs that one machine can partition, 8
to 256 parts: 0.41 on pubmed, 0.39 on coauthor_cs. (Plexus, 7.1 prints 0.35 for products-14M: 18 to 22 million owned and
halo nodes from 32 to 256 ranks; denser graphs start steeper, amazon_computers with 0.57.)"""

KNOWN_RANKS, ROWS_BY_EDGE = 2048, 1934.8559e9 / (4 * 768) / 2_593_241_212
"""The default number of rows that a partition sends: as many per edge as for mag240M at 2,048 ranks (SuperGCN, Table 5:
the volume of a post exchange of 768 columns of float32)."""

HYBRID_SHARE = 1269.5784 / 1934.8559
"""Rows of the hybrid exchange over those of post (SuperGCN, Table 5)."""


@dataclass(frozen=True)
class GraphStatistics:
    """Sizes of a graph that is not at hand, and the growth of its halo."""

    num_nodes: int  # N
    num_edges: int  # E, both directions of undirected edges counted
    num_features: int  # columns of x
    num_classes: int | None  # of y; None: the output is as wide as the hidden layers
    halo_ranks: int  # the number of ranks that ``halo_rows`` holds for
    halo_rows: float  # rows sent in one post aggregation, all ranks together: halo nodes summed over ranks
    growth: float = GROWTH  # ``rows = halo_rows (ranks / halo_ranks)^growth``
    source: str = "given"  # of the numbers

    def __post_init__(self) -> None:
        classes = 1 if self.num_classes is None else self.num_classes
        least = min(self.num_nodes, self.num_edges, self.num_features, classes, self.halo_ranks)
        if least < 1 or not (self.halo_rows >= 0 and self.growth >= 0):
            raise OptionError(
                f"Expected a graph with positive numbers of nodes, edges, features, classes and ranks, and rows and "
                f"growth from 0 (got {self}): see `plan` for a graph at hand"
            )

    def rows(self, num_ranks: int) -> float:
        """Rows sent in one post aggregation; never more than remote edges of random parts."""
        if num_ranks == 1:
            return 0.0
        fitted = self.halo_rows * (num_ranks / self.halo_ranks) ** self.growth
        return min(float(fitted), self.num_edges * (1 - 1 / num_ranks))


def even_load(graph: GraphStatistics, num_ranks: int, ranks_per_node: int) -> HaloLoad:
    """The load of one of P equal parts that send each other equally much, by the hybrid exchange."""
    rows = graph.rows(num_ranks) * HYBRID_SHARE / num_ranks
    others = max(num_ranks - 1, 1)
    inside = min(ranks_per_node, num_ranks) - 1
    messages = min(num_ranks - 1, rows)
    nodes, entries = graph.num_nodes / num_ranks, (graph.num_edges + graph.num_nodes) / num_ranks
    share = inside / others
    return HaloLoad(nodes, entries, rows * share, rows * (1 - share), messages * share, messages * (1 - share))


class Epoch(NamedTuple):
    """The prices of a full-batch epoch on a number of ranks: a line of a table."""

    ranks: int  # P
    halo_nodes: float  # owned and halo nodes, summed over ranks (P, 7.1)
    halo: dict[int, Price]  # by number of bits, forward and backward alike
    grid: Price  # on the cheapest mesh
    shape: MeshShape  # that mesh
    sums: Sums  # its form
    speedups: dict[int, tuple[float, float]]  # :func:`speedup` of the widest layer by bits below 32; empty for one rank


def model_of(graph: GraphStatistics, layers: int, width: int, conv: Conv = "sage") -> Model:
    """A stack of convs on the graph."""
    channels = graph.num_features, graph.num_classes
    return Model.of_layers(graph.num_nodes, graph.num_edges, *channels, (layers, width), conv)


def epoch(graph: GraphStatistics, model: Model, num_ranks: int, machine: Machine, bits: Sequence[int] = (32,)) -> Epoch:
    """Price both layouts on ``num_ranks`` ranks."""
    load = even_load(graph, num_ranks, machine.ranks_per_node)
    halo = {b: halo_price(model, [load], machine, num_ranks, (b, b)) for b in bits}
    priced = [(price_of(model, shape, sums, machine), shape, sums) for shape in meshes(num_ranks) for sums in FORMS]
    cube = nearest_cube(num_ranks)
    grid, shape, sums = min(priced, key=lambda p: (p[0].seconds, p[1] != cube))
    width, narrow = max(model.widths[1:]), [b for b in bits if b != 32 and num_ranks > 1]
    speedups = {b: speedup(load, width, machine, num_ranks, b) for b in narrow}
    return Epoch(num_ranks, graph.num_nodes + graph.rows(num_ranks), halo, grid, shape, sums, speedups)


def crossover(epochs: Sequence[Epoch]) -> int | None:
    """The fewest ranks from which on the grid is cheaper than the halo in full precision; None: never."""
    first = None
    for line in reversed(epochs):
        if line.grid.seconds >= line.halo[32].seconds:
            break
        first = line.ranks
    return first


def speedup(load: HaloLoad, width: int, machine: Machine, num_ranks: int, bits: int) -> tuple[float, float]:
    """An exchange in full precision over the quantized one: by eq. 2 and 5-6 of SuperGCN, and as eq. 8 has it.

    Eq. 8 is ``(gamma + delta) / (1 + delta)`` with gamma = 32 / bits and delta the latency over the quantized transfer.
    """
    full = exchange_seconds(load, width, machine, num_ranks)
    quantized = exchange_seconds(load, width, machine, num_ranks, bits)
    total = quantized + quantize_seconds(load, width, machine, num_ranks, bits)
    bare = load._replace(rows_inside=0.0, rows_between=0.0)
    latency = exchange_seconds(bare, width, machine, num_ranks, bits)
    transfer = (full - latency) * bits / 32
    delta = latency / transfer
    return full / total, (32 / bits + delta) / (1 + delta)
