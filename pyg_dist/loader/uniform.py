"""``UniformVertexLoader``: mini-batches of nodes drawn uniformly, without communication.

Samples are functions of the seed, the step and the sizes, computed alike on every rank.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from pyg_dist.backend import host, ops
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import digest, raised_on_all_ranks, require_equal
from pyg_dist.data import DistributedData
from pyg_dist.data.batch import chosen_nodes, ready
from pyg_dist.errors import DataError, OptionError
from pyg_dist.graph.sample import DataGroup, PairProbability, Subset
from pyg_dist.loader.batches import BatchLoader
from pyg_dist.tensor import NodeTensor

_LIKELY = 0.5


class UniformVertexLoader(BatchLoader):
    r"""Iterates over subgraphs that B uniformly drawn nodes induce, each a ``DistributedData``.

    The sample of a step is a function of the seed, the step, N and B: every rank computes it and selects its own rows
    and edges, and no message is sent until the batch is used (ScaleGNN, III-D and IV). What a batch has, and how steps
    go on over epochs, is said of :class:`~pyg_dist.loader.BatchLoader`.

    With several data groups (``mesh={"data": 2, "part": 2}``, on the grid ``mesh={"data": 2, "x": 2}``) each group
    draws its own sample, and the batch is the disjoint union of all (ScaleGNN, IV-A): losses, norms and gradients are
    those of its rows, B for each group.

    Edge weights are divided by the probability that the source was drawn, given the target,
    :math:`p = (B - 1) / (N - 1)`; self loops stay (eq. 23-24). ``GCNConv`` keeps the norm of the whole graph,
    means of ``SAGEConv`` its degree: with these and all convs that sum rows natively (``GINConv`` ...), an aggregation
    is on average that of the whole graph. Convs with messages of their own use the induced subgraph as it is.

    Args:
        data: the graph.
        batch_size: B, in ``[2, N]``.
        num_steps: steps of an epoch; None: ceil(N / (B groups)).
        seed: seed of the samples.
        cover: an epoch is one permutation of all nodes, cut into batches whose sizes differ by one at most.
        input_nodes: a mask or ids of nodes, such as the training nodes, of which every batch has
            ``max(1, round(B * number / N))``; the others are drawn from the rest. Weights are divided by the
            probabilities of these pairs.
        rescale: divide the weights; False: every conv sees the induced subgraph, as from ``data.subgraph``.
        prefetch: whether a thread makes the next batch while this one trains.

    Raises:
        DataError: ``data`` is no ``DistributedData``, or ``input_nodes`` are no nodes of it.
        OptionError: An option is not one of the values allowed.
        AgreementError: The ranks were given different options.
        UnsupportedError: ``data`` is a batch of several data groups.

    Constructing the loader is collective. Drawing batches is not, but using them is: all ranks use the same batches.

    Example:
        >>> loader = UniformVertexLoader(data, batch_size=17, input_nodes=data.train_mask)
        >>> for batch in loader:
        ...     out = model(batch.x, batch.edge_index)
        ...     loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
        >>> len(loader), tuple(batch.x.shape)
        (2, (17, 34))
    """

    sampler: UniformSampling

    def __init__(
        self,
        data: DistributedData,
        batch_size: int,
        num_steps: int | None = None,
        seed: int = 0,
        cover: bool = False,
        input_nodes: object = None,
        rescale: bool = True,
        prefetch: bool = True,
    ) -> None:
        with raised_on_all_ranks():
            _check(data, batch_size, num_steps, seed, cover, input_nodes)
        options = {"batch_size": batch_size, "num_steps": num_steps, "seed": seed, "cover": cover, "rescale": rescale}
        options["input_nodes"] = input_nodes is not None
        require_equal({f"option {k}": str(v) for k, v in options.items()}, "give every rank the same loader")
        given = None if input_nodes is None else chosen_nodes(data, input_nodes, "input_nodes")
        if given is not None and given.numel() == 0:
            raise DataError("Expected input_nodes to be at least one node (got none): leave it out")
        ready(data)
        group, num_groups = data.graph.data_group
        sampler = UniformSampling(
            data.num_nodes,
            int(batch_size),
            math.ceil(data.num_nodes / (batch_size * num_groups)) if num_steps is None else int(num_steps),
            int(seed),
            group,
            num_groups,
            cover=bool(cover),
            input_nodes=given,
            rescale=bool(rescale),
        )
        super().__init__(data, sampler, prefetch)
        self._warn()

    def __repr__(self) -> str:
        s = self.sampler
        return f"{type(self).__name__}({s.batch_size} of {s.num_nodes} nodes, {s.num_steps} steps)"

    def _warn(self) -> None:
        """Warn of means over no node, and of biased sums (collective where the data has a mask)."""
        s, messages = self.sampler, []
        mask = self.data.get("train_mask")
        if s.input_nodes is None and isinstance(mask, NodeTensor) and mask.dtype == torch.bool and mask.dim() == 1:
            none = s.probability_of_none(int(mask.sum())) ** s.num_groups
            if 1 - (1 - none) ** len(self) > _LIKELY:
                messages.append(
                    f"{none:.0%} of the batches have no node of train_mask, and a mean over none is NaN: pass "
                    f"input_nodes=data.train_mask, or a larger batch_size"
                )
        if s.input_nodes is not None and s.rescale:
            pairs = zip(s.sizes, (s.input_nodes.numel(), s.other_nodes.numel()), strict=True)
            if any(drawn < min(number, 2) for drawn, number in pairs):
                messages.append(
                    f"Batches of {s.batch_size} nodes have {s.sizes[0]} of input_nodes and {s.sizes[1]} others, so "
                    f"that some pairs never meet and sums are biased: pass a larger batch_size"
                )
        if session.is_main():
            for message in messages:
                warnings.warn(message, stacklevel=3)


def _check(data: object, batch_size: Any, num_steps: Any, seed: Any, cover: object, input_nodes: object) -> None:
    if not isinstance(data, DistributedData):
        remedy = "use NeighborLoader" if isinstance(data, HeteroData) else "wrap the graph, DistributedData(data)"
        raise DataError(f"Expected a DistributedData with one type of nodes (got {type(data).__name__}): {remedy}")
    if not _is_integer(batch_size) or not 2 <= batch_size <= data.num_nodes:
        raise OptionError(f"Expected batch_size between 2 and the {data.num_nodes} nodes (got {batch_size!r})")
    if num_steps is not None and (not _is_integer(num_steps) or num_steps < 1):
        raise OptionError(f"Expected num_steps to be a positive integer or None (got {num_steps!r})")
    if not _is_integer(seed) or not -(2**63) <= seed < 2**63:
        raise OptionError(f"Expected seed to be an integer of 64 bits (got {seed!r})")
    if cover:
        if input_nodes is not None:
            raise OptionError("Expected cover or input_nodes (got both): leave one out")
        _, num_groups = data.graph.data_group
        num_steps = math.ceil(data.num_nodes / (batch_size * num_groups)) if num_steps is None else num_steps
        count = num_steps * num_groups
        if data.num_nodes < 2 * count:
            raise OptionError(
                f"Expected two nodes at least in each of {count} batches that cover {data.num_nodes} nodes (got "
                f"fewer): pass a larger batch_size or fewer num_steps"
            )


def _is_integer(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


@dataclass(frozen=True, eq=False)
class UniformSampling:
    """Uniform samples without replacement (ScaleGNN, III-D), each from the first places of a keyed permutation.

    A :class:`~pyg_dist.loader.batches.Sampler` without messages, equal on every machine. O(B) time and memory, whatever
    N is.
    """

    num_nodes: int  # N
    batch_size: int  # B
    num_steps: int  # of an epoch
    seed: int  # any integer modulo 2^64
    group: int = 0  # the number of this rank's data group
    num_groups: int = 1  # data groups, which draw independently
    cover: bool = False  # an epoch is one permutation, cut into batches whose sizes differ by one at most
    # ascending ids of nodes of which every batch has the same number; ``None``: there are none
    input_nodes: Tensor | None = None
    rescale: bool = True  # whether subsets have the probabilities of their pairs
    sends = False  # every rank computes the whole sample

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

    def sample(self, step: int) -> Subset:
        node_id = self.node_id(step)
        scale = self._pairs(node_id.numel()) if self.rescale else None
        if self.num_groups == 1:
            return Subset(node_id, scale=scale)
        sizes = [self.batch_size] * self.num_groups
        if self.cover:
            sizes = [len(range(*self._bounds(step, g))) for g in range(self.num_groups)]
        group = DataGroup(self.group, sum(sizes[: self.group]), sum(sizes))
        return Subset(node_id, scale=scale, group=group)

    def node_id(self, step: int) -> Tensor:
        """S_t, ascending, int64 ``[B]``."""
        group = self.group
        if self.cover:
            return self._piece(step, group)
        words = (self.seed, step, group, self.num_nodes, self.batch_size)
        if self.input_nodes is None:
            return _drawn(self.num_nodes, self.batch_size, ops.mixed_seed(*words, 0))
        lists = (self.input_nodes, self.other_nodes)
        picked = [
            nodes[_drawn(nodes.numel(), size, ops.mixed_seed(*words, kind))]
            for kind, (nodes, size) in enumerate(zip(lists, self.sizes, strict=True), start=1)
        ]
        return ascending(torch.cat(picked), self.num_nodes)

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
        if self.input_nodes is None:
            return PairProbability.uniform(batch_size, self.num_nodes)
        sizes = self.input_nodes.numel(), self.other_nodes.numel()
        return PairProbability.of_kinds(self.sizes, sizes, self._is_other)

    @cached_property
    def _is_other(self) -> Tensor:
        """Whether a node is none of the input nodes, bool ``[N]``."""
        is_other = host.ones(self.num_nodes, dtype=torch.bool)
        is_other[self.input_nodes] = False
        return is_other

    @cached_property
    def other_nodes(self) -> Tensor:
        """Ascending ids of the nodes that are no input nodes, where there are any of these."""
        return host.flatnonzero(self._is_other)

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
