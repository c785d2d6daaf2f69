"""``NeighborLoader`` and ``LinkNeighborLoader``: PyG's, with batches that do not depend on the number of ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

from pyg_dist.backend import ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import digest, raise_together, require_equal
from pyg_dist.data import DistributedData
from pyg_dist.data.batch import listed_nodes, ready
from pyg_dist.errors import DataError, OptionError, PygDistError, UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.sample import Subset
from pyg_dist.loader.batches import BatchLoader
from pyg_dist.loader.neighbors import InEdges, NeighborSampling, NodeSeeds, Seeds, Steps
from pyg_dist.tensor import RowTensor

_SUBGRAPHS = ("directional", "induced", "bidirectional")
_OF_WORKERS = (
    "num_workers", "persistent_workers", "pin_memory", "prefetch_factor", "worker_init_fn", "timeout",
    "multiprocessing_context", "pin_memory_device",
)  # fmt: skip
_WITHOUT_EFFECT = ("is_sorted", "filter_per_worker", "temporal_strategy", "generator")
_REFUSED = {
    "time_attr": "sample without times, or take subgraphs of each period",
    "input_time": "sample without times, or take subgraphs of each period",
    "edge_label_time": "sample without times, or take subgraphs of each period",
    "weight_attr": "leave it out: in-edges are drawn uniformly",
    "transform_sampler_output": "pass transform, which gets the batch",
    "neighbor_sampler": "pass a Sampler of your own to pyg_dist.loader.BatchLoader",
    "sampler": "pass input_nodes and shuffle",
    "batch_sampler": "pass input_nodes, batch_size and shuffle",
}


class _Neighbors(BatchLoader[Subset | None]):
    """What both loaders share: their options, and the sampler."""

    sampler: NeighborSampling

    def __init__(
        self,
        data: Data,
        num_neighbors: Sequence[int],
        seeds_of: Callable[[Steps], Seeds],
        num_inputs: Callable[[], int],
        options: dict[str, Any],
    ) -> None:
        name = type(self).__name__
        error: PygDistError | None = None
        try:
            _check(name, data, num_neighbors, options)
            if num_inputs() < options["batch_size"] and options["drop_last"]:
                raise OptionError(
                    f"Expected at least one batch of {options['batch_size']} inputs (got {num_inputs()} inputs and "
                    f"drop_last=True): pass a smaller batch_size"
                )
        except PygDistError as caught:
            error = caught
        if isinstance(data, DistributedData):
            raise_together(error)
            require_equal(
                {f"option {k}": str(v) for k, v in _compared(options).items()}, "give every rank the same loader"
            )
        elif error is not None:
            raise error
        for what in _OF_WORKERS:
            if options.get(what) and session.is_main():
                warnings.warn(f"{what} has no effect: a thread makes the next batch (prefetch)", stacklevel=4)
                break
        steps = Steps(
            num_inputs(), int(options["batch_size"]), bool(options["shuffle"]), bool(options["drop_last"]),
            int(options["seed"]),
        )  # fmt: skip
        if isinstance(data, DistributedData):
            ready(data)
            in_edges = InEdges.of(data.graph)
            group: Group | None = data.graph.node_sharding.group
        else:
            in_edges, group = InEdges.of_edge_index(data.edge_index, data.num_nodes), None
        sampler = NeighborSampling(
            in_edges,
            data.num_nodes,
            group,
            seeds_of(steps),
            tuple(int(count) for count in num_neighbors),
            steps.seed,
            options["subgraph_type"] if options["directed"] else "induced",
            bool(options["replace"]),
            bool(options["disjoint"]),
        )
        super().__init__(data, sampler, options["prefetch"])
        self.transform = options["transform"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.sampler.num_neighbors)} neighbours, {len(self)} steps)"

    def _take(self) -> Any:
        batch = super()._take()
        return batch if self.transform is None else self.transform(batch)


class NeighborLoader(_Neighbors):
    r"""PyG's ``NeighborLoader``, without pyg-lib, with the same batches on any number of ranks and in any layout.

    A batch has the seeds first, then the nodes of each hop in ascending order, and the attributes that PyG's has:
    ``batch_size``, ``input_id``, ``n_id``, ``e_id``, ``num_sampled_nodes``, ``num_sampled_edges``, and ``batch``
    where it is disjoint. Its edges keep the order of the graph. Which in-edges of a node are kept is a
    function of (seed, step, hop, node) alone: uniform, without replacement in O(number) time for any degree.

    Rows stay on the ranks that have them; what moves are the ids of sampled edges, and the halo of the batch's layers.
    Of a plain ``Data``, in one process, batches are plain, too.

    Args:
        data: a ``DistributedData``, in memory or of a store; in one process a ``Data``, too.
        num_neighbors: in-edges of a node by hop; -1: all.
        input_nodes: distinct ids or a mask of the seeds; ``None``: all nodes.
        replace: whether an edge may be drawn several times; the batch then has it several times.
        subgraph_type: ``"directional"``: the edges that were drawn; ``"induced"``: all between the nodes;
            ``"bidirectional"``: those that were drawn and their opposites, which the graph must have.
        disjoint: whether each seed has nodes of its own.
        transform: of each batch.
        directed: ``False``: ``subgraph_type="induced"``.
        batch_size: seeds of a step.
        shuffle: whether each epoch has a permutation of its own.
        drop_last: whether an epoch leaves out what fills no batch.
        seed: of the permutations and draws.
        prefetch: whether a thread makes the next batch while this one trains.
        kwargs: options of PyG's loader: those of its workers have no effect. ``time_attr``, ``weight_attr`` and others
            that are not there are refused.

    Raises:
        DataError: ``data`` is no graph, or ``input_nodes`` are no nodes of it, or repeat.
        OptionError: An option is not one of the values allowed.
        AgreementError: The ranks were given different options.
        UnsupportedError: An option is not there, or ``data`` has several data groups.

    Constructing it is collective, and drawing batches on several ranks is.

    Example:
        >>> loader = NeighborLoader(data, [4, 2], input_nodes=data.train_mask, batch_size=2)
        >>> batch = next(iter(loader))
        >>> batch.batch_size, batch.n_id.tolist()[:2], batch.num_sampled_nodes
        (2, [0, 4], [2, 5, 2])
    """

    def __init__(
        self,
        data: Data,
        num_neighbors: Sequence[int],
        input_nodes: Any = None,
        input_time: Any = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        directed: bool = True,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        prefetch: bool = True,
        **kwargs: Any,
    ) -> None:
        options = {
            "input_time": input_time, "replace": replace, "subgraph_type": _value(subgraph_type), "disjoint": disjoint,
            "temporal_strategy": temporal_strategy, "time_attr": time_attr, "weight_attr": weight_attr,
            "transform": transform, "directed": directed, "batch_size": batch_size, "shuffle": shuffle,
            "drop_last": drop_last, "seed": seed, "prefetch": prefetch, **kwargs,
        }  # fmt: skip
        nodes: list[Tensor] = []

        def num_inputs() -> int:
            if not nodes:
                nodes.append(_input_nodes(data, input_nodes))
            return nodes[0].numel()

        super().__init__(data, num_neighbors, lambda steps: NodeSeeds(steps, nodes[0]), num_inputs, options)


class LinkNeighborLoader(_Neighbors):
    r"""PyG's ``LinkNeighborLoader``: as :class:`NeighborLoader`, with the ends of edges as seeds.

    A batch has ``input_id``, and by ``neg_sampling``: ``edge_label_index``, numbers of nodes in the batch, and
    ``edge_label`` (none, or ``"binary"``); or ``src_index``, ``dst_pos_index`` and ``dst_neg_index`` (``"triplet"``).
    They are the same tensors on every rank. Negative ends are drawn uniformly of all nodes, keyed by (seed, step).

    Args:
        data: see :class:`NeighborLoader`.
        num_neighbors: see there.
        edge_label_index: the edges, int64 ``[2, n]``; ``None``: all edges of the graph.
        edge_label: their labels, ``[n, ...]``. With binary sampling labels from 0 are raised by one, as in PyG.
        neg_sampling: ``"binary"``, ``"triplet"``, or a ``torch_geometric.sampler.NegativeSampling`` without weights.
        neg_sampling_ratio: negative edges for each edge; ``neg_sampling="binary"``.
        replace: see :class:`NeighborLoader`, as for the other options.

    Example:
        >>> loader = LinkNeighborLoader(data, [4, 2], batch_size=2, neg_sampling="binary")
        >>> next(iter(loader)).edge_label.tolist()
        [1.0, 1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        data: Data,
        num_neighbors: Sequence[int],
        edge_label_index: Any = None,
        edge_label: Tensor | None = None,
        edge_label_time: Any = None,
        replace: bool = False,
        subgraph_type: Any = "directional",
        disjoint: bool = False,
        temporal_strategy: str = "uniform",
        neg_sampling: Any = None,
        neg_sampling_ratio: float | None = None,
        time_attr: str | None = None,
        weight_attr: str | None = None,
        transform: Callable[[Any], Any] | None = None,
        *,
        directed: bool = True,
        batch_size: int = 1,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        prefetch: bool = True,
        **kwargs: Any,
    ) -> None:
        options = {
            "edge_label_time": edge_label_time, "replace": replace, "subgraph_type": _value(subgraph_type),
            "disjoint": disjoint, "temporal_strategy": temporal_strategy, "time_attr": time_attr,
            "weight_attr": weight_attr, "transform": transform, "directed": directed, "batch_size": batch_size,
            "shuffle": shuffle, "drop_last": drop_last, "seed": seed, "prefetch": prefetch, **kwargs,
        }  # fmt: skip
        if edge_label_index is None and isinstance(data, DistributedData):
            edge_label_index = data.graph.full_edge_index().cpu()
        found: list[tuple[Tensor, Tensor | None, Negatives]] = []

        def num_inputs() -> int:
            if not found:
                negatives = _negatives(neg_sampling, neg_sampling_ratio)
                if disjoint:
                    raise UnsupportedError("Expected disjoint=False in LinkNeighborLoader (got True): leave it out")
                edges, labels = _edge_label(data, edge_label_index, edge_label, negatives)
                found.append((edges, labels, negatives))
            return found[0][0].shape[1]

        super().__init__(
            data, num_neighbors, lambda steps: LinkSeeds(steps, data.num_nodes, *found[0]), num_inputs, options
        )


