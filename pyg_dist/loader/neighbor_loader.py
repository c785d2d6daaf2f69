"""``NeighborLoader`` and ``LinkNeighborLoader``: PyG's, with batches that do not depend on the number of ranks."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch_geometric.loader
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import raised_on_all_ranks, require_equal
from pyg_dist.data import DistributedData
from pyg_dist.errors import DataError, OptionError, PygDistError, UnsupportedError
from pyg_dist.loader import inputs
from pyg_dist.loader.batches import BatchLoader, batch_of, is_distributed
from pyg_dist.loader.inputs import Inputs
from pyg_dist.loader.neighbors import NeighborSampling
from pyg_dist.loader.seeds import Listed, Steps
from pyg_dist.tensor import EdgeTensor, RowTensor

_SUBGRAPHS = ("directional", "induced", "bidirectional")
_NO_TIMES = "sample without times, or take subgraphs of each period"
_REFUSED = {
    "time_attr": _NO_TIMES, "input_time": _NO_TIMES, "edge_label_time": _NO_TIMES,
    "transform_sampler_output": "pass transform, which gets the batch",
    "neighbor_sampler": "pass a Sampler of your own to pyg_dist.loader.BatchLoader",
    "sampler": "pass input_nodes and shuffle",
    "batch_sampler": "pass input_nodes, batch_size and shuffle",
}  # fmt: skip
_OF_WORKERS = (
    "num_workers", "persistent_workers", "pin_memory", "prefetch_factor", "worker_init_fn", "timeout",
    "multiprocessing_context", "pin_memory_device",
)  # fmt: skip
_WITHOUT_EFFECT = ("is_sorted", "filter_per_worker", "temporal_strategy", "generator")
_COMPARED = "replace subgraph_type disjoint directed batch_size shuffle drop_last seed weight_attr".split()
_KNOWN = {*_COMPARED, "transform", "prefetch", *_OF_WORKERS, *_WITHOUT_EFFECT}


class _Neighbors(BatchLoader):
    """The base of both loaders: PyG's options, and the sampler.

    ``read`` reads the inputs that the script gives (collective). Errors are raised on every rank.
    """

    sampler: NeighborSampling

    def __init__(
        self, data: Data | HeteroData, num_neighbors: object, read: Callable[[], Inputs], options: dict[str, Any]
    ) -> None:
        options = {
            "replace": False, "subgraph_type": "directional", "disjoint": False, "weight_attr": None, "transform": None,
            "directed": True, "batch_size": 1, "shuffle": False, "drop_last": False, "seed": 0, "prefetch": True,
            **options,
        }  # fmt: skip
        subgraph_type = options["subgraph_type"]
        options["subgraph_type"] = getattr(subgraph_type, "value", subgraph_type)  # of an enum of PyG's
        num_groups = data.graph.data_group[1] if isinstance(data, DistributedData) else 1
        with raised_on_all_ranks((PygDistError,)) if is_distributed(data) else nullcontext():
            _check(type(self).__name__, data, options)
            counts, found = inputs.fan_outs(data, num_neighbors), read()
            if found.size < options["batch_size"] * num_groups and options["drop_last"]:
                raise OptionError(
                    f"Expected at least one batch of {options['batch_size'] * num_groups} inputs (got {found.size} "
                    f"inputs and drop_last=True): pass a smaller batch_size"
                )
        if is_distributed(data):
            require_equal({f"option {k}": str(options[k]) for k in _COMPARED}, "give every rank the same loader")
        of_workers = [name for name in _OF_WORKERS if options.get(name)]
        if of_workers and session.is_main():
            warnings.warn(f"{of_workers[0]} has no effect: a thread makes the next batch (prefetch)", stacklevel=3)
        steps = Steps(
            found.size, int(options["batch_size"]), bool(options["shuffle"]), bool(options["drop_last"]),
            int(options["seed"]), num_groups,
        )  # fmt: skip
        sampler = inputs.sampling(data, counts, found, steps, options)
        self._num_neighbors = num_neighbors
        super().__init__(data, sampler, options["prefetch"])
        self.transform = options["transform"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._num_neighbors} neighbours, {len(self)} steps)"

    @property
    def dataset(self) -> range:
        """The numbers of the inputs, as PyG's loaders have them: its length is how many there are."""
        return range(self.sampler.seeds.steps.size)

    def __call__(self, index: object) -> object:
        """The batch of some inputs, given by their numbers: a function of these and the seed (collective)."""
        listed = Listed.of(self.sampler.seeds.steps, index)
        sampler = replace(self.sampler, seeds=replace(self.sampler.seeds, steps=listed))
        return self._finished(self._batches.alone(lambda: batch_of(self.data, sampler, 0)))

    def _finished(self, batch: object) -> object:
        batch = super()._finished(batch)
        return batch if self.transform is None else self.transform(batch)


