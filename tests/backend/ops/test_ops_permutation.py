"""The keyed permutation is one, equals its reference, is uniform over nodes and pairs, and never changes."""

from __future__ import annotations

import pytest
import reference_ops as reference
import torch
from scipy.special import chdtrc, chdtri
from torch.library import opcheck

from pyg_dist.backend import ops
from pyg_dist.errors import DataError

SIZES = [1, 2, 3, 4, 5, 8, 17, 64, 65, 256, 257, 1000, 4097, 10_000]


@pytest.mark.parametrize("size", SIZES)
def test_every_number_once(size: int) -> None:
    for seed in range(5):
        permuted = ops.keyed_permutation(torch.arange(size), size, seed)
        assert torch.equal(permuted.sort().values, torch.arange(size))


@pytest.mark.parametrize("size", [*SIZES, 2**31, 10**12, 2**62])
def test_it_equals_the_reference(size: int) -> None:
    place = torch.tensor([0, 1, size // 3, size // 2, size - 1]).clamp_(max=size - 1)
    for seed in (0, 1, -1, 2**63 + 5):
        permuted = ops.keyed_permutation(place, size, seed)
        assert torch.equal(permuted, reference.keyed_permutation(place, size, seed))
        assert int(permuted.min()) >= 0
        assert int(permuted.max()) < size


def test_it_does_not_depend_on_threads_or_other_places() -> None:
    before, size = torch.get_num_threads(), 10**6
    place = torch.arange(20_000)
    try:
        torch.set_num_threads(1)
        one = ops.keyed_permutation(place, size, 5)
        torch.set_num_threads(3)
        assert torch.equal(ops.keyed_permutation(place, size, 5), one)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(ops.keyed_permutation(place[7777:9000], size, 5), one[7777:9000])


def test_values_are_fixed() -> None:
    """A run that is restarted under another version, or on another machine, draws the same samples."""
    assert ops.mixed_seed(0, 1, 2) == GOLDEN_SEED
    assert ops.keyed_permutation(torch.arange(6), 1000, 7).tolist() == GOLDEN_SMALL
    assert ops.keyed_permutation(torch.arange(4), 10**12, 7).tolist() == GOLDEN_LARGE


GOLDEN_SEED = 12421565313168862949
GOLDEN_SMALL = [716, 554, 66, 447, 757, 137]
GOLDEN_LARGE = [308606024914, 666695793353, 178715631170, 382165440334]


def test_seeds_are_mixed() -> None:
    seeds = {ops.mixed_seed(*k) for k in ((0, 1), (1, 0), (0, 0, 1), (0,), (1,), (0, 0), (-1,), (2**64 - 2,))}
    assert len(seeds) == 8
    assert ops.mixed_seed(-1) == ops.mixed_seed(2**64 - 1)


@pytest.mark.parametrize(("size", "count"), [(2, 1), (5, 2), (8, 4), (13, 4), (50, 9), (300, 20)])
def test_nodes_and_pairs_are_uniform(size: int, count: int) -> None:
    """Chi-square statistics of samples without replacement, at a level of 10^-6; the seeds are fixed."""
    num_samples = 20_000
    place = torch.arange(count)
    chosen = torch.zeros(num_samples, size, dtype=torch.float64)
    for step in range(num_samples):
        chosen[step, ops.keyed_permutation(place, size, ops.mixed_seed(3, step))] = 1
    together = chosen.T @ chosen
    expected = num_samples * count / size
    nodes = float((together.diag() - expected).square().sum() / expected) * (size - 1) / (size - count)
    assert chdtrc(size - 1, nodes) > 1e-6
    if count > 1:
        # Counts of pairs are correlated, which the bound leaves room for.
        pairs = together[torch.triu_indices(size, size, 1).unbind()]
        expected = num_samples * count * (count - 1) / size / (size - 1)
        statistic = float((pairs - expected).square().sum() / expected)
        assert statistic < chdtri(pairs.numel(), 1e-6)


def test_arguments() -> None:
    with pytest.raises(DataError, match=r"'place' to lie in \[0, 5\), got 5 at position 1"):
        ops.keyed_permutation(torch.tensor([0, 5]), 5, 0)
    with pytest.raises(DataError, match=r"'place' to lie in \[0, 5\), got -1 at position 0"):
        ops.keyed_permutation(torch.tensor([-1, 5]), 5, 0)
    with pytest.raises(DataError, match=r"'size' to lie in \[1, 2\^62\], got 0"):
        ops.keyed_permutation(torch.arange(0), 0, 0)
    with pytest.raises(DataError, match="Int"):
        ops.keyed_permutation(torch.arange(3, dtype=torch.int32), 5, 0)
    assert ops.keyed_permutation(torch.arange(0), 5, 0).numel() == 0


def test_opcheck() -> None:
    opcheck(torch.ops.pyg_dist.keyed_permutation.default, (torch.arange(3), 5, 1))