@dataclass(frozen=True)
class Negatives:
    """Negative samples: how, and how many for each edge."""

    mode: Literal["none", "binary", "triplet"] = "none"
    amount: float = 0.0


@dataclass(frozen=True, eq=False)
class LinkSeeds:
    """The ends of edges, int64 ``[2, n]``, and of negative ones."""

    steps: Steps
    num_nodes: int
    edges: Tensor
    label: Tensor | None
    negatives: Negatives

    @property
    def num_steps(self) -> int:
        """See :class:`~pyg_dist.loader.neighbors.Seeds`."""
        return self.steps.num_steps

    @property
    def options(self) -> dict[str, Any]:
        """See :class:`~pyg_dist.loader.neighbors.Seeds`."""
        label = None if self.label is None else digest(self.label)
        return {
            **self.steps.options, "edge_label_index": digest(self.edges), "edge_label": label,
            "neg_sampling": self.negatives.mode, "neg_sampling_amount": self.negatives.amount,
        }  # fmt: skip

    def at(self, step: int) -> tuple[Tensor, dict[str, Any]]:
        """See :class:`~pyg_dist.loader.neighbors.Seeds`."""
        input_id = self.steps.at(step)
        source, target = self.edges[:, input_id]
        mode, num_edges = self.negatives.mode, input_id.numel()
        num_negative = math.ceil(num_edges * self.negatives.amount)
        drawn = self._nodes(num_negative, 2 if mode == "binary" else 1, step)
        if mode == "triplet":
            ends = [source, target, drawn[:, 0]]
        else:
            ends = [source, drawn[:, 0], target, drawn[:, 1]] if mode == "binary" else [source, target]
        node, number = torch.unique(torch.cat(ends), return_inverse=True)
        found: dict[str, Any] = {"input_id": input_id, "batch_size": num_edges}
        if mode == "triplet":
            source, target, negative = number.split([num_edges, num_edges, num_negative])
            if self.negatives.amount != 1:
                negative = negative.view(num_edges, -1)
            return node, {**found, "src_index": source, "dst_pos_index": target, "dst_neg_index": negative}
        label = None if self.label is None else self.label[input_id]
        if mode == "binary":
            label = torch.ones(num_edges) if label is None else label
            label = torch.cat([label, label.new_zeros(num_negative, *label.shape[1:])])
        found["edge_label_index"] = number.view(2, -1)
        return node, found if label is None else {**found, "edge_label": label}

    def _nodes(self, count: int, columns: int, step: int) -> Tensor:
        """Uniform ids, int64 ``[count, columns]``: a function of the seed and the step."""
        key, seed = torch.arange(count), ops.mixed_seed(self.steps.seed, step, self.num_nodes, 6)
        uniform = ops.keyed_uniform(key, columns, seed, dtype=torch.float64)
        return (uniform * self.num_nodes).long()