class NeighborLoader(_Neighbors):
    r"""PyG's ``NeighborLoader``, without pyg-lib, with the same batches on any number of ranks and in any layout.

    A batch has the seeds first, then the nodes of each hop in ascending order, and the attributes that PyG's has:
    ``batch_size``, ``input_id``, ``n_id``, ``e_id``, ``num_sampled_nodes``, ``num_sampled_edges``, and ``batch``
    where it is disjoint. Its edges are ordered by hop, and in it as in the graph. Which in-edges of a node are kept is
    a function of (seed, step, hop, node) alone: uniform, without replacement in O(number) time for any degree.

    Rows stay on the ranks that have them. The owner of a node draws its in-edges, and sends the ids of their sources to
    the owners of these; the thread that makes the next batch does so over messages of its own, while this one trains.
    Of a plain ``Data``, in one process, batches are plain, too.

    Of a graph with types a batch is a graph with types, whose nodes of each type are numbered so, and the attributes
    are those of types and relations, as in PyG. Each hop draws in-edges of each relation; no bidirectional batches.

    With several data groups (``mesh={"data": 2, "part": 2}``) each group draws a batch of ``batch_size`` seeds, and the
    batch is the disjoint union of all: the seeds of all groups first, then the nodes of each hop.

    Args:
        data: a ``DistributedData``, in memory or of a store; in one process a ``Data`` or ``HeteroData``, too.
        num_neighbors: in-edges of a node by hop; -1: all. With types one list for each relation, or a list by relation.
        input_nodes: distinct ids or a mask of the seeds; ``None``: all nodes. Of types ``("paper", ids or mask)``.
        more: PyG's further arguments, in its order.
        options: see below.

    ``replace`` (False): whether an edge may be drawn several times; the batch then has it several times.
    ``subgraph_type`` (``"directional"``): the edges that were drawn; ``"induced"``, or ``directed=False``: all between
    the nodes; ``"bidirectional"``: those that were drawn and their opposites, which the graph must have.
    ``disjoint`` (False): whether each seed has nodes of its own.
    ``weight_attr``: the name of an edge attribute, finite and at least 0, to which the probabilities of a node's edges
    are proportional in one draw after another (Efraimidis and Spirakis, 2006), in O(degree) time.
    ``transform``: of each batch.
    ``input_id`` of a batch says where its seeds stand in ``input_nodes``: of a mask these are ids, as in PyG.
    ``batch_size`` (1): seeds of a step and a data group.
    ``shuffle`` (False): whether each epoch has a permutation of its own.
    ``drop_last`` (False): whether an epoch leaves out an incomplete last batch.
    ``seed`` (0): of the permutations and draws.
    ``prefetch`` (True): whether a thread makes the next batch while this one trains.
    Options of PyG's workers have no effect. ``time_attr`` and others that are not there are refused.

    Raises:
        DataError: ``data`` is no graph, ``input_nodes`` are no nodes of it or repeat, or weights are no weights.
        OptionError: An option is not one of the values allowed.
        AgreementError: The ranks were given different options.
        UnsupportedError: An option is not there.

    Constructing it is collective, and drawing batches on several ranks is.

    Example:
        >>> loader = NeighborLoader(data, [4, 2], input_nodes=data.train_mask, batch_size=2)
        >>> batch = next(iter(loader))
        >>> batch.batch_size, batch.n_id.tolist()[:2], batch.num_sampled_nodes
        (2, [0, 4], [2, 6, 8])
    """

    def __init__(
        self,
        data: Data | HeteroData,
        num_neighbors: object,
        input_nodes: object = None,
        *more: object,
        **options: object,
    ) -> None:
        options = _named(torch_geometric.loader.NeighborLoader, 3, more) | options
        super().__init__(data, num_neighbors, lambda: inputs.node_seeds(data, input_nodes), options)


