"""Attention over all nodes: torch's layers and kernel, PyG's GPSConv, and what linear transformers write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import NUM_FEATURES, NUM_NODES, Results, assert_same, gradients, graph, parts
from against_torch import Expression, Operands, Refusal, check, every_layout, ranks_and_names, refuse_all
from torch import Tensor, nn
from torch_geometric import nn as gnn
from workers import Pools, on_ranks

from pyg_dist import DistributedData, distribute, world_size
from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.sharding import RowSharding


def layer(t: Operands, *args: Any, adds: str = "", batch_first: bool = False, **options: Any) -> Any:
    """``nn.MultiheadAttention`` with weights that learn, the same for both kinds of operands."""
    module = nn.MultiheadAttention(t.F, 1, batch_first=batch_first, **dict.fromkeys(adds.split(), True)).to(t.x.dtype)
    rng = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        t._made.setdefault(name, values.to(t.x.dtype).requires_grad_())
    weights = {name: t._made[name] for name, _ in module.named_parameters()}
    return torch.func.functional_call(module, weights, args, options)


def scores(t: Operands) -> Tensor:
    """A plain ``[N, L, L]`` of integers, for a sequence for each row."""
    return torch.arange(t.N).view(-1, 1, 1) + torch.arange(t.c.shape[1] ** 2).view(1, t.c.shape[1], -1)


def sequences(t: Operands, **masks: Tensor) -> Any:
    return layer(t, t.c, t.c, t.c, batch_first=True, **masks)[0]


def heads(x: Any) -> Any:
    """``[2, N, F]``."""
    return torch.stack([x, x.sin()], 1).transpose(0, 1)


sdpa = F.scaled_dot_product_attention
EXPRESSIONS: dict[str, Expression] = {
    "matrix": lambda t: sdpa(t.x, t.y, t.x * t.y),
    "heads": lambda t: sdpa(heads(t.x), heads(t.y), heads(t.x * t.y), scale=0.3).sum(0),
    "batch and heads": lambda t: sdpa(heads(t.x)[None], heads(t.y)[None], heads(t.x)[None]).sum((0, 1)),
    "plain keys": lambda t: sdpa(t.x, t.weight.repeat(2, 1), t.weight.repeat(2, 1).sin()),
    "of selected nodes": lambda t: sdpa(t.x[t.mask], t.y, t.x),
    "masked": lambda t: sdpa(t.x, t.y, t.x, attn_mask=torch.eye(t.N, dtype=torch.bool) | (torch.arange(t.N) > 2)),
    "causal": lambda t: sdpa(t.x, t.y, t.x, is_causal=True),
    "layer, causal": lambda t: layer(
        t, t.x, t.x, t.x, attn_mask=torch.ones(t.N, t.N).triu(1).bool(), is_causal=True, need_weights=False
    )[0],
    "row by row": lambda t: sdpa(t.c, t.d, t.c * t.d),
    "written out": lambda t: [
        (heads(t.x) @ heads(t.y).transpose(-2, -1) / 2).softmax(dim=-1) @ heads(t.x * t.y),
        (t.x @ t.y.T).softmax(-1) @ t.x,
    ][1],
    "layer": lambda t: layer(t, t.x, t.x, t.x, need_weights=False)[0],
    "layer with weights": lambda t: [*layer(t, t.x, t.y, t.x)],
    "layer of a batch": lambda t: layer(t, t.c, t.d, t.d, need_weights=False)[0],
    "layer, batch first": lambda t: layer(t, heads(t.x), heads(t.y), heads(t.y), batch_first=True)[0].sum(0),
    "layer, masked": lambda t: layer(t, t.x, t.x, t.x, attn_mask=torch.eye(t.N).to(t.x.dtype), need_weights=False)[0],
    "layer with padding": lambda t: layer(t, t.x, t.x, t.x, key_padding_mask=torch.arange(t.N) > 3)[0],
    "layer, each head's weights": lambda t: layer(t, t.c, t.d, t.c, average_attn_weights=False)[1].sum((0, 1)),
    "layer of sequences, padded": lambda t: sequences(t, key_padding_mask=scores(t)[:, 0] % 2 == 1),
    "layer of sequences, masked": lambda t: sequences(t, attn_mask=scores(t).to(t.x.dtype)),
    "layer of plain keys": lambda t: layer(t, t.x, t.full, t.full)[0],
    "layer with a key of its own": lambda t: [*layer(t, t.x, t.x, t.x, adds="add_bias_kv")],
    "layer with a zero key": lambda t: [(out := layer(t, t.c, t.c, t.c, adds="add_zero_attn"))[0], out[1].sum(0)],
    "sums over nodes": lambda t: torch.einsum("nhm,hmd->nhd", t.c, torch.einsum("lhm,lhd->hmd", t.d, t.c)),
    "norms over nodes": lambda t: torch.einsum(
        "nhm,hm->nh", t.c, torch.einsum("lhm,l->hm", t.d, torch.ones(t.N, dtype=t.x.dtype))
    ),
    "linear attention": lambda t: (heads(t.x) @ (heads(t.y).transpose(-2, -1) @ heads(t.x * t.y))).sum(0),
    "its norm": lambda t: torch.einsum(
        "...L,...Ld->...Ld",
        1 / (3 + heads(t.x.square()) @ heads(t.y.square()).sum(-2).unsqueeze(-1)).squeeze(-1),
        heads(t.y),
    ).sum(0),
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(EXPRESSIONS))
def test_attention(name: str) -> None:
    for layout in every_layout():
        check(EXPRESSIONS[name], layout, name)


REFUSED: list[Refusal] = [
    (lambda t: sdpa(t.c, t.c, t.c, dropout_p=0.5), MixedRowsError, "draws dropout by sequence: pass dropout=0"),
    (lambda t: sdpa(t.x.T, t.x.T, t.x.T), MixedRowsError, "got rows in dimension 1 of 2): transpose them"),
    (lambda t: sdpa(t.full, t.x, t.x), MixedRowsError, "expected a query with a row for each node (got a plain one)"),
    (lambda t: sdpa(t.c, t.c, t.full), MixedRowsError, "row-wise only for query, key and value with rows alike"),
    (lambda t: layer(t, t.full, t.x, t.x), MixedRowsError, "expected a query with a row for each node"),
]  # fmt: skip


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)


def with_dropout() -> dict[str, Tensor]:
    """What is drawn, at this world size; values and gradients are those of torch's functions with that mask."""
    rng = torch.Generator().manual_seed(2)
    found = {}
    for shape in ((NUM_NODES, NUM_FEATURES), (NUM_NODES, 2, NUM_FEATURES)):
        full = torch.randn(shape, generator=rng, dtype=torch.float64)
        module = nn.MultiheadAttention(NUM_FEATURES, 1, dropout=0.5).double()
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        sides: list[Results] = []
        rows = nodes()
        x: Any = NodeTensor.from_local(rows.slice(full), rows).requires_grad_()
        torch.manual_seed(7)
        out, weights = module(x, x, x, attn_mask=torch.ones(NUM_NODES, NUM_NODES).tril(-9).bool())
        out.tanh().sum().backward()
        sides.append({"out": out.full_tensor().detach(), "x": x.grad.full_tensor(), **gradients(module)})
        kept = weights.full_tensor().detach()
        module.zero_grad()
        x = full.clone().requires_grad_()
        q, k, v = F.linear(x, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
        q, k, v = (y.view(NUM_NODES, -1, NUM_FEATURES).movedim(1, 0) for y in (q, k, v))
        scores = (q @ k.mT / NUM_FEATURES**0.5).masked_fill(
            torch.ones(NUM_NODES, NUM_NODES).tril(-9).bool(), -torch.inf
        )
        out = module.out_proj((2 * scores.softmax(-1) * (kept != 0) @ v).movedim(0, 1).reshape(shape))
        out.tanh().sum().backward()
        sides.append({"out": out.detach(), "x": x.grad, **gradients(module)})
        assert_same(sides[0], sides[1])
        assert 0.4 < (kept[scores.softmax(-1).view(kept.shape) > 0] == 0).double().mean() < 0.6
        found[str(shape)] = kept
    x = NodeTensor.from_local(rows.slice(full[:, 0]), rows)
    torch.manual_seed(8)
    found["of the kernel"] = sdpa(x, x, torch.eye(NUM_NODES).double(), dropout_p=0.25, is_causal=True).full_tensor()
    assert (found["of the kernel"].triu(1) == 0).all()
    return found


def nodes() -> RowSharding:
    sharding: RowSharding = DistributedData(graph(), partition=parts(graph(), world_size())).graph.node_sharding
    return sharding


def test_dropout_is_drawn_by_query_and_key(workers: Pools) -> None:
    alone, *others = [found for world_size in (1, 3) for found in workers(world_size).run(with_dropout)]
    for found in others:
        assert_same(found, alone)


class Gps(nn.Module):
    """GPSConv twice: local messages, attention over all nodes, batch norms."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        channels = 8
        self.encode = nn.Linear(NUM_FEATURES, channels)
        local = (gnn.GINConv(nn.Linear(channels, channels)), None)
        self.convs = nn.ModuleList(gnn.GPSConv(channels, conv, heads=2, act="tanh", **options) for conv in local)
        self.out = nn.Linear(channels, 3)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = self.encode(x)
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.out(x)  # type: ignore[no-any-return]


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, "halo"), (2, "halo"), (3, "halo"), (3, "grid"), pytest.param(4, "halo", marks=pytest.mark.slow)],
)
def test_gps(layout: str) -> None:
    data = graph()
    options: Any = {"layout": "grid"} if layout == "grid" else {"partition": parts(data, world_size())}
    for kind in ({}, {"norm": "layer_norm"}):
        found: list[Results] = []
        for given in (data, DistributedData(data, **options)):
            torch.manual_seed(3)
            model = Gps(**kind).double()
            model = model if given is data else distribute(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            mine: Results = {}
            for step in range(2):
                x = given.x.detach().clone().requires_grad_()
                out = model(x, given.edge_index)
                loss = F.cross_entropy(out[given.train_mask], given.y[given.train_mask] % 3)
                optimizer.zero_grad()
                loss.backward()
                if step == 0:
                    mine |= {"out": out.full_tensor() if given is not data else out, **gradients(model)}
                    mine["x.grad"] = x.grad if given is data else x.grad.full_tensor()  # type: ignore[union-attr]
                optimizer.step()
                mine[f"loss {step}"] = loss.detach()
            found.append(mine | {name: p.detach() for name, p in model.named_parameters()})
        assert_same(found[1], found[0], str(kind))
        assert found[0]["out"].shape == (NUM_NODES, 3)
