"""The seeds of sampled neighbours: input nodes, or the ends of links and of negative links."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import OptionError


class Start(NamedTuple):
    """The seeds of a step's batch, which every rank knows."""

    # ids of nodes by data group, int64; those of a group are distinct, unless the batch is disjoint
    seeds: list[Tensor]
    tree: Tensor  # the number of each seed's input, group after group, int64; for disjoint batches
    attributes: dict[str, Any]  # of the batch


@dataclass(frozen=True, eq=False)
class Steps:
    """The inputs of each step, of ``size`` inputs; data groups share them evenly."""

    size: int  # inputs of an epoch
    batch_size: int  # of a step and a data group
    shuffle: bool  # whether each epoch has a permutation of its own
    drop_last: bool  # whether an epoch leaves out an incomplete last batch
    seed: int  # of the permutations
    num_groups: int = 1  # data groups

    @property
    def size_of_step(self) -> int:
        """Inputs of a step; the last step of an epoch may have fewer."""
        return self.batch_size * self.num_groups

    @property
    def num_steps(self) -> int:
        """Of an epoch."""
        return self.size // self.size_of_step if self.drop_last else -(-self.size // self.size_of_step)

    def at(self, step: int) -> Tensor:
        """Numbers of inputs, int64."""
        epoch, k = divmod(step, self.num_steps)
        place = host.arange(k * self.size_of_step, min((k + 1) * self.size_of_step, self.size))
        if not self.shuffle:
            return place
        return ops.keyed_permutation(place, self.size, ops.mixed_seed(self.seed, epoch, self.size, 4))

    def by_group(self, inputs: Tensor) -> list[Tensor]:
        """Split a tensor with an entry for each input of a step into the data groups' parts."""
        return list(inputs.tensor_split(self.num_groups))

    @property
    def options(self) -> dict[str, object]:
        """The options that determine the seeds, by name."""
        return {name: getattr(self, name) for name in ("seed", "batch_size", "shuffle", "drop_last", "num_groups")}