class LinkNeighborLoader(_Neighbors):
    r"""PyG's ``LinkNeighborLoader``: as :class:`NeighborLoader`, with the ends of edges as seeds.

    A batch has ``input_id``, and by ``neg_sampling``: ``edge_label_index``, numbers of nodes in the batch, and
    ``edge_label`` (none, or ``"binary"``); or ``src_index``, ``dst_pos_index`` and ``dst_neg_index`` (``"triplet"``).
    They are the same tensors on every rank. Negative ends are drawn of all nodes, keyed by (seed, step). In a disjoint
    batch each end has a tree of its own, and ``batch`` says to which edge a node belongs, as in PyG.

    Args:
        data: see :class:`NeighborLoader`.
        num_neighbors: see there.
        edge_label_index: the edges, int64 ``[2, n]``; ``None``: all edges of the graph. Of types ``(relation, edges)``.
        edge_label: their labels, ``[n, ...]``. With binary sampling labels from 0 are raised by one, as in PyG.
        neg_sampling: ``"binary"``, ``"triplet"``, or a ``NegativeSampling`` of PyG, whose weights are those of nodes as
            ends of negative edges.
        neg_sampling_ratio: negative edges for each edge; ``neg_sampling="binary"``.
        more: PyG's further arguments, in its order.
        options: see :class:`NeighborLoader`.

    Example:
        >>> loader = LinkNeighborLoader(data, [4, 2], batch_size=2, neg_sampling="binary")
        >>> next(iter(loader)).edge_label.tolist()
        [1.0, 1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        data: Data | HeteroData,
        num_neighbors: object,
        edge_label_index: object = None,
        edge_label: Tensor | None = None,
        *more: object,
        **options: Any,
    ) -> None:
        options = _named(torch_geometric.loader.LinkNeighborLoader, 4, more) | options
        edges = edge_label_index, edge_label, options.pop("neg_sampling", None), options.pop("neg_sampling_ratio", None)
        super().__init__(data, num_neighbors, lambda: inputs.link_seeds(data, *edges), options)


def _named(loader: type, num_named: int, more: tuple[object, ...]) -> dict[str, Any]:
    """The arguments after the first ones, by the names that PyG's loader has for them."""
    names = list(inspect.signature(loader).parameters)[num_named:-1]
    if len(more) > len(names):
        raise OptionError(
            f"Expected at most {num_named + len(names)} positional arguments (got {num_named + len(more)})"
        )
    return dict(zip(names, more, strict=False))


def _check(loader: str, data: object, options: dict[str, Any]) -> None:
    if not isinstance(data, Data | HeteroData):
        raise DataError(
            f"Expected a Data or DistributedData (got {type(data).__name__}): wrap a graph, or a HeteroData"
        )
    if not is_distributed(data) and session.world_size() > 1:
        raise DataError(f"Expected a DistributedData on several ranks (got {type(data).__name__}): wrap the graph")
    for name, value in options.items():
        if name in _REFUSED and value is not None:
            got = repr(value) if isinstance(value, str) else type(value).__name__
            raise UnsupportedError(f"Expected {loader} without {name} (got {got}): {_REFUSED[name]}")
        if name not in _KNOWN and name not in _REFUSED:
            raise OptionError(f"Expected an option of {loader} (got {name}={value!r}): leave it out")
    inputs.check(loader, data, options)
    if options["subgraph_type"] not in _SUBGRAPHS:
        raise OptionError(
            f"Expected subgraph_type to be one of {', '.join(_SUBGRAPHS)} (got {options['subgraph_type']!r})"
        )
    for name, least in (("batch_size", 1), ("seed", -(2**63))):
        value = options[name]
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
            raise OptionError(f"Expected {name} to be an integer from {least} to {2**63 - 1} (got {value!r})")
    if options["transform"] is not None and not callable(options["transform"]):
        raise OptionError(f"Expected transform to be a function of a batch (got {options['transform']!r})")
    if options["weight_attr"] is not None:
        name = options["weight_attr"]
        for store in inputs.stores_of(data).values():
            if isinstance(data, Data) or name in store:
                _check_weight(store, name, is_distributed(data))


def _check_weight(store: Any, name: object, is_distributed: bool) -> None:
    weight: Any = store.get(name) if isinstance(name, str) else None
    is_of_edges = isinstance(weight, EdgeTensor if is_distributed else Tensor)
    if not is_of_edges or not store.is_edge_attr(name) or weight.dim() != 1:
        raise DataError(
            f"Expected weight_attr to be the name of a one-dimensional edge attribute (got {name!r}): add it to data"
        )
    values = weight.to_local() if isinstance(weight, RowTensor) else weight
    if values.is_complex() or not bool((values.isfinite() & (values >= 0)).all()):
        raise DataError(f"Expected finite weights of at least 0 in {name!r} (got others): clamp them")
