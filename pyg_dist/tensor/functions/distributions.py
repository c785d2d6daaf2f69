"""Random rows of more distributions, keyed as in :mod:`.random`.

By inverting the distribution function, or by rejection. Each entry then draws numbers of its own in as many rounds as
it needs, so it does not depend on other entries. Equal at every world size up to the last bit of torch's logarithms and
powers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import Context
from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import DataError
from pyg_dist.tensor.functions.random import draw, draw_seed, refuse_generator
from pyg_dist.tensor.registry import Function, bind, implements, refuse
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors

_MOST = 2**53
"""Integers that float64 tells apart."""


@implements("normal", namespaces=(torch,))
def normal(function: Function, mean: object = 0.0, std: Any = 1.0, *, generator: object = None) -> Tensor:
    """``mean + std * z``; one of them may be a number or a plain tensor."""
    refuse_generator(function, generator)
    with torch.no_grad():
        like = mean + std  # of both one's shape
        if not isinstance(like, RowTensor):
            raise refuse(function, "of a plain mean and std makes no rows")
        return mean + std * torch.randn_like(like)  # type: ignore[no-any-return]


@implements("randint_like")
def randint_like(
    function: Function, x: RowTensor, *bounds: int, dtype: torch.dtype | None = None,
    device: torch.device | None = None, generator: object = None, **named: object,
) -> Tensor:  # fmt: skip
    """Integers uniform in [low, high)."""
    refuse_generator(function, generator)
    bound = bind(function, "low high" if len(bounds) == 2 or "low" in named else "high", bounds, named)
    with local_tensors():
        drawn = _integers(x, int(bound.get("low", 0)), int(bound["high"]))
        return as_row_tensor_(drawn.to(device or x.device, dtype or x.dtype), x._sharding)


@implements("random_")
def random_(function: Function, x: RowTensor, *bounds: object, generator: object = None, **named: object) -> Tensor:
    """Fill with integers uniform in [from, to); without bounds, in what the dtype holds exactly."""
    refuse_generator(function, generator)
    bound = bind(function, "from to" if len(bounds) > 1 or "from" in named else "to", bounds, named)
    to = bound.get("to")
    with local_tensors():
        return x.copy_(_integers(x, int(bound.get("from") or 0), _largest(x.dtype) if to is None else int(to)))


def _largest(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return min(_MOST, torch.iinfo(dtype).max + 1)


def _integers(x: RowTensor, low: int, high: int) -> Tensor:
    if not 0 < high - low <= _MOST:
        raise DataError(f"Expected low < high, at most 2^53 integers to draw from (got low={low}, high={high})")
    return (draw(ops.keyed_uniform, x, torch.float64) * (high - low)).long() + low


@implements("poisson", namespaces=(torch,))
def poisson(function: Function, x: RowTensor, generator: object = None) -> Tensor:
    """Counts with the rates in x: small ones by inversion, large ones by Hoermann's PTRS (1993)."""
    refuse_generator(function, generator)
    with local_tensors(), torch.no_grad():
        rate = x.as_subclass(Tensor).double()
        if not x._sharding.group.all_true(bool((rate >= 0).all() and rate.isfinite().all())):
            raise DataError("Expected poisson to have rates that are finite and not negative (got others)")
        is_small = rate < 10
        few, many = _few(x, rate.clamp(max=10)), _many(x, rate.clamp(min=10))
        return as_row_tensor_(torch.where(is_small, few, many).to(x.dtype), x._sharding)


def _few(x: RowTensor, rate: Tensor) -> Tensor:
    """The first k whose distribution function is above a uniform number."""
    left, chance = draw(ops.keyed_uniform, x, torch.float64), (-rate).exp()
    count = torch.zeros_like(rate)
    for k in range(1, 100):  # a rate of 10 exceeds 60 with a chance below 2^-53
        left = left - chance
        count += left >= 0
        chance = chance * rate / k
    return count


