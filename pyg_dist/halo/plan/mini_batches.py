"""Traffic, memory and time of a step on a mini-batch: counted on sampled batches, without a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.errors import OptionError
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.pricing.base import aligned
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, memory_range, reduction_seconds

NUM_SAMPLES = 5


@dataclass(frozen=True)
class MiniBatchPlan:
    """Means over sampled batches, which estimate the expectation; what a sample itself says is exact."""

    batch_size: int  # nodes that each data group draws uniformly, B
    num_nodes: int  # of the graph, N
    num_groups: int  # data groups, each with the graph in as many parts
    whole: Plan  # the plan of a full-batch aggregation in one group
    batches: tuple[Plan, ...]  # the plans of sampled batches of one group

    @staticmethod
    def of(edge_index: Tensor, whole: Plan, batch_size: int, num_groups: int, seed: int = 0) -> MiniBatchPlan:
        """Plan :data:`NUM_SAMPLES` batches. Not collective, O(E) time for each.

        ``whole`` is the plan of the whole graph in a group's parts.
        """
        parts = whole.parts
        assert parts is not None, "a plan that was counted in this process has its parts"
        num_nodes = parts.numel()
        if not 2 <= batch_size <= num_nodes:
            raise OptionError(f"Expected --batch-size between 2 and the {num_nodes:,} nodes (got {batch_size:,})")
        batches = []
        for number in range(NUM_SAMPLES):
            place = ops.keyed_permutation(host.arange(batch_size), num_nodes, ops.mixed_seed(seed, number))
            node_id = place.sort().values
            new_id = host.full((num_nodes,), -1, dtype=torch.int64)
            new_id[node_id] = host.arange(batch_size)
            ends = new_id[edge_index]
            induced = ends[:, (ends >= 0).all(0)]
            plan = Plan.of(
                induced, parts[node_id], whole.ranks, whole.exchange, whole.partition, whole.ranks_per_node
            )  # fmt: skip
            batches.append(replace(plan, bits=whole.bits))
        return MiniBatchPlan(batch_size, num_nodes, num_groups, whole, tuple(batches))

    @property
    def ranks(self) -> int:
        """The number of ranks in all groups."""
        return self.num_groups * self.whole.ranks

    @property
    def steps(self) -> int:
        """The number of steps in an epoch: ceil(N / (B groups))."""
        return -(-self.num_nodes // (self.batch_size * self.num_groups))

    def _mean(self, number: Callable[[Plan], float]) -> float:
        return mean(number(plan) for plan in self.batches)

    def _model(self, plan: Plan, model: Model) -> Model:
        entries = self.batch_size + sum(s.edges for s in plan.sizes)
        return replace(model, num_nodes=self.batch_size, num_entries=entries, input="new")

    def seconds(self, model: Model, machine: Machine) -> float:
        """Mean seconds of a step on a group's slowest rank, with the sum of gradients over all groups."""
        price = self._mean(lambda plan: plan.price(self._model(plan, model), machine).seconds)
        sums = (reduction_seconds(model, machine, ranks) for ranks in (self.ranks, self.whole.ranks))
        return price + next(sums) - next(sums)

    def memory_bytes(self, model: Model) -> list[int]:
        """Memory that a step takes beside the graph, the most of any sample, by rank of a group."""
        by_sample = [plan.memory_bytes(self._model(plan, model)) for plan in self.batches]
        return [max(of_rank) for of_rank in zip(*by_sample, strict=True)]

    def to_dict(self, widths: list[int], machine: Machine, model: Model) -> dict[str, Any]:
        """Plain numbers for programs; rows and bytes of one aggregation, all ranks of a group together."""
        exchange = self.whole.exchange
        return {
            "batch_size": self.batch_size,
            "data_groups": self.num_groups,
            "samples": len(self.batches),
            "steps": self.steps,
            "edges": self._mean(lambda plan: sum(s.edges for s in plan.sizes)),
            "rows": self._mean(lambda plan: plan.rows[exchange]),
            "bytes": {str(w): self._mean(lambda plan, w=w: plan.halo_bytes(w)) for w in widths},  # type: ignore[misc]
            "memory_bytes": self.memory_bytes(model),
            "seconds": self.seconds(model, machine),
        }

    def describe(self, widths: list[int], machine: Machine, model: Model) -> str:
        """A table for people."""
        numbers = self.to_dict(widths, machine, model)
        low, high = (choose(plan.rows[self.whole.exchange] for plan in self.batches) for choose in (min, max))
        groups = f", {self.num_groups} data groups of {self.whole.ranks} ranks" if self.num_groups > 1 else ""
        lines = [
            ["edges", f"{numbers['edges']:,.0f}"],
            ["rows sent in an aggregation", f"{numbers['rows']:,.0f} ({low:,} to {high:,}; "
             f"full batch {self.whole.rows[self.whole.exchange]:,})"],
            *([f"sent at {w} columns", f"{numbers['bytes'][str(w)] / 2**20:,.2f} MiB"] for w in widths),
            ["memory of a step, beside the graph", memory_range(numbers["memory_bytes"])],
            ["a step", f"{1e3 * numbers['seconds']:,.1f} ms"],
            ["an epoch", f"{self.steps:,} steps, {self.steps * numbers['seconds']:,.2f} s"],
        ]  # fmt: skip
        title = (
            f"mini-batches of {self.batch_size:,} of {self.num_nodes:,} nodes{groups}: means of {len(self.batches)} "
            f"sampled batches{', of each group' if groups else ''}"
        )
        return "\n".join([title, *aligned(lines, left=(0, 1))])
