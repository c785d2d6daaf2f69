"""What the convs take on the grid, and what they refuse alike on every rank."""

from __future__ import annotations

import pytest
import torch
from random_graphs import random_graph
from workers import on_ranks

from pyg_dist import DistributedData
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
from pyg_dist.errors import DataError, UnsupportedError


@on_ranks(4)
def test_features_of_the_wrong_width_are_refused_on_every_rank() -> None:
    graph = random_graph(23, 90, num_features=6)
    refused = r"Expected rows with {} columns \(got shape \[23, 6\]\): make the layer with in_channels=6"
    for mesh in ({"x": 2, "y": 2}, {"x": 4}):
        data = DistributedData(graph.clone(), layout="grid", mesh=mesh)
        for conv in (DistributedGCNConv, DistributedSAGEConv):
            for inputs in (5, 8):  # narrower, and wider than x
                for outputs in (4, 16):  # the map first, and the sums first
                    layer = conv(inputs, outputs).double()
                    with pytest.raises(DataError, match=refused.format(inputs)):
                        layer(data.x, data.edge_index)
        sage = DistributedSAGEConv((6, 8), 4).double()
        with pytest.raises(DataError, match=refused.format(8)):
            sage((data.x, data.x), data.edge_index)
    torch.distributed.barrier()


@on_ranks(2)
@pytest.mark.parametrize("layout", [{}, {"layout": "grid", "mesh": {"x": 2}}], ids=str)
def test_what_is_no_matrix_of_floats_is_refused(layout: dict[str, object]) -> None:
    data = DistributedData(random_graph(23, 90), **layout)
    wrong = [data.x.to(dtype) for dtype in (torch.int64, torch.bool)]
    wrong += [data.y.double(), data.x[:, 0]]
    for conv in (DistributedGCNConv(5, 4).double(), DistributedSAGEConv(5, 4).double()):
        for x in wrong:
            with pytest.raises(DataError, match=r"expected features \[N, F\] in float32, .* or float16 \(got"):
                conv(x, data.edge_index)
        with pytest.raises(UnsupportedError, match=r"reads features along dimension -2 \(got shape \[23, 5, 1\]"):
            conv(data.x.view(23, 5, 1), data.edge_index)


@on_ranks(2)
def test_results_have_the_dtype_of_stock_pyg() -> None:
    """Edge weights promote, and autocast narrows what it narrows, on both layouts as in stock PyG."""
    from torch_geometric.nn import GCNConv, SAGEConv

    graph = random_graph(23, 90, dtype=torch.float32)
    for layout in ({}, {"layout": "grid", "mesh": {"x": 2}}):
        data = DistributedData(graph.clone(), **layout)
        for normalize in (True, False):
            ours = DistributedGCNConv(5, 3, normalize=normalize)
            stock = GCNConv(5, 3, normalize=normalize)
            stock.load_state_dict(ours.state_dict())
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                for learn in (True, False):
                    weight = graph.edge_weight.to(dtype).requires_grad_(learn)
                    expected = stock(graph.x, graph.edge_index, weight)
                    out = ours(data.x, data.edge_index, weight)
                    assert out.dtype == expected.dtype
                    error = 3e-2 if dtype == torch.bfloat16 else 1e-5  # PyG's norm has the dtype of the weights
                    torch.testing.assert_close(out.full_tensor(), expected, rtol=error, atol=error)
            with torch.autocast("cpu", torch.bfloat16):
                assert ours(data.x, data.edge_index).dtype == stock(graph.x, graph.edge_index).dtype
        for width in (3, 5, 9):
            sage, expected_sage = DistributedSAGEConv(5, width), SAGEConv(5, width)
            expected_sage.load_state_dict(sage.state_dict())
            with torch.autocast("cpu", torch.bfloat16):
                out, expected = sage(data.x, data.edge_index), expected_sage(graph.x, graph.edge_index)
            assert out.dtype == expected.dtype == torch.bfloat16
            torch.testing.assert_close(out.full_tensor(), expected, rtol=3e-2, atol=3e-2)


@on_ranks(2)
def test_negative_degrees() -> None:
    """The root of a negative degree is NaN, which reaches the gradients of sources only, as in stock PyG."""
    from torch_geometric.nn import GCNConv

    graph = random_graph(23, 60)
    graph.edge_weight = graph.edge_weight - 0.6
    stock, ours = (kind(5, 3, add_self_loops=False).double() for kind in (GCNConv, DistributedGCNConv))
    ours.load_state_dict(stock.state_dict())
    x = graph.x.clone().requires_grad_()
    stock(x, graph.edge_index, graph.edge_weight).sum().backward()
    assert x.grad is not None
    silent = torch.ones(23, dtype=torch.bool)
    silent[graph.edge_index[0]] = False
    degree = torch.zeros(23).double().index_add_(0, graph.edge_index[1], graph.edge_weight)
    assert bool((silent & (degree < 0)).any())
    for layout in ({}, {"layout": "grid", "mesh": {"x": 2}}, {"layout": "grid", "mesh": {"y": 2}}):
        data = DistributedData(graph.clone(), **layout)
        data.x.requires_grad_()
        ours(data.x, data.edge_index, data.edge_weight).sum().backward()
        torch.testing.assert_close(data.x.grad.full_tensor(), x.grad, rtol=0, atol=1e-10, equal_nan=True)
