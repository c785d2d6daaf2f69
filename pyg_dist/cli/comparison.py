"""Partitions by several methods compared: what they would send and cost (Demirci et al., Table 2, for any graph)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pyg_dist.halo.plan.plan import Plan
from pyg_dist.plan.budget import solve_within
from pyg_dist.plan.parts import PartsOptions, Report, solve
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.pricing.plot import new_figure


@dataclass(frozen=True)
class Measured:
    """One method at one number of parts."""

    method: str  # of the partition
    parts: int  # how many
    volume: int  # rows that a post exchange sends
    hybrid: int  # rows that the hybrid exchange sends
    messages: float  # of a rank in the hybrid exchange, on average
    most_messages: int  # of the rank with the most
    imbalance: float  # largest over mean of the ranks' work
    largest_sender: int  # rows of the rank that sends most in the hybrid exchange
    largest_post_sender: int  # the same of a post exchange
    epoch: float  # predicted seconds of a training step
    seconds: float  # to partition


def found_parts(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    options: PartsOptions,
    train_mask: Tensor | None,
    time_budget: float | None,
    report: Report,
) -> tuple[Tensor, float]:
    """The part of each node, and the seconds that it took to find them."""
    began = time.perf_counter()
    if time_budget is None:
        parts = solve(edge_index, num_nodes, num_parts, options, train_mask, report)
    else:
        parts = solve_within(time_budget, edge_index, num_nodes, num_parts, options, train_mask)
    return parts, time.perf_counter() - began


def measured(
    edge_index: Tensor, parts: Tensor, num_parts: int, method: str, seconds: float, model: Model, machine: Machine
) -> Measured:
    """What these parts send and cost."""
    plan = Plan.of(edge_index, parts, num_parts, "hybrid", method, machine.ranks_per_node)
    post = Plan.of(edge_index, parts, num_parts, "post", method, machine.ranks_per_node)
    messages = [s.messages for s in plan.sizes]
    return Measured(
        method, num_parts, plan.rows["post"], plan.rows["hybrid"], sum(messages) / num_parts, max(messages),
        plan.imbalance([s.work for s in plan.sizes]), max(s.rows_sent for s in plan.sizes),
        max(s.rows_sent for s in post.sizes),
        plan.price(model, machine).seconds, seconds,
    )  # fmt: skip


def beside_random(lines: Sequence[Measured]) -> list[tuple[Measured, float | None, float | None]]:
    """Each line with its volume and hybrid volume over those of random parts, where these were measured."""
    random = {line.parts: line for line in lines if line.method == "random"}

    def share(line: Measured, name: str) -> float | None:
        base = getattr(random[line.parts], name) if line.parts in random else 0
        return getattr(line, name) / base if base else None

    return [(line, share(line, "volume"), share(line, "hybrid")) for line in lines]


def to_dict(lines: Sequence[Measured]) -> list[dict[str, Any]]:
    """Plain values for programs."""
    return [
        vars(line) | {"volume_over_random": volume, "hybrid_over_random": hybrid}
        for line, volume, hybrid in beside_random(lines)
    ]


def table(lines: Sequence[Measured]) -> str:
    """A line for each method and number of parts, for people."""
    header = f"{'parts':>6} {'method':<11}{'volume':>12}{'/random':>8}{'hybrid':>12}{'/random':>8}{'messages':>10}"
    text = [f"{header}{'most':>6}{'work':>7}{'sender':>10}{'epoch, s':>11}{'seconds':>9}"]
    for line, volume, hybrid in beside_random(lines):
        shares = ["-" if share is None else f"{share:.3f}" for share in (volume, hybrid)]
        text.append(
            f"{line.parts:>6} {line.method:<11}{line.volume:>12,}{shares[0]:>8}{line.hybrid:>12,}{shares[1]:>8}"
            f"{line.messages:>10.1f}{line.most_messages:>6}{line.imbalance:>7.2f}{line.largest_sender:>10,}"
            f"{line.epoch:>11.4g}{line.seconds:>9.1f}"
        )
    return "\n".join(text)


def plot(path: Path, lines: Sequence[Measured]) -> None:
    """Draw volume and hybrid volume by parts, a line a method (needs matplotlib)."""
    figure = new_figure(9, 4)
    panels: Iterable[Any] = figure.subplots(1, 2)
    for axes, name, title in zip(panels, ("volume", "hybrid"), ("post exchange", "hybrid exchange"), strict=True):
        for method in dict.fromkeys(line.method for line in lines):
            points = [(line.parts, getattr(line, name)) for line in lines if line.method == method]
            axes.plot(*zip(*points, strict=True), label=method, marker="o")
        axes.set(xscale="log", yscale="log", xlabel="parts", ylabel="rows sent in an aggregation", title=title)
    axes.legend()
    figure.savefig(path)


def options_for(options: PartsOptions, method: str) -> PartsOptions:
    """The options of one method of several: what only others take is left out."""
    is_hypergraph = method in ("hypergraph", "stochastic")
    return replace(
        options, method=method,
        solver=options.solver if is_hypergraph else "mt-kahypar",
        preset=options.preset if is_hypergraph or method == "cover" else None,
        batches=options.batches if method == "stochastic" else None,
    )  # fmt: skip
