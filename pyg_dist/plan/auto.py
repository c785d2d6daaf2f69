"""Comparison of both layouts: what each exchange and each mesh would cost, and why one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from pyg_dist.grid.plan.cost import Candidate
from pyg_dist.halo.plan.cost import halo_price, loads_of
from pyg_dist.halo.plan.cover import EXCHANGES, ExchangeKind
from pyg_dist.halo.plan.plan import Hierarchy, shares_machines
from pyg_dist.halo.plan.sizes import all_sizes
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price


@dataclass(frozen=True)
class HaloCandidate:
    """One exchange of the halo layout, with its price."""

    exchange: ExchangeKind  # what sums send
    price: Price  # predicted, for a step
    two_levels: bool = False  # whether ranks of a machine share what crosses to another

    @property
    def seconds(self) -> float:
        """Predicted, for a step."""
        return self.price.seconds

    def __str__(self) -> str:
        return f"halo, {self.exchange} exchange{' in two levels' * self.two_levels}"

    def to_dict(self) -> dict[str, object]:
        """Plain values."""
        return {
            "layout": "halo", "exchange": self.exchange, "levels": 1 + self.two_levels,
            "predicted_seconds": self.seconds,
        }  # fmt: skip


def halo_candidates(
    edge_index: Tensor, parts: Tensor, num_ranks: int, model: Model, machine: Machine, hierarchy: Hierarchy = "auto"
) -> list[HaloCandidate]:
    """Every exchange with these parts, in its cheaper levels, the cheapest first; of equal prices, hybrid.

    Not collective, O(E log E) time.
    """
    on_each = machine.ranks_per_node
    levels: tuple[int | None, ...] = (None,)
    if shares_machines(num_ranks, on_each) and hierarchy != "off":
        levels = (on_each,) if hierarchy == "on" else (None, on_each)

    def candidate(exchange: ExchangeKind, shared_by: int | None) -> HaloCandidate:
        sizes, rows = all_sizes(edge_index, parts, num_ranks, exchange, shared_by)
        messages = None if shared_by is None else [s.messages for s in sizes]
        loads = loads_of([s.nodes for s in sizes], [s.work for s in sizes], rows, on_each, messages)
        return HaloCandidate(exchange, halo_price(model, loads, machine, num_ranks), shared_by is not None)

    kinds = sorted(EXCHANGES, key=lambda kind: kind != "hybrid")
    cheaper = (min((candidate(kind, shared_by) for shared_by in levels), key=lambda c: c.seconds) for kind in kinds)
    return sorted(cheaper, key=lambda c: c.seconds)


def reasons(halo: Sequence[HaloCandidate], grid: Sequence[Candidate], model: Model, machine: Machine) -> str:
    """What layout="auto" takes, in one line: the cheapest of each layout, what they spend, and what was assumed."""
    best, other = f"{halo[0]}, {halo[0].price} a step", f"{grid[0]}, {grid[0].price} a step"
    if grid[0].seconds < halo[0].seconds:
        best, other = other, best
    return f"layout='auto': {best}; the other layout's best: {other}. Priced for a {model}; constants: {machine.source}"
