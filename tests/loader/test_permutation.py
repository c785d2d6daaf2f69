"""The keyed permutation is one, is uniform over nodes and pairs, and never changes."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chi2

from pyg_dist.loader.permutation import mixed_key, permuted


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17, 64, 65, 1000, 4097])
def test_every_number_once(size: int) -> None:
    for key in range(20):
        assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_values_are_fixed() -> None:
    """A run that is restarted under another version, or on another machine, draws the same samples."""
    assert mixed_key(0, 1, 2) == GOLDEN_KEY
    assert permuted(np.arange(6), 1000, key=7).tolist() == GOLDEN_SMALL
    assert permuted(np.arange(4), 10**12, key=7).tolist() == GOLDEN_LARGE


GOLDEN_KEY = 0
GOLDEN_SMALL: list[int] = []
GOLDEN_LARGE: list[int] = []


def test_keys_are_mixed() -> None:
    keys = {mixed_key(*numbers) for numbers in ((0, 1), (1, 0), (0, 0, 1), (0,), (1,), (0, 0), (-1,), (2**64 - 2,))}
    assert len(keys) == 8
    assert mixed_key(-1) == mixed_key(2**64 - 1)


@pytest.mark.parametrize(("size", "count"), [(2, 1), (5, 2), (8, 4), (13, 4), (50, 9), (300, 20)])
def test_nodes_and_pairs_are_uniform(size: int, count: int) -> None:
    """Chi-square statistics of samples without replacement, at a level of 10^-6; keys are fixed."""
    num_samples = 20_000
    together = np.zeros((size, size))
    for step in range(num_samples):
        chosen = permuted(np.arange(count), size, mixed_key(3, step))
        together[np.ix_(chosen, chosen)] += 1
    expected = num_samples * count / size
    nodes = ((np.diag(together) - expected) ** 2 / expected).sum() * (size - 1) / (size - count)
    assert chi2.sf(nodes, size - 1) > 1e-6
    if count > 1:
        # The counts of pairs spread less than independent ones: the bound is on the safe side of neither, so wide.
        pairs = together[np.triu_indices(size, 1)]
        expected = num_samples * count * (count - 1) / size / (size - 1)
        statistic = ((pairs - expected) ** 2 / expected).sum()
        assert statistic < chi2.isf(1e-6, pairs.size)
