"""Measures this machine for the cost models: products, copies, and messages by size and by number of partners."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import scipy.optimize
import torch

from pyg_dist.backend import host, ops
from pyg_dist.backend.comm.group import Group, group_within
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.errors import OptionError

Samples = np.ndarray[tuple[int, int], np.dtype[np.float64]]
Values = np.ndarray[tuple[int], np.dtype[np.float64]]

# What a rank hands to one collective: the small ones show what a call costs, the large ones the bandwidth.
MESSAGE_BYTES = (64, 4096, 65_536, 262_144, 1 << 20, 1 << 22)

_CACHE_BYTES = 1 << 25  # more than a core's share of the last level of today's processors


class SpmmFit(NamedTuple):
    """Coefficients of a model of sparse products, and how well it predicts what it has not seen."""

    coefficients: tuple[float, float, float]  # seconds by entry x column, by entry, by row x column of the result
    r2: float  # mean over random 70/30 splits of the held-out R2 of log seconds
    r2_of_paper: float  # the same for Plexus' three terms (4.1; there 0.79, of seconds on GPUs)


class NetworkFit(NamedTuple):
    """Seconds of an all-to-all: ``call + latency x partners + bytes / bandwidth``.

    ``bandwidth`` is in bytes per second that a rank sends; ``r2`` of log seconds, of the samples themselves.
    """

    call: float
    latency: float
    bandwidth: float
    r2: float


_HOST = torch.device("cpu")

# Nodes and mean degrees of the graphs whose tiles are multiplied: long enough, on each kind of device, to be timed.
SPMM_SIZES = {
    "cpu": ((20_000, 8), (20_000, 30), (60_000, 16), (8_000, 100)),
    "cuda": ((500_000, 8), (500_000, 30), (1_000_000, 16)),
}


def median_seconds(function: Callable[[], object], repeats: int = 7, device: torch.device = _HOST) -> float:
    """The median of several runs, as epochs are judged: on a shared machine the shortest has luck that no epoch has.

    Before each run, other data goes through the caches, as in an epoch.
    """
    times = []
    other = torch.zeros(_CACHE_BYTES // 4 * (1 if device.type == "cpu" else 8), device=device)
    for _ in range(repeats):
        other.add_(1)
        finish(device)
        start = time.perf_counter()
        function()
        finish(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def finish(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spmm_samples(
    seed: int = 0, sizes: Sequence[tuple[int, int]] | None = None, device: torch.device = _HOST
) -> Samples:
    """Entries, rows, source rows, columns and seconds of sparse products, one a line (not collective).

    Tiles of random graphs of these sizes (:data:`SPMM_SIZES`), cut as meshes cut them: short and wide, tall and narrow.
    Degrees of sources follow a power law of exponent 2.5, as of many graphs: that of the k-th is as k^(-2/3).
    """
    rng = np.random.default_rng(seed)
    samples = []
    for num_nodes, degree in SPMM_SIZES[device.type] if sizes is None else sizes:
        source = (num_nodes * rng.random(num_nodes * degree) ** 3).astype(np.int64)
        source = rng.permutation(num_nodes)[source]
        target = rng.integers(0, num_nodes, source.size)
        for x in (1, 2, 4):
            for z in (1, 4):
                here = (source < num_nodes // x) & (target < num_nodes // z)
                row, column = torch.from_numpy(target[here]), torch.from_numpy(source[here])
                csr = CSR.from_edges(row, column, None, num_nodes // z, num_nodes // x).to(device)
                for columns in (8, 32, 128, 256):
                    dense = torch.randn(num_nodes // x, columns, device=device)
                    multiply = partial(ops.spmm_csr, csr.rowptr, csr.col, dense)
                    seconds = median_seconds(multiply, device=device)
                    samples.append((csr.num_entries, csr.num_rows, csr.num_cols, columns, seconds))
    return np.array(samples)


def fit_spmm(samples: Samples, num_splits: int = 200) -> SpmmFit:
    """Fit with coefficients that are not negative (pure): least squares of errors over the root of the seconds.

    So large products decide, which an epoch's time goes to; of relative errors, small narrow tiles would.
    """
    entries, rows, sources, columns, seconds = samples.T
    ours = np.stack([entries * columns, entries, rows * columns], 1)
    root = np.sqrt(entries * columns)
    paper = np.stack([root, root * sources / columns, root * rows / columns], 1)

    def held_out(terms: Samples) -> float:
        values = []
        for seed in range(num_splits):
            shuffled = np.random.default_rng(seed).permutation(seconds.size)
            train, test = np.split(shuffled, [int(0.7 * seconds.size)])
            fitted = _fit(terms[train], seconds[train], 0.5)
            values.append(_r2(terms[test] @ fitted, seconds[test]))
        return float(np.mean(values))

    a, b, c = _fit(ours, seconds, 0.5).tolist()
    return SpmmFit((a, b, c), held_out(ours), held_out(paper))


def gemm_rate(device: torch.device = _HOST) -> float:
    """Flops per second of a layer's dense products, forward and of both gradients (not collective).

    Narrower layers are slower: of 64 columns by a third.
    """
    rows, columns = (20_000, 128) if device.type == "cpu" else (200_000, 256)
    x, weight = torch.randn(rows, columns, device=device), torch.randn(columns, columns, device=device)

    def multiply() -> None:
        y = torch.nn.functional.linear(x, weight)
        torch.mm(y, weight)
        torch.mm(y.t(), x)

    return 6 * rows * columns * columns / median_seconds(multiply, device=device)


def stream_rate(num_values: int | None = None, depth: int = 8, device: torch.device = _HOST) -> float:
    """Bytes per second that element-wise functions read and write, there and back (not collective).

    As an epoch has them: every result is kept until the way back frees it, so that no cache holds what is read and the
    allocator gets new pages from the system each time, which costs more than the copies (benchmarks/REPORT.md).
    """
    num_values = num_values or (1 << 21 if device.type == "cpu" else 1 << 26)
    x = torch.randn(num_values, device=device, requires_grad=True)

    def there_and_back() -> None:
        y: torch.Tensor = x
        for _ in range(depth):
            y = (y + 1.0).relu()
        torch.autograd.grad(y, x, x.detach())

    passes = depth * (2 + 2 + 3)  # the sum, ReLU, and ReLU's derivative, which reads the gradient and the result
    return 4 * num_values * passes / median_seconds(there_and_back, 9, device)


def quantize_rate(device: torch.device = _HOST) -> float:
    """Bytes per second that quantizing to 2, 4 and 8 bits reads and writes, and the way back (not collective)."""
    rows, seconds, num_bytes = 8_000 if device.type == "cpu" else 200_000, 0.0, 0
    x, out = (torch.randn(rows, 256, device=device) for _ in range(2))
    rowptr, key = (torch.arange(count, device=device) for count in (rows + 1, rows))
    column = torch.randperm(rows, device=device).int()
    for bits in (2, 4, 8):
        pack = partial(ops.quantize_csr, rowptr, column, x, bits, key=key)
        packed = pack()
        unpack = partial(ops.dequantize_csr_add, out, rowptr, column, packed, bits)
        seconds += median_seconds(pack, device=device) + median_seconds(unpack, device=device)
        num_bytes += 2 * (x.nbytes + packed.nbytes)
    return num_bytes / seconds


def groupings(machine_of: Sequence[int], is_inside: bool) -> list[list[list[int]]]:
    """Groups of ranks that exchange at once (pure).

    Inside machines, neighbouring ranks: 2, 4, 8 ... and all of a machine. Between machines, one rank of each.
    """
    machines = [[r for r, m in enumerate(machine_of) if m == machine] for machine in dict.fromkeys(machine_of)]
    smallest = min(map(len, machines))
    if not is_inside:
        return [[[ranks[k] for ranks in machines] for k in range(smallest)]] if len(machines) > 1 else []
    sizes = sorted({2**k for k in range(1, 20) if 2**k <= smallest} | ({smallest} if smallest > 1 else set()))
    return [[r[k : k + n] for r in machines for k in range(0, len(r) - n + 1, n)] for n in sizes]


def network_samples(
    world: Group, grouped: Sequence[list[list[int]]], repeats: int = 6, device: torch.device = _HOST
) -> Samples:
    """Partners, bytes sent by a rank, elapsed and processor seconds of all-to-alls, one a line (collective).

    All groups of :func:`groupings` take part at once. Of the repeats the median counts: of what elapsed on the slowest
    rank, and of the ranks' mean processor time. That is of all threads: those of a wire that receive are among them.
    """
    samples = []
    for groups in grouped:
        group = group_within(groups)
        for num_bytes in MESSAGE_BYTES:
            seconds = _all_to_all_seconds(group, num_bytes, world, repeats, device)
            partners = len(groups[0]) - 1
            samples.append((partners, _piece(num_bytes, partners + 1) * 4 * partners, *seconds))
    return np.array(samples).reshape(-1, 4)


def fit_network(samples: Samples, by_processor: bool = False) -> NetworkFit:
    """Fit by least squares of relative errors (pure): of elapsed or of processor seconds.

    Raises:
        OptionError: Large messages took no longer than small ones: there was other work on the machine.
    """
    partners, num_bytes = samples[:, 0], samples[:, 1]
    seconds = samples[:, 3 if by_processor else 2]
    terms = np.stack([np.ones(seconds.size), partners, num_bytes], 1)
    fitted = _fit(terms, seconds)
    if not fitted[2] > 0:
        raise OptionError(
            f"Expected larger messages to take longer (got {seconds.tolist()} s for {num_bytes.tolist()} bytes): "
            f"measure again on a quiet machine"
        )
    return NetworkFit(float(fitted[0]), float(fitted[1]), float(1 / fitted[2]), _r2(terms @ fitted, seconds))


def num_cores(world: Group, machine_of: Sequence[int]) -> int:
    """Cores of the first machine that its ranks may use, all together (collective): each may be bound to some."""
    mine = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    counts = world.gather_counts(len(mine))
    ids = torch.split(world.gather_rows(host.tensor(mine), counts), counts)
    return len({int(i) for rank, found in enumerate(ids) if machine_of[rank] == machine_of[0] for i in found})


def _fit(terms: Samples, seconds: Values, power: float = 1.0) -> Values:
    """Coefficients that are not negative; those that the samples cannot separate get equal shares.

    Errors count over ``seconds`` to this power.
    """
    scale = seconds**power
    scaled = terms / scale[:, None]
    size = scaled.max(0)
    shares = 1e-4 * np.eye(terms.shape[1])
    rows, wanted = (np.concatenate([scaled / size, shares]), np.concatenate([seconds / scale, np.zeros(len(shares))]))
    return scipy.optimize.nnls(rows, wanted)[0] / size  # type: ignore[no-any-return]


def _r2(predicted: Values, seconds: Values) -> float:
    wanted = np.log(seconds)
    error = np.log(predicted + 1e-12) - wanted
    return float(1 - (error**2).sum() / ((wanted - wanted.mean()) ** 2).sum())


def _piece(num_bytes: int, num_ranks: int) -> int:
    return max(num_bytes // 4 // num_ranks, 1)


def _all_to_all_seconds(
    group: Group, num_bytes: int, world: Group, repeats: int, device: torch.device, in_a_row: int = 8
) -> tuple[float, float]:
    """Elapsed and processor seconds of one all-to-all among several in a row, as an epoch has them."""
    piece = _piece(num_bytes, group.size)
    content, arrived = (make(piece * group.size, device=device) for make in (torch.zeros, torch.empty))
    transport, sizes = Transport(group), [piece] * group.size
    elapsed, processor = [], []
    for _ in range(repeats):
        world.all_true(True)
        start, of_process = time.perf_counter(), time.process_time()
        for _ in range(in_a_row if group.size > 1 else 0):
            transport.all_to_all(content, sizes, sizes, arrived).wait()
        finish(device)
        taken = host.tensor([time.perf_counter() - start, time.process_time() - of_process], dtype=torch.float64)
        elapsed.append(float(world.all_reduce_(taken[:1].clone(), "max")) / in_a_row)
        processor.append(float(world.all_reduce_(taken[1:].clone())) / in_a_row / world.size)
    return statistics.median(elapsed), statistics.median(processor)
