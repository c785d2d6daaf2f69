"""``plan --ranks 1 2 4 8``: numbers of ranks compared, a line for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pyg_dist.errors import OptionError
from pyg_dist.pricing.base import DistributionPlan, fold
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.pricing.plot import new_figure, number_ranks

MIB = 2**20


@dataclass(frozen=True)
class RankCount:
    """What training on a number of ranks would cost."""

    ranks: int  # P
    layout: str  # the layout that was planned, in words
    seconds: float  # of a training step
    speedup: float  # of one process over these
    memory_bytes: int  # of the rank that needs most
    sent_bytes: int  # in one aggregation of ``width`` columns, all ranks together
    imbalance: float  # the most loaded rank over the mean, of nodes


def compare(
    counts: Sequence[int], plan_of: Callable[[int], DistributionPlan], width: int, model: Model, machine: Machine
) -> list[RankCount]:
    """Plan for one rank and for each of ``counts``, in ascending order."""
    plans = {count: plan_of(count) for count in sorted({1, *counts})}
    seconds_of = {count: plan.price(model, machine).seconds for count, plan in plans.items()}
    found = []
    for count in sorted(set(counts)):
        plan, seconds = plans[count], seconds_of[count]
        nodes = plan.nodes
        imbalance = max(nodes) * len(nodes) / max(sum(nodes), 1)
        memory, sent = max(plan.memory_bytes(model)), plan.halo_bytes(width)
        found.append(RankCount(count, plan.layout, seconds, seconds_of[1] / seconds, memory, sent, imbalance))
    return found


def table(found: Sequence[RankCount], width: int, model: Model, machine: Machine) -> str:
    """The lines for people, and which number is worth it."""
    lines = [
        f"predicted for a {model}; MiB sent are of one aggregation of {width} columns",
        f"constants: {machine.source}",
        f"{'ranks':>6}  {'layout':<6}  {'s a step':>10}  {'speed-up':>8}  {'MiB a rank':>10}  {'MiB sent':>10}  "
        "max/mean nodes",
    ]
    for one in found:
        lines.append(
            f"{one.ranks:>6}  {one.layout:<6}  {one.seconds:>10.4g}  {one.speedup:>7.2f}x  "
            f"{one.memory_bytes / MIB:>10,.1f}  {one.sent_bytes / MIB:>10,.2f}  {one.imbalance:>14.2f}"
        )
    return fold("\n".join([*lines, advice(found)]))


def advice(found: Sequence[RankCount]) -> str:
    """The fastest number, and the largest that uses its ranks at least half."""
    fastest = min(found, key=lambda one: one.seconds)
    busy = [one for one in found if one.speedup >= 0.5 * one.ranks]
    text = f"fastest: {fastest.ranks} rank{'s' * (fastest.ranks > 1)} ({fastest.speedup:.1f} times as fast as one)"
    if busy:
        text += f"; the most that are used at least half: {max(busy, key=lambda one: one.ranks).ranks}"
    return text


def to_dict(found: Sequence[RankCount], width: int, model: Model, machine: Machine) -> dict[str, Any]:
    """The same numbers, for programs."""
    return {
        "model": str(model), "machine": machine.source, "width": width, "plans": [asdict(one) for one in found]
    }  # fmt: skip


def plot(path: str | Path, found: Sequence[RankCount]) -> None:
    """Draw seconds, and memory and bytes, by ranks."""
    if len(found) < 2:
        raise OptionError(f"Expected two numbers of ranks or more to draw (got {len(found)}): --ranks 1 2 4 8")
    figure = new_figure(10, 4)
    time, size = figure.subplots(1, 2)
    ranks = [one.ranks for one in found]
    time.plot(ranks, [one.speedup for one in found], marker="o", label="predicted")
    time.plot(ranks, ranks, linestyle=":", color="grey", label="ideal")
    time.set(title="speed-up over one process", xscale="log", yscale="log")
    size.plot(ranks, [one.memory_bytes / MIB for one in found], marker="o", label="memory of the largest rank")
    size.plot(ranks, [one.sent_bytes / MIB for one in found], marker="o", label="sent in one aggregation")
    size.set(title="MiB", xscale="log")
    for axes in (time, size):
        number_ranks(axes, ranks)
        axes.legend(fontsize="small")
    figure.savefig(path)
