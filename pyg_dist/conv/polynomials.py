"""Convs that are polynomials of one matrix (TAGConv, SGConv, SSGConv, GraphConv): hops and linear maps in either order.

The cheaper order is taken. The hops of constant features are computed once and kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GraphConv, Linear, MessagePassing, SGConv, SSGConv, TAGConv

from pyg_dist.backend.dense import large_tensors
from pyg_dist.conv.fast_paths import NORMS, Given, fast_path
from pyg_dist.conv.graph_functions import gcn_norm
from pyg_dist.conv.weighted_sum import add_into_, commutes, operator_of, sum_form
from pyg_dist.graph import caches
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import Operator
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.functions.layers import product
from pyg_dist.tensor.row_tensor import as_row_tensor_, local_tensors

_WHOLE_COLUMNS = 16
"""MKL's products with a multiple of it take two thirds of the time: 170,000 x 128 by 128 x 192, one thread of a Zen 4
109 ms, by 128 x 188 172 ms."""


@dataclass(frozen=True)
class _Polynomial:
    """``sum_k A^k x W_k + b``; or, with one map, ``(sum_k c_k A^k x) W + b``."""

    lins: list[Linear]  # the maps of powers 0, 1, ...; or the one map
    bias: Tensor | None
    factors: tuple[float, ...] | None  # c_0, c_1, ..., if there is one map
    degree: int

    @staticmethod
    def of(conv: MessagePassing) -> _Polynomial:
        if isinstance(conv, TAGConv):
            return _Polynomial(list(conv.lins), conv.bias, None, conv.K)
        if isinstance(conv, GraphConv):
            return _Polynomial([conv.lin_root, conv.lin_rel], conv.lin_rel.bias, None, 1)
        if isinstance(conv, SGConv):
            return _Polynomial([conv.lin], conv.lin.bias, (*[0.0] * conv.K, 1.0), conv.K)
        each = (1 - conv.alpha) / conv.K if conv.K else 0.0
        return _Polynomial([conv.lin], conv.lin.bias, (conv.alpha, *[each] * conv.K), conv.K)


@dataclass(eq=False, frozen=True)
class _Hops:
    """The key of one operator's hops in x's cache; ``factors`` as in :class:`_Polynomial`."""

    degree: int
    factors: tuple[float, ...] | None

    @staticmethod
    def of(operator: object, polynomial: _Polynomial) -> _Hops:
        own = _HOPS.setdefault(operator, {})
        key = polynomial.degree, polynomial.factors
        return own.setdefault(key, _Hops(*key))


_HOPS: weakref.WeakKeyDictionary[object, dict[Any, _Hops]] = weakref.WeakKeyDictionary()


@fast_path(TAGConv, GraphConv, SGConv, SSGConv, when=lambda conv: not getattr(conv, "cached", False))
def polynomial_forward(conv: MessagePassing, edges: Edges, given: Given) -> Tensor | None:
    """The forward of a conv that is a polynomial (collective); ``None`` where PyG's has to run.

    That is on features sharded by columns, for linear maps that are changed or hooked, and under autocast.
    (``cached=True`` fixes PyG's order, so such convs never come here.)
    """
    x, weight = given["x"], given.get("edge_weight")
    if type(x) is not NodeTensor or x._sharding is not edges.graph.feature_sharding(x.shape[-1]):  # type: ignore[attr-defined]
        return None
    polynomial = _Polynomial.of(conv)
    if polynomial.degree < 1 or not all(map(commutes, polynomial.lins)) or torch.is_autocast_enabled(x.device.type):
        return None
    if any(lin.weight.dtype != x.dtype or lin.in_channels != x.shape[-1] for lin in polynomial.lins):
        return None
    is_tag = isinstance(conv, TAGConv)
    if isinstance(conv, (SGConv, SSGConv)) or (is_tag and conv.normalize):
        loops = not is_tag and conv.add_self_loops
        edges, weight = gcn_norm(edges, weight, x.size(0), False, loops, conv.flow, dtype=x.dtype)
    elif weight is None:
        weight = edges.weight
    form: Any = sum_form(conv.stock)
    operator, dtype = operator_of(edges, x, weight, NORMS[type(conv.aggr_module)], form.flattens)
    if operator is None or dtype != x.dtype:
        return None
    graph: Any = edges.graph
    run = _Run(conv, graph, operator, polynomial)
    if graph.is_cached(x, operator):
        # A single hop is kept by the graph.
        num_kept = polynomial.degree if polynomial.factors is None else 1
        keeps = polynomial.degree > 1 and caches.is_cacheable(x, x._sharding, num_kept)
        return run.of_constant(x) if keeps else run.in_order(x)
    return run.projected(x) if run.project_first(x) else run.in_order(x)


@dataclass(frozen=True)
class _Run:
    conv: MessagePassing
    graph: Any
    operator: Operator
    polynomial: _Polynomial

    def project_first(self, x: NodeTensor) -> bool:
        """Whether the linear maps come first: if this aggregates no more columns, forward and backward together.

        Columns are counted as in :func:`~pyg_dist.conv.weighted_sum.project_first`. On a tie the maps come first, since
        then no hop is kept for the backward.
        """
        lin = self.polynomial.lins[0]
        backward = torch.is_grad_enabled()
        learns = x.requires_grad or any(lin.weight.requires_grad for lin in self.polynomial.lins)
        first = lin.in_channels * (1 + (backward and x.requires_grad))
        return bool(lin.out_channels * (1 + (backward and learns)) <= first)

    def of_constant(self, x: NodeTensor) -> Tensor:
        """The output from kept hops, which the first call computes in full precision."""
        key = _Hops.of(self.operator, self.polynomial)
        known = caches.lookup(x, key)
        if known is None:
            # Another object for the same rows: otherwise the graph would keep each hop, too.
            hops = self._hops(NodeTensor.from_local(x.to_local(), x._sharding), layer=None)
            known = caches.store(x, key, hops, self.graph)
        lins, bias = self.polynomial.lins, self.polynomial.bias
        kept = known.rows(NodeTensor, x._sharding)
        if self.polynomial.factors is not None:
            return _linear(kept, lins, bias)
        return add_into_(_linear(kept, lins[1:], bias, dim=1), _linear(x, lins[:1]))

    def in_order(self, x: NodeTensor) -> Tensor:
        lins, bias = self.polynomial.lins, self.polynomial.bias
        if self.polynomial.factors is not None:
            summed: Any = as_row_tensor_(self._hops(x, self.conv), x._sharding)
            return _linear(summed, lins, bias)
        out: Tensor = _linear(x, lins[:1])
        for lin in lins[1:]:
            x = self.graph.aggregate(x, self.operator, self.conv)
            out = add_into_(out, _linear(x, [lin]))
        return out if bias is None else add_into_(out, bias)

    def projected(self, x: NodeTensor) -> Tensor:
        """The output with the linear maps first, then Horner's scheme from the highest power down."""
        x._is_reused = True  # in a second call its hops are worth keeping
        bias, factors = self.polynomial.bias, self.polynomial.factors
        out: Any = _linear(x, self.polynomial.lins)
        if factors is not None:
            out = as_row_tensor_(self._hops(out, self.conv), x._sharding)
        else:
            width = self.polynomial.lins[0].out_channels
            pieces = large_tensors.split_columns(out.to_local(), [width] * len(self.polynomial.lins))
            *others, out = (as_row_tensor_(piece, x._sharding) for piece in pieces)
            for other in reversed(others):
                out = add_into_(self.graph.aggregate(out, self.operator, self.conv), other)
        return out if bias is None else add_into_(out, bias)

    def _hops(self, x: NodeTensor, layer: MessagePassing | None) -> Tensor:
        """The local rows of ``A^k x`` for k = 1, 2, ..., concatenated; or of the weighted sum of all powers."""
        factors, hop = self.polynomial.factors, x
        hops: list[Tensor] = []
        total: Any = None if factors is None or factors[0] == 0 else factors[0] * x
        for k in range(1, self.polynomial.degree + 1):
            hop = self.graph.aggregate(hop, self.operator, layer)
            if factors is None:
                hops.append(hop.to_local())
            elif factors[k] != 0:
                term = hop if factors[k] == 1 else factors[k] * hop
                total = term if total is None else add_into_(total, term)
        return torch.cat(hops, 1) if factors is None else total.to_local()


def _linear(x: NodeTensor, lins: Sequence[Linear], bias: Tensor | None = None, dim: int = 0) -> NodeTensor:
    """``x [W_1 ... W_n]``, the maps' outputs concatenated, perhaps with padding columns of zeros at the end.

    With ``dim=1`` the sum of the maps, each of its own block of x's columns.
    """
    rows = x._sharding
    weights = [rows.copy_to_ranks(lin.weight) for lin in lins]  # not concatenated before: gradients share a bucket
    weight = weights[0]
    if len(weights) > 1 and dim == 0:
        num_zeros = -sum(w.shape[0] for w in weights) % _WHOLE_COLUMNS
        weights = [*weights, weight.new_zeros(num_zeros, weight.shape[1])]
    if len(weights) > 1:
        weight = torch.cat(weights, dim)
    entered = None if bias is None else rows.copy_to_ranks(bias)
    with local_tensors():
        return as_row_tensor_(product(x, weight, entered), rows)  # type: ignore[return-value]
