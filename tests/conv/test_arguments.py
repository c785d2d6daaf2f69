"""Every argument of a conv counts as in PyG, or raises: ``size``, pairs of features, and what PyG's functions take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from against_stock import differences
from test_any_conv import NUM_NODES, F, G, graph, mlp
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import get_laplacian, scatter, softmax
from workers import on_ranks

import pyg_dist
from pyg_dist.errors import UnsupportedError

N = NUM_NODES


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    call: Callable[[Any, Any], Any]  # of the conv and the data


class Sums(gnn.MessagePassing):
    """As a script may have it: a plain sum, whose ``propagate`` gets a size."""

    def __init__(self, size: Any) -> None:
        super().__init__()
        self.sizes = size

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, size=self.sizes)  # type: ignore[no-any-return]


class OwnSteps(Sums):
    """With steps of its own."""

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        return scatter(inputs, index, dim=0, dim_size=dim_size, reduce="max")


class OwnNumber(Sums):
    """Aggregates into a number of rows of its own."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)  # type: ignore[no-any-return]

    def aggregate(self, inputs: Tensor, index: Tensor, ptr: Any = None, dim_size: int | None = None) -> Tensor:
        return super().aggregate(inputs, index, ptr, self.sizes)  # type: ignore[no-any-return]


class Updates(Sums):
    """Edges get a weight first."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # edge_updater_type: (x: Tensor)
        return self.edge_updater(edge_index, x=x, size=self.sizes)  # type: ignore[no-any-return]

    def edge_update(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        return x_i * x_j


class Scaled(Sums):
    """Its ``size`` is a number of its own."""

    def forward(self, x: Tensor, edge_index: Tensor, size: float) -> Tensor:
        return size * self.propagate(edge_index, x=x)  # type: ignore[no-any-return]


class PassesOn(gnn.GATConv):
    """Extends a conv with a size."""

    def forward(self, x: Tensor, edge_index: Tensor, size: Any = None) -> Tensor:
        return super().forward(x, edge_index, size=size) + 1  # type: ignore[no-any-return]


class Paired(Sums):
    """Its second tensor of rows tells only how many targets there are."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=(x, torch.ones(self.sizes, F, dtype=x.dtype)))  # type: ignore[no-any-return]


