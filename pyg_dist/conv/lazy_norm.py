"""The edges and weights that ``gcn_norm`` returns: stand-ins, whose tensors are made when they are first read.

A sum with these weights (:mod:`~pyg_dist.conv.weighted_sum`) needs only the graph's operator of the norm: two scales
per node if there are no edge weights, cached as for ``GCNConv``. Any other use makes the tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.conv.inputs import snapshot
from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.edges import SINGLE_EDGES, Edges
from pyg_dist.graph.protocol import DistributedGraph, EdgeView, Norm, Operator
from pyg_dist.graph.sharded_edges import ALIKE
from pyg_dist.tensor import EdgeTensor
from pyg_dist.tensor.registry import Args, Function, Kwargs, mapped
from pyg_dist.tensor.row_tensor import DerivedOperand, version_of

Make = Callable[[Edges, "EdgeTensor | None"], "tuple[Edges, Tensor]"]


class LazyNorm:
    """GCN's norm of all edges of a graph; ``make`` makes the edges, with loops, and their weights (collective)."""

    def __init__(self, edges: Edges, weight: EdgeTensor | None, norm: Norm, dtype: torch.dtype, make: Make) -> None:
        self.dtype, self.graph = dtype, edges.graph
        self._all, self._weight, self._norm, self._make = edges, weight, norm, make
        self._learning: dict[torch.dtype, Operator | None] = {}

    def is_of(self, edges: Edges) -> bool:
        """Whether ``edges`` are this norm's."""
        return isinstance(edges, NormedEdges) and edges.lazy is self

    def stand_ins(self) -> tuple[NormedEdges, NormWeight]:
        """The edges and weights that a conv gets; reading them makes them."""
        edges = torch.empty(2, 0, dtype=torch.int64, device="meta").as_subclass(NormedEdges)
        edges.lazy, edges.graph, edges.weight = self, self.graph, None
        weight = torch.empty(0, dtype=self.dtype, device="meta").as_subclass(NormWeight)
        weight.lazy = self
        return edges, weight

    @cached_property
    def made(self) -> tuple[Edges, Tensor]:
        """The edges and their weights (collective at the first use); kept if edge weights do not learn."""
        if not self._learns:
            edges, values, version = self._all.kept.get((self._norm, self.dtype), self._weight, self._make_for_cache)
            if version is not None and version == version_of(values):  # no conv has written to them
                return self._all if edges is None else edges, values
        return self._make(self._all, self._weight)

    def _make_for_cache(self) -> tuple[Edges | None, Tensor, int | None]:
        """Edges, weights and their version; ``None`` for ``self._all``, since it owns the cache (a cycle)."""
        edges, values = self._make(self._all, self._weight)
        return None if edges is self._all else edges, values, version_of(values)

    @property
    def _learns(self) -> bool:
        return self._weight is not None and self._weight.requires_grad and torch.is_grad_enabled()

    def operator(self, dtype: torch.dtype) -> Operator | None:
        """The normalised matrix (collective); ``None`` for mini-batches without one, whose edges are then made.

        All hops of a forward pass share it, so the degrees of weights that learn are summed once.
        """
        if not self._learns:
            return self._built(dtype)  # the graph keeps it
        if dtype not in self._learning:
            self._learning[dtype] = self._built(dtype)
        return self._learning[dtype]

    def _built(self, dtype: torch.dtype) -> Operator | None:
        try:
            return self.graph.operator(self._norm, self._weight, dtype)
        except UnsupportedError:
            return None

    def freeze(self) -> None:
        """Use the present values of the weights from now on, as ``cached=True`` does."""
        if self._weight is not None and not self._weight.requires_grad:
            self._weight = snapshot(self._weight)


def norm_of(graph: DistributedGraph | EdgeView, add_self_loops: bool, improved: bool, has_weights: bool) -> Norm:
    """GCN's norm as in PyG, where ``improved`` has no effect on an ``edge_index`` without weights."""
    return Norm.gcn(add_self_loops, 2.0 if improved and (has_weights or graph.loop_rule != "remaining") else 1.0)


class NormedEdges(Edges):
    """The edges of the norm, with its loops."""

    lazy: LazyNorm

    def __getattribute__(self, name: str) -> object:
        if name == "rows" or name in SINGLE_EDGES:
            return getattr(self.lazy.made[0], name)
        return super().__getattribute__(name)

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        if func in ALIKE or func == Tensor.device.__get__:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*made(args), **made(kwargs or {}))


class NormWeight(DerivedOperand):
    """The weights of the norm: any function on them gets an edge tensor."""

    lazy: LazyNorm

    @classmethod
    def __torch_function__(cls, func: Function, types: object, args: Args = (), kwargs: Kwargs | None = None) -> object:
        return func(*made(args), **made(kwargs or {}))


def made(value: Any) -> Any:
    """``value`` with the stand-ins in it replaced by their tensors (collective at the first use)."""
    return mapped(value, _made)


def _made(value: Any) -> Any:
    if isinstance(value, NormWeight):
        return value.lazy.made[1]
    return value.lazy.made[0] if isinstance(value, NormedEdges) else value