def _value(option: Any) -> Any:
    """Of an enum of PyG's."""
    return getattr(option, "value", option)


def _compared(options: dict[str, Any]) -> dict[str, Any]:
    names = "replace subgraph_type disjoint directed batch_size shuffle drop_last seed"
    return {name: options[name] for name in names.split()}


def _check(loader: str, data: Any, num_neighbors: Any, options: dict[str, Any]) -> None:
    """Check each option by itself."""
    if not isinstance(data, Data):
        raise DataError(f"Expected a Data or DistributedData (got {type(data).__name__}): one kind of nodes and edges")
    if isinstance(data, DistributedData):
        _, num_groups = data.graph.data_group
        if num_groups > 1:
            raise UnsupportedError(
                f"Expected one data group in {loader} (got {num_groups}): leave 'data' out of the mesh, or use "
                f"UniformVertexLoader"
            )
    elif session.world_size() > 1:
        raise DataError(f"Expected a DistributedData on several ranks (got {type(data).__name__}): wrap the graph")
    elif not isinstance(data.edge_index, Tensor):
        raise DataError("Expected a graph with edge_index (got none): T.ToEdgeIndex() makes it of adj_t")
    for name, value in options.items():
        if name in _REFUSED and value is not None:
            raise UnsupportedError(f"Expected {loader} without {name} (got {value!r}): {_REFUSED[name]}")
        if name not in _KNOWN and name not in _REFUSED:
            raise OptionError(f"Expected an option of {loader} (got {name}={value!r}): leave it out")
    counts = None if isinstance(num_neighbors, dict | str) else num_neighbors
    try:
        counts = [int(count) for count in counts]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        counts = []
    if not counts or min(counts) < -1 or (isinstance(num_neighbors, Tensor) and num_neighbors.dim() != 1):
        raise OptionError(
            f"Expected num_neighbors to be a list of counts of each hop, -1 for all (got {num_neighbors!r})"
        )
    if options["subgraph_type"] not in _SUBGRAPHS:
        raise OptionError(
            f"Expected subgraph_type to be one of {', '.join(_SUBGRAPHS)} (got {options['subgraph_type']!r})"
        )
    for name, least in (("batch_size", 1), ("seed", -(2**63))):
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise OptionError(f"Expected {name} to be an integer from {least} (got {value!r})")
    if options["transform"] is not None and not callable(options["transform"]):
        raise OptionError(f"Expected transform to be a function of a batch (got {options['transform']!r})")