class Normed(gnn.MessagePassing):
    """Calls PyG's norm with the options that it was made with."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, weight = gcn_norm(edge_index, None, dtype=x.dtype, **self.options)
        return self.propagate(edge_index, x=x, weight=weight)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


class Laplacian(Normed):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, weight = get_laplacian(edge_index, None, dtype=x.dtype, **self.options)
        return self.propagate(edge_index, x=x, weight=weight)  # type: ignore[no-any-return]


class Pointed(Normed):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return softmax(x[edge_index[0]], edge_index[1], **self.options)


def plain(conv: Any, data: Any) -> Any:
    return conv(data.x, data.edge_index)


def hooked(conv: Any) -> Any:
    conv.register_propagate_forward_pre_hook(lambda conv, given: (given[0], (N, N + 3), given[2]))
    return conv


def sized(size: Any, **names: str) -> Callable[[Any, Any], Any]:
    return lambda conv, data: conv(
        data.x, data.edge_index, size=size, **{name: data[value] for name, value in names.items()}
    )


def from_sources(size: Any) -> Callable[[Any, Any], Any]:
    return lambda conv, data: conv((data.x, None), data.edge_index, size=size)


EDGE_ATTR, EDGE_TYPE = {"edge_attr": "edge_attr"}, {"edge_type": "edge_type"}
SIZED: dict[str, tuple[Callable[[], nn.Module], dict[str, str]]] = {
    "SAGE": (lambda: gnn.SAGEConv(F, G), {}),
    "SAGE max": (lambda: gnn.SAGEConv(F, G, aggr="max"), {}),
    "GAT": (lambda: gnn.GATConv(F, G), {}),
    "GIN": (lambda: gnn.GINConv(mlp(F, G)), {}),
    "Graph": (lambda: gnn.GraphConv(F, G), {}),
    "GEN": (lambda: gnn.GENConv(F, G), {}),
    "General": (lambda: gnn.GeneralConv(F, G, attention=True), {}),
    "MF": (lambda: gnn.MFConv(F, G), {}),
    "Simple": (lambda: gnn.SimpleConv(), {}),
    "WL": (lambda: gnn.WLConvContinuous(), {}),
    "GINE": (lambda: gnn.GINEConv(mlp(F, G), edge_dim=3), EDGE_ATTR),
    "GMM": (lambda: gnn.GMMConv(F, G, 3, 2), EDGE_ATTR),
    "NN": (lambda: gnn.NNConv(F, G, mlp(3, F * G)), EDGE_ATTR),
    "RGAT": (lambda: gnn.RGATConv(F, G, 3), EDGE_TYPE),
}  # fmt: skip

TAKEN: dict[str, Case] = {
    **{f"{name}, a pair": Case(make, sized((N, N), **more)) for name, (make, more) in SIZED.items()},
    **{
        f"{name}, {size}": Case(SIZED[name][0], sized(size))
        for name in ("SAGE", "GIN", "Graph")
        for size in ([N, N], (N, None), (None, N), (None, None), torch.Size((N, N)))
    },
    "a tensor": Case(SIZED["Graph"][0], sized(torch.tensor([N, N]))),
    "from sources": Case(lambda: gnn.SAGEConv(F, G, root_weight=False), from_sources((N, N))),
    "of a script": Case(lambda: Sums((None, N)), plain),
    "own steps": Case(lambda: OwnSteps((N, N)), plain),
    "own number": Case(lambda: OwnNumber(N), plain),
    "edges": Case(lambda: Updates([N, N]), plain),
    "a number of its own": Case(lambda: Scaled(None), lambda conv, data: conv(data.x, data.edge_index, size=3.0)),
    "passed on": Case(lambda: PassesOn(F, G), sized((N, N))),
    "as many targets": Case(lambda: Paired(N), plain),
    **{
        f"norm by {flow}, {loops}": Case(partial(Normed, num_nodes=N, flow=flow, add_self_loops=loops), plain)
        for flow in ("source_to_target", "target_to_source")
        for loops in (True, False)
    },
    "Laplacian": Case(lambda: Laplacian(num_nodes=N, normalization="sym"), plain),
    "softmax": Case(lambda: Pointed(num_nodes=N + 2), plain),
}  # fmt: skip

ALL_NODES = "expected all 47 nodes as sources and as targets"
REFUSED: dict[str, tuple[Case, str]] = {
    **{f"{name}, fewer": (Case(make, sized((N, 40), **more)), ALL_NODES) for name, (make, more) in SIZED.items()},
    "more targets": (Case(SIZED["Graph"][0], sized((None, N + 1))), ALL_NODES),
    "one number": (Case(SIZED["SAGE"][0], sized((N,))), ALL_NODES),
    "from sources": (Case(lambda: gnn.SAGEConv(F, G, root_weight=False), from_sources((N, N + 3))), ALL_NODES),
    "of a script": (Case(lambda: Sums((N, N + 2)), plain), ALL_NODES),
    "own steps": (Case(lambda: OwnSteps((N, 40)), plain), ALL_NODES),
    "own number": (Case(lambda: OwnNumber(N + 4), plain), ALL_NODES),
    "edges": (Case(lambda: Updates((N + 1, N)), plain), ALL_NODES),
    "passed on": (Case(lambda: PassesOn(F, G, add_self_loops=False), sized((N, 40))), ALL_NODES),
    "a hook": (Case(lambda: hooked(Sums(None)), plain), ALL_NODES),
    "more targets' rows": (Case(lambda: Paired(N + 5), plain), ALL_NODES),
    "fewer targets' rows": (Case(lambda: Paired(N - 5), plain), ALL_NODES),
    "nodes of a norm": (Case(lambda: Normed(num_nodes=N + 2), plain), ALL_NODES),
    "nodes of a Laplacian": (Case(lambda: Laplacian(num_nodes=N + 2), plain), ALL_NODES),
    "ptr": (Case(lambda: Pointed(ptr=torch.tensor([0, 310])), plain), "expected no 'ptr'"),
}


def result(case: Case, data: Any, is_ours: bool) -> Any:
    torch.manual_seed(0)
    model = case.make().double()
    return case.call(pyg_dist.distribute(model) if is_ours else model, data)


@pytest.mark.parametrize("layout", ["halo", "grid"])
@on_ranks(1, 2)
def test_arguments_count_as_in_pyg(layout: str) -> None:
    data = graph()
    ours = pyg_dist.DistributedData(data, layout=layout)
    differing = {}
    for name, case in TAKEN.items():
        lines = differences({"out": result(case, ours, True)}, {"out": result(case, data, False)})
        if lines:
            differing[name] = lines
    assert not differing
    for name, (case, message) in REFUSED.items():
        with pytest.raises(UnsupportedError) as caught:
            result(case, ours, True)
        assert message in str(caught.value), name
        assert "\n" not in str(caught.value), name
