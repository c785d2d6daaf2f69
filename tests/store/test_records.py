"""Records on disk come back by key, those of one key as they came, whatever the memory is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pyg_dist.store.records import sorted_records, stable_order


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("bound", "count"),
    [(1, 5), (3, 1000), (1 << 16, 1000), (70_000, 0), (70_000, 1000), (70_000, 100_000), (1 << 30, 1000)],
)
def test_the_stable_order(bound: int, count: int, dtype: type) -> None:
    key = (np.random.default_rng(0).random(count) ** 3 * bound).astype(dtype)
    for given in (key, np.sort(key), np.repeat(key[::2], 2)[::2]):
        order = stable_order(given, bound)
        assert order.dtype == np.int64
        assert np.array_equal(order, np.argsort(given, kind="stable"))


@pytest.mark.parametrize("limit", [1, 100, 40_000, 200_000])
def test_records_by_key(tmp_path: Path, limit: int) -> None:
    dtype = np.dtype([("key", np.int64), ("number", np.int32)])
    records = np.empty(50_000 if limit > 100 else 3000, dtype)
    records["key"] = (np.random.default_rng(1).random(len(records)) ** 3 * 80_000).astype(np.int64) + 7
    records["number"] = np.arange(len(records))
    records.tofile(tmp_path / "records")
    pieces = list(sorted_records(tmp_path / "records", dtype, lambda r: r["key"], 7, 80_007, limit))
    assert max(map(len, pieces)) <= limit
    assert np.array_equal(np.concatenate(pieces), records[np.argsort(records["key"], kind="stable")])
    assert list(tmp_path.iterdir()) == []
