"""Uniform samples of nodes, S_t: functions of the seed, the step and the sizes, computed alike on every rank."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.session.agreement import digest
from pyg_dist.graph.sample import DataGroup, PairProbability, Subset


@dataclass(frozen=True, eq=False)
class UniformSampling:
    """Uniform samples without replacement (ScaleGNN, III-D), each from the first places of a keyed permutation.

    A :class:`~pyg_dist.loader.sampler.Sampler` without messages, equal on every machine. O(B) time and memory, whatever
    N is.
    """

    num_nodes: int  # N
    batch_size: int  # B
    num_steps: int  # of an epoch
    seed: int  # any integer modulo 2^64
    group: int = 0  # the number of this rank's data group
    num_groups: int = 1  # data groups, which draw independently
    cover: bool = False  # an epoch is one permutation, cut into batches whose sizes differ by one at most
    # ascending ids of the nodes of which every batch has the same number; ``None``: no such nodes
    input_nodes: Tensor | None = None
    other_nodes: Tensor | None = None  # ascending ids of the others, where there are input nodes
    rescale: bool = True  # whether subsets have the probabilities of their pairs

    @property
    def options(self) -> dict[str, object]:
        nodes = None if self.input_nodes is None else digest(self.input_nodes)
        return {
            "seed": self.seed, "num_nodes": self.num_nodes, "batch_size": self.batch_size, "num_steps": self.num_steps,
            "num_groups": self.num_groups, "cover": self.cover, "rescale": self.rescale, "input_nodes": nodes,
        }  # fmt: skip

    @property
    def sizes(self) -> tuple[int, int]:
        """Input nodes and others of each batch."""
        if self.input_nodes is None:
            return 0, self.batch_size
        num_input = max(1, round(self.batch_size * self.input_nodes.numel() / self.num_nodes))
        return num_input, self.batch_size - num_input

    @property
    def sends(self) -> bool:
        """See :class:`~pyg_dist.loader.sampler.Sampler`: every rank knows all that a sample follows from."""
        return False

    def sample(self, step: int) -> Subset:
        node_id = self.node_id(step)
        scale = self._pairs(node_id.numel()) if self.rescale else None
        if self.num_groups == 1:
            return Subset(node_id, scale=scale)
        sizes = [self._size(step, g) for g in range(self.num_groups)]
        group = DataGroup(self.group, sum(sizes[: self.group]), sum(sizes))
        return Subset(node_id, scale=scale, group=group)

    def node_id(self, step: int) -> Tensor:
        """S_t, ascending, int64 ``[B]``."""
        group = self.group
        if self.cover:
            return self._piece(step, group)
        words = (self.seed, step, group, self.num_nodes, self.batch_size)
        if self.input_nodes is None or self.other_nodes is None:
            return _drawn(self.num_nodes, self.batch_size, ops.mixed_seed(*words, 0))
        lists = (self.input_nodes, self.other_nodes)
        picked = [
            nodes[_drawn(nodes.numel(), size, ops.mixed_seed(*words, kind))]
            for kind, (nodes, size) in enumerate(zip(lists, self.sizes, strict=True), start=1)
        ]
        return ascending(torch.cat(picked), self.num_nodes)

    def _size(self, step: int, group: int) -> int:
        """Nodes of a group's sample."""
        if not self.cover:
            return self.batch_size
        low, high = self._bounds(step, group)
        return high - low

    def _bounds(self, step: int, group: int) -> tuple[int, int]:
        """First and last place, exclusive, of a batch in its epoch's permutation."""
        number, count = step % self.num_steps * self.num_groups + group, self.num_steps * self.num_groups
        return self.num_nodes * number // count, self.num_nodes * (number + 1) // count

    def _piece(self, step: int, group: int) -> Tensor:
        epoch, count = step // self.num_steps, self.num_steps * self.num_groups
        low, high = self._bounds(step, group)
        seed = ops.mixed_seed(self.seed, epoch, self.num_nodes, count, 3)
        return ascending(ops.keyed_permutation(host.arange(low, high), self.num_nodes, seed), self.num_nodes)

    def _pairs(self, batch_size: int) -> PairProbability:
        if self.input_nodes is None or self.other_nodes is None:
            return PairProbability.uniform(batch_size, self.num_nodes)
        sizes = self.input_nodes.numel(), self.other_nodes.numel()
        return PairProbability.of_kinds(self.sizes, sizes, self._is_other)

    @cached_property
    def _is_other(self) -> Tensor:
        """Bool ``[N]``, where there are input nodes."""
        is_other = host.zeros(self.num_nodes, dtype=torch.bool)
        is_other[self.other_nodes] = True
        return is_other

    def probability_of_none(self, num_marked: int) -> float:
        """How probable it is that a batch has none of ``num_marked`` nodes: hypergeometric."""
        others, size = self.num_nodes - num_marked, self.batch_size
        if size > others:
            return 0.0
        log = math.lgamma(others + 1) - math.lgamma(others - size + 1)
        log -= math.lgamma(self.num_nodes + 1) - math.lgamma(self.num_nodes - size + 1)
        return math.exp(log)


def _drawn(size: int, count: int, seed: int) -> Tensor:
    """``count`` numbers of ``[0, size)``, ascending."""
    if count == 0:
        return host.arange(0)
    return ascending(ops.keyed_permutation(host.arange(count), size, seed), size)


def ascending(numbers: Tensor, size: int) -> Tensor:
    """Sort numbers below ``size``. NumPy sorts in vectors, 10 times as fast as torch; of 32 bits twice as many."""
    dtype = np.int32 if size <= 2**31 else np.int64
    return torch.from_numpy(np.sort(numbers.numpy().astype(dtype, copy=False)).astype(np.int64, copy=False))
