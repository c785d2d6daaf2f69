"""What convs and models are given by mistake: one clear line on every rank, and nobody hangs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_graphs import random_graph, uneven_parts
from torch_geometric.nn import GCN, GATConv, GCNConv, GINConv, SAGEConv
from workers import Pools, on_ranks

from pyg_dist import DistributedData, rank
from pyg_dist.conv import DistributedConv, DistributedGCNConv, DistributedSAGEConv


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        return "no error"
    assert "\n" not in message, "expected an error of one line"
    return message


def hooked(conv: Any) -> Any:
    conv.register_message_forward_hook(lambda module, inputs, out: 2 * out)
    return conv.double()


def patched(conv: Any) -> Any:
    conv.message = lambda x_j: 2 * x_j
    return conv.double()


def hooked_below(conv: Any) -> Any:
    conv.aggr_module.register_forward_hook(lambda module, inputs, out: 2 * out)
    return conv.double()


def mistakes(world_size: int) -> dict[str, str]:
    class OwnMessage(DistributedSAGEConv):
        def message(self, x_j: torch.Tensor) -> torch.Tensor:
            return x_j.relu()

    graph, lin = random_graph(30, 120), torch.nn.Linear(5, 3)
    data = DistributedData(graph, partition=uneven_parts(30, world_size))
    other = DistributedData(graph, partition="random")
    sage, gcn = DistributedSAGEConv(5, 3).double(), DistributedGCNConv(5, 3).double()
    return {
        "plain edge_index": message_of(lambda: sage(graph.x, graph.edge_index)),
        "edges of a larger graph": message_of(lambda: gcn(data.x, graph.edge_index + 1)),
        "edges as pairs": message_of(lambda: gcn(data.x, graph.edge_index.t())),
        "edges of floats": message_of(lambda: gcn(data.x, graph.edge_index.double())),
        "edges that differ": message_of(lambda: gcn(data.x, graph.edge_index[:, rank() :])),
        "edges as a list": message_of(lambda: gcn(data.x, graph.edge_index.tolist())),
        "two graphs": message_of(lambda: sage(data.x, other.edge_index)),
        "rows": message_of(lambda: sage(torch.randn(7, 5, dtype=torch.float64), data.edge_index)),
        "sparse rows": message_of(lambda: gcn(graph.x.to_sparse(), data.edge_index)),
        "edge weight rows": message_of(lambda: gcn(data.x, data.edge_index, torch.rand(7))),
        "edge weight of another graph": message_of(lambda: gcn(data.x, data.edge_index, other.edge_weight)),
        "node tensor as weight": message_of(lambda: gcn(data.x, data.edge_index, data.y.double())),
        "stock sage": message_of(lambda: SAGEConv(5, 3).double()(data.x, data.edge_index)),
        "stock gcn": message_of(lambda: GCNConv(5, 3).double()(data.x, data.edge_index)),
        "stock gat": message_of(lambda: GATConv(5, 3).double()(data.x, data.edge_index)),
        "stock gcn in a model": message_of(lambda: GCN(5, 8, 2, 3).double()(data.x, data.edge_index)),
        "gcn pair": message_of(lambda: gcn((data.x, data.x), data.edge_index)),
        "message": message_of(lambda: OwnMessage(5, 3).double()(data.x, data.edge_index)),
        "hook on the aggregation": message_of(lambda: hooked_below(DistributedGCNConv(5, 3))(data.x, data.edge_index)),
        "hook on GIN's": message_of(lambda: hooked_below(DistributedConv(GINConv(lin)))(data.x, data.edge_index)),
        "integers": message_of(lambda: DistributedSAGEConv(5, 3)(data.x.long(), data.edge_index)),
        "none": message_of(lambda: sage(data.x, data.edge_index)),
    }


EXPECTED = {
    "plain edge_index": "DataError: DistributedSAGEConv expected features and edge_index of a DistributedData",
    "edges of a larger graph": "DataError: Expected 'edge_index' to hold node ids below num_nodes=30 (got 30)",
    "edges as pairs": "DataError: Expected 'edge_index' of shape [2, num_edges] (got [120, 2])",
    "edges of floats": "DataError: Expected 'edge_index' to hold integer node ids",
    "edges that differ": "AgreementError: Expected the same edge_index on every rank",
    "edges as a list": "DataError: DistributedGCNConv expected features and edge_index of a DistributedData",
    "two graphs": "LayoutMismatchError",
    "rows": "DataError: DistributedSAGEConv expected node features with 30 rows",
    "sparse rows": "UnsupportedError: DistributedGCNConv expected dense features (got torch.sparse_coo)",
    "edge weight rows": "DataError: DistributedGCNConv expected 'edge_weight' with",
    "edge weight of another graph": "DataError: DistributedGCNConv expected 'edge_weight' with",
    "node tensor as weight": "DataError: DistributedGCNConv expected 'edge_weight' with",
    "stock sage": "UnsupportedError: SAGEConv is a stock conv",
    "stock gcn": "UnsupportedError: GCNConv is a stock conv",
    "stock gat": "UnsupportedError: GATConv is a stock conv",
    "stock gcn in a model": "UnsupportedError: GCNConv is a stock conv",
    "gcn pair": "ValueError: 'DistributedGCNConv' received a tuple",
    "message": "UnsupportedError: OwnMessage got a change to 'message', a step of the stock conv",
    "hook on the aggregation": "UnsupportedError: GCNConv cannot be distributed as it is called here (Expected no hook",
    "hook on GIN's": "UnsupportedError: GINConv cannot be distributed as it is called here (Expected no hook",
    "integers": "DataError: DistributedSAGEConv expected features [N, F] in float32, float64, bfloat16 or float16 (got",
    "none": "no error",
}


@pytest.mark.parametrize("world_size", [3])
def test_mistakes(workers: Pools, world_size: int) -> None:
    for messages in workers(world_size).run(mistakes, world_size):
        for name, expected in EXPECTED.items():
            assert messages[name].startswith(expected), name


def test_a_plain_edge_index_works_alone() -> None:
    graph = random_graph(10, 30)
    assert DistributedSAGEConv(5, 3).double()(graph.x, graph.edge_index).shape == (10, 3)


@on_ranks(2)
def test_what_pyg_switches_is_no_patch() -> None:
    """``decomposed_layers`` and explainers put a ``propagate`` of PyG's own into a conv: nothing is patched."""
    graph = random_graph(30, 120)
    data = DistributedData(graph)
    for stock, ours in ((SAGEConv, DistributedSAGEConv), (GCNConv, DistributedGCNConv)):
        for layers in (1, 2) if stock is GCNConv else (1,):  # stock SAGE cannot be decomposed
            convs = [kind(6, 4, decomposed_layers=layers).double() for kind in (stock, ours)]
            convs[1].load_state_dict(convs[0].state_dict())
            for conv in convs if layers == 1 else []:
                conv.explain = True
                conv.explain = False
            x = torch.cat([data.x, data.x[:, :1]], dim=1)
            expected = convs[0](torch.cat([graph.x, graph.x[:, :1]], dim=1), graph.edge_index)
            torch.testing.assert_close(convs[1](x, data.edge_index).full_tensor(), expected, rtol=0, atol=1e-10)


