"""A plain tensor that differs between ranks raises where a number is made of it, and what may differ does not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from random_graphs import random_graph
from torch import Tensor, nn
from wire import Wire
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.backend.comm import group as groups
from pyg_dist.backend.comm.checks import noted, replicas
from pyg_dist.conv import DistributedGCNConv as GCNConv
from pyg_dist.errors import AgreementError

LAYOUTS = [{"partition": "metis"}, {"partition": "random"}, {"layout": "grid"}]
N, FEATURES = 40, 5


def odd() -> bool:
    """Whether this is the rank that goes astray."""
    return pyg_dist.rank() == 1


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(int(odd())), dtype=torch.float64)


class Projected(nn.Module):
    """A random projection that is no parameter and no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = drawn(FEATURES, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.proj


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = GCNConv(FEATURES, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))
        self.double()

    def forward(self, data: Any) -> Tensor:
        x = self.norm(self.conv(data.x, data.edge_index))
        return x * self.scale  # type: ignore[no-any-return]

    def loss(self, data: Any) -> Tensor:
        return F.cross_entropy(self(data)[data.train_mask], data.y[data.train_mask])


def trained(data: Any) -> Classifier:
    """After a step, in which the ranks agree."""
    model = Classifier()
    model.loss(data).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.loss(data)
    return model


def drifted(data: Any) -> None:
    model = trained(data)
    if odd():
        model.conv.lin.weight.data.add_(1e-3)  # no version counts it
    for _ in range(20 * replicas._PARAMETERS_EVERY):  # they have their turn now and then
        model.loss(data)


def loaded(data: Any) -> None:
    """The best model comes back on one rank alone, as under ``is_main()``."""
    model = trained(data)
    if odd():
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    model.eval()
    with torch.no_grad():
        (model(data).argmax(-1) == data.y).sum().item()


def statistics(data: Any) -> None:
    model = trained(data)
    if odd():
        model.norm.running_mean += 1
    model.eval().loss(data)


def buffer(data: Any) -> None:
    model = trained(data)
    if odd():
        model.scale += 1
    model.loss(data)


def written(data: Any) -> None:
    x = data.x.clone()
    x[data.train_mask] = drawn(FEATURES)
    x.mean()


def masked(data: Any) -> None:
    for name in ("train_mask", "other_mask", "other_mask" if odd() else "train_mask"):
        data.x[data[name]].sum()


def gate(data: Any) -> None:
    """A learning factor, on whose way there is noise."""
    alpha = torch.zeros(FEATURES, dtype=torch.float64, requires_grad=True)
    (data.x * (alpha + drawn(FEATURES)).sigmoid()).sum().backward()


# What each does, and what the error says of the tensor and the line.
CASES: dict[str, tuple[Callable[[Any], object], str, str]] = {
    "projection": (lambda data: Projected()(data.x).sum(), "tensor float64 [5, 3]", "return x @ self.proj"),
    "noise": (lambda data: (data.x + drawn(FEATURES)).mean(0), "tensor float64 [5]", "data.x + drawn(FEATURES)"),
    "noise of rows": (lambda data: (data.x * drawn(N, FEATURES)).max(), "tensor float64 [40, 5]", "drawn(N, FEATURES)"),
    "noise by numpy": (
        lambda data: data.x.add(torch.from_numpy(np.random.default_rng(int(odd())).random(FEATURES))).norm(),
        "tensor float64 [5]", "np.random.default_r",
    ),
    "a number": (lambda data: (data.x * drawn()).sum(), "tensor float64 []", "data.x * drawn()"),
    "columns": (lambda data: data.x[:, drawn(FEATURES).argsort()][:, 0].sum(), "tensor int64 [5]", "argsort()"),
    "class weights": (
        lambda data: F.cross_entropy(data.x, data.y, weight=drawn(FEATURES).exp()), "tensor float64 [5]", "drawn",
    ),
    "written rows": (written, "tensor float64 [5]", "x[data.train_mask] = drawn(FEATURES)"),
    "a gate": (gate, "tensor float64 [5]", "drawn(FEATURES)).sigmoid()"),
    "all rows": (lambda data: (data.x + drawn(5)).full_tensor(), "tensor float64 [5]", "data.x + drawn(5)"),
    "a sample": (lambda data: data.x[drawn(N).argsort()[:7]].sum(), "list of nodes", "drawn(N).argsort()[:7]"),
    "masks by a set of names": (masked, "mask", "data.x[data[name]].sum()"),
    "a drifted parameter": (drifted, "parameter float64 [4, 5]", "self.conv(data.x, data.edge_index)"),
    "a parameter loaded on one rank": (loaded, "parameter float64 [4, 5]", "self.conv(data.x, data.edge_index)"),
    "statistics": (statistics, "tensor float64 [4]", "self.norm("),
    "a buffer": (buffer, "tensor float64 [4]", "return x * self.scale"),
}  # fmt: skip


