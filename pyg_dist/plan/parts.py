"""From a graph to the parts of its nodes: solve a model, refine by minimum covers, place on machines."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.errors import OptionError
from pyg_dist.halo.plan.cover import ExchangeKind, RemoteEdges
from pyg_dist.halo.plan.levels import Hierarchy, LevelCounts
from pyg_dist.halo.plan.sizes import renumbered, rows_across
from pyg_dist.partition import METHODS as MODELS
from pyg_dist.partition import Batches, partition
from pyg_dist.partition.hypergraph import build_cover_model, choice_by_degree
from pyg_dist.partition.inputs import Array, as_edges, check_ends
from pyg_dist.partition.kahypar import hypergraph_parts
from pyg_dist.partition.metis import MAX_TRIED, build_graph_model, metis_parts, weighted_by_hubs
from pyg_dist.partition.solver import Preset, Solver, SolverOptions, require_memory
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model

METHODS = (*MODELS, "metis-cover", "cover")

FOR_SUMS = ("cover", "metis-cover")
"""Methods for the hybrid exchange alone: an edge is not multiplied where its target is, if its sum is sent."""

_TRIED: dict[str, list[tuple[str, int]]] = {
    "metis": [("metis-cut", 0), ("metis-cut", 1)], "metis-cut": [("metis-cut", 1)], "metis-cover": [],
    "hypergraph": [], "cover": [],
}  # fmt: skip
"""Methods that also find machines' parts first, and further tries of each: a method, and an offset of the seed."""

_HEAVIER = 1.05
"""Another try is taken only if its heaviest part weighs at most so many times the first try's. In-edges weigh, which
attention and max read on the target's rank; for :data:`FOR_SUMS`, entries and rows, as in
:func:`~pyg_dist.partition.inputs.node_work`."""

_MAX_COMPARED = 2_000_000
"""Edges up to which "metis" also tries "metis-cover": it takes twice as long, 16 s on one core for 1.6 million."""

_MOST_IN_EDGES = 2.0
""""metis" takes parts of "metis-cover" if their most in-edges of a rank are at most this much more than METIS'."""

_HUB_EXPONENTS, _HUB_SEEDS = (0.5, 1.0, 1.5), 4
"""Tries of "metis-cover". Rows between two machines on the R-MAT graph of benchmarks/two_machines.py: 7,200, 6,530
and, with parts that may be too heavy, 4,830 (8,796 by "metis"), of soc_slashdot0902 17,456, 16,856 and 17,159 (19,215);
of amazon_computers, between four, the best of 20 seeds 4,704, 4,802 and 4,952 (4,856)."""

_MAX_ROUNDS = 8
_LEAST_GAIN = 0.002  # of the rows: a round that saves less is the last

Report = Callable[[str, Tensor], None]
"""Called with the progress, in words, and the best parts so far."""


def _silent(step: str, parts: Tensor) -> None:
    """No report."""


@dataclass(frozen=True)
class PartsOptions:
    """How parts are found. See :func:`pyg_dist.partition.partition` for those from ``epsilon`` to ``batches``."""

    method: str | Tensor | np.typing.NDArray[np.generic] = "metis"  # one of METHODS, or the parts themselves
    epsilon: float = 0.03  # how much heavier than the mean a part may be
    seed: int = 0  # of solvers
    solver: Solver = "mt-kahypar"  # of hypergraphs
    preset: Preset | None = None  # Mt-KaHyPar's; None: the method's own
    memory: int | None = None  # bytes that a method may take
    batches: Batches | None = field(default=None, compare=False)  # mini-batches of "stochastic"
    exchange: ExchangeKind = "hybrid"  # of sums; "cover" and "metis-cover" make parts for "hybrid"
    ranks_per_node: int | None = None  # ranks on each machine; None: it is not known which ranks share one
    hierarchy: Hierarchy = "auto"  # whether ranks of a machine share rows from other machines
    model: Model | None = None  # whose step is priced where parts are compared; None: that of plans
    machine: Machine | None = None  # that it is priced for; None: the constants measured here
    bits: tuple[int, int] = (32, 32)  # of a number in the messages, forward and backward

    def __post_init__(self) -> None:
        SolverOptions(self.epsilon, self.seed, self.solver, self.preset, self.memory)
        if not isinstance(self.method, str):
            return
        if self.method not in METHODS:
            raise OptionError(
                f"Expected a partition of {', '.join(METHODS)}, or the part of each node (got {self.method!r})"
            )
        require_hybrid(self.method, self.exchange)
        if self.method == "cover" and self.solver != "mt-kahypar":
            raise OptionError(
                f"Expected solver='mt-kahypar' with partition='cover', which improves parts (got {self.solver!r})"
            )


