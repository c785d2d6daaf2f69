"""A sampler of one's own, as docs/developers/adding.md writes one: every second node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pyg_dist.graph.sample import Subset


@dataclass(frozen=True)
class EverySecond:
    """The even nodes and the odd ones in turn."""

    num_nodes: int
    num_steps: int = 2

    @property
    def options(self) -> dict[str, Any]:
        return {"num_nodes": self.num_nodes, "num_steps": self.num_steps}

    sends = False

    def sample(self, step: int) -> Subset:
        return Subset(torch.arange(step % 2, self.num_nodes, 2))