def differing(options: dict[str, Any]) -> dict[str, str]:
    graph = random_graph(N, 160, FEATURES, seed=2)
    graph.other_mask = ~graph.train_mask
    data, found = pyg_dist.DistributedData(graph, **options), {}
    for name, (case, _, _) in CASES.items():
        with pytest.raises(AgreementError) as caught:
            case(data)
        found[name] = caught.value.message
    return found


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@pytest.mark.parametrize("world_size", [3])
def test_what_differs_is_named(workers: Pools, world_size: int, options: dict[str, Any]) -> None:
    for messages in workers(world_size).run(differing, options):
        for name, (_, what, code) in CASES.items():
            message = messages[name]
            assert message.startswith(f"Expected the same {what}"), (name, message)
            other = "train_mask on ranks 0, 2, other_mask on rank 1" if what == "mask" else "another on rank 1"
            assert f"on every rank (got {other})" in message, message
            assert "at test_replicas.py:" in message, message
            assert code in message, message
            assert "\n" not in message


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
@on_ranks(3)
def test_what_may_differ_does_not_raise(options: dict[str, Any]) -> None:
    """What one rank may do alone."""
    data = pyg_dist.DistributedData(random_graph(N, 160, FEATURES, seed=2), **options)
    noise = torch.ones(FEATURES, dtype=torch.float64)
    if odd():
        data.best_mask = data.train_mask  # a second name of one mask
    for _ in range(2):
        data.x[data.train_mask].sum()
        if odd() and not options.get("layout"):
            data.x * drawn(FEATURES)  # nobody else needs it
        (data.x * noise).sum()
        if odd():
            noise.copy_(noise.clone())  # a version more, and the same values
    noise.data.mul_(2)  # no version counts it
    if odd():
        noise.mul_(1)
    (data.x * noise).sum()
    wide = torch.ones(1, FEATURES, dtype=torch.float64).expand(N, FEATURES)
    for other in (wide, noise.bfloat16(), noise > 0, noise[:0].sum(), wide.t().t(), noise.view(1, -1)):
        (data.x * other).sum()
    with torch.inference_mode():
        (data.x * torch.ones(FEATURES)).sum()
    leaf = drawn(FEATURES, 3).requires_grad_()  # no module's, and rank 0's from here on
    (data.x @ leaf).sum().backward()
    millionths = int(1e6 * leaf.sum())
    assert groups.world_group().gather_counts(millionths) == [millionths] * pyg_dist.world_size()


def rounded() -> list[str]:
    """What a rank is told of values that differ in their last bits, and then of others."""
    data = pyg_dist.DistributedData(random_graph(N, 160, FEATURES, seed=2))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    factor = torch.linspace(1, 2, FEATURES, dtype=torch.float64) * (1 + 1e-15 * odd())
    logger = logging.getLogger("pyg_dist")
    logger.addHandler(handler)
    try:
        for _ in range(3):
            (data.x * factor).sum()
    finally:
        logger.removeHandler(handler)
    for _ in range(replicas._REST):
        data.x.sum()
    with pytest.raises(AgreementError, match="on rank 1"):
        (data.x * (factor + 1e-6 * odd())).sum()
    return told


@pytest.mark.parametrize("world_size", [3])
def test_rounding_is_warned_of_once(workers: Pools, world_size: int) -> None:
    first, *others = workers(world_size).run(rounded)
    (warning,) = first
    assert warning.startswith("the tensor float64 [5] that met distributed rows at test_replicas.py:")
    assert "(data.x * factor).sum()" in warning
    assert "by rounding on rank 1" in warning
    assert not any(others)


def test_what_counts_as_rounding() -> None:
    x = np.array([1.0, -3.0, np.nan, np.inf, 0.0])

    def is_rounding(other: object, dtype: torch.dtype = torch.float32, size: int = 5) -> bool:
        samples = [(dtype, (size,), x), (dtype, (size,), np.asarray(other, x.dtype))]
        return noted.differ_by_rounding(samples)

    assert is_rounding(x * (1 + 1e-5))
    assert is_rounding([1, -3, np.nan, np.inf, -0.0])
    assert not is_rounding([1, -3, np.nan, np.inf, 0.0], size=500)  # where nobody has looked
    assert not is_rounding([1.01, -3, np.nan, np.inf, 0])
    assert is_rounding([1.01, -3, np.nan, np.inf, 0], torch.bfloat16)
    assert not is_rounding([1, -3, 0, np.inf, 0])
    assert not is_rounding([1, -3, np.nan, -np.inf, 0])
    assert not is_rounding([1, -3, np.nan, np.inf])
    whole = np.array([1, 2])
    assert not noted.differ_by_rounding([(torch.int64, (2,), whole), (torch.int64, (2,), whole + 1)])


def messages_of_a_step() -> tuple[int, int]:
    """With the comparison and without."""
    data = pyg_dist.DistributedData(random_graph(N, 160, FEATURES, seed=2))
    model = trained(data)
    counts = []
    for smallest in (groups._SMALL, -1):
        with mock.patch.object(groups, "_SMALL", smallest), Wire() as wire:
            model.loss(data).backward()
        counts.append(wire.num_others + wire.num_collectives)
    return counts[0], counts[1]


def test_nothing_more_is_sent(workers: Pools) -> None:
    for with_it, without in workers(2).run(messages_of_a_step):
        assert with_it == without > 0


def test_digests_tell_values_shapes_and_dtypes_apart() -> None:
    x = torch.arange(6.0).view(2, 3)
    apart = [
        x, x.t(), x.view(3, 2), x.double(), x.int(), x.bfloat16(), x.half(), x > 1, x[:, :2], x[:, :1].expand(2, 3),
        x + 1e-6, x.to(torch.complex64), x.to(torch.float8_e5m2), x[0, 0], x[:0],
    ]  # fmt: skip
    digests = [noted.digest_of(tensor)[0] for tensor in apart]
    assert len({*digests}) == len(digests)
    assert digests == [noted.digest_of(tensor.clone())[0] for tensor in apart]
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    assert noted.digest_of(conjugate)[0] == noted.digest_of(conjugate.resolve_conj())[0]
    large = torch.zeros(100_000)
    changed = large.clone()
    changed[77_777] = 1
    assert noted.digest_of(large)[0] != noted.digest_of(changed)[0]