def require_hybrid(method: str, exchange: ExchangeKind) -> None:
    """Refuse methods that save only rows of the hybrid exchange for another exchange."""
    if method in FOR_SUMS and exchange != "hybrid":
        raise OptionError(
            f"Expected exchange='hybrid' with partition={method!r} (got {exchange!r}, whose rows it makes more): "
            f"partition='hypergraph' has few of them"
        )


def find_parts(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    options: PartsOptions,
    train_mask: Tensor | None = None,
    report: Report = _silent,
) -> Tensor:
    """The rank of every node, int32 ``[N]``. Not collective; ``report`` is called if another method found them.

    Given parts stay as they are. Others are put on ranks such that few rows leave a machine. METIS, "hypergraph",
    "cover" and "metis-cover" also find parts of machines first and then cut these, and METIS is tried several times,
    for few rows and for few cut edges; of tries that are about as well balanced, that with the fewest rows between
    machines is taken. Where ranks of a machine may share rows that cross machines, "metis" takes the parts of
    "metis-cover" (up to 2 million edges) if fewer rows cross, a step of sums costs no more, and the most in-edges of a
    rank at most double. "cover" finds other parts in each run on several cores, but for a deterministic preset.
    """
    parts = solve(edge_index, num_nodes, num_parts, options, train_mask)
    if not isinstance(options.method, str) or options.ranks_per_node is None:
        return parts
    edge_index, on_each = as_edges(edge_index), options.ranks_per_node
    placed = renumbered(edge_index, parts, num_parts, on_each, options.exchange)
    if options.method not in _TRIED or on_each == 1 or on_each >= num_parts or num_parts % on_each:
        return placed

    is_for_sums, mean = options.method in FOR_SUMS, edge_index.shape[1] / max(num_nodes, 1)

    def measured(parts: Tensor) -> tuple[int, float]:
        """Rows between machines, and the weight of the heaviest part."""
        counts = LevelCounts.of(edge_index, parts, num_parts, on_each)
        counted = counts.counted(options.exchange, options.hierarchy != "off")
        load = max(s.work + mean * s.nodes if is_for_sums else s.edges for s in counted.sizes)
        return rows_across(counted.rows, on_each), load

    best = _Best(placed, measured)
    tries = [replace(options, method=method, seed=options.seed + more) for method, more in _TRIED[options.method]]
    if edge_index.shape[1] > MAX_TRIED:
        tries = []
    for number, of_try in enumerate([options, *tries]):
        best.offer(_machines_first(edge_index, num_nodes, num_parts, on_each, of_try, train_mask))
        if number:  # the first one is where it began
            at_once = solve(edge_index, num_nodes, num_parts, of_try, train_mask)
            best.offer(renumbered(edge_index, at_once, num_parts, on_each, options.exchange))
    may_share = options.exchange == "hybrid" and options.hierarchy != "off"
    if options.method != "metis" or not may_share or edge_index.shape[1] > _MAX_COMPARED:
        return best.parts
    of_sums = replace(options, method="metis-cover")
    other = find_parts(edge_index, num_nodes, num_parts, of_sums, train_mask)
    if not _for_sums(edge_index, num_parts, options, best.parts, other):
        return best.parts
    report("metis-cover", other)
    return other


def _for_sums(edge_index: Tensor, num_parts: int, options: PartsOptions, metis: Tensor, other: Tensor) -> bool:
    """Whether not METIS' parts, but those of "metis-cover" are taken by the rule of :func:`find_parts`."""
    on_each = options.ranks_per_node or num_parts
    machine = (Machine.load() if options.machine is None else options.machine).with_ranks_per_node(on_each)
    model = options.model or Model.of_layers(metis.numel(), edge_index.shape[1], None, None)

    def measured(parts: Tensor) -> tuple[int, float, int]:
        """Rows between machines, seconds of a step, and the most in-edges."""
        counts = LevelCounts.of(edge_index, parts, num_parts, on_each)
        counted = counts.chosen(options.exchange, options.hierarchy, model, machine, options.bits)
        seconds = counted.price(model, machine, options.bits).seconds
        return rows_across(counted.rows, on_each), seconds, max(s.edges for s in counted.sizes)

    (rows, seconds, edges), (fewer, cheaper, heaviest) = measured(metis), measured(other)
    return fewer < rows and cheaper <= seconds and heaviest <= _MOST_IN_EDGES * edges


