"""One full-batch training epoch, pyg_dist against stock PyG on the same two cores: time and peak memory.

    python benchmarks/epoch.py                    # a few minutes
    python benchmarks/epoch.py --graph A          # 170,000 nodes, 2.3 million edges; within 12 GiB
    python benchmarks/epoch.py --graph C --only adj_t "1 rank" "dense products"    # no room for a message per edge

An epoch is forward, loss, backward and Adam's step. Stock PyG runs in one process with two threads, on ``edge_index``
and on ``adj_t`` (a torch CSR tensor); pyg_dist on one rank with two threads and on two ranks with one thread each. GCN
runs with ``cached=True`` everywhere, so that stock PyG does not compute its norm anew in each epoch. pyg_dist runs the
stock script after the swap; with norm, ReLU and dropout in one module; and with nothing remembered from epoch to epoch.
"dense products" is the floor: the products of the linear maps and of their gradients alone, into memory that is there.
Turns that other programs have disturbed are repeated. The table goes to the terminal, all measurements to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import gpu_epoch
import gpu_measure
import machine
import power_law
import torch
import torch.nn.functional as F
from epoch_models import MODELS
from gpu_measure import Log, Place
from measure import Epoch, Measurement, Schedule, Variant, interleaved
from torch_geometric.transforms import ToSparseTensor
from tqdm import tqdm

from pyg_dist import DistributedData
from pyg_dist.backend.session.settings import REMEMBER_MIB

BASELINE = "stock PyG, edge_index"
FLOOR = "dense products"
NUM_CORES = 2
RESULTS = Path(__file__).resolve().parent / "results"


def training_epoch(graph: str, model_name: str, form: str) -> Epoch:
    """Return a function that trains for one epoch.

    Args:
        graph: name or path, see :func:`power_law.load`.
        model_name: key of ``MODELS``.
        form: "edge_index" or "adj_t" for stock PyG; "swapped", the stock script; "fused", with ``NormReLUDropout``;
            "forgetful", where nothing is remembered from epoch to epoch.
    """
    is_stock = form in ("edge_index", "adj_t")
    os.environ[REMEMBER_MIB.name] = "0" if form == "forgetful" else "inf"
    torch.manual_seed(0)
    data = power_law.load(graph)
    num_classes = int(data.y.max()) + 1
    if form == "adj_t":
        data = ToSparseTensor(layout=torch.sparse_csr)(data)
    elif not is_stock:
        data = DistributedData(data)
    make, stock_conv, distributed_conv = MODELS[model_name]
    model = make(data.num_features, num_classes, stock_conv if is_stock else distributed_conv, form == "fused")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    edges = data.adj_t if form == "adj_t" else data.edge_index

    def epoch() -> float:
        optimizer.zero_grad()
        out = model(data.x, edges)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def dense_products(graph: str, model_name: str) -> Epoch:
    """Return a function that multiplies as an epoch does: forward, and by weights and inputs backward."""
    data = power_law.load(graph)
    hidden, num_maps = {"sage": (256, 2), "gcn": (128, 1)}[model_name]
    widths = (data.num_features, hidden, hidden, int(data.y.max()) + 1)
    rows = [torch.randn(data.num_nodes, width) for width in widths]
    weights = [torch.randn(a, b) for a, b in pairwise(widths)]
    by_weights = [torch.empty_like(weight) for weight in weights]

    def epoch() -> None:
        for layer, (weight, by_weight) in enumerate(zip(weights, by_weights, strict=True)):
            for _ in range(num_maps):
                torch.mm(rows[layer], weight, out=rows[layer + 1])
                torch.mm(rows[layer].t(), rows[layer + 1], out=by_weight)
                if layer:  # the features want no gradient
                    torch.mm(rows[layer + 1], weight.t(), out=rows[layer])

    return epoch


def variants(graph: str, model_name: str, only: list[str]) -> list[Variant]:
    """The ways to train that are compared, and the floor, on the same cores. ``only``: those whose names end so."""

    def variant(name: str, form: str, num_ranks: int) -> Variant:
        return Variant(name, training_epoch, (graph, model_name, form), num_ranks, num_threads=NUM_CORES // num_ranks)

    known = [
        variant(BASELINE, "edge_index", 1),
        variant("stock PyG, adj_t", "adj_t", 1),
        variant("pyg_dist, 1 rank", "swapped", 1),
        variant("pyg_dist, 1 rank, fused modules", "fused", 1),
        variant("pyg_dist, 1 rank, nothing remembered", "forgetful", 1),
        variant("pyg_dist, 2 ranks", "swapped", 2),
        Variant(FLOOR, dense_products, (graph, model_name), num_threads=NUM_CORES),
    ]
    return [v for v in known if not only or v.name.endswith(tuple(only))]


def ratios(measured: dict[str, Measurement]) -> dict[str, dict[str, float]]:
    """Return each variant's speed-up and memory against the first one, stock PyG's ``edge_index`` path by default.

    Times are medians; memory is the peak of the epochs above the imports, of the largest rank.
    """
    base = next(iter(measured.values()))
    return {
        name: {
            "speed_up": round(base.median / m.median, 3),
            "memory": round(max(m.used_mib) / max(base.used_mib), 3),
        }
        for name, m in measured.items()
    }


def table(results: dict[str, dict[str, Measurement]]) -> str:
    """Return the results for people."""
    lines = [f"{'':43}{'epoch':>10}{'(min .. max)':>20}{'speed-up':>10}{'MiB by rank':>16}{'memory':>9}{'foreign':>9}"]
    for model_name, measured in results.items():
        against_stock = ratios(measured)
        for name, m in measured.items():
            spread = f"({1000 * min(m.seconds):.1f} .. {1000 * max(m.seconds):.1f})"
            used = " + ".join(f"{mib:.0f}" for mib in m.used_mib)
            ratio = against_stock[name]
            lines.append(
                f"{model_name + ': ' + name:43}{1000 * m.median:>7.1f} ms{spread:>20}{ratio['speed_up']:>9.2f}x"
                f"{used:>16}{ratio['memory']:>8.2f}x{max(m.foreign):>9.0%}"
            )
    return "\n".join(lines)


def write(
    output: Path,
    description: dict[str, Any],
    schedule: Schedule,
    results: dict[str, dict[str, Measurement]],
    **more: Any,
) -> None:
    """Write a JSON file: the command, the machine, ratios and all that was measured."""
    content = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "machine": description,
        "schedule": asdict(schedule),
        **more,
        "ratios": {model: ratios(measured) for model, measured in results.items()},
        "results": {model: {name: asdict(m) for name, m in by_name.items()} for model, by_name in results.items()},
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: {output}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="small", help=f"{', '.join(power_law.SIZES)}, or a .npz file")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["sage", "gcn"])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help="variants whose names end with one of these"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant that count")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in a turn")
    parser.add_argument("--warmup", type=int, default=1, help="turns that do not count")
    parser.add_argument(
        "--max-foreign", type=float, default=0.05, help="repeat a turn if others had more of the machine"
    )
    parser.add_argument("--retakes", type=int, default=10, help="repeat a turn at most so often")
    parser.add_argument("--output", type=Path, help="the JSON file (default: benchmarks/results/epoch-GRAPH.json)")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: gpu_epoch.py, on its own graphs"
    )
    args = parser.parse_args()
    if args.device == "cuda":
        gpu_epoch.run(Place.of("cuda"), Log(args.output or gpu_measure.RESULTS, "epoch"))
        return

    if hasattr(os, "sched_setaffinity"):  # all variants on the same cores; processes inherit this
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    description = machine.describe()
    schedule = Schedule(args.rounds, args.epochs, args.warmup, args.max_foreign, args.retakes)
    results = {}
    for model_name in args.models:
        bar = lambda turns, name=model_name: tqdm(turns, desc=name, unit="turn", disable=None)  # noqa: E731
        results[model_name] = interleaved(variants(args.graph, model_name, args.only), schedule, bar)
    print(table(results))
    shares = [share for measured in results.values() for m in measured.values() for share in m.foreign]
    num_disturbed = sum(share > args.max_foreign for share in shares)
    if num_disturbed:
        print(f"others disturbed {num_disturbed} of {len(shares)} turns: repeat this on a quiet machine")

    output = args.output or RESULTS / f"epoch-{Path(args.graph).stem}.json"
    write(output, description, schedule, results)


if __name__ == "__main__":
    main()