_KNOWN = {
    "replace", "subgraph_type", "disjoint", "transform", "directed", "batch_size", "shuffle", "drop_last", "seed",
    "prefetch", *_OF_WORKERS, *_WITHOUT_EFFECT,
}  # fmt: skip


def _whole(data: Data, value: Any, what: str) -> Any:
    """A row tensor's values on every rank (collective)."""
    if not isinstance(value, RowTensor):
        return value
    if isinstance(data, DistributedData) and value._sharding is not data.graph.node_sharding:
        raise DataError(
            f"Expected '{what}' over the nodes of data (got {value._sharding} of another graph or selection)"
        )
    return value.full_tensor()


def _input_nodes(data: Data, input_nodes: Any) -> Tensor:
    """Ids in the order given."""
    if input_nodes is None:
        return torch.arange(data.num_nodes)
    if isinstance(input_nodes, tuple):
        raise DataError("Expected 'input_nodes' without a node type (got a tuple): pass the ids or the mask alone")
    ids = listed_nodes(_whole(data, input_nodes, "input_nodes"), data.num_nodes, "input_nodes")
    if ids.numel() == 0:
        raise DataError("Expected input_nodes to be at least one node (got none): leave it out")
    if torch.unique(ids).numel() < ids.numel():
        raise DataError("Expected distinct 'input_nodes' (got some of them several times): pass each node once")
    return ids