def _machines_first(
    edge_index: Tensor, num_nodes: int, num_parts: int, on_each: int, options: PartsOptions, train_mask: Tensor | None
) -> Tensor:
    """A part for each machine, each of which is cut into those of its ranks: int32 ``[N]``."""
    half = replace(options, epsilon=options.epsilon / 2)  # the two may add up
    machine = solve(edge_index, num_nodes, num_parts // on_each, half, train_mask).long()
    source, target = machine[edge_index]
    parts, number = host.empty(num_nodes, dtype=torch.int32), host.empty(num_nodes, dtype=torch.int64)
    for m in range(num_parts // on_each):
        node = host.flatnonzero(machine == m)
        number[node] = host.arange(node.numel())
        inside = number[edge_index[:, (source == m) & (target == m)]]
        mask = None if train_mask is None else train_mask[node]
        parts[node] = m * on_each + solve(inside, node.numel(), on_each, half, mask)
    return parts


def solve(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    options: PartsOptions,
    train_mask: Tensor | None = None,
    report: Report = _silent,
) -> Tensor:
    """The part of every node by the method's model, int32 ``[N]``, without regard to machines. Not collective."""
    method = options.method
    is_cover = isinstance(method, str) and method in FOR_SUMS
    if not is_cover or not 1 < num_parts < num_nodes:
        method = "metis" if is_cover else method  # nothing to solve: one part, or a node each
        return partition(
            edge_index, num_nodes, num_parts, method, train_mask,
            options.epsilon, options.seed, options.solver, options.preset, options.memory, options.batches,
        )  # fmt: skip
    edge_index = as_edges(edge_index)
    check_ends(edge_index, num_nodes, "edge_index")
    require_memory(str(method), num_nodes, edge_index.shape[1], num_parts, options.memory)
    by_method = _by_cover if method == "cover" else _by_hubs
    return by_method(edge_index, num_nodes, num_parts, options, train_mask, report)


class Covered(NamedTuple):
    """Parts with their minimum cover."""

    parts: Tensor  # int32 ``[N]``
    is_post: Array  # the cover's choice for remote edges, and for local ones that of the net that reaches more parts
    rows: int  # rows that the hybrid exchange sends


def covered(edge_index: Tensor, parts: Tensor, num_parts: int, is_post: Array) -> Covered:
    """Choose post or pre for every edge by the minimum cover of the remote ones. O(E log E) time.

    A local edge costs nothing as a pin of either net. It goes to the net that reaches more parts, so that its nodes may
    move across a boundary at no cost; where both reach as many, ``is_post`` decides.
    """
    source, target = edge_index
    remote = RemoteEdges.of(edge_index, parts, num_parts)
    cover = remote.cover("hybrid")
    sent = torch.bincount(remote.rows.node[cover.left], minlength=parts.numel())
    summed = torch.bincount(remote.sums.node[cover.right], minlength=parts.numel())
    more, less = (sent[source] > summed[target]).numpy(), (sent[source] < summed[target]).numpy()
    chosen: Array = more | (is_post & ~less)
    chosen[remote.edge.numpy()] = cover.left[remote.row].numpy()
    return Covered(parts, chosen, int(cover.left.sum() + cover.right.sum()))


def refine(
    edge_index: Tensor,
    start: Covered,
    num_parts: int,
    options: PartsOptions,
    train_mask: Tensor | None = None,
    report: Report = _silent,
    rounds: range = range(_MAX_ROUNDS),
) -> Covered:
    """Rounds of: medium-grain model of the cover's choice, a V-cycle from the parts, minimum cover.

    The model's connectivity is exactly the number of rows that the parts send, and the next cover sends at most as many
    as the V-cycle leaves. A round that would send more is dropped, and ends this. Each round has its own seed.
    """
    best = start
    for number in rounds:
        solver = SolverOptions(options.epsilon, options.seed + number, preset=options.preset)
        model = build_cover_model(edge_index, best.parts.numel(), best.is_post, train_mask)
        parts = hypergraph_parts(model, num_parts, solver, "quality", best.parts)
        found = covered(edge_index, parts, num_parts, best.is_post)
        gain = best.rows - found.rows
        if gain > 0:
            best = found
            report(f"round {number + 1}: {best.rows:,} rows", best.parts)
        if gain <= _LEAST_GAIN * best.rows:
            break
    return best


def _by_hubs(
    edge_index: Tensor, num_nodes: int, num_parts: int, options: PartsOptions, train_mask: Tensor | None, report: Report
) -> Tensor:
    """METIS with links weighted by the degrees of their ends in several ways, and as "metis". The fewest rows stay."""
    epsilon, seed = options.epsilon, options.seed
    by_degree, mean = choice_by_degree(edge_index, num_nodes), edge_index.shape[1] / num_nodes

    def measured(parts: Tensor) -> tuple[int, float]:
        """Rows that are sent, and the entries and rows of the heaviest part."""
        found = covered(edge_index, parts, num_parts, by_degree)
        multiplies = torch.where(torch.from_numpy(found.is_post), edge_index[1], edge_index[0])
        entries, nodes = (torch.bincount(owner, minlength=num_parts) for owner in (parts[multiplies], parts))
        return found.rows, float((entries + mean * nodes).max())

    best = _Best(partition(edge_index, num_nodes, num_parts, "metis", train_mask, epsilon, seed), measured)
    report(f"metis: {best.rows:,} rows", best.parts)
    model = build_graph_model(edge_index, num_nodes, train_mask)
    num_seeds = _HUB_SEEDS if edge_index.shape[1] <= MAX_TRIED else 1
    for exponent in _HUB_EXPONENTS if model.neighbor.size else ():
        weighted = weighted_by_hubs(model, edge_index, exponent, train_mask)
        for number in range(num_seeds):
            best.offer(metis_parts(weighted, num_parts, epsilon, seed * num_seeds + number))
            report(f"links of hubs by degree^-{exponent}: {best.rows:,} rows", best.parts)
    return best.parts


class _Best:
    """The parts with the fewest rows so far, of those that are about as well balanced as the first.

    ``measured`` gives rows, and the weight of the heaviest part.
    """

    def __init__(self, parts: Tensor, measured: Callable[[Tensor], tuple[int, float]]) -> None:
        self.parts, self.measured = parts, measured
        self.rows, heaviest = measured(parts)
        self.limit = _HEAVIER * heaviest

    def offer(self, parts: Tensor) -> None:
        rows, heaviest = self.measured(parts)
        if rows < self.rows and heaviest <= self.limit:
            self.parts, self.rows = parts, rows


def _by_cover(
    edge_index: Tensor, num_nodes: int, num_parts: int, options: PartsOptions, train_mask: Tensor | None, report: Report
) -> Tensor:
    """A round from each start: METIS, the model of the choice by degree (two seeds), column nets. The best goes on."""
    by_degree, began = choice_by_degree(edge_index, num_nodes), time.monotonic()

    def start(name: str, seed: int) -> Tensor:
        if name == "cover":
            model = build_cover_model(edge_index, num_nodes, by_degree, train_mask)
            solver = SolverOptions(options.epsilon, seed, preset=options.preset)
            return hypergraph_parts(model, num_parts, solver, "default")
        preset = (options.preset or "default") if name == "hypergraph" else None
        return partition(edge_index, num_nodes, num_parts, name, train_mask, options.epsilon, seed, preset=preset)

    def report_of(name: str) -> Report:
        return lambda step, parts: report(f"{name}, {step}, {time.monotonic() - began:.0f} s", parts)

    found: list[tuple[Covered, Report]] = []
    for name, seed in (("metis", 0), ("cover", 0), ("cover", 1), ("hypergraph", 0)):
        say = report_of(name)
        first = covered(edge_index, start(name, options.seed + seed), num_parts, by_degree)
        say(f"start: {first.rows:,} rows", first.parts)
        found.append((refine(edge_index, first, num_parts, options, train_mask, say, range(1)), say))
    best, say = min(found, key=lambda one: one[0].rows)
    return refine(edge_index, best, num_parts, options, train_mask, say, range(1, _MAX_ROUNDS)).parts
