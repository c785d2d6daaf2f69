"""``HeteroConv``: the results of relations with the same targets are summed while they are computed.

Stock code makes a tensor of each relation, stacks them, and sums over the stack. Here no stack is made, and for
relations with linear maps of sums over neighbours (``SAGEConv``) all products are added into one tensor ::

    x'_t = scale * (sum_r A_r x_s(r) W_r^T  +  x_t (sum_r V_r)^T  +  sum_r b_r)        scale: 1, or 1 / R for a mean

with one product for the targets' own rows, and one sum of the gradients of all b_r.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from types import FunctionType
from typing import Any, cast

from torch import Tensor
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.nn.conv.hetero_conv import group

from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.dense import large_tensors
from pyg_dist.conv.fast_paths import is_hooked
from pyg_dist.conv.function_patching import patched
from pyg_dist.conv.weighted_sum import project_first
from pyg_dist.graph.protocol import DistributedGraph, Operator
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.functions.layers import product, sparse_rows
from pyg_dist.tensor.row_tensor import as_row_tensor_, local_tensors


@dataclass(frozen=True)
class LinearTerms:
    """A SAGE conv's result that is not computed yet: ``lin_l(A source) + lin_r(root)``."""

    conv: SAGEConv
    graph: DistributedGraph
    operator: Operator  # A
    source: NodeTensor
    root: NodeTensor | None

    def value(self) -> Tensor:
        """Compute the result (collective)."""
        return cast(Tensor, self.conv.linear_aggregation(self.graph, self.source, self.root, self.operator))

    @property
    def projects_first(self) -> bool:
        """Whether the linear map goes first. If both orders aggregate equally many columns, memory decides.

        For its derivative a map that comes last keeps ``A source``, one that comes first only the source's rows.
        """
        lin, keeps_less = self.conv.lin_l, self.graph.sources.size <= self.graph.targets.size
        return project_first(lin, self.graph, self.source, self.operator, on_tie=keeps_less)


@dataclass(frozen=True)
class Biased:
    """The sum of the results of some relations, with the bias apart."""

    rows: NodeTensor
    bias: Tensor | None = None  # already copied to ranks
    count: int = 1  # relations; with several, ``rows`` may be written to

    def plus(self, other: Biased) -> Biased:
        """The sum with one more relation."""
        with local_tensors():
            rows = (large_tensors.add if self.count == 1 else large_tensors.add_into_)(self.rows, other.rows)
            bias = other.bias if self.bias is None else self.bias if other.bias is None else self.bias + other.bias
        return Biased(cast(NodeTensor, as_row_tensor_(rows, self.rows._sharding)), bias, self.count + 1)

    def value(self) -> Tensor:
        """The result, with the bias."""
        if self.bias is None:
            return self.rows
        with local_tensors():
            return as_row_tensor_(large_tensors.add(self.rows, self.bias), self.rows._sharding)


class DistributedHeteroConv(HeteroConv):
    r"""PyG's :class:`~torch_geometric.nn.HeteroConv` over relations of a distributed graph, same numbers (exact).

    .. math::
        \mathbf{x}^{\prime}_t = \mathrm{aggr}_{r = (s, \cdot, t)} \; \mathrm{conv}_r(\mathbf{x}_s, \mathbf{x}_t)

    For ``aggr="sum"`` and ``"mean"``, see the module; every other way is the stock one. :func:`pyg_dist.distribute`
    makes it of a ``HeteroConv``; constructor, parameters and ``state_dict`` are the stock module's. On plain tensors it
    *is* the stock module.

    Shapes:
        - x_dict: ``{type: [N_type, F_in]}``, node tensors
        - edge_index_dict: ``{relation: handle}``
        - output: ``{type: [N_type, F_out]}``

    Collective, forward and backward.
    """

    is_distributed = True

    def forward(self, *args_dict: object, **kwargs_dict: object) -> dict[str, Tensor]:
        if self.aggr not in ("sum", "mean"):
            return cast("dict[str, Tensor]", super().forward(*args_dict, **kwargs_dict))
        results: dict[str, list[object]] = defaultdict(list)  # by type of the targets
        adding = HeteroConv.__new__(HeteroConv)  # a copy whose convs add to results
        vars(adding).update(aggr=self.aggr, convs={r: partial(_add, results[r[-1]], c) for r, c in self.convs.items()})
        convs = [conv for conv in self.convs.values() if hasattr(conv, "gives_terms") and not is_hooked(conv)]
        for conv in convs:
            conv.gives_terms = True
        try:
            return _forward(adding, *args_dict, **kwargs_dict)  # type: ignore[no-any-return]
        finally:
            for conv in convs:
                conv.gives_terms = False

    def __repr__(self) -> str:
        return str(super().__repr__()).removeprefix("Distributed")  # a script prints the model that it names


def _add(results: list[Any], conv: Callable[..., object], *args: object, **kwargs: object) -> list[Any]:
    """Call ``conv``, and add its result to ``results``, to equally shaped rows if there are some (collective)."""
    result = conv(*args, **kwargs)
    result = Biased(result) if type(result) is NodeTensor else result
    if isinstance(result, Biased) and _form(result) is not None:
        for k, known in enumerate(results):
            if isinstance(known, Biased) and _form(known) == _form(result):
                results[k] = known.plus(result)
                return results
    results.append(result)
    return results


