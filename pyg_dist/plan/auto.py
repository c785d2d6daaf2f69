"""Comparison of both layouts: what each exchange and each mesh would cost, and why one is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyg_dist.grid.plan.cost import Candidate
from pyg_dist.halo.plan.cost import halo_price, loads_of
from pyg_dist.halo.plan.cover import EXCHANGES, ExchangeKind
from pyg_dist.halo.plan.sizes import all_sizes
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price


@dataclass(frozen=True)
class HaloCandidate:
    """One exchange of the halo layout, with its price."""

    exchange: ExchangeKind  # what sums send
    price: Price  # predicted, for a step

    @property
    def seconds(self) -> float:
        """Predicted, for a step."""
        return self.price.seconds

    def __str__(self) -> str:
        return f"halo, {self.exchange} exchange"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"layout": "halo", "exchange": self.exchange, "predicted_seconds": self.seconds}


def halo_candidates(
    edge_index: Tensor, parts: Tensor, num_ranks: int, model: Model, machine: Machine
) -> list[HaloCandidate]:
    """Every exchange with these parts, the cheapest first; of equal prices, hybrid. Not collective, O(E log E) time."""
    found = []
    for exchange in sorted(EXCHANGES, key=lambda kind: kind != "hybrid"):
        sizes, rows = all_sizes(edge_index, parts, num_ranks, exchange)
        loads = loads_of([s.nodes for s in sizes], [s.work for s in sizes], rows, machine.ranks_per_node)
        found.append(HaloCandidate(exchange, halo_price(model, loads, machine, num_ranks)))
    return sorted(found, key=lambda c: c.seconds)


def reasons(halo: Sequence[HaloCandidate], grid: Sequence[Candidate], model: Model, machine: Machine) -> str:
    """What layout="auto" takes, in one line: the cheapest of each layout, what they spend, and what was assumed."""
    best, other = f"{halo[0]}, {halo[0].price} a step", f"{grid[0]}, {grid[0].price} a step"
    if grid[0].seconds < halo[0].seconds:
        best, other = other, best
    return f"layout='auto': {best}; the other layout's best: {other}. Priced for a {model}; constants: {machine.source}"
