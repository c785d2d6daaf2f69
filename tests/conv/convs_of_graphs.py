"""Convs of a script that take a graph, or a container that has edges, alone or beside edges."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.utils import degree

F = 6  # columns, as of the graph of test_any_conv.py


class TakesAll(gnn.MessagePassing):
    """Its only argument is a graph, or a container of what a graph has."""

    def __init__(self, pack: Callable[..., Any], unpack: Callable[[Any], tuple[Any, ...]], **options: str) -> None:
        super().__init__(aggr="mean", **options)
        self.lin, self.edge_lin, self.pack, self.unpack = nn.Linear(F, F), nn.Linear(3, F), pack, unpack

    def forward(self, given: Any) -> Any:
        x, edge_index, edge_attr = self.unpack(given)
        norm = degree(edge_index[1], x.size(0)).clamp(min=1).rsqrt()[edge_index[0]]
        return self.propagate(edge_index, x=self.lin(x), edge_attr=self.edge_lin(edge_attr), norm=norm)

    def message(self, x_j: Tensor, edge_attr: Tensor, norm: Tensor) -> Tensor:
        return x_j * edge_attr.sigmoid() * norm.view(-1, 1)


class Packs(nn.Module):
    def __init__(self, conv: TakesAll) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Any:
        return self.conv(self.conv.pack(x, edge_index, edge_attr))


class TakesBoth(TakesAll):
    """Edges, and a container that has edges."""

    def forward(self, edge_index: Any, given: Any) -> Any:  # type: ignore[override]
        x = self.unpack(given)[0]
        norm = degree(edge_index[1], x.size(0)).clamp(min=1)[edge_index[1]]
        return super().forward(given) + self.propagate(edge_index, x=x, edge_attr=self.lin.bias, norm=norm)


class PacksBeside(Packs):
    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Any:
        return self.conv(edge_index, self.conv.pack(x, edge_index, edge_attr))


class ChangesGraph(TakesAll):
    """Gives the graph back, with other rows; so does the conv that it calls."""

    def __init__(self, inner: TakesAll | None, **options: str) -> None:
        super().__init__(as_graph, parts_of, **options)
        self.inner = inner

    def forward(self, given: Any) -> Any:
        given.x = given.x + super().forward(given)
        return given if self.inner is None else self.inner(given)


class Layers(nn.Module):
    """Convs that take and give a graph, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([ChangesGraph(ChangesGraph(None)), ChangesGraph(None)])

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Any:
        first = graph = as_graph(x, edge_index, edge_attr)
        for conv in self.convs:
            graph = conv(graph)
        assert graph is first
        assert graph.edge_index is edge_index
        return graph.x


class Graph(NamedTuple):
    x: Any
    edges: list[Any]


class Attributes(dict[str, Any]):
    @property
    def edge_index(self) -> Any:
        return self["edge_index"]


def as_graph(x: Tensor, edge_index: Any, edge_attr: Tensor) -> Data:
    return Data(x=x, edge_index=edge_index, edge_attr=edge_attr)


def parts_of(data: Any) -> tuple[Any, ...]:
    return data.x, data.edge_index, data.edge_attr


def of_containers(packs: type[Packs] = Packs, conv: type[TakesAll] = TakesAll) -> Packs:
    def pack(x: Tensor, edge_index: Any, edge_attr: Tensor) -> Any:
        return Graph(x, [Attributes(edge_index=edge_index), edge_attr])

    return packs(conv(pack, lambda given: (given.x, given.edges[0].edge_index, given.edges[1])))