def _many(x: RowTensor, rate: Tensor) -> Tensor:
    b = 0.931 + 2.53 * rate.sqrt()
    a = 0.02483 * b - 0.059
    inverse_alpha, v_r = 1.1239 + 1.1328 / (b - 3.4), 0.9277 - 3.6224 / (b - 2)

    def round_(number: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        u, v = number() - 0.5, number()
        us = 0.5 - u.abs()
        k = ((2 * a / us + b) * u + rate + 0.43).floor()
        bound = k * rate.log() - rate - torch.lgamma(k + 1)
        is_under = (v * inverse_alpha / (a / us.square() + b)).log() <= bound
        is_inside = (us >= 0.07) & (v <= v_r)
        return k, is_inside | (is_under & (k >= 0) & ~((us < 0.013) & (v > us)))

    return _by_rejection(x, rate, round_)


def _by_rejection(
    x: RowTensor, like: Tensor, round_: Callable[[Callable[..., Tensor]], tuple[Tensor, Tensor]]
) -> Tensor:
    """For each entry the value of the first round that is accepted; NaN where ``like`` is NaN.

    ``round_`` makes values of keyed numbers, uniform ones or another op's, and says which of them are accepted.
    """
    seed = draw_seed()
    key, columns = on_device(x._sharding.rng_key, x.device), math.prod(x.shape[1:])
    num_draws = 0

    def number(keyed: Callable[..., Tensor] = ops.keyed_uniform) -> Tensor:
        nonlocal num_draws
        num_draws += 1
        mixed = ops.mixed_seed(seed, num_draws)
        return keyed(key, columns, mixed, x._sharding.first_column, torch.float64).view(like.shape)

    found, is_open = torch.full_like(like, math.nan), ~like.isnan()
    while bool(is_open.any()):
        values, accepted = round_(number)
        now = is_open & accepted
        found = torch.where(now, values, found)
        is_open = is_open & ~accepted
    return found


class _Gamma(torch.autograd.Function):
    """Standard gamma numbers, with the derivative by the concentration that torch has for its own."""

    @staticmethod
    def forward(ctx: Context, concentration: Tensor, drawn: Tensor) -> Tensor:
        ctx.save_for_backward(concentration, drawn)
        return drawn.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        concentration, drawn = ctx.saved_tensors
        return grad * torch._standard_gamma_grad(concentration, drawn), None


@implements("_standard_gamma")
def standard_gamma(function: Function, x: RowTensor, generator: object = None) -> Tensor:
    """Gamma numbers, for ``torch.distributions``' Gamma, Chi2 and StudentT (Marsaglia and Tsang, 2000)."""
    refuse_generator(function, generator)
    with local_tensors():
        alpha = x.as_subclass(Tensor)
        drawn = _gamma(x, alpha.detach().double()).to(x.dtype).clamp_(min=torch.finfo(x.dtype).tiny)
        out: Tensor = _Gamma.apply(alpha, drawn)  # type: ignore[no-untyped-call]
        return as_row_tensor_(out, x._sharding)


def _gamma(x: RowTensor, alpha: Tensor) -> Tensor:
    alpha = torch.where(alpha > 0, alpha, math.nan)
    d = torch.where(alpha < 1, alpha + 1, alpha) - 1 / 3
    c = 1 / (9 * d).sqrt()

    def round_(number: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        z, u = number(ops.keyed_normal), number()
        v = (1 + c * z).pow(3)
        log_v = v.clamp(min=1e-300).log()
        return d * v, (v > 0) & (u.log() < 0.5 * z.square() + d - d * v + d * log_v)

    drawn = _by_rejection(x, d, round_)
    boost = (1 - draw(ops.keyed_uniform, x, torch.float64)).pow(1 / alpha)
    return torch.where(alpha < 1, drawn * boost, drawn)


@implements("_sample_dirichlet")
def sample_dirichlet(function: Function, x: RowTensor, generator: object = None) -> Tensor:
    """Gamma numbers over their sum, for ``torch.distributions``' Dirichlet and Beta."""
    refuse_generator(function, generator)
    with torch.no_grad():
        drawn = torch._standard_gamma(x.double())
        return (drawn / drawn.sum(-1, keepdim=True)).to(x.dtype)
