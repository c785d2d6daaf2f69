"""Messages in flight have memory of their own: layers, models, passes and exceptions in every mix."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from against_stock import NUM_FEATURES, NUM_NODES
from bits import assert_same_bits
from random_graphs import random_graph
from torch import Tensor
from torch_geometric.nn import GCNConv, SAGEConv
from workers import on_ranks

from pyg_dist import DistributedData
from pyg_dist.backend.comm.codec import Codec
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.comm.wires.wire import Flight
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
from pyg_dist.graph.protocol import Norm
from pyg_dist.halo.exchange import ToNeighbours


class Models:
    """Two models on one graph, ours and PyG's, with the same weights."""

    def __init__(self, world_size: int) -> None:
        self.graph = random_graph(NUM_NODES, 6 * NUM_NODES, seed=3)
        self.graph.x = torch.randn(NUM_NODES, NUM_FEATURES, generator=torch.Generator().manual_seed(1)).double()
        parts = torch.randint(0, world_size, (NUM_NODES,), generator=torch.Generator().manual_seed(2))
        self.data = DistributedData(self.graph, partition=parts)
        self.stock = [[SAGEConv(NUM_FEATURES, 7), SAGEConv(7, 7)], [GCNConv(NUM_FEATURES, 7), GCNConv(7, 3)]]
        self.ours = [
            [DistributedSAGEConv(NUM_FEATURES, 7), DistributedSAGEConv(7, 7)],
            [DistributedGCNConv(NUM_FEATURES, 7), DistributedGCNConv(7, 3)],
        ]
        for stock, ours in zip(self.stock, self.ours, strict=True):
            for a, b in zip(stock, ours, strict=True):
                a.double().load_state_dict(b.double().state_dict())

    def run(self, pattern: Any) -> None:
        """The gradients of a pattern of passes are the same on both sides."""
        stock, ours = (pattern(models, data) for models, data in ((self.stock, self.graph), (self.ours, self.data)))
        for a, b in zip(stock, ours, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-10)


def out(model: list[Any], data: Any) -> Tensor:
    x = data.x.detach().clone().requires_grad_()
    for conv in model:
        x = conv(x, data.edge_index).tanh()
    return x


def gradients(models: list[list[Any]]) -> list[Tensor]:
    parameters = [p for model in models for conv in model for p in conv.parameters()]
    found = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = None
    return found


def interleaved(models: list[list[Any]], data: Any) -> list[Tensor]:
    outs = [out(model, data) for model in (*models, *models)]
    for result in reversed(outs):
        result.square().sum().backward()
    return gradients(models)


def retained(models: list[list[Any]], data: Any) -> list[Tensor]:
    first, second = (out(model, data).square().sum() for model in models)
    first.backward(retain_graph=True)
    second.backward()
    with torch.inference_mode():
        out(models[0], data)
    first.backward()
    return gradients(models)


def second_order(models: list[list[Any]], data: Any) -> list[Tensor]:
    total = sum(out(model, data).square().sum() for model in models)
    weights = [conv.lin_l.weight for conv in models[0]] + [conv.lin.weight for conv in models[1]]
    slopes = torch.autograd.grad(total, weights, create_graph=True)
    sum(slope.square().sum() for slope in slopes).backward()
    return gradients(models)


@pytest.mark.parametrize("exception", [False, True])
@on_ranks(2, 4)
def test_passes_in_any_order(world_size: int, exception: bool) -> None:
    models = Models(world_size)
    if exception:
        from pyg_dist.backend.sparse.matrix import Matrix

        multiply, calls = Matrix.multiply, iter(range(100))

        def failing(*args: Any, **kwargs: Any) -> Tensor:
            if next(calls) == 3:  # while messages fly
                raise MemoryError("too little")
            return multiply(*args, **kwargs)

        Matrix.multiply = failing  # type: ignore[method-assign]
        try:
            with pytest.raises(MemoryError):
                models.run(interleaved)
        finally:
            Matrix.multiply = multiply  # type: ignore[method-assign]
        models.data.x.to_local()  # all ranks failed at the same call, so their messages still match
    for _ in range(2):
        for pattern in (interleaved, retained, second_order):
            models.run(pattern)


@on_ranks(3)
def test_what_arrives_at_once_is_one_product(world_size: int) -> None:
    """As on nccl, where no sender is waited for alone: one product takes all that arrives."""
    with patch(
        "pyg_dist.halo.view.exchange_of", lambda transport, sent, received, _=0: ToNeighbours(transport, sent, received)
    ):
        data = DistributedData(random_graph(NUM_NODES, 20 * NUM_NODES, seed=3), partition=torch.arange(NUM_NODES) % 3)
    operator = data.graph.operator(Norm.SUM, None, torch.float64)
    x = torch.randn(data.graph.num_local, 5, dtype=torch.float64)
    wire: Any = type(world_group().wire(x))
    exchange, products = wire.exchange, []

    def at_once(*arguments: Any) -> Flight:
        flight = exchange(*arguments)
        return Flight(others=[*flight.arriving.values(), *flight.others])

    def added() -> Tensor:
        products.clear()
        with patch.object(Codec, "unpack_add", counted):
            return operator.halo.add(operator.halo.send(x), torch.zeros_like(x))

    def counted(*arguments: Any) -> None:
        products.append(arguments)
        unpack_add(*arguments)

    unpack_add = Codec.unpack_add
    expected = added()
    assert len(products) == world_size - 1
    with patch.object(wire, "exchange", at_once):
        torch.testing.assert_close(added(), expected)
    assert [len(message) for _, message, *_ in products] == [operator.halo.exchange.num_received]


@on_ranks(2)
def test_partial_sums_are_rounded_once(world_size: int) -> None:
    """Partial sums of bfloat16 rows are made in float32 and rounded once, into the message."""
    parts = torch.arange(NUM_NODES) % world_size
    data = DistributedData(random_graph(NUM_NODES, 20 * NUM_NODES, seed=3), partition=parts, exchange="pre")
    float32, graph = torch.float32, data.graph
    for norm in (Norm.SUM, Norm.gcn(add_self_loops=True)):
        operator = graph.operator(norm, None, float32)
        outgoing, scale = operator.halo.outgoing, operator.col_scale
        assert int(outgoing.pattern.rowptr.diff().max()) > 2, "no partial sums to round"
        x = (torch.randn(graph.num_local, 33) * 100).bfloat16()
        message = torch.empty(outgoing.num_rows, 66, dtype=torch.uint8)
        operator.halo.codecs.direct[0].pack(message, outgoing, x, scale)
        exact = outgoing.multiply(x.float(), col_scale=scale).bfloat16()
        assert_same_bits(message.view(torch.bfloat16), exact)
        by_steps, factor = torch.zeros_like(exact), 1.0 if scale is None else scale.bfloat16().view(-1, 1)
        scaled = x * factor
        for row, col in zip(outgoing.pattern.row().tolist(), outgoing.pattern.col.tolist(), strict=True):
            by_steps[row] += scaled[col]
        assert not torch.equal(by_steps, exact), "rounding at every step would go unnoticed"