def _form(result: object) -> tuple[object, ...] | None:
    """A key that results have in common if they can be summed: nodes, columns and dtype of whole rows."""
    if isinstance(result, LinearTerms):
        weight = result.conv.lin_l.weight
        return id(result.graph.targets), weight.shape[0], weight.dtype
    if not isinstance(result, Biased) or result.rows.dim() != 2:
        return None
    return id(result.rows._sharding), result.rows.shape[1], result.rows.dtype


def _grouped(given: list[list[Any]], aggr: str) -> Tensor:
    """PyG's ``group`` of the results, one list for each relation (collective if there are linear terms)."""
    results, scale = given[0], 1 / len(given) if aggr == "mean" else 1
    forms = {_form(result) for result in results}
    if len(given) > 1 and len(forms) == 1 and None not in forms:
        return _total(results, scale)
    values = [r.value() if isinstance(r, (LinearTerms, Biased)) else r for r in results]
    if len(values) == len(given):
        return cast(Tensor, group(values, aggr))
    return cast(Tensor, group(values, "sum") * scale)


def _total(results: Sequence[Any], scale: float) -> Tensor:
    terms = [result for result in results if isinstance(result, LinearTerms)]
    rows = [result for result in results if isinstance(result, Biased)]  # one, or none
    sharding = terms[0].graph.targets if terms else rows[0].rows._sharding
    of_terms = [_sum_of(terms, scale)] if terms else []
    with local_tensors():
        scaled = [r.rows if scale == 1 else large_tensors.multiply(r.rows, scale) for r in rows]
        scaled += [r.bias * scale for r in rows if r.bias is not None]
        total = reduce(large_tensors.add_into_, [*of_terms, *scaled])
    return cast(Tensor, as_row_tensor_(total.as_subclass(Tensor), sharding))


def _sum_of(terms: Sequence[LinearTerms], scale: float) -> Tensor:
    """This rank's rows of ``scale`` times the sum of terms with the same targets (collective)."""
    rows = terms[0].graph.targets

    def entered(parameter: Tensor) -> Tensor:
        with local_tensors():
            weight = rows.copy_to_ranks(parameter)
            return weight if scale == 1 else weight * scale

    orders = [term.projects_first for term in terms]
    first = _projected([term for term, is_first in zip(terms, orders, strict=True) if is_first], entered)
    # Messages for maps that come last are started before anything is multiplied.
    pairs: list[tuple[Any, Tensor]] = [
        (term.graph.start(term.source, term.operator, term.conv), entered(term.conv.lin_l.weight))
        for term, is_first in zip(terms, orders, strict=True)
        if not is_first
    ]
    begun = next(first, None)
    biases = [entered(term.conv.lin_l.bias) for term in terms if term.conv.lin_l.bias is not None]
    bias = sum(biases[1:], start=biases[0]) if biases else None
    out: Tensor | None = None
    for given, weight in [*_roots(terms, entered), *pairs]:
        x = given.wait() if isinstance(given, Pending) else given
        with local_tensors():
            if out is None:
                out, bias = product(x, weight, bias), None
            elif sparse_rows(x, weight) is not None:
                out = large_tensors.add_into_(out, product(x, weight))
            else:
                out = large_tensors.add_product_(out, x.as_subclass(Tensor), weight)
    while begun is not None:
        following = None if rows.is_on_one_rank else next(first, None)  # under way while this one is waited for
        with local_tensors():
            made = begun.wait().as_subclass(Tensor)
            out = made if out is None else large_tensors.add_into_(out, made)
        del made
        begun = following
        if begun is None:
            begun = next(first, None)
    assert out is not None
    with local_tensors():
        return out if bias is None else large_tensors.add_into_(out, bias)


def _projected(terms: Sequence[LinearTerms], entered: Callable[[Tensor], Tensor]) -> Iterator[Pending[NodeTensor]]:
    """``A (source W^T)`` of each term, started as the iterator advances (collective)."""
    for term in terms:
        with local_tensors():
            projected = product(term.source, entered(term.conv.lin_l.weight))
        rows = cast(NodeTensor, as_row_tensor_(projected, term.source._sharding))
        yield term.graph.start(rows, term.operator, term.conv)


def _roots(terms: Sequence[LinearTerms], entered: Callable[[Tensor], Tensor]) -> list[tuple[NodeTensor, Tensor]]:
    """The distinct roots, each with the sum of its maps' weights."""
    weights: dict[int, tuple[NodeTensor, Tensor]] = {}
    for term in terms:
        if term.root is not None:
            weight = entered(term.conv.lin_r.weight)
            known = weights.get(id(term.root))
            weights[id(term.root)] = term.root, weight if known is None else known[1] + weight
    return list(weights.values())


_forward: Any = patched(cast(FunctionType, HeteroConv.forward), {group: _grouped})