@dataclass(frozen=True, eq=False)
class Listed(Steps):
    """One step, with inputs that are listed."""

    input_id: Tensor = field(default_factory=lambda: host.arange(0))

    @staticmethod
    def of(steps: Steps, index: object) -> Listed:
        """The step of some inputs of ``steps``, each once.

        Raises:
            OptionError: They are no inputs of ``steps``.
        """
        input_id = host.as_tensor(index).long()
        if input_id.dim() != 1 or not 0 < torch.unique(input_id).numel() == input_id.numel():
            raise OptionError(f"Expected some numbers of inputs, each once (got {index!r})")
        if int(input_id.min()) < 0 or int(input_id.max()) >= steps.size:
            raise OptionError(f"Expected numbers of inputs from 0 to {steps.size - 1} (got {index!r})")
        batch_size = -(-input_id.numel() // steps.num_groups)
        return Listed(input_id.numel(), batch_size, False, False, steps.seed, steps.num_groups, input_id)

    def at(self, step: int) -> Tensor:
        """All listed inputs."""
        return self.input_id


@dataclass(frozen=True, eq=False)
class NodeSeeds:
    """Input nodes."""

    steps: Steps
    node: Tensor  # distinct, int64 ``[n]``
    input_id: Tensor  # of each in batches, int64 ``[n]``

    @property
    def options(self) -> dict[str, object]:
        """The options that determine the seeds, by name."""
        return {**self.steps.options, "input_nodes": digest(self.node)}

    @property
    def max_seeds(self) -> int:
        """An upper bound of the seeds of a step in a disjoint batch, all data groups together."""
        return self.steps.size_of_step

    def at(self, step: int, is_disjoint: bool) -> Start:
        """The seeds of a step."""
        place = self.steps.at(step)
        count = place.numel()
        attributes = {"batch_size": count, "input_id": self.input_id.index_select(0, place)}
        return Start(self.steps.by_group(self.node.index_select(0, place)), host.arange(count), attributes)


@dataclass(frozen=True)
class Negatives:
    """Negative samples: mode, number for each edge, and running sums of the weights by which ends are drawn."""

    mode: Literal["none", "binary", "triplet"] = "none"
    amount: float = 0.0
    source_weight: Tensor | None = None
    target_weight: Tensor | None = None

    @property
    def ends_of_edge(self) -> int:
        """An upper bound of the seeds for an edge, with its negative samples."""
        return 2 + math.ceil(self.amount) * {"none": 0, "binary": 2, "triplet": 1}[self.mode]


@dataclass(frozen=True, eq=False)
class LinkSeeds:
    """The ends of edges, int64 ``[2, n]``, and of negative ones."""

    steps: Steps
    ends: tuple[range, range]  # ids of the nodes that may be sources, and targets, of negative edges
    edges: Tensor
    label: Tensor | None
    negatives: Negatives

    @property
    def options(self) -> dict[str, object]:
        """The options that determine the seeds, by name."""
        negatives = self.negatives
        tensors = {
            "edge_label_index": self.edges, "edge_label": self.label, "src_weight": negatives.source_weight,
            "dst_weight": negatives.target_weight,
        }  # fmt: skip
        digests = {name: None if value is None else digest(value) for name, value in tensors.items()}
        return {
            **self.steps.options, **digests, "neg_sampling": negatives.mode, "neg_sampling_amount": negatives.amount,
        }  # fmt: skip

    @property
    def max_seeds(self) -> int:
        """As :attr:`NodeSeeds.max_seeds`."""
        return self.steps.size_of_step * self.negatives.ends_of_edge

    def at(self, step: int, is_disjoint: bool) -> Start:
        """The seeds of a step."""
        input_id = self.steps.at(step)
        source, target = self.edges[:, input_id]
        mode, num_edges = self.negatives.mode, input_id.numel()
        num_negative = math.ceil(num_edges * self.negatives.amount)
        negative = self._drawn(num_negative, 1, step)
        found: dict[str, object] = {"input_id": input_id, "batch_size": num_edges}
        if mode == "triplet":
            if self.negatives.amount != 1:
                negative = negative.view(num_edges, -1)
            seeds, (source, target, negative), tree = self._numbered([source, target, negative], is_disjoint)
            found |= {"src_index": source, "dst_pos_index": target, "dst_neg_index": negative}
            return Start(seeds, tree, found)
        ends = [source, target]
        if mode == "binary":
            ends += [self._drawn(num_negative, 0, step), negative]
        seeds, numbers, tree = self._numbered(ends, is_disjoint)
        found["edge_label_index"] = torch.stack([torch.cat(numbers[0::2]), torch.cat(numbers[1::2])])
        label = None if self.label is None else self.label[input_id]
        if mode == "binary":
            label = host.ones(num_edges) if label is None else label
            label = torch.cat([label, label.new_zeros(num_negative, *label.shape[1:])])
        return Start(seeds, tree, found if label is None else {**found, "edge_label": label})

    def _numbered(self, ends: list[Tensor], is_disjoint: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Seeds by data group, the number of each end in the batch, and the tree of each seed.

        In a disjoint batch each end is a seed of its own; the ends of an edge are a tree, and so are those of a binary
        negative edge.
        """
        tree_of = [host.arange(end.shape[0]) for end in ends]
        if self.negatives.mode == "binary":
            tree_of[2:] = [tree + ends[0].shape[0] for tree in tree_of[2:]]
        seeds, trees, numbers = [], [], []
        first = 0
        pieces = zip(*(self.steps.by_group(end) for end in ends), strict=True)
        pieces_of_tree = zip(*(self.steps.by_group(tree) for tree in tree_of), strict=True)
        for piece, tree in zip(pieces, pieces_of_tree, strict=True):
            by_negative = [end.movedim(0, -1) for end in piece]  # of each edge the first one, then the second ...
            flat = torch.cat([end.reshape(-1) for end in by_negative])
            if is_disjoint:
                node, number = flat, host.arange(flat.numel())
                repeated = [t.repeat(end[:1].numel()) for t, end in zip(tree, piece, strict=True) if t.numel()]
                trees.append(torch.cat([flat[:0], *repeated]))
            else:
                node, number = torch.unique(flat, return_inverse=True)
            split = torch.split(number + first, [end.numel() for end in piece])
            numbers.append([part.view(end.shape).movedim(-1, 0) for part, end in zip(split, by_negative, strict=True)])
            seeds.append(node)
            first += node.numel()
        of_ends = [torch.cat(of_end) for of_end in zip(*numbers, strict=True)]
        return seeds, of_ends, torch.cat(trees or [host.arange(0)])

    def _drawn(self, count: int, end: Literal[0, 1], step: int) -> Tensor:
        """Ids of nodes, int64 ``[count]``, uniform or by weights: a function of the seed and the step."""
        ids, sums = self.ends[end], (self.negatives.source_weight, self.negatives.target_weight)[end]
        seed = ops.mixed_seed(self.steps.seed, step, len(ids), 6)
        uniform = ops.keyed_uniform(host.arange(count), 1, seed, 1 - end, dtype=torch.float64).view(-1)
        if sums is None:
            return ids.start + (uniform * len(ids)).long()
        return ids.start + torch.searchsorted(sums, uniform * sums[-1], right=True)


Seeds = NodeSeeds | LinkSeeds
"""The seeds of all steps."""
