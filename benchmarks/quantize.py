"""Quantized messages: the kernels against a copy and against torch, exchanges, and an epoch; quiet machine wanted.

    python benchmarks/quantize.py --kernels --exchange --epoch        # five minutes on two cores

Kernels run on one thread, over 100,000 rows: each sample is the CPU time of one call, and the least of ``--rounds``
counts, since others can only add to it. *Fraction*: time of ``y.copy_(x)`` over the same float32 rows by the kernel's
time. *Ratio*: time of the same formula in torch operations by the kernel's time. Exchanges are forward and backward of
one aggregation over gloo on loopback, by the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import machine
import power_law
import torch
import torch.nn.functional as F
from measure import Schedule, Variant, interleaved
from torch import Tensor

from pyg_dist import DistributedData
from pyg_dist.backend import ops
from pyg_dist.backend.ops import library
from pyg_dist.backend.ops.quantize import packed_row_bytes
from pyg_dist.conv import DistributedSAGEConv
from pyg_dist.graph.protocol import Norm

RESULTS = Path(__file__).resolve().parent / "results" / "quantize.json"
NUM_ROWS, WIDTHS, BITS = 100_000, (64, 128, 256, 602), (2, 4, 8)


def least(call: Callable[[], Any], rounds: int) -> float:
    """CPU seconds of this thread."""
    times = []
    for _ in range(rounds + 1):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return min(times[1:])


def by_torch(x: Tensor, bits: int, stochastic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize and pack with torch operations; Z and S are not rounded."""
    levels = 2**bits - 1
    zero, high = x.aminmax(dim=1, keepdim=True)
    scale = (high - zero) / levels
    steps = (x - zero) / scale
    q = (steps + torch.rand_like(steps)).floor() if stochastic else steps.round()
    q = q.clamp(max=levels).to(torch.uint8)
    per_byte = 8 // bits
    q = F.pad(q, (0, -q.shape[1] % per_byte)).view(q.shape[0], -1, per_byte)
    return (q << (bits * torch.arange(per_byte, dtype=torch.uint8))).sum(2, dtype=torch.uint8), zero, scale


