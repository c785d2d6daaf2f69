"""Partitions by several methods compared: what they would send and cost (Demirci et al., Table 2, for any graph)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from pyg_dist.halo.plan.plan import Plan
from pyg_dist.plan.budget import solve_within
from pyg_dist.plan.parts import PartsOptions, Report, solve
from pyg_dist.pricing.base import columns
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
    volume_over_random: float | None = None  # the volume over that of random parts, where these were measured
    hybrid_over_random: float | None = None  # the same of the hybrid exchange


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
    plan, post = (
        Plan.of(edge_index, parts, num_parts, exchange, method, machine.ranks_per_node)
        for exchange in ("hybrid", "post")
    )
    messages = [s.messages for s in plan.sizes]
    return Measured(
        method, num_parts, plan.rows["post"], plan.rows["hybrid"], sum(messages) / num_parts, max(messages),
        plan.imbalance([s.work for s in plan.sizes]), max(s.rows_sent for s in plan.sizes),
        max(s.rows_sent for s in post.sizes), plan.price(model, machine).seconds, seconds,
    )  # fmt: skip


def beside_random(found: Sequence[Measured]) -> list[Measured]:
    """The same, with what they send over what random parts send, where these were measured."""
    random = {one.parts: one for one in found if one.method == "random"}

    def share(one: Measured, base: Measured) -> Measured:
        volume, hybrid = (sent / most if most else None
                          for sent, most in ((one.volume, base.volume), (one.hybrid, base.hybrid)))  # fmt: skip
        return replace(one, volume_over_random=volume, hybrid_over_random=hybrid)

    return [share(one, random[one.parts]) if one.parts in random else one for one in found]


def table(found: Sequence[Measured]) -> str:
    """A line for each method and number of parts, for people."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    return "\n".join(columns(
        found,
        ("parts", lambda one: f"{one.parts}"),
        ("method", lambda one: one.method),
        ("volume", lambda one: f"{one.volume:,}"),
        ("/random", lambda one: share(one.volume_over_random)),
        ("hybrid", lambda one: f"{one.hybrid:,}"),
        ("/random", lambda one: share(one.hybrid_over_random)),
        ("messages", lambda one: f"{one.messages:.1f}"),
        ("most", lambda one: f"{one.most_messages}"),
        ("work", lambda one: f"{one.imbalance:.2f}"),
        ("sender", lambda one: f"{one.largest_sender:,}"),
        ("epoch, s", lambda one: f"{one.epoch:.4g}"),
        ("seconds", lambda one: f"{one.seconds:.1f}"),
        left=(1,),
    ))  # fmt: skip


def plot(path: Path, found: Sequence[Measured]) -> None:
    """Draw volume and hybrid volume by parts, a line a method (needs matplotlib)."""
    figure = new_figure(9, 4)
    for axes, name, title in zip(
        figure.subplots(1, 2), ("volume", "hybrid"), ("post exchange", "hybrid exchange"), strict=True
    ):
        for method in dict.fromkeys(one.method for one in found):
            points = [(one.parts, getattr(one, name)) for one in found if one.method == method]
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
