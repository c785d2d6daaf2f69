"""Dropout and random tensors: keyed by (one draw of torch's CPU generator, row, column).

So the same mask falls on a node whatever the world size, the partition or the layout, and recomputation under
activation checkpointing, which restores the generator, draws it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import init

from pyg_dist.backend import ops
from pyg_dist.backend.on_device import is_capturing, on_device
from pyg_dist.errors import DataError, MixedRowsError, UnsupportedError
from pyg_dist.tensor.functions.pointwise import aligned
from pyg_dist.tensor.registry import TABLE, Function, bind, by_steps, implements, public_name, refuse
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors, version_of


def draw_seed() -> int:
    """One draw of torch's default CPU generator, whose state the ranks share; not while a CUDA graph is captured."""
    if is_capturing():
        raise UnsupportedError(
            "Expected no random numbers while a CUDA graph is captured (got a seed drawn from the host's generator, "
            "which every replay would repeat): capture without dropout, in eval mode or with p=0"
        )
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))


@contextmanager
def own_randomness(rank: int | None, device: torch.device) -> Iterator[None]:
    """Context for code that draws values for this rank's rows: the generators of all ranks stay equal.

    If the code has drawn (on every rank or on none), the CPU's generator is one draw ahead afterwards, and that of
    ``device`` begins anew with that draw; else both are unchanged. Without a rank, which stands for some of its rows,
    drawing raises: the values would be others than for all rows.
    """
    here = torch.device("cpu")
    kinds = {here, device}
    before = {kind: _random_state(kind) for kind in kinds}
    seed = draw_seed()
    after = _random_state(here)
    fresh = {kind: torch.Generator(kind).manual_seed(seed + (rank or 0)).get_state() for kind in kinds}
    for kind in kinds:
        _random_state(kind, fresh[kind])
    drew: dict[torch.device, bool] = {}
    try:
        yield
    finally:
        drew = {kind: not torch.equal(_random_state(kind), fresh[kind]) for kind in kinds}
        for kind in kinds - {here}:
            _random_state(kind, torch.Generator(kind).manual_seed(seed).get_state() if drew[kind] else before[kind])
        _random_state(here, after if any(drew.values()) else before[here])
    if any(drew.values()) and rank is None:
        raise MixedRowsError("Random numbers without keys differ from block to block: use torch.nn.functional.dropout")


def _random_state(device: torch.device, new: Tensor | None = None) -> Tensor:
    """The state of a device's default generator, known to the host: nothing is waited for. With ``new``, set that."""
    of_device = () if device.type == "cpu" else (device,)
    module: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)
    if new is not None:
        module.set_rng_state(new, *of_device)
    state: Tensor = module.get_rng_state(*of_device) if new is None else new
    return state


@implements("dropout")
def dropout(
    function: Function, x: RowTensor, p: float = 0.5, training: bool = True, inplace: bool = False, *,
    train: bool = True,
) -> Tensor:  # fmt: skip
    """Zero entries with probability p and scale the others by 1 / (1 - p)."""
    if probability(p, training and train) == 0.0:
        return x
    with local_tensors():
        key = on_device(x._sharding.rng_key, x.device)
        local, form = x.as_subclass(Tensor), x._sparse_form
        out = ops.keyed_dropout(local, key, p, draw_seed(), x._sharding.first_column)
        if inplace:
            return x.copy_(out)
        dropped = as_row_tensor_(out, x._sharding)
        dropped._sparse_form = None if form is None else form.of_masked(local, version_of(x), out)
        return dropped