def back_by_torch(out: Tensor, coded: tuple[Tensor, Tensor, Tensor], bits: int) -> Tensor:
    """Unpack, dequantize and add with torch operations."""
    packed, zero, scale = coded
    shifts = bits * torch.arange(8 // bits, dtype=torch.uint8)
    q = (packed[:, :, None] >> shifts) & (2**bits - 1)
    return out.add_(q.flatten(1)[:, : out.shape[1]] * scale + zero)


def kernels(rounds: int) -> list[dict[str, Any]]:
    """Rows in order, one entry a row: what a post exchange packs, and the same rows added."""
    torch.set_num_threads(1)
    rowptr, col, key = torch.arange(NUM_ROWS + 1), torch.arange(NUM_ROWS, dtype=torch.int32), torch.arange(NUM_ROWS)
    lines = []
    for width in WIDTHS:
        x = torch.randn(NUM_ROWS, width)
        y = torch.zeros_like(x)
        copy = least(lambda x=x, y=y: y.copy_(x), rounds)  # type: ignore[misc]
        for bits in BITS:
            out = torch.empty(NUM_ROWS, packed_row_bytes(width, bits), dtype=torch.uint8)
            for name, keys in (("stochastic", key), ("nearest", None)):
                call = lambda: ops.quantize_csr(rowptr, col, x, bits, key=keys, seed=1, out=out)  # noqa: E731, B023
                reference = lambda: by_torch(x, bits, keys is not None)  # noqa: E731, B023
                seconds, torch_seconds = least(call, rounds), least(reference, 2)
                lines.append(_line("quantize and pack", width, bits, name, copy, seconds, torch_seconds))
            coded = by_torch(x, bits, True)
            call = lambda: ops.dequantize_csr_add(y, rowptr, col, out, bits)  # noqa: E731, B023
            reference = lambda: back_by_torch(y, coded, bits)  # noqa: E731, B023
            seconds, torch_seconds = least(call, rounds), least(reference, 2)
            lines.append(_line("unpack and add", width, bits, "", copy, seconds, torch_seconds))
    return lines


def _line(kernel: str, width: int, bits: int, rounding: str, copy: float, own: float, torch_: float) -> dict[str, Any]:
    return {
        "kernel": kernel,
        "width": width,
        "bits": bits,
        "rounding": rounding,
        "copy_ms": round(1e3 * copy, 2),
        "ms": round(1e3 * own, 2),
        "fraction_of_copy": round(copy / own, 2),
        "torch_ms": round(1e3 * torch_, 1),
        "ratio_to_torch": round(torch_ / own, 1),
    }


def make_exchange(bits: int, width: int) -> Callable[[], object]:
    """One aggregation of what needs a gradient, forward and backward, without local edges worth mentioning."""
    data = DistributedData(power_law.load("small"), partition="random", bits=bits)
    layer = torch.nn.Identity().train()
    operator = data.graph.operator(Norm.MEAN, None, torch.float32)
    x = torch.randn(data.graph.num_local, width)

    def exchange() -> None:
        halo = operator.halo.coded(data.graph.codecs(layer))
        for way in (halo, halo.transposed):
            way.add(way.send(x), torch.zeros_like(x))

    return exchange


class SAGE(torch.nn.Module):
    """Hidden 256, LayerNorm, ReLU, dropout 0.5, three layers."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        widths = (in_channels, 256, 256, num_classes)
        self.convs = torch.nn.ModuleList(DistributedSAGEConv(a, b) for a, b in pairwise(widths))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(256) for _ in range(2))

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Scores."""
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = F.dropout(norm(conv(x, edge_index)).relu(), 0.5, self.training)
        return self.convs[-1](x, edge_index)  # type: ignore[no-any-return]


def make_epoch(bits: int, graph: str) -> Callable[[], object]:
    """A training epoch; the first layer's sums are remembered."""
    torch.manual_seed(0)
    data = DistributedData(power_law.load(graph), bits=bits)
    model = SAGE(data.num_features, int(data.y.max()) + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> None:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()

    return epoch


def compared(variants: list[Variant], schedule: Schedule) -> dict[str, dict[str, Any]]:
    """Median seconds by variant, and what disturbed them."""
    measured = interleaved(variants, schedule)
    return {
        name: {"seconds": round(m.median, 5), "turns": [round(s, 5) for s in m.seconds], "foreign": m.foreign}
        for name, m in measured.items()
    }


def main() -> None:
    """Measure what is asked for and put it into the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--exchange", action="store_true")
    parser.add_argument("--epoch", action="store_true")
    parser.add_argument("--graph", default="A", help="of the epoch")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, Any] = machine.earlier_results(args.results) or {}
    found["machine"] = {**machine.describe(), "isa": library.isa()}
    if args.kernels:
        found["kernels"] = kernels(args.rounds)
        for line in found["kernels"]:
            print(line)
    schedule = Schedule(num_rounds=3, epochs_per_turn=3, num_retakes=2)
    if args.exchange:
        found["exchange"] = {}
        for num_ranks in (2, 4):
            for width in WIDTHS:
                variants = [
                    Variant(f"{bits} bits, width {width}, {num_ranks} ranks", make_exchange, (bits, width), num_ranks)
                    for bits in (32, 2)
                ]
                measured = compared(variants, schedule)
                found["exchange"] |= measured
                print({name: line["seconds"] for name, line in measured.items()}, flush=True)
    if args.epoch:
        variants = [Variant(f"{bits} bits", make_epoch, (bits, args.graph), 2) for bits in (32, 2)]
        measured = compared(variants, Schedule(num_rounds=args.rounds, epochs_per_turn=2, num_retakes=2))
        exact, coarse = (measured[v.name] for v in variants)
        saved = [1 - after / before for before, after in zip(exact["turns"], coarse["turns"], strict=True)]
        error = statistics.stdev(saved) / math.sqrt(len(saved))
        found["epoch"] = {"graph": args.graph, "ranks": 2, **measured, "saved_by_2_bits": saved}
        print(f"epoch on {args.graph}, 2 ranks: {exact['seconds']} s in fp32, {coarse['seconds']} s in int2;", end=" ")
        print(f"saved in {len(saved)} pairs of turns: {statistics.mean(saved):.1%} +- {error:.1%}")
    args.results.parent.mkdir(exist_ok=True)
    args.results.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
