"""Measures this machine for the cost models: sparse and dense products, bandwidth and latency of messages."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch
import torch.distributed as dist

from pyg_dist.backend import ops
from pyg_dist.backend.axis import Axis
from pyg_dist.backend.csr import CSR

Samples = np.ndarray[tuple[int, int], np.dtype[np.float64]]


class SpmmFit(NamedTuple):
    """Coefficients of a model of sparse products, and how well it predicts what it has not seen.

    Attributes:
        coefficients: by entry x column, by entry, by row x column of the result, in seconds.
        r2: mean over random 70/30 splits of the held-out R2 of log seconds.
        r2_of_paper: the same for Plexus' three terms (4.1; there 0.79, of seconds on GPUs).
    """

    coefficients: tuple[float, float, float]
    r2: float
    r2_of_paper: float


def best_seconds(function: Callable[[], object], repeats: int = 7) -> float:
    """The shortest of several runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def spmm_samples(seed: int = 0) -> Samples:
    """Entries, rows, source rows, columns and seconds of sparse products, one a line (not collective).

    Tiles of random graphs with a few hubs, cut as meshes cut them: short and wide, tall and narrow.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for num_nodes, degree in ((20_000, 8), (20_000, 30), (60_000, 6), (60_000, 16)):
        source = (rng.pareto(1.5, num_nodes * degree) * 40).astype(np.int64) % num_nodes
        source = rng.permutation(num_nodes)[source]
        target = rng.integers(0, num_nodes, source.size)
        for x in (1, 2, 4):
            for z in (1, 4):
                here = (source < num_nodes // x) & (target < num_nodes // z)
                row, column = torch.from_numpy(target[here]), torch.from_numpy(source[here])
                csr = CSR.from_edges(row, column, torch.arange(row.numel()), num_nodes // z, num_nodes // x)
                for columns in (8, 32, 128):
                    dense = torch.randn(num_nodes // x, columns)
                    seconds = best_seconds(lambda c=csr, d=dense: ops.spmm_csr(c.rowptr, c.col, d))  # type: ignore[misc]
                    samples.append((csr.num_entries, csr.num_rows, csr.num_cols, columns, seconds))
    return np.array(samples)


def fit_spmm(samples: Samples, num_splits: int = 200) -> SpmmFit:
    """Fit by least squares of relative errors, with coefficients that are not negative (pure)."""
    entries, rows, sources, columns, seconds = samples.T
    ours = np.stack([entries * columns, entries, rows * columns], 1)
    root = np.sqrt(entries * columns)
    paper = np.stack([root, root * sources / columns, root * rows / columns], 1)

    def fit(terms: Samples, chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Samples:
        scaled = terms[chosen] / seconds[chosen, None]
        size = scaled.max(0)
        return scipy.optimize.nnls(scaled / size, np.ones(chosen.size))[0] / size  # type: ignore[no-any-return]

    def held_out(terms: Samples) -> float:
        values = []
        for seed in range(num_splits):
            shuffled = np.random.default_rng(seed).permutation(seconds.size)
            train, test = np.split(shuffled, [int(0.7 * seconds.size)])
            wanted = np.log(seconds[test])
            error = np.log(terms[test] @ fit(terms, train) + 1e-12) - wanted
            values.append(1 - (error**2).sum() / ((wanted - wanted.mean()) ** 2).sum())
        return float(np.mean(values))

    a, b, c = fit(ours, np.arange(seconds.size))
    return SpmmFit((float(a), float(b), float(c)), held_out(ours), held_out(paper))


def gemm_rate() -> float:
    """Flops per second of a tall dense product (not collective)."""
    x, weight = torch.randn(20_000, 64), torch.randn(64, 64)
    return 2 * 20_000 * 64 * 64 / best_seconds(lambda: torch.nn.functional.linear(x, weight))


class Link(NamedTuple):
    """Bytes per second that each rank sends while all send, and seconds of a collective without content."""

    bandwidth: float
    latency: float


def link(axis: Axis, num_bytes: int = 4 << 20) -> Link:
    """Measure the all-to-all among the ranks of an axis of at least two (collective)."""
    piece = num_bytes // 4 // axis.size
    content, arrived = torch.zeros(piece * axis.size), torch.empty(piece * axis.size)
    little, there = torch.zeros(axis.size), torch.empty(axis.size)

    def seconds(out: torch.Tensor, given: torch.Tensor) -> float:
        mine = best_seconds(lambda: dist.all_to_all_single(out, given, group=axis.process_group))
        return float(axis.reduce_(torch.tensor([mine], dtype=torch.float64), "max"))

    latency = seconds(there, little)
    sent = piece * (axis.size - 1) * 4
    # Ranks beyond the cores have taken turns, which the model counts once more.
    turns = max(1.0, axis.size / num_cores())
    return Link(sent * turns / max(seconds(arrived, content) - latency, 1e-9), latency / turns)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
