"""Random functions: the same numbers for a row at every world size, of the right distribution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_torch import distribute, node_rows
from bits import assert_same_bits
from torch.nn import init
from workers import Workers

from pyg_dist.errors import DataError, MixedRowsError, UnsupportedError
from pyg_dist.tensor.functions.random import draw_seed
from pyg_dist.tensor.selection import elements_of

WIDE = 600  # columns: enough for a mean


def drawn() -> dict[str, torch.Tensor]:
    """One call of each function, from one seed."""
    torch.manual_seed(3)
    zeros, half = (distribute(torch.full((7, WIDE), value), node_rows()) for value in (0.0, 0.5))
    tensors = {
        "rand_like": torch.rand_like(zeros),
        "randn_like": torch.randn_like(zeros),
        "uniform_": zeros.clone().uniform_(2.0, 3.0),
        "normal_": zeros.clone().normal_(2.0, 3.0),
        "exponential_": zeros.clone().exponential_(2.0),
        "bernoulli": torch.bernoulli(half * 0.5),
        "bernoulli_": zeros.clone().bernoulli_(0.75),
        "bernoulli_ of each": zeros.clone().bernoulli_(half),
        "dropout": torch.nn.functional.dropout(half, 0.25),
        "init.uniform_": init.uniform_(zeros.clone(), -1.0, 1.0),
        "init.normal_": init.normal_(zeros.clone(), 1.0, 0.1),
        "init.constant_": init.constant_(zeros.clone(), 4.0),
        "init.kaiming_uniform_": init.kaiming_uniform_(zeros.clone(), a=5**0.5),
        "init.xavier_normal_": init.xavier_normal_(zeros.clone()),
    }
    for name, tensor in tensors.items():
        assert tensor.shape == (7, WIDE), name
    last_first, chances = torch.arange(6, -1, -1), half * torch.arange(7.0).view(7, 1) / 3
    torch.manual_seed(5)
    paired = zeros.clone().bernoulli_(chances[last_first])
    torch.manual_seed(5)
    assert torch.equal(paired.full_tensor(), zeros.clone().bernoulli_(chances.full_tensor()[last_first]).full_tensor())
    with pytest.raises(UnsupportedError, match="draws from torch's default CPU generator"):
        zeros.uniform_(generator=torch.Generator())
    with pytest.raises(MixedRowsError, match="multinomial of one dimension would draw rows"):
        torch.multinomial(half[:, 0], 2)
    for weights, replacement in ((half[:, :1], False), (-half, True), (zeros, True), (half / 0, True)):
        with pytest.raises(DataError, match="Expected weights of each row that are finite"):
            torch.multinomial(weights, 2, replacement)
    rare = zeros.bfloat16().bernoulli_(0.001)
    assert rare.float().mean() < 0.001 + 5 * (0.001 / rare.numel()) ** 0.5
    assert zeros.half().bernoulli_(0.5).float().mean() > 0.4
    narrow = torch.nn.functional.gumbel_softmax(zeros.bfloat16(), hard=True)
    assert not narrow.isnan().any()
    return {name: tensor.full_tensor() for name, tensor in tensors.items()}


def test_random(workers: Callable[[int], Workers]) -> None:
    (alone,) = workers(1).run(drawn)
    for world_size in (2, 3):
        for others in workers(world_size).run(drawn):
            for name, tensor in others.items():
                assert_same_bits(tensor, alone[name], name)
    moments = {
        "rand_like": (0.5, 12**-0.5), "randn_like": (0.0, 1.0), "uniform_": (2.5, 12**-0.5), "normal_": (2.0, 3.0),
        "exponential_": (0.5, 0.5),
        "bernoulli": (0.25, 0.1875**0.5), "bernoulli_": (0.75, 0.1875**0.5), "bernoulli_ of each": (0.5, 0.5),
        "dropout": (0.5, 0.5 * 3**-0.5), "init.uniform_": (0.0, 3**-0.5), "init.normal_": (1.0, 0.1),
        "init.constant_": (4.0, 0.0), "init.kaiming_uniform_": (0.0, (3 * WIDE) ** -0.5),
        "init.xavier_normal_": (0.0, (2 / (7 + WIDE)) ** 0.5),
    }  # fmt: skip
    assert moments.keys() == alone.keys()
    for name, (mean, std) in moments.items():
        # Five standard errors of the mean, and of a standard deviation.
        assert abs(alone[name].mean() - mean) <= 5 * std / (7 * WIDE) ** 0.5, name
        assert abs(alone[name].std() - std) <= 5 * std / (7 * WIDE) ** 0.5, name
        assert len(alone[name].unique(dim=0)) == (1 if name == "init.constant_" else 7), name


def draws_of_columns() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    weights = distribute(torch.tensor([0.0, 1, 3, 0, 4]).expand(700, 5).contiguous(), elements_of(node_rows(), 100))
    logits = weights.log().requires_grad_()
    hard = torch.nn.functional.gumbel_softmax(logits, tau=0.5, hard=True)
    soft = torch.nn.functional.gumbel_softmax(logits, dim=1)
    return {
        "with replacement": torch.multinomial(weights, 9, replacement=True).full_tensor(),
        "without": torch.multinomial(weights, 3).full_tensor(),
        "one": weights.multinomial(1).full_tensor(),
        "hard": hard.full_tensor().detach().round(decimals=5),
        "soft": soft.full_tensor().detach(),
    }


def test_columns_are_drawn_by_their_weights(workers: Callable[[int], Workers]) -> None:
    (alone,) = workers(1).run(draws_of_columns)
    for others in workers(2).run(draws_of_columns):
        for name, tensor in others.items():
            assert_same_bits(tensor, alone[name], name)
    expected = torch.tensor([0.0, 1, 3, 0, 4]) / 8
    for columns in (alone["with replacement"], alone["one"], alone["hard"].argmax(1)):
        share = torch.bincount(columns.flatten(), minlength=5) / columns.numel()
        assert (share - expected).abs().max() <= 5 * (0.25 / columns.numel()) ** 0.5
    assert torch.equal(alone["without"].sort(1).values, torch.tensor([1, 2, 4]).expand(700, 3))
    assert torch.equal(alone["hard"].sum(1), torch.ones(700))
    torch.testing.assert_close(alone["soft"].sum(1), torch.ones(700))


def test_no_seed_is_drawn_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would repeat it."""
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match="Expected no random numbers while a CUDA graph is captured"):
        draw_seed()
    assert torch.equal(torch.get_rng_state(), before)
