"""What layers are made of, and layers: rows meet plain parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from against_torch import WORLD_SIZES, Form, Operands, Refusal, agree, check, ranks_and_names, refuse_all
from workers import on_ranks

from pyg_dist.errors import MixedRowsError


def cells(gates: int) -> list[Form]:
    """One step of a recurrent cell with ``gates`` gates; states of an LSTM are a pair."""

    def call(f: Callable[..., object], t: Operands, has_bias: bool, plain_state: bool = False) -> object:
        size = gates * t.F
        state = (t.full if plain_state else t.y, t.p) if gates == 4 else t.full if plain_state else t.y
        biases = (t.gate_bias[:size], t.gate_bias[:size] * 2) if has_bias else ()
        return f(t.x, state, t.gates[:size], t.more_gates[:size], *biases)

    return [lambda f, t: call(f, t, True), lambda f, t: call(f, t, False), lambda f, t: call(f, t, True, True)]


def sequences(gates: int) -> list[Form]:
    """Two steps of a recurrent layer for every row."""

    def call(f: Callable[..., tuple[object, ...]], t: Operands, has_bias: bool) -> object:
        size, zeros = gates * t.F, torch.zeros(1, t.N, t.F, dtype=t.gates.dtype)
        weights = [t.gates[:size], t.more_gates[:size], *[t.gate_bias[:size], t.gate_bias[:size] * 2][: 2 * has_bias]]
        state = (zeros, zeros) if gates == 4 else zeros
        return f(t.c, state, weights, has_bias, 1, 0.0, True, False, True)[0]

    return [lambda f, t: call(f, t, True), lambda f, t: call(f, t, False)]


FORMS: dict[str, Sequence[Form]] = {
    "gru": sequences(3),
    "lstm": sequences(4),
    "rnn_tanh": sequences(1),
    "rnn_relu": sequences(1),
    "linear": [
        lambda f, t: f(t.x, t.weight), lambda f, t: f(t.x, t.weight, t.matrix[0]),
        lambda f, t: f(t.c, weight=t.weight, bias=t.matrix[0]),
        lambda f, t: f(t.x, t.vector), lambda f, t: f(t.x[t.only], t.weight, t.matrix[0]),
        lambda f, t: f(t.x[t.v > 99], t.weight, t.matrix[0]),
    ],
    "conv1d": [
        lambda f, t: f(t.x.unsqueeze(1), t.weight.view(4, 1, t.F)),
        lambda f, t: f(t.c, t.gates[:8, :2].reshape(4, 2, 2), t.matrix[0], padding=1),
        lambda f, t: f(t.c, weight=t.table[:2].view(4, 2, 1)),
    ],
    "conv2d": [
        lambda f, t: f(t.c.unsqueeze(1), t.weight[:, :2].reshape(2, 1, 2, 2), padding="same"),
        lambda f, t: f(t.c.unsqueeze(3), t.gates[:3, :2].reshape(3, 2, 1, 1), t.vector[:3], stride=2),
    ],
    "relu": [lambda f, t: f(t.x), lambda f, t: f(t.c)],
    "bilinear": [
        lambda f, t: f(t.x, t.y, t.gates.view(4, t.F, t.F)),
        lambda f, t: f(t.x, t.full, t.gates.view(4, t.F, t.F), t.matrix[0]),
    ],
    "group_norm": [
        lambda f, t: f(t.c, 2), lambda f, t: f(t.c, 1, t.matrix[0, :2], t.matrix[1, :2]),
        lambda f, t: f(t.x, 1, weight=t.vector), lambda f, t: f(t.x, t.F),
    ],
    "prelu": [
        lambda f, t: f(t.x, t.vector), lambda f, t: f(t.x, t.vector[:1]), lambda f, t: f(t.c, t.matrix[0, :2]),
        lambda f, t: f(t.v, t.vector[:1]),
    ],
    "layer_norm": [
        lambda f, t: f(t.x, (t.F,)), lambda f, t: f(t.x, (t.F,), t.vector, t.class_weight),
        lambda f, t: f(t.c, (2, t.F)),
        lambda f, t: f(t.c, normalized_shape=(t.F,), weight=t.vector, eps=1e-3),
    ],
    "rms_norm": [
        lambda f, t: f(t.x, (t.F,)), lambda f, t: f(t.x, (t.F,), t.vector), lambda f, t: f(t.c, (2, t.F), eps=1e-3),
    ],
    "gru_cell": cells(3),
    "lstm_cell": cells(4),
    "rnn_tanh_cell": cells(1),
    "rnn_relu_cell": cells(1),
    "embedding": [
        lambda f, t: f(t.label, t.table), lambda f, t: f(t.i % t.F, t.table),
        lambda f, t: f(t.label, t.table, padding_idx=1),
        lambda f, t: f(input=t.label[t.mask], weight=t.table),
    ],
    "isin": [
        lambda f, t: f(t.i, torch.tensor([1, 3])), lambda f, t: f(t.label, torch.arange(t.N)), lambda f, t: f(t.i, 3),
        lambda f, t: f(t.i, t.full_i[0]),
    ],
    "searchsorted": [
        lambda f, t: f(t.sorted, t.x), lambda f, t: f(t.sorted, t.v, right=True),
        lambda f, t: f(t.sorted, input=t.x, side="right"),
    ],
    "bucketize": [lambda f, t: f(t.x, t.sorted), lambda f, t: f(t.v, t.sorted, right=True)],
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_layers(name: str) -> None:
    agree(name, FORMS[name], must_distribute=True)


@on_ranks(*WORLD_SIZES)
def test_modules() -> None:
    """Modules of torch, with parameters from one seed; their gradients are part of the result."""

    def trained(t: Operands, module: torch.nn.Module, *inputs: str) -> list[torch.Tensor]:
        module = module.double()
        for k, parameter in enumerate(module.parameters()):
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(k))
        out = module(*(getattr(t, name) for name in inputs))
        out = out[0] if isinstance(out, tuple) else out
        (out.square() * t.mask.view(-1, *[1] * (out.dim() - 1))).sum().backward()
        return [out.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]

    for layout in ("tall", "square"):
        check(lambda t: trained(t, torch.nn.Linear(t.F, 4), "x"), layout)
        check(
            lambda t: trained(
                t, torch.nn.Sequential(torch.nn.Linear(t.F, 4), torch.nn.LayerNorm(4), torch.nn.ELU()), "x"
            ),
            layout,
        )
        check(lambda t: trained(t, torch.nn.GRUCell(t.F, t.F), "x", "y"), layout)
        check(lambda t: trained(t, torch.nn.GRUCell(t.F, 4), "x"), layout)
        check(lambda t: trained(t, torch.nn.LSTMCell(t.F, 4), "x"), layout)
        check(lambda t: trained(t, torch.nn.Embedding(t.F, 4), "label"), layout)
        check(lambda t: trained(t, torch.nn.PReLU(), "x"), layout)
        check(lambda t: trained(t, torch.nn.Bilinear(t.F, t.F, 2), "x", "y"), layout)
        check(lambda t: trained(t, torch.nn.GroupNorm(1, 2), "c"), layout)
        check(lambda t: trained(t, torch.nn.RMSNorm(t.F), "x"), layout)


REFUSED: list[Refusal] = [
    (lambda t: F.linear(t.full, t.x), MixedRowsError, "is row-wise only for distributed rows and plain parameters"),
    (lambda t: F.linear(t.x, t.y), MixedRowsError, "is row-wise only for distributed rows and plain parameters"),
    (lambda t: F.layer_norm(t.x, (t.N, t.F)), MixedRowsError, "over all dimensions would mix rows"),
    (lambda t: F.embedding(torch.tensor([0]), t.x), MixedRowsError, "is row-wise only"),
    (
        lambda t: F.embedding(t.label, t.table, max_norm=1.0),
        MixedRowsError,
        "embedding with max_norm needs the indices",
    ),
    (
        lambda t: torch.gru(t.c, t.c[:, :1], [t.gates, t.gates], False, 1, 0.0, True, False, False),
        MixedRowsError,
        "row-wise only for one sequence per row, [N, L, F] with batch_first=True or [L, N, F] without, and no initial",
    ),
    (
        lambda t: torch.gru(t.c, torch.zeros(2, t.N, t.F), [t.gates] * 4, False, 2, 0.5, True, False, True),
        MixedRowsError,
        "draws dropout for all rows",
    ),
    (
        lambda t: F.conv1d(t.x, t.gates[:, :1, None]),
        MixedRowsError,
        "only for [N, C, ...] of 3 dimensions (got [7, 3])",
    ),
    (lambda t: F.bilinear(t.x, t.v, t.gates), MixedRowsError, "would align the rows"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)
