"""Random functions: the same numbers for a row at every world size, of the right distribution."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from against_torch import distribute, node_rows
from bits import assert_same_bits
from torch.nn import init
from workers import Pools

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
    assert 0.4 < zeros.clone().bernoulli_().mean() < 0.6  # p is 0.5 where it is not given
    narrow = torch.nn.functional.gumbel_softmax(zeros.bfloat16(), hard=True)
    assert not narrow.isnan().any()
    return {name: tensor.full_tensor() for name, tensor in tensors.items()}


def test_random(workers: Pools) -> None:
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


def test_columns_are_drawn_by_their_weights(workers: Pools) -> None:
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


def of_distributions() -> dict[str, torch.Tensor]:
    """Rows of each function that draws by inversion or rejection, by name; ranges and rates that take each way."""
    torch.manual_seed(4)
    rows = node_rows()
    zeros = distribute(torch.zeros(7, WIDE, dtype=torch.float64), rows)
    channels = distribute(torch.ones(7, WIDE, 2, dtype=torch.float64), rows)
    concentrations = distribute(torch.tensor([0.3, 1.0, 4.5]).double().expand(7, 3).contiguous(), rows)
    distributions = torch.distributions
    tensors = {
        "normal": torch.normal(zeros + 2, 3.0),
        "normal of a number": torch.normal(2.0, zeros + 3),
        "normal of both": torch.normal(zeros + 2, zeros + 3),
        "log_normal_": zeros.clone().log_normal_(0.5, 0.25),
        "cauchy_": zeros.clone().cauchy_(1.0, 2.0),
        "exponential_": zeros.clone().exponential_(2.0),
        "geometric_": zeros.clone().geometric_(0.3),
        "randint_like": torch.randint_like(zeros, 3, 9),
        "randint_like below": torch.randint_like(zeros, 6, dtype=torch.int32) + 3,
        "random_": zeros.clone().random_(3, 9),
        "random_ below": zeros.long().random_(6) + 3,
        "poisson, few": torch.poisson(zeros + 2.5),
        "poisson, many": distributions.Poisson(zeros + 40).sample(),
        "gamma, small": distributions.Gamma(zeros + 0.3, zeros + 2).sample(),
        "gamma, large": distributions.Gamma(zeros + 4.5, zeros + 2).rsample(),
        "laplace": distributions.Laplace(zeros + 1, zeros + 2).rsample(),
        "exponential": distributions.Exponential(zeros + 2).rsample(),
        "beta": distributions.Beta(zeros + 0.5, zeros + 2).sample(),
        "dirichlet": torch.cat([distributions.Dirichlet(concentrations).sample() for _ in range(WIDE // 3)], dim=1),
        "alpha_dropout": torch.nn.functional.alpha_dropout(torch.randn_like(zeros), 0.2, training=True),
        "feature_alpha_dropout": torch.feature_alpha_dropout(torch.randn_like(channels), 0.2, True).flatten(1),
        "dropout1d": torch.nn.functional.dropout1d(channels, 0.25).flatten(1),
        "dropout2d": torch.nn.functional.dropout2d(channels.unsqueeze(-1), 0.25).flatten(1),
        "feature_dropout": torch.feature_dropout(channels, 0.25, True).flatten(1),
        "dropout3d": torch.nn.functional.dropout3d(channels.view(7, WIDE, 2, 1, 1), 0.25).flatten(1),
        "rrelu_": torch.rrelu_(zeros - 1, 0.1, 0.3, True),
        "rrelu": torch.nn.functional.rrelu(zeros - 1, 0.1, 0.3, training=True),
    }
    with pytest.raises(MixedRowsError, match="dropout1d of 2 dimensions would drop rows"):
        torch.nn.functional.dropout1d(zeros)
    with pytest.raises(MixedRowsError, match="of values makes no rows"):
        zeros.new([1.0])
    assert type(zeros.new(3, 2)) is torch.Tensor
    with pytest.raises(DataError, match="rates that are finite and not negative"):
        torch.poisson(zeros - 1)
    return {name: tensor.full_tensor().double().detach() for name, tensor in tensors.items()}


def test_distributions(workers: Pools) -> None:
    """The same at every world size; and a test of each against SciPy's distribution function."""
    # Half a second, in each rank that imports this module.
    from scipy.stats import beta, cauchy, expon, gamma, geom, kstest, laplace, lognorm, norm, poisson, randint, uniform

    (alone,) = workers(1).run(of_distributions)
    for others in workers(3).run(of_distributions):
        for name, tensor in others.items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-13, atol=0, msg=name)
    for name in ("normal", "normal of a number", "normal of both"):
        assert kstest(alone[name].flatten(), norm(2, 3).cdf).pvalue > 1e-3, name
    continuous = {
        "log_normal_": lognorm(0.25, scale=math.exp(0.5)), "cauchy_": cauchy(1, 2), "exponential_": expon(scale=0.5),
        "gamma, small": gamma(0.3, scale=0.5), "gamma, large": gamma(4.5, scale=0.5), "beta": beta(0.5, 2),
        "laplace": laplace(1, 2), "exponential": expon(scale=0.5),
        "rrelu": uniform(-0.3, 0.2), "rrelu_": uniform(-0.3, 0.2),
    }  # fmt: skip
    for name, distribution in continuous.items():
        assert kstest(alone[name].flatten(), distribution.cdf).pvalue > 1e-3, name
    for column, concentration in enumerate((0.3, 1.0, 4.5)):
        marginal = beta(concentration, 5.8 - concentration)
        assert kstest(alone["dirichlet"][:, column::3].flatten(), marginal.cdf).pvalue > 1e-3
    torch.testing.assert_close(alone["dirichlet"].view(-1, 3).sum(1), torch.ones(7 * WIDE // 3).double())
    integers = ("randint_like", "randint_like below", "random_", "random_ below")
    counted = {
        "geometric_": geom(0.3), "poisson, few": poisson(2.5), "poisson, many": poisson(40),
        **dict.fromkeys(integers, randint(3, 9)),
    }  # fmt: skip
    for name, distribution in counted.items():
        # Randomised within each integer's step, the distribution function is uniform.
        values = alone[name].flatten().numpy()
        low, high = distribution.cdf(values - 1), distribution.cdf(values)
        steps = np.random.default_rng(0).uniform(low, high)
        assert kstest(steps, uniform.cdf).pvalue > 1e-3, name
    for name in ("dropout1d", "dropout2d", "dropout3d", "feature_dropout"):
        pairs = alone[name].view(7, WIDE, 2)
        assert torch.equal(pairs[..., 0], pairs[..., 1]), name
        assert set(pairs.unique().tolist()) == {0.0, 1 / 0.75}, name
        assert abs(pairs.mean() - 1) <= 5 * (1 / 3 / (7 * WIDE)) ** 0.5, name
    for name in ("alpha_dropout", "feature_alpha_dropout"):
        bound = 5 / (7 * WIDE) ** 0.5
        assert abs(alone[name].mean()) <= 1.5 * bound, name
        assert abs(alone[name].std() - 1) <= 2 * bound, name


def gradients_of_draws() -> dict[str, torch.Tensor]:
    torch.manual_seed(6)
    rows = node_rows()
    concentration = distribute(torch.linspace(0.3, 6, 21).double().view(7, 3), rows).requires_grad_()
    drawn = torch.distributions.Gamma(concentration, 1.0).rsample()
    (of_gamma,) = torch.autograd.grad(drawn.sin().sum(), concentration)
    shares = torch.distributions.Dirichlet(concentration).rsample()
    (of_dirichlet,) = torch.autograd.grad(shares[:, 0].sin().sum(), concentration)
    x = distribute(torch.linspace(-2, 2, 21).double().view(7, 3), rows).requires_grad_()
    slopes = torch.nn.functional.rrelu(x, 0.1, 0.3, training=True)
    (of_slopes,) = torch.autograd.grad(slopes.sum(), x)
    kept = torch.nn.functional.alpha_dropout(x, 0.5, training=True)
    (of_kept,) = torch.autograd.grad(kept.sum(), x)
    found = {"drawn": drawn, "by drawn": of_gamma, "shares": shares, "by shares": of_dirichlet, "x": x}
    found |= {"concentration": concentration, "slopes": slopes, "by slopes": of_slopes, "by kept": of_kept}
    return {name: value.full_tensor().detach() for name, value in found.items()}


def test_gradients_of_draws(workers: Pools) -> None:
    for world_size in (1, 2):
        for found in workers(world_size).run(gradients_of_draws):
            c, drawn, shares = found["concentration"], found["drawn"], found["shares"]
            torch.testing.assert_close(found["by drawn"], torch._standard_gamma_grad(c, drawn) * drawn.cos())
            plain = c.clone().requires_grad_()
            grad = torch.zeros_like(c)
            grad[:, 0] = shares[:, 0].cos()
            total = plain.sum(1, keepdim=True).expand_as(plain)
            expected = torch._dirichlet_grad(shares, plain, total) * (grad - (shares * grad).sum(1, keepdim=True))
            torch.testing.assert_close(found["by shares"], expected.detach())
            negative = found["x"] <= 0
            slope = torch.where(negative, found["slopes"] / found["x"], 1.0)
            torch.testing.assert_close(found["by slopes"][found["x"] != 0], slope[found["x"] != 0])
            scale = ((1.7580993408473766**2 * 0.5 + 1) * 0.5) ** -0.5
            assert set(found["by kept"].unique().tolist()) == {0.0, scale}


def test_no_seed_is_drawn_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would repeat it."""
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match="Expected no random numbers while a CUDA graph is captured"):
        draw_seed()
    assert torch.equal(torch.get_rng_state(), before)
