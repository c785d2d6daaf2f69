"""The two orders of a weight gradient, ``Q^T H`` as torch's linear has it and ``(H^T Q)^T`` (Plexus, 5.3), in turns.

OMP_NUM_THREADS=1 python benchmarks/weight_gradient.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

SHAPES = [
    (rows, *columns) for rows in (5_000, 30_000, 120_000) for columns in ((64, 64), (256, 256), (128, 40), (16, 64))
]


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    print(f"{'rows':>8}{'H':>6}{'Q':>6}{'Q^T H':>12}{'(H^T Q)^T':>14}{'ratio':>8}")
    for rows, wide, width in SHAPES:
        h, q = torch.randn(rows, wide), torch.randn(rows, width)
        pairs = [(seconds(lambda: q.t().mm(h)), seconds(lambda: h.t().mm(q).t())) for _ in range(20)]  # noqa: B023
        ours, reversed_ = (min(times) for times in zip(*pairs, strict=True))
        print(f"{rows:>8}{wide:>6}{width:>6}{1e3 * ours:>9.2f} ms{1e3 * reversed_:>11.2f} ms{reversed_ / ours:>8.2f}")


if __name__ == "__main__":
    main()
