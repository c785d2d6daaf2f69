"""Rows in another dimension than the first: stacked hops, heads, states of recurrent layers, attention within rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.utils as pyg
from against_torch import Expression, Operands, Refusal, check, every_layout, ranks_and_names, refuse_all
from torch import Tensor, nn
from workers import on_ranks

from pyg_dist.errors import LayoutMismatchError, MixedRowsError


def hops(t: Operands) -> Any:
    """``[3, N, F]``."""
    return torch.stack([t.x, t.y.sin(), t.x * t.y])


def queue(t: Operands) -> Tensor:
    kept = torch.zeros(t.F, 9, dtype=t.x.dtype)
    kept[:, 1:4] = t.x[:3].T
    return kept


def heads(t: Operands) -> Any:
    """``[2, N, F]``, as ``x.view(N, H, F).transpose(0, 1)`` gives them."""
    return t.c.transpose(0, 1)


def of_weights(module: nn.Module, t: Operands) -> nn.Module:
    """The module with weights that learn, and are the same for both kinds of operands."""
    rng = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=rng, dtype=torch.float64)
        t._made.setdefault(name, values.to(t.x.dtype).requires_grad_())
    return module.to(t.x.dtype)


def run(module: nn.Module, t: Operands, *args: Any, **options: Any) -> Any:
    module = of_weights(module, t)
    weights = {name: t._made[name] for name, _ in module.named_parameters()}
    return torch.func.functional_call(module, weights, args, options)


def attended(t: Operands, **options: Any) -> Any:
    return run(nn.MultiheadAttention(t.F, 1, batch_first=True), t, t.c, t.c, t.c, **options)


def encoded(t: Operands, training: bool = True) -> Any:
    layer = nn.TransformerEncoderLayer(t.F, 1, 8, dropout=0.0, batch_first=True, activation=torch.tanh)
    return run(layer.train(training), t, t.c)


def last_state(kind: type[nn.Module], t: Operands, **options: Any) -> Any:
    return run(kind(t.F, 2, batch_first=True, **options), t, t.c)[1]


def in_two_steps(kind: type[nn.Module], t: Operands) -> Any:
    module = of_weights(kind(t.F, 2, batch_first=True), t)
    weights = {name: t._made[name] for name, _ in module.named_parameters()}
    _, state = torch.func.functional_call(module, weights, (t.c,))
    return torch.func.functional_call(module, weights, (t.d, state))[0]


def with_nodes_second(kind: type[nn.Module], t: Operands) -> list[Any]:
    """Two steps of a sequence for each node, from zeros, as GeniePath takes them."""
    module = of_weights(kind(t.F, 2, bias=False), t)
    weights = {name: t._made[name] for name, _ in module.named_parameters()}
    state: Any = torch.zeros(1, t.x.shape[0], 2, dtype=t.x.dtype)
    state = (state, state) if kind is nn.LSTM else state
    out, state = torch.func.functional_call(module, weights, (t.x[None, :], state))
    x = torch.cat([out, t.y.unsqueeze(0)], -1)[:, :, : t.F]
    again, state = torch.func.functional_call(module, weights, (x, state))
    return [again[0], *(s.squeeze(0) for s in (state if kind is nn.LSTM else [state]))]


def kernel(t: Operands, channels: int) -> Any:
    return t.weight[:1, :1] * torch.arange(4.0 * channels, dtype=t.x.dtype).sin().view(1, -1)


EXPRESSIONS: dict[str, Expression] = {
    "stacked": lambda t: [hops(t)[0], hops(t)[-1], hops(t)[1, :, 0], hops(t)[..., 1].t(), hops(t).select(0, 1)],
    "sliced": lambda t: [hops(t)[1:].sum(0), hops(t)[:, :, 1:].amax(0), hops(t)[[2, 0]].permute(1, 0, 2)],
    "ordered": lambda t: [
        hops(t).topk(2, dim=1).values, hops(t).sort(1)[0], hops(t).cumsum(1), hops(t).sort(dim=2)[0].sum(0),
    ],
    "put together": lambda t: [
        F.cross_entropy(hops(t).reshape(3 * t.N, -1), torch.arange(3 * t.N) % t.F),
        (hops(t).flatten(0, 1) @ t.weight.T).view(3, t.N, -1).sin().sum(0),
        hops(t).unsqueeze(0).reshape(-1, t.F).view(1, 3, -1, t.F)[0, 1],
    ],
    "classes": lambda t: F.cross_entropy(hops(t).transpose(1, 2), torch.arange(3 * t.N).view(3, t.N) % t.F),
    "convolved": lambda t: [
        F.conv2d(hops(t).unsqueeze(0), kernel(t, 3).view(2, 3, 1, 2), t.vector[:2])[0, 1],
        F.conv2d(hops(t).permute(2, 0, 1)[None], kernel(t, t.F).view(2, t.F, 2, 1), stride=(2, 1))[0, 0, 0],
    ],
    "convolved by one": lambda t: [
        F.conv1d(heads(t).transpose(1, 2), kernel(t, t.F).view(4, t.F, 1), t.matrix[0])[1, 2],
        F.conv1d(hops(t).permute(2, 0, 1), kernel(t, 3).view(12, 1, 1), stride=1, padding=(0,), groups=3)[0, 5],
    ],
    "queue": queue,
    "one row": lambda t: [
        t.x[[3]].squeeze(0), t.c[t.v == t.v.max()].squeeze(0), t.x[[1]].argmax(1).squeeze(0), t.c[:1].mT.squeeze(0).mT,
    ],
    "linear over rows": lambda t: [
        F.linear(t.x.T, t.full.T, t.vector), F.linear(hops(t).transpose(1, 2), t.full.T), F.linear(t.v[None], t.full.T),
    ],
    "prelu": lambda t: [F.prelu(hops(t), t.vector[:1])[1], F.prelu(hops(t).transpose(1, 2), t.vector)[0].t()],
    "batch norm": lambda t: [
        F.batch_norm(hops(t).transpose(1, 2), None, None, t.vector, t.vector.sin(), True)[1].t(),
        F.batch_norm(hops(t), None, None, t.full_v, t.full_v.cos(), True)[2],
        F.batch_norm(hops(t), t.full_v.detach(), 1 + t.full_v.detach() ** 2, None, t.full_v)[0],
    ],
    "sums by an index": lambda t: pyg.scatter(hops(t), t.label, dim=1, dim_size=9).sum(0),
    "largest by an index": lambda t: pyg.scatter(hops(t), t.label, dim=-2, dim_size=9, reduce="max"),
    "index_add": lambda t: torch.zeros(3, 9, t.F, dtype=t.x.dtype).index_add_(1, t.label, hops(t)),
    "as a batch of one": lambda t: (t.x.view(1, -1, t.F) * t.v.view(1, t.N, 1))[0],
    "selected": lambda t: hops(t).index_select(0, torch.tensor([2, 0])).sum(0),
    "unbound": lambda t: [*hops(t), *hops(t).unbind(), *hops(t).unbind(-1)[0].t().split(2, 1)],
    "reduced": lambda t: [hops(t).mean(0), hops(t).sum(dim=0), hops(t).max(0), hops(t).min(dim=0)[0], hops(t).std(0)],
    "more": lambda t: [hops(t).logsumexp(0), hops(t).norm(dim=0), hops(t).argmax(0), hops(t).median(0).values],
    "places": lambda t: [hops(t).argmax(), hops(t).argmin(keepdim=True), hops(t).argmax(1), hops(t).argmin(0, True)[0]],
    "by position": lambda t: [
        hops(t).std(False), hops(t).var(True), hops(t).var(0, False), hops(t).sort(0, True)[0].sum(0),
        hops(t).topk(1, 0, False).values.sum(0), hops(t).argsort(0, True).sum(0),
        hops(t).amax(axis=0, keepdims=True)[0],
    ],
    "taken apart": lambda t: [*hops(t).unbind(), *hops(t).unbind(-1)[0].t().unbind(1), *hops(t), *hops(t).unbind(1)],
    "more along": lambda t: [
        hops(t).prod(0), hops(t).quantile(0.5, 0), hops(t).cummax(0).values[0], hops(t).repeat_interleave(2, 0).sum(0),
    ],
    "several": lambda t: [hops(t).sum((0, 2)), hops(t).sum((0, -1), keepdim=True)[0], hops(t).sum(), hops(t).mean()],
    "over rows": lambda t: [hops(t).mean(1), hops(t).sum((0, 1)), hops(t).amax(1, keepdim=True), hops(t).sum(1, True)],
    "kept": lambda t: (hops(t) - hops(t).mean(0, keepdim=True)).square().sum(0),
    "softmax": lambda t: [hops(t).softmax(0).sum(-1).t(), (F.softmax(hops(t), dim=0) * hops(t)).sum(0)],
    "cumsum": lambda t: hops(t).cumsum(0)[-1],
    "weighed": lambda t: (hops(t) * t.matrix[0, :3].view(3, 1, 1)).sum(0),
    "weighed by columns": lambda t: (hops(t) * t.vector + t.row).relu().mean(0),
    "weighed by rows": lambda t: (hops(t) * t.column + t.x - 2 * hops(t)).tanh().sum(0),
    "numbers": lambda t: ((1 - hops(t) / 3).exp().clone().contiguous().to(t.x.dtype) ** 2)[0],
    "plain rows": lambda t: (hops(t) + t.full).sum(0),
    "attention of hops": lambda t: (torch.softmax((hops(t) @ t.vector.view(-1, 1)).tanh(), dim=0) * hops(t)).sum(0),
    "layers": lambda t: F.layer_norm(F.linear(hops(t), t.weight, t.matrix[0]), (4,)).movedim(1, 0),
    "moved back": lambda t: [hops(t).transpose(0, 1), hops(t).permute(1, 2, 0), heads(t).movedim(0, 2)],
    "flat": lambda t: hops(t).permute(1, 0, 2).reshape(t.N, -1),
    "other places": lambda t: t.c.permute(1, 2, 0).permute(2, 0, 1) * t.c.permute(2, 1, 0).mT.sum(0).unsqueeze(2),
    "by heads": lambda t: torch.bmm(heads(t), t.gates[: 2 * t.F].view(2, t.F, t.F)).transpose(0, 1).flatten(1),
    "by a head": lambda t: torch.matmul(heads(t), t.gates[: t.F].view(1, t.F, -1))[0] + (heads(t) @ t.matrix)[1, :, :1],
    "joined": lambda t: [torch.cat([hops(t), heads(t)]).sum(0), torch.cat([hops(t), hops(t)], dim=-1)[1]],
    "squeezed": lambda t: [hops(t)[:1].squeeze(0), hops(t)[:1].squeeze(), t.c[:, :1].transpose(0, 1).squeeze(0)],
    "in front": lambda t: [t.x[None].sum(0), t.x.unsqueeze(0)[0], t.x[None, t.mask][0], (t.x[None] * t.x[None, :])[0]],
    "in front of others": lambda t: [t.v[None] @ t.x, t.v.unsqueeze(0).t(), t.c[None, :, 1].mean(1), t.c[None].sum(1)],
    "rows picked": lambda t: [hops(t)[:, t.mask].sum(0), hops(t)[1:, [2, 0, 2]][0], hops(t)[..., t.mask, :].mean(0)],
    "reshaped": lambda t: [
        hops(t).view(3, t.N, t.F, 1)[0], hops(t).reshape(-1, 1, t.N, t.F)[1, 0], hops(t).flatten(2).sum(0),
        t.c.permute(1, 2, 0).flatten(0, 1).t(), hops(t).unsqueeze(1)[0, 0], hops(t).unsqueeze(-1)[1],
        hops(t).unsqueeze(2).flatten(2).sum(0),
    ],
    "expanded": lambda t: [
        t.x.unsqueeze(0).expand(4, -1, -1).sum(0), t.x[None].repeat(2, 1, 2)[1], t.x.T.expand(2, -1, t.N).sum(0).t(),
    ],
    "along": lambda t: [
        F.normalize(hops(t), dim=-1)[0], F.normalize(hops(t), dim=1)[1], hops(t).chunk(3, -1)[1][0],
        hops(t).split([1, 2], dim=0)[1].sum(0), F.glu(torch.cat([hops(t), hops(t)], -1), -1)[0],
        F.glu(torch.cat([hops(t), hops(t)], -1))[1],
    ],
    "losses": lambda t: [
        F.mse_loss(hops(t), hops(t).sin()), F.l1_loss(hops(t), hops(t).cos(), reduction="sum"),
        F.huber_loss(hops(t), hops(t).sin(), reduction="none").sum(0),
        F.smooth_l1_loss(hops(t)[:, t.mask], 0 * hops(t)[:, t.mask]),
        F.binary_cross_entropy_with_logits(hops(t), hops(t).detach().sigmoid()),
        F.mse_loss(hops(t), torch.stack([t.full] * 3)), nn.MSELoss()(hops(t), hops(t).cos()),
    ],
    "in place": lambda t: [(hops(t) * 1).add_(t.x).relu_().sum(0), (hops(t) + 0).mul_(2)[1]],
    "stacked again": lambda t: [
        torch.stack([hops(t), hops(t).sin()], 0)[1, 2], torch.stack([hops(t), hops(t).sin()], -1).sum((0, -1)),
        torch.cat([hops(t), torch.stack([t.full] * 2)]).sum(0), torch.cat([t.x.T, t.y.T], 1).sum(0),
    ],
    "vectors": lambda t: [
        torch.stack([t.v, t.u])[1], torch.vstack([t.full_v, t.v]).sum(1), torch.stack([t.v, t.u, t.v]) @ t.x,
        torch.row_stack([t.v, t.u])[:, t.mask].t(), torch.stack((t.v, t.u)).var(0), torch.stack([t.v, t.u]).std(-1),
    ],
    "pairs": lambda t: [
        t.v[:, None] - t.u[None], t.x[None] * t.y.unsqueeze(1), (t.label[:, None] == t.label[None]).sum(0),
        t.label.view(-1, 1) != t.label.view(-1, 1).T, (t.v.view(1, -1) >= t.u.view(-1, 1)).sum(-1),
        torch.maximum(t.x.unsqueeze(1), other=t.y.unsqueeze(0)), torch.sub(input=t.x[None], other=t.y[:, None]),
        (torch.stack([t.v, t.u]) == t.v).sum(0), (t.u == torch.stack([t.v, t.u])).sum(0),
        t.column - t.v, t.v - t.column, ((t.column - t.label) ** 2).mean(), torch.where(t.column > 0, t.u, t.column),
        (t.row.T.expand(t.F, t.N) * t.v)[1], (t.matrix[None, :, :1] - t.u)[0, 2],
    ],
    "products": lambda t: [
        t.x.T @ t.y, hops(t).mT @ hops(t), (hops(t) @ t.matrix.unsqueeze(0))[1], (hops(t) @ hops(t).mT)[1],
        ((hops(t) @ hops(t).mT).softmax(-1) @ hops(t))[2], t.matrix.T.expand(2, -1, -1)[0] @ t.x.T @ t.y,
        torch.stack([t.full] * 3).mT @ hops(t), (hops(t) @ t.matrix)[0], t.x.T.sum(0),
        (t.x.T * 2)[1], (t.x.T + t.y.T).t(), t.x.T @ t.v,
        hops(t).unsqueeze(0).mT @ hops(t)[:1],
    ],
    "covariances": lambda t: [torch.cov(t.x.T), t.x.T.cov(correction=0), torch.corrcoef(t.x.T), t.x.T.corrcoef()],
    "einsum": lambda t: [
        torch.einsum("bnf,fg->bng", hops(t), t.matrix)[1], torch.einsum("bnf,bng->bfg", hops(t), hops(t).sin()),
        torch.einsum("...nf,...ng->...fg", hops(t), hops(t)), torch.einsum("bnf,bmf->bnm", hops(t), hops(t))[0],
        torch.einsum("bnf->bf", hops(t)), torch.einsum("...L,...Ld->...Ld", hops(t)[..., 0], hops(t))[2],
        torch.einsum("fn,ng->fg", t.x.T, t.y), torch.einsum("bnf,n->bnf", hops(t), t.v)[0],
    ],
    "linear of one vector": lambda t: [
        F.linear(rows, t.full.T[: 2 * t.F], bias)
        for rows in (t.x.T, t.v, t.x.T.unsqueeze(0))
        for bias in (None, t.full.flatten()[: t.F])
    ],
    "shapes": lambda t: [hops(t).shape, len(hops(t)), hops(t).dim(), hops(t).size(1), hops(t).numel()],
    "attention": lambda t: attended(t),
    "attention without weights": lambda t: attended(t, need_weights=False)[0],
    "attention of one query": lambda t: run(
        nn.MultiheadAttention(t.F, 1, batch_first=True), t, t.x.unsqueeze(1), t.c, t.d
    ),
    "attention with padding": lambda t: attended(t, key_padding_mask=t.c[:, :, 0] > 1.5),
    "encoder": lambda t: encoded(t),
    "encoder, evaluated": lambda t: encoded(t, training=False),
    "gru": lambda t: last_state(nn.GRU, t)[-1],
    "lstm": lambda t: [state.squeeze(0) for state in last_state(nn.LSTM, t)],
    "both ways": lambda t: torch.cat([*last_state(nn.GRU, t, bidirectional=True, num_layers=2)[-2:]], dim=-1),
    "gru, in two steps": lambda t: in_two_steps(nn.GRU, t),
    "rnn, in two steps": lambda t: in_two_steps(nn.RNN, t),
    "lstm of nodes": lambda t: with_nodes_second(nn.LSTM, t),
    "gru of nodes": lambda t: with_nodes_second(nn.GRU, t),
    "lstm, in two steps": lambda t: in_two_steps(nn.LSTM, t),
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(EXPRESSIONS))
def test_moved_rows(name: str) -> None:
    for layout in every_layout():
        check(EXPRESSIONS[name], layout, name)


MOVE = "has no distributed form for rows in dimension 1"
REFUSED: list[Refusal] = [
    (lambda t: hops(t)[:, 0], MixedRowsError, f"__getitem__ {MOVE} (of shape [3, 7, 3]): move them first, x.movedim("),
    (lambda t: hops(t)[t.mask], MixedRowsError, f"__getitem__ {MOVE}"),
    (lambda t: hops(t).view(3, -1), MixedRowsError, f"view {MOVE}"),
    (lambda t: hops(t) @ hops(t), LayoutMismatchError, "matmul got shapes that do not fit ([3, 7, 3] and [3, 7, 3])"),
    (lambda t: F.cross_entropy(hops(t), t.label), MixedRowsError, f"cross_entropy {MOVE}"),
    (lambda t: F.kl_div(hops(t), hops(t), reduction="batchmean"), MixedRowsError, f"kl_div {MOVE}"),
    (lambda t: hops(t).expand(3, 14, 3), MixedRowsError, f"expand {MOVE}"),
    (lambda t: F.prelu(hops(t), t.vector), MixedRowsError, f"prelu {MOVE}"),
    (
        lambda t: F.conv1d(heads(t).transpose(1, 2), kernel(t, t.F).view(2, t.F, 2)),
        MixedRowsError,
        "conv1d has no distributed form for rows in dimension 2 (of shape [2, 3, 7])",
    ),
    (
        lambda t: F.conv1d(heads(t).transpose(1, 2), kernel(t, t.F).view(4, t.F, 1), stride=2),
        MixedRowsError,
        "A convolution has no distributed form with stride=2 along rows, in dimension 2",
    ),
    (lambda t: hops(t) + t.v, MixedRowsError, f"add {MOVE}"),
    (lambda t: hops(t) + t.c.permute(1, 2, 0), MixedRowsError, "add has no distributed form for rows in dimension 2"),
    (lambda t: torch.cat([hops(t), t.c]), MixedRowsError, f"cat {MOVE}"),
    (lambda t: (t.x * 1)[None].mul_(t.x[torch.tensor([3])][:, None]), MixedRowsError, f"mul_ {MOVE}"),
    (lambda t: F.mse_loss(t.x[:, None], t.y[None]), MixedRowsError, f"mse_loss {MOVE}"),
    (lambda t: F.layer_norm(t.c.permute(2, 1, 0), (t.N,)), MixedRowsError, "layer_norm has no distributed form for"),
    (
        lambda t: nn.MultiheadAttention(t.F, 1, dropout=0.5, batch_first=True).to(t.x.dtype)(t.c, t.c, t.c),
        MixedRowsError,
        "draws dropout by sequence",
    ),
]  # fmt: skip


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)
    t = Operands("tall", True)
    moved = hops(t)
    assert repr(moved) == f"{moved}" == "MovedRows([3, 7, 3], rows in dimension 1)"
    plain: Tensor = moved.full_tensor()
    torch.testing.assert_close(plain, hops(Operands("tall", False)))