def _negatives(neg_sampling: Any, ratio: float | None) -> Negatives:
    if ratio:
        if neg_sampling is not None:
            raise OptionError("Expected neg_sampling or neg_sampling_ratio (got both): leave one out")
        neg_sampling = NegativeSampling("binary", ratio)
    try:
        cast = NegativeSampling.cast(neg_sampling)
    except (TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            f"Expected neg_sampling to be 'binary', 'triplet' or a NegativeSampling (got {neg_sampling!r})"
        ) from error
    if cast is None:
        return Negatives()
    if cast.src_weight is not None or cast.dst_weight is not None:
        raise UnsupportedError("Expected neg_sampling without weights (got some): ends are drawn uniformly")
    return Negatives("triplet" if cast.is_triplet() else "binary", float(cast.amount))


def _edge_label(data: Data, edges: Any, label: Any, negatives: Negatives) -> tuple[Tensor, Tensor | None]:
    """The edges and their labels."""
    edges = data.edge_index if edges is None else edges
    if isinstance(edges, DistributedEdgeIndex):
        edges = edges.full_tensor()
    if isinstance(edges, tuple) or not isinstance(edges, Tensor) or edges.dim() != 2 or edges.shape[0] != 2:
        got = list(edges.shape) if isinstance(edges, Tensor) else type(edges).__name__
        raise DataError(f"Expected 'edge_label_index' to be a tensor of shape [2, n] (got {got})")
    edges = edges.cpu().long()
    listed_nodes(edges.reshape(-1), data.num_nodes, "edge_label_index")
    if edges.shape[1] == 0:
        raise DataError("Expected edge_label_index to have at least one edge (got none): leave it out")
    if label is None:
        return edges, None
    if negatives.mode == "triplet":
        raise OptionError("Expected no edge_label with neg_sampling='triplet' (got one): leave it out")
    label = label.full_tensor() if isinstance(label, RowTensor) else torch.as_tensor(label)
    if label.dim() == 0 or label.shape[0] != edges.shape[1]:
        raise DataError(f"Expected 'edge_label' to have {edges.shape[1]} rows (got shape {list(label.shape)})")
    label = label.cpu()
    if negatives.mode == "binary" and not label.is_complex() and int(label.min()) == 0:
        label = label + 1  # zero is the label of negative edges
    return edges, label
