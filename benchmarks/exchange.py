"""What each exact saving of the halo traffic brings, switched on one after another, and what overlap hides of the rest.

    torchrun --standalone --nproc-per-node 2 benchmarks/exchange.py --graph A --model sage

Three layers of width 256 (SAGE) or 128 (GCN). All variants have one partition and live in the same processes; they take
turns. An epoch is as long as its slowest rank. The least of the rounds and their median are given, and ratios of both:
other programs on the machine only add to an epoch.
``MB sent`` is the largest over the ranks, for one epoch (10^6 bytes).
Then the last variant runs under ``pyg_dist.profile()``: the time of its exchanges that nothing hides, with overlap, and
all of it, without (with the waiting for slower ranks apart).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import power_law
import torch
import torch.nn.functional as F
from epoch_models import MODELS
from tqdm import tqdm

import pyg_dist
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session.agreement import on_main
from pyg_dist.backend.session.settings import REMEMBER_MIB
from pyg_dist.conv import gcn, sage
from pyg_dist.partition import partition

RESULTS = Path(__file__).resolve().parent / "results"
PARTS = ("exchange", "wait", "aggregate", "dense")  # of a profiled epoch
STOCK_ORDER = {"sage": False, "gcn": True}  # whether stock PyG applies the linear map first


@dataclass
class Variant:
    name: str
    exchange: str
    has_cheaper_order: bool
    remembers: bool
    epoch: Callable[[], float] | None = None
    data: Any = None
    seconds: list[float] = field(default_factory=list)
    num_bytes: float = 0.0


@contextmanager
def switched(variant: Variant, model_name: str) -> Iterator[None]:
    """Switch the savings that the variant lacks off; they have no option, since they are exact."""
    module = {"sage": sage, "gcn": gcn}[model_name]
    original = module.project_first
    if not variant.has_cheaper_order:
        module.project_first = lambda *_: STOCK_ORDER[model_name]
    os.environ[REMEMBER_MIB.name] = "inf" if variant.remembers else "0"
    try:
        yield
    finally:
        module.project_first = original
        del os.environ[REMEMBER_MIB.name]


def training(data: Any, model_name: str) -> Callable[[], float]:
    torch.manual_seed(0)
    make, _, conv = MODELS[model_name]
    model = make(data.num_features, int(data.y.max()) + 1, conv)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> float:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def exposed(variant: Variant, model_name: str, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of an epoch and its parts (each the slowest rank's; the fastest epoch), by overlap."""
    assert variant.epoch is not None
    taken: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
    for _ in range(rounds):
        for overlap, found in taken.items():
            with switched(variant, model_name), pyg_dist.profile(overlap=overlap) as profiled:
                variant.epoch()
            tables = [profiled.table(rank) for rank in range(len(profiled.seconds))]
            parts = [max(sum(row[p] for row in table) for table in tables) for p in PARTS]
            found.append((max(profiled.seconds), *parts))
    return {
        "with overlap" if overlap else "without overlap": {
            name: 1000 * value for name, value in zip(("epoch", *PARTS), min(found), strict=True)
        }
        for overlap, found in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="small", help=f"{', '.join(power_law.SIZES)}, or a .npz file")
    parser.add_argument("--model", choices=MODELS, default="sage")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the partition")
    parser.add_argument("--output", type=Path, help="the JSON file (default: benchmarks/results/exchange-GRAPH-...)")
    args = parser.parse_args()

    pyg_dist.init()
    axis, graph = world_group(), power_law.load(args.graph)

    parts = on_main(lambda: partition(graph.edge_index, graph.num_nodes, axis.size, seed=args.seed)).long()
    variants = [
        Variant("post, stock order", "post", False, False),
        Variant("+ hybrid", "hybrid", False, False),
        Variant("+ cheaper order", "hybrid", True, False),
        Variant("+ remembering", "hybrid", True, True),
    ]
    for variant in variants:
        with switched(variant, args.model):
            variant.data = pyg_dist.DistributedData(graph, partition=parts, exchange=variant.exchange)
            variant.epoch = training(variant.data, args.model)
    for turn in tqdm(range(args.rounds + 2), disable=None if axis.rank == 0 else True, unit="round"):
        losses = []
        for variant in variants:
            assert variant.epoch is not None
            with switched(variant, args.model):
                axis.all_reduce_(torch.zeros(1))  # start together
                sent, start = variant.data.traffic.num_bytes, time.perf_counter()
                torch.manual_seed(turn)  # for dropout
                losses.append(variant.epoch())
                taken = [time.perf_counter() - start, variant.data.traffic.num_bytes - sent]
            slowest, variant.num_bytes = axis.all_reduce_(torch.tensor(taken, dtype=torch.float64), "max").tolist()
            if turn >= 2:  # the second epoch remembers what the first one computed
                variant.seconds.append(slowest)
        if turn == 0 and max(losses) - min(losses) > 1e-4:
            raise SystemExit(f"the variants train differently: losses {losses}")
    overlap = exposed(variants[-1], args.model, args.rounds)
    if axis.rank != 0:
        return
    base = variants[0]
    results: dict[str, dict[str, Any]] = {}
    print(f"{'':20}{'least':>12}{'ratio':>8}{'median':>12}{'ratio':>8}{'MB sent':>10}{'ratio':>8}")
    for variant in variants:
        results[variant.name] = {"seconds": variant.seconds, "bytes_sent": variant.num_bytes}
        line = f"{variant.name:20}"
        for name, of in (("least", min), ("median", statistics.median)):
            taken, speed_up = of(variant.seconds), of(base.seconds) / of(variant.seconds)
            results[variant.name] |= {name: taken, f"{name}_speed_up": round(speed_up, 3)}
            line += f"{1000 * taken:>9.0f} ms{speed_up:>8.2f}"
        less = base.num_bytes / max(variant.num_bytes, 1)
        print(f"{line}{variant.num_bytes / 1e6:>10.1f}{less:>8.2f}")
    for name, parts in overlap.items():
        print(f"{name:20}" + ", ".join(f"{part} {value:.1f} ms" for part, value in parts.items()))
    output = args.output or RESULTS / f"exchange-{Path(args.graph).stem}-{args.model}-{axis.size}ranks.json"
    words = [Path(word).name if os.sep in word else word for word in sys.argv[1:]]
    content = {
        "command": " ".join([f"torchrun --nproc-per-node {axis.size} benchmarks/exchange.py", *words]),
        "machine": machine.describe(),
        "threads": torch.get_num_threads(),
        "environment": {name: os.environ[name] for name in ("GLIBC_TUNABLES",) if name in os.environ},
        "rows": variants[-1].data.plan.rows,
        "variants": results,
        "overlap_ms": overlap,
    }
    output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
