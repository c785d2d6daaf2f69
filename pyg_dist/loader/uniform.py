"""``UniformVertexLoader``: mini-batches of nodes drawn uniformly, without communication."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch_geometric.data import HeteroData

from pyg_dist.backend import host
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import raised_on_all_ranks, require_equal
from pyg_dist.data import DistributedData
from pyg_dist.data.batch import chosen_nodes, ready
from pyg_dist.errors import DataError, OptionError
from pyg_dist.loader.batches import BatchLoader
from pyg_dist.loader.sampling import UniformSampling
from pyg_dist.tensor import NodeTensor

_LIKELY = 0.5


class UniformVertexLoader(BatchLoader):
    r"""Iterates over subgraphs that B uniformly drawn nodes induce, each a ``DistributedData``.

    The sample of a step is a function of the seed, the step, N and B: every rank computes it and selects its own rows
    and edges, and no message is sent until the batch is used (ScaleGNN, III-D and IV). A batch has the attributes of
    ``data``, and ``n_id`` and ``e_id``: ``t[batch.n_id]`` selects the batch's rows of any node tensor of ``data``, with
    gradients and without communication.

    With several data groups (``mesh={"data": 2, "part": 2}``, on the grid ``mesh={"data": 2, "x": 2}``) each group
    draws its own sample, and the batch is the disjoint union of all (ScaleGNN, IV-A): losses, norms and gradients are
    those of its rows, B for each group.

    Edge weights are divided by the probability that the source was drawn, given the target,
    :math:`p = (B - 1) / (N - 1)`; self loops stay (eq. 23-24). ``GCNConv`` keeps the norm of the whole graph,
    means of ``SAGEConv`` its degree: with these and all convs that sum rows natively (``GINConv`` ...), an aggregation
    is on average that of the whole graph. Convs with messages of their own use the induced subgraph as it is.

    The numbers of steps continue over epochs. An iteration ends with its epoch; after a ``break`` the next one
    continues.

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
        prefetch: whether a thread makes the next batch while this one trains. It lasts over epochs, until a ``break``,
            the end of the session, or of the loader.

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
        num_nodes = data.num_nodes
        others = None
        if given is not None:
            is_other = host.ones(num_nodes, dtype=torch.bool)
            is_other[given] = False
            others = is_other.nonzero().view(-1)
        group, num_groups = data.graph.data_group
        sampler = UniformSampling(
            num_nodes,
            int(batch_size),
            math.ceil(num_nodes / (batch_size * num_groups)) if num_steps is None else int(num_steps),
            int(seed),
            group,
            num_groups,
            cover=bool(cover),
            input_nodes=given,
            other_nodes=others,
            rescale=bool(rescale),
        )
        super().__init__(data, sampler, prefetch)
        self._warn()

    def __repr__(self) -> str:
        s = self.sampler
        return f"{type(self).__name__}({s.batch_size} of {s.num_nodes} nodes, {s.num_steps} steps)"

    def _warn(self) -> None:
        """Say what the script's loss, or its sums, will not be (collective where the data has a mask)."""
        s, messages = self.sampler, []
        mask = self.data.get("train_mask")
        if s.input_nodes is None and isinstance(mask, NodeTensor) and mask.dtype == torch.bool and mask.dim() == 1:
            none = s.probability_of_none(int(mask.sum())) ** s.num_groups
            if 1 - (1 - none) ** len(self) > _LIKELY:
                messages.append(
                    f"{none:.0%} of the batches have no node of train_mask, and a mean over none is NaN: pass "
                    f"input_nodes=data.train_mask, or a larger batch_size"
                )
        if s.input_nodes is not None and s.other_nodes is not None and s.rescale:
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
    """Check each option by itself."""
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
