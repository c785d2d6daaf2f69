"""Masked label propagation: some training labels become features, the others go into the loss."""

from __future__ import annotations

import numbers
import weakref
from collections.abc import MutableMapping
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pyg_dist.backend import host, ops
from pyg_dist.backend.on_device import copied_to
from pyg_dist.errors import DataError, LayoutMismatchError, OptionError
from pyg_dist.graph.protocol import NodeSharding
from pyg_dist.tensor import NodeTensor, RowTensor
from pyg_dist.tensor.functions.random import draw_seed
from pyg_dist.tensor.row_index import origin_of
from pyg_dist.tensor.row_tensor import version_of
from pyg_dist.tensor.sharding import RowSharding

# With so many training nodes it about never happens that all are embedded: 0.9^256 is 2e-12.
_NUM_FIRST = 256


class MaskedLabelPropagation(nn.Module):
    r"""Adds embedded labels to the features of some training nodes; the loss is over the other training nodes.

    .. math::
        x'_i = x_i + [i \in D] \, E_{y_i}, \qquad D \subseteq T \text{ drawn anew each step}, \qquad
        \text{loss over } T \setminus D

    Source: "Masked Label Prediction" (Shi et al., 2021), as in SuperGCN, 2.5 and 6.1: labels spread with the features,
    and make up for the accuracy that quantized messages lose. Labels of nodes in the loss are not embedded, so none
    leaks into its own loss. In evaluation the labels of all training nodes are embedded, and the returned mask is
    ``train_mask``.

    The draw is a function of one number of torch's CPU generator and the node's global id, the same for every world
    size and layout, and for a plain ``Data``. At least one node is left for the loss: if the first 256 training nodes
    (or all, if they are fewer; on a batch, those of each data group) were all drawn, the one with the largest number
    stays. E is initialised with normal values of variance 1 / channels, so that an embedded label is about as long as a
    row-normalised feature vector. Exact. Not collective, except for E's gradient, which is summed, and for a check of
    labels and mask at their first use and after a change; those of a batch are checked with the graph's.

    Args:
        num_classes: labels are ``0 ... num_classes - 1``; outside of the mask any integer is allowed.
        channels: columns of x.
        rate: the probability with which a training label is embedded, in ``[0, 1)``.

    Shapes:
        - x: ``[N, channels]`` node tensor or plain tensor
        - y: ``[N]`` integers
        - train_mask: bool ``[N]``
        - output: ``[N, channels]``, and the nodes of the loss, bool ``[N]``; node tensors if x is one, with whole rows
          on the grid layout, too

    Raises:
        OptionError: ``rate`` is no number in ``[0, 1)``.
        LayoutMismatchError: x, y and ``train_mask`` are not all plain, or not all distributed alike.
        DataError: their shapes or dtypes do not fit, or a training label is out of range (on every rank, naming the
            node and its rank).

    Example:
        >>> label_propagation = MaskedLabelPropagation(num_classes=4, channels=34)
        >>> x, loss_mask = label_propagation(data.x, data.y, data.train_mask)
        >>> out = model(x, data.edge_index)
        >>> loss = F.cross_entropy(out[loss_mask], data.y[loss_mask])
    """

    def __init__(self, num_classes: int, channels: int, rate: float = 0.5) -> None:
        super().__init__()
        given: object = rate
        if type(given) is bool or not isinstance(given, numbers.Real) or not 0.0 <= rate < 1.0:
            raise OptionError(f"Expected 0 <= rate < 1, the share of training labels to embed (got {rate!r})")
        self.num_classes, self.channels, self.rate = num_classes, channels, rate
        self.weight = nn.Parameter(torch.empty(num_classes, channels))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the embedding anew."""
        nn.init.normal_(self.weight, std=self.channels**-0.5)

    def forward(self, x: Tensor, y: Tensor, train_mask: Tensor) -> tuple[Tensor, Tensor]:
        x = x.to_rows() if isinstance(x, RowTensor) else x  # on the grid: labels are whole rows
        rows = _rows_of(x, y, train_mask)
        if x.dim() != 2 or x.shape[1] != self.channels or not y.shape == train_mask.shape == x.shape[:1]:
            raise DataError(
                f"MaskedLabelPropagation expected x [N, {self.channels}], y [N] and a mask [N] (got {list(x.shape)}, "
                f"{list(y.shape)} and {list(train_mask.shape)}): check its channels, and y.view(-1)"
            )
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool or train_mask.dtype != torch.bool:
            raise DataError(
                f"MaskedLabelPropagation expected integer labels and a bool mask (got {y.dtype} and "
                f"{train_mask.dtype}): y.long()"
            )
        nodes = _checked(y, train_mask, self.num_classes, rows)
        local, labels, mask = (t.to_local() if isinstance(t, RowTensor) else t for t in (x, y, train_mask))
        weight = self.weight if rows is None else rows.copy_to_ranks(self.weight)
        embedded, others = nodes.place, nodes.place[:0]
        if self.training:
            drawn = self._draw(nodes)
            embedded, others = nodes.place[drawn], nodes.place[~drawn]
        place = copied_to(embedded, local.device)
        added = F.embedding(labels[place].long(), weight).to(local.dtype)
        out = local.index_add(0, place, added)
        if self.training:
            mask = mask.index_fill(0, place, False)
        if rows is None:
            return out, mask
        of_loss = NodeTensor.from_local(mask, rows)
        if self.training:
            of_loss._places = version_of(of_loss), others
        return NodeTensor.from_local(out, rows), of_loss

    def _draw(self, nodes: _Checked) -> Tensor:
        """Which of this rank's training nodes are embedded. Every rank draws the first ones' numbers for itself."""
        seed = draw_seed()
        drawn = ops.keyed_uniform(nodes.key, 1, seed).view(-1) < self.rate
        if nodes.first.numel():
            numbers_of_first = ops.keyed_uniform(nodes.first, 1, seed).view(-1)
            if numbers_of_first.max() < self.rate:
                drawn &= nodes.key != nodes.first[numbers_of_first.argmax()]
        return drawn

    def extra_repr(self) -> str:
        """The options."""
        return f"{self.num_classes}, {self.channels}, rate={self.rate}"


def _rows_of(x: Tensor, y: Tensor, train_mask: Tensor) -> RowSharding | None:
    """The distribution that all three share; None: plain tensors."""
    rows = x._sharding if isinstance(x, RowTensor) else None
    for name, t in (("y", y), ("train_mask", train_mask)):
        other = t._sharding if isinstance(t, RowTensor) else None
        if (rows is None) != (other is None) or not (rows is None or other is None or rows.is_equivalent(other)):
            raise LayoutMismatchError(
                f"MaskedLabelPropagation expected x, y and train_mask of one DistributedData, or all plain (got "
                f"{type(x).__name__} x and {type(t).__name__} {name}{', spread otherwise' if rows and other else ''}): "
                f"take them from the same data"
            )
    return rows


class _Checked(NamedTuple):
    """Labels that were checked, known by their mask's object and version.

    Tensors are on the host, so that a step does not wait for a device.
    """

    mask_version: int | None
    labels: weakref.ref[Tensor]
    labels_version: int | None
    num_classes: int  # how many were expected
    place: Tensor  # this rank's training nodes, local rows, int64
    key: Tensor  # the key of each in draws
    first: Tensor  # the keys of the first training nodes of all ranks, ascending
    # a bit for each node of the graph: whether it trains, uint8 ``[ceil(N / 8)]``; made for the first batch
    bits: Tensor | None = None


_known: MutableMapping[Tensor, _Checked] = WeakIdKeyDictionary()


def _checked(y: Tensor, train_mask: Tensor, num_classes: int, rows: RowSharding | None) -> _Checked:
    """The training nodes, if all their labels are in range (collective, unless known)."""
    versions = version_of(train_mask), version_of(y)
    known = _known.get(train_mask)
    if known is not None and known.labels() is y and known[:1] + known[2:4] == (*versions, num_classes):
        return known
    of_batch = _checked_with_graph(y, train_mask, num_classes, rows)
    if of_batch is not None:
        return of_batch
    labels, mask = ((t.to_local() if isinstance(t, RowTensor) else t).cpu() for t in (y, train_mask))
    place = mask.nonzero().view(-1)
    key = place if rows is None else rows.rng_key[place]
    is_bad = (labels[place] < 0) | (labels[place] >= num_classes)
    # A node out of range and its label, then the first training nodes; -1: none.
    found = host.full((1, 2 + _NUM_FIRST), -1)
    if is_bad.any():
        found[0, 0], found[0, 1] = key[is_bad][0], labels[place][is_bad][0]
    first = key.sort().values[:_NUM_FIRST]
    found[0, 2 : 2 + first.numel()] = first
    found = found if rows is None else rows.group.gather_rows(found, [1] * rows.group.size)
    for rank, (node, label) in enumerate(found[:, :2].tolist()):
        if node >= 0:
            raise DataError(
                f"MaskedLabelPropagation expected training labels 0 ... {num_classes - 1} (got {label} at node {node}"
                f"{'' if rows is None else f' of rank {rank}'}): check num_classes, and take unlabelled nodes out of "
                f"the mask"
            )
    first = found[:, 2:].flatten()
    first = first[first >= 0].sort().values[:_NUM_FIRST]
    checked = _Checked(versions[0], weakref.ref(y), versions[1], num_classes, place, key, first)
    if None not in versions:
        _known[train_mask] = checked
    return checked


def _checked_with_graph(y: Tensor, train_mask: Tensor, num_classes: int, rows: RowSharding | None) -> _Checked | None:
    """Labels and mask of a batch, by the graph's (collective where these are unknown); ``None``: of no batch.

    Every rank knows all nodes of the sample, so it knows its first training nodes without a message.
    """
    of_mask, of_y = (origin_of(t) if isinstance(t, RowTensor) else None for t in (train_mask, y))
    if of_mask is None or of_y is None or of_mask[1] is not of_y[1] or not isinstance(rows, NodeSharding):
        return None
    mask_of_graph, nodes = of_mask[0], of_mask[1].source
    if rows.sample is None or rows.sample.kept is not None:
        return None  # a batch whose nodes do not ascend
    if not isinstance(nodes, NodeSharding) or nodes.sample is not None:
        return None  # the batch of a subgraph, where a node's key is not its number
    of_graph = _checked(of_y[0], mask_of_graph, num_classes, nodes)
    if of_graph.bits is None:
        of_graph = of_graph._replace(bits=_bits(of_graph.key, nodes))
        if mask_of_graph in _known:
            _known[mask_of_graph] = of_graph
    assert of_graph.bits is not None
    ids = rows.sample.node_id
    trains = (of_graph.bits[ids >> 3] >> (ids & 7)) & 1
    first = ids[trains.bool()][:_NUM_FIRST]
    if rows.sample.group is not None:
        first = first + rows.sample.group.index * nodes.num_rng_keys
    place = train_mask.to_local().cpu().nonzero().view(-1)  # type: ignore[attr-defined]
    labels, versions = weakref.ref(y), (version_of(train_mask), version_of(y))
    return _Checked(versions[0], labels, versions[1], num_classes, place, rows.rng_key[place], first)


def _bits(key: Tensor, nodes: NodeSharding) -> Tensor:
    """Whether each node of the graph is a training node, as bits (collective)."""
    counts = nodes.group.gather_counts(key.numel())
    trains = host.zeros(nodes.size, dtype=torch.bool)
    trains[nodes.group.gather_rows(key, counts)] = True
    return torch.from_numpy(np.packbits(trains.numpy(), bitorder="little"))