@on_ranks(2)
def test_patched_linear_maps_are_called() -> None:
    """A linear map with a forward of its own is called, as it is or before the sum."""
    graph = random_graph(30, 120)
    for layout in ("halo", "grid"):
        data = DistributedData(graph, layout=layout)
        for stock, ours in ((SAGEConv, DistributedSAGEConv), (GCNConv, DistributedGCNConv)):
            for width in (3, 5, 9):
                convs = [kind(5, width, bias=False).double() for kind in (stock, ours)]
                convs[1].load_state_dict(convs[0].state_dict())
                for conv in convs:
                    lin = conv.lin if hasattr(conv, "lin") else conv.lin_l
                    lin.forward = lambda x, forward=lin.forward: 2 * forward(x)
                expected = convs[0](graph.x, graph.edge_index)
                found = convs[1](data.x, data.edge_index).full_tensor()
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@on_ranks(2)
def test_changed_steps_run() -> None:
    """Steps that a conv has hooked or replaced are those of the stock conv, on both layouts."""
    graph = random_graph(30, 120)
    for layout in ("halo", "grid"):
        data = DistributedData(graph, layout=layout)
        for change in (hooked, patched):
            for stock, ours in ((SAGEConv, DistributedSAGEConv), (GCNConv, DistributedGCNConv)):
                if change is patched and stock is GCNConv:
                    continue
                convs = [change(kind(5, 3)) for kind in (stock, ours)]
                convs[1].load_state_dict(convs[0].state_dict())
                expected, found = convs[0](graph.x, graph.edge_index), convs[1](data.x, data.edge_index)
                torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=1e-10)
                assert type(convs[1]) is ours


@on_ranks(2)
def test_features_without_columns() -> None:
    """Rows without columns travel, in any number of bits."""
    graph = random_graph(30, 120)
    for bits in (32, 2):
        data = DistributedData(graph, partition="random", bits=bits)
        for conv in (DistributedSAGEConv(0, 3), DistributedConv(GATConv(0, 3))):
            out = conv.double()(data.x[:, :0], data.edge_index)
            out.sum().backward()
            assert out.shape == (30, 3)