def probability(p: float, training: bool) -> float:
    """The probability of a dropout: zero outside of training."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    return p if training else 0.0


def draw(
    keyed: Callable[..., Tensor], x: RowTensor, dtype: torch.dtype | None = None, per_row: Sequence[int] | None = None
) -> Tensor:
    """Numbers for each local row of x, ``per_row`` or as many as it has; to be called under :data:`local_tensors`.

    By default of x's dtype, but for half precision, whose steps are coarse: then of float32.
    """
    rows, per_row = x._sharding, x.shape[1:] if per_row is None else per_row
    first = rows.first_column if tuple(per_row) == tuple(x.shape[1:]) else 0
    key, dtype = on_device(rows.rng_key, x.device), dtype or torch.promote_types(x.dtype, torch.float32)
    return keyed(key, math.prod(per_row), draw_seed(), first, dtype).view(rows.num_local, *per_row)


def refuse_generator(function: Function, generator: object) -> None:
    """Raise where another generator is given than the one whose state the ranks share."""
    if generator is not None:
        raise UnsupportedError(
            f"{public_name(function)} of row tensors draws from torch's default CPU generator (got another): "
            f"leave 'generator' out"
        )


@implements("rand_like", "randn_like")
def random_like(
    function: Function, x: RowTensor, *, dtype: torch.dtype | None = None, device: torch.device | None = None,
    requires_grad: bool = False, generator: object = None, **_: object,
) -> Tensor:  # fmt: skip
    """Uniform in [0, 1), or standard normal."""
    refuse_generator(function, generator)
    with local_tensors():
        keyed = ops.keyed_uniform if function is torch.rand_like else ops.keyed_normal
        out = draw(keyed, x, dtype or x.dtype).to(device or x.device)
        return as_row_tensor_(out.requires_grad_(requires_grad), x._sharding)


def _exponentials(x: RowTensor, rate: float) -> Tensor:
    if not rate > 0:
        raise DataError(f"Expected exponential_ to have a positive 'lambd' (got {rate})")
    return exponential(x) / rate


def _geometrics(x: RowTensor, p: float) -> Tensor:
    if not 0 < p < 1:
        raise DataError(f"Expected geometric_ to have a p between 0 and 1 (got {p})")
    return (exponential(x).double() / -math.log1p(-p)).ceil_().clamp_(min=1)


# By the function's name: its parameters' names and defaults, and what it fills a tensor with.
_FILLS: dict[str, tuple[dict[str, float], Callable[..., Tensor]]] = {
    "uniform_": (
        {"from": 0.0, "to": 1.0},
        lambda x, low, high: low + (high - low) * draw(ops.keyed_uniform, x, x.dtype),
    ),
    "normal_": ({"mean": 0.0, "std": 1.0}, lambda x, mean, std: mean + std * draw(ops.keyed_normal, x, x.dtype)),
    "log_normal_": (
        {"mean": 1.0, "std": 2.0},
        lambda x, mean, std: (mean + std * draw(ops.keyed_normal, x, torch.float64)).exp(),
    ),
    "cauchy_": (
        {"median": 0.0, "sigma": 1.0},
        lambda x, median, sigma: median + sigma * (math.pi * (draw(ops.keyed_uniform, x, torch.float64) - 0.5)).tan(),
    ),
    "exponential_": ({"lambd": 1.0}, _exponentials),
    "geometric_": ({"p": math.nan}, _geometrics),
}


@implements(*_FILLS)
def fill(function: Function, x: RowTensor, *args: float, generator: object = None, **kwargs: float) -> Tensor:
    """Fill with numbers of a distribution: by inverting its distribution function, but for normal ones."""
    defaults, drawn = _FILLS[function.__name__]
    bound = defaults | bind(function, " ".join(defaults), args, kwargs)
    refuse_generator(function, generator)
    with local_tensors():
        return x.copy_(drawn(x, *bound.values()))


@implements("bernoulli", "bernoulli_")
def bernoulli(function: Function, x: RowTensor, p: Any = None, *, generator: object = None) -> Tensor:
    """Ones with the probabilities in x (or ``p``)."""
    refuse_generator(function, generator)
    with local_tensors():
        if p is None:
            p = 0.5 if function.__name__.endswith("_") else x
        p = aligned(function, (x, p), {})[0][1]
        drawn = (draw(ops.keyed_uniform, x) < p).to(x.dtype)
        return x.copy_(drawn) if function.__name__.endswith("_") else as_row_tensor_(drawn, x._sharding)


def exponential(x: RowTensor) -> Tensor:
    """Numbers like x's local rows, ``-log(1 - u)``, never zero: their logarithms are noise of Gumbel's."""
    uniform = draw(ops.keyed_uniform, x)
    return -torch.log1p(-uniform.clamp_(min=torch.finfo(uniform.dtype).eps / 4))  # half of the smallest step


@implements("gumbel_softmax")
def gumbel_softmax(function: Function, *args: object, **kwargs: object) -> object:
    """As torch does it, from keyed noise."""
    return by_steps(function, *args, **kwargs)


@implements("multinomial")
def multinomial(
    function: Function, x: RowTensor, num_samples: int, replacement: bool = False, *, generator: object = None
) -> Tensor:
    """Columns drawn for each row by its weights: by inverting cumulative sums, or by exponential races."""
    refuse_generator(function, generator)
    if x.dim() != 2:
        raise refuse(function, "of one dimension would draw rows")
    if not x.is_floating_point() or num_samples < 1:
        raise DataError(f"Expected floating weights and one sample or more (got {x.dtype}, num_samples={num_samples})")
    with local_tensors():
        weights = x.as_subclass(Tensor).detach()
        least = 1 if replacement else num_samples
        is_valid = bool((weights >= 0).all() and weights.isfinite().all() and ((weights > 0).sum(1) >= least).all())
        if not x._sharding.group.all_true(is_valid):
            raise DataError(
                f"Expected weights of each row that are finite, not negative, {least} or more above zero (got others)"
            )
        if replacement:
            uniform = draw(ops.keyed_uniform, x, per_row=[num_samples])
            sums = weights.cumsum(1, dtype=uniform.dtype)
            drawn = torch.searchsorted(sums, uniform * sums[:, -1:], right=True).clamp_(max=weights.shape[1] - 1)
        else:
            races = exponential(x) / weights  # the smallest win (Efraimidis and Spirakis, 2006)
            drawn = races.topk(num_samples, 1, largest=False).indices
        return as_row_tensor_(drawn, x._sharding)


def _kaiming_uniform(tensor: Tensor, a: float, mode: str, nonlinearity: str, generator: Any) -> Tensor:
    fan = init._calculate_correct_fan(tensor, mode)  # type: ignore[arg-type]  # fans of the global shape
    limit = math.sqrt(3.0 / fan) * init.calculate_gain(nonlinearity, a)  # type: ignore[arg-type]
    return tensor.uniform_(-limit, limit, generator=generator)


# torch offers these four to subclasses under their own names; the others of torch.nn.init call the methods above.
_INITIALISERS: dict[Function, Callable[..., Tensor]] = {
    init.uniform_: lambda tensor, a, b, generator: tensor.uniform_(a, b, generator=generator),
    init.normal_: lambda tensor, mean, std, generator: tensor.normal_(mean, std, generator=generator),
    init.constant_: lambda tensor, val: tensor.fill_(val),
    init.kaiming_uniform_: _kaiming_uniform,
}


def initialise(function: Function, *args: object, **kwargs: object) -> Tensor:
    """``torch.nn.init`` on a parameter with distributed rows."""
    with torch.no_grad():
        return _INITIALISERS[function](*args, **kwargs)


TABLE.update(dict.fromkeys(_INITIALISERS, initialise))


@implements("alpha_dropout", "feature_alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout_of_kinds(
    function: Function, x: RowTensor, p: float = 0.5, training: bool = True, inplace: bool = False, *,
    train: bool = True,
) -> Tensor:  # fmt: skip
    """Dropout that keeps mean and variance of SELU's outputs (alpha), or drops whole channels ``[N, C, ...]``."""
    p, name = probability(p, training and train), function.__name__.rstrip("_")
    of_channels, is_alpha = name != "alpha_dropout", "alpha" in name
    if of_channels and x.dim() < {"dropout1d": 3, "dropout3d": 5}.get(name, 2):
        raise refuse(function, f"of {x.dim()} dimensions would drop rows, as channels of one sample")
    if p == 0.0:
        return x
    shape = x.shape[1:2] + (1,) * (x.dim() - 2) if of_channels else x.shape[1:]
    with local_tensors():
        keep = draw(ops.keyed_uniform, x, per_row=shape) >= p
        if is_alpha:
            # What is dropped becomes SELU's limit, -scale * alpha; then mean 0 and variance 1 are restored.
            low = -1.7580993408473766
            scale = 0.0 if p == 1.0 else ((low * low * p + 1) * (1 - p)) ** -0.5
            out = torch.where(keep, x.as_subclass(Tensor), low) * scale - low * p * scale
        else:
            out = x.as_subclass(Tensor) * (keep.to(x.dtype) / (1 - p) if p < 1.0 else 0.0)
        return x.copy_(out) if inplace else as_row_tensor_(out, x._sharding)


@implements("rrelu", "rrelu_", namespaces=(torch, torch.nn.functional))
def rrelu(
    function: Function, x: RowTensor, lower: float = 1.0 / 8, upper: float = 1.0 / 3, training: bool = False,
    inplace: bool = False, generator: object = None,
) -> Tensor:  # fmt: skip
    """ReLU whose slopes of negative values are drawn in training; in evaluation they are the mean."""
    refuse_generator(function, generator)
    with local_tensors():
        slope: float | Tensor = (lower + upper) / 2
        if training:
            slope = lower + (upper - lower) * draw(ops.keyed_uniform, x)
        local = x.as_subclass(Tensor)
        out = torch.where(local <= 0, local * slope, local)
        return x.copy_(out) if inplace or function.__name__.endswith("_") else as_row_tensor_(out, x._sharding)
