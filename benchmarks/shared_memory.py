"""Messages between ranks of one machine: through memory that they share, and by gloo's TCP, in turns within one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/shared_memory.py

Each rank sends every other one as many bytes. "packed there": the rows that leave were written to shared memory, as a
halo exchange does; "copied": a sender copies them there. The median over the turns; an exchange is as long as its
slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import machine
import torch
from torch import Tensor

import pyg_dist
from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.backend.comm.topology import machines
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.comm.wires.shared_memory import SharedMemory
from pyg_dist.backend.session.state import current

RESULTS = Path(__file__).resolve().parent / "results"
ROW_BYTES = 256


@contextmanager
def by_tcp() -> Iterator[None]:
    """Ranks that share no memory, for a while."""
    memory = current().of(SharedMemory)
    memory.of_rank, kept = {}, memory.of_rank
    try:
        yield
    finally:
        memory.of_rank = kept


def exchange(group: Group, num_bytes: int) -> Callable[[Tensor | None], float]:
    """Return what sends so many bytes to each other rank, from ``rows`` or a tensor of its own; its seconds."""
    transport, num_rows = Transport(group), num_bytes // ROW_BYTES
    others = [(group.rank + k) % group.size for k in range(1, group.size)]
    pieces = [(rank, k * num_rows, (k + 1) * num_rows) for k, rank in enumerate(others)]
    own = torch.full((len(others) * num_rows, ROW_BYTES), group.rank, dtype=torch.uint8)
    out = torch.empty_like(own)

    def seconds(rows: Tensor | None) -> float:
        if rows is not None:
            rows.view_as(own).copy_(own)
        group.barrier()
        begin = time.perf_counter()
        transport.to_neighbours(own if rows is None else rows.view_as(own), pieces, pieces, out).wait()
        took = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
        assert all((out[low] == rank).all() and (out[high - 1] == rank).all() for rank, low, high in pieces)
        return float(group.all_reduce_(took, "max"))

    return seconds


def measured(group: Group, num_bytes: int, turns: int) -> dict[str, float]:
    """Medians, in milliseconds."""
    run, transport = exchange(group, num_bytes), Transport(group)
    found: dict[str, list[float]] = {"tcp": [], "copied": [], "packed there": []}
    for turn in range(turns + 2):
        with by_tcp():
            by = {"tcp": run(None)}
        by["copied"] = run(None)
        rows = transport.shared(num_bytes * (group.size - 1))
        assert rows is not None, "messages of this size share no memory"
        by["packed there"] = run(rows)
        del rows
        for name, took in by.items():
            if turn > 1:
                found[name].append(took)
    return {name: 1000 * statistics.median(took) for name, took in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="*", default=[512, 1024, 4096, 16384, 65536], help="of a message")
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--output", type=Path, default=RESULTS / "shared_memory.json", help="the JSON file")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    pyg_dist.init(backend="gloo")
    machines()
    group, rows = world_group(), []
    for kib in args.kib:
        took = measured(group, kib << 10, args.turns)
        rows.append({"KiB": kib, **{name: round(ms, 4) for name, ms in took.items()}})
        if pyg_dist.is_main():
            print(
                f"{kib:7,} KiB: by TCP {took['tcp']:7.2f} ms, copied {took['copied']:7.2f} "
                f"({took['tcp'] / took['copied']:.1f}x), packed there {took['packed there']:7.2f} "
                f"({took['tcp'] / took['packed there']:.1f}x)"
            )
    if pyg_dist.is_main():
        result = {"machine": machine.describe(), "ranks": group.size, "turns": args.turns, "ms": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
