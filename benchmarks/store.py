"""Writing a store of an R-MAT graph and opening it: seconds by edge, peaks of memory, beside sorting in memory.

    python benchmarks/store.py --edges 10000000 --folder /scratch --out benchmarks/results/store.json

Each measurement is a process of one thread; beside its seconds stand those of the processor that it had, which others
on the machine change less. Figures that --out has already are not measured again: a long study may be interrupted, and
called again with the same --folder, which takes about 200 bytes an edge; --clean empties it.

The baseline is a stable sort of the same edges by target with NumPy, in memory, with sources taken along. Peaks are of
resident memory, mapped pages included, above what was resident after the imports. What a rank holds is the bytes of its
tensors. Of a single process's load it is also told what the peak has of pages with the code of libraries, which the
system maps when a function is first called: some 11 MiB, however small the graph.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import describe, earlier_results
from resident_memory import current_mib, forget_peak, mapped_mib, peak_mib
from torch import Tensor

PARTS = 16
EDGES_BY_NODE = 20
"""About; the number of nodes is a power of two."""
FEATURES = 128
COMPARED = ("seconds", "processor_seconds", "peak_mib", "held_mib")
MODELS = ("random", "stream", "grid")
"""How the parts are found; or tiles, for a mesh of four ranks."""


class Stopwatch:
    """Seconds since it was made, and those of the processor that this process had."""

    def __init__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        return {
            "seconds": time.perf_counter() - self._start[0],
            "processor_seconds": time.process_time() - self._start[1],
        }


def scale_of(edges: int) -> int:
    """The logarithm of the number of nodes."""
    return round(math.log2(edges / EDGES_BY_NODE))


def make(folder: Path, edges: int) -> dict[str, Any]:
    """The same edges as ``.npy`` and as text."""
    from pyg_dist.store.sources import open_source

    chunks = list(open_source(f"rmat:scale={scale_of(edges)},edges={edges}").chunks(1 << 20))
    ends = np.stack([np.concatenate([c.source for c in chunks]), np.concatenate([c.target for c in chunks])])
    np.save(folder / "edges.npy", ends.astype(np.int32))
    with (folder / "edges.txt").open("w") as file:
        for low in range(0, edges, 1 << 20):
            pairs = zip(*ends[:, low : low + (1 << 20)].tolist(), strict=True)
            file.write("\n".join(map("%d %d".__mod__, pairs)) + "\n")
    return {"text_bytes": (folder / "edges.txt").stat().st_size}


def sort(folder: Path, edges: int) -> dict[str, Any]:
    """The baseline."""
    source, target = np.load(folder / "edges.npy").astype(np.int64)
    watch = Stopwatch()
    order = np.argsort(target, kind="stable")
    taken = source[order], target[order]
    return watch.read() | {"edges": len(taken[0])}


def convert(folder: Path, edges: int, graph: str, model: str, memory: str) -> dict[str, Any]:
    """The command, in this process."""
    from pyg_dist.cli import main

    wanted = f"rmat:scale={scale_of(edges)},edges={edges},features={FEATURES}"
    name, store = (wanted, model) if graph == "rmat" else (str(folder / graph), f"{graph}.store")
    is_grid = model == "grid"
    kind = ["--parts", "4", "--layout", "grid"] if is_grid else ["--parts", str(PARTS), "--model", model]
    before, watch = current_mib(), Stopwatch()
    forget_peak()
    with (folder / "said").open("w") as file:
        stdout, sys.stdout = sys.stdout, file
        status = main(["partition", name, str(folder / store), *kind, "--memory", memory, "--force", "--json"])
        sys.stdout = stdout
    taken = watch.read()
    if status:
        raise SystemExit(status)
    if graph != "rmat":
        shutil.rmtree(folder / store)
    return taken | {
        "microseconds_per_edge": taken["seconds"] / edges * 1e6,
        "processor_microseconds_per_edge": taken["processor_seconds"] / edges * 1e6,
        "peak_above_imports_mib": peak_mib() - before,
    }


def held_mib(thing: Any, seen: set[int]) -> float:
    """The bytes of all tensors in a value."""
    if isinstance(thing, Tensor):
        storage = thing.untyped_storage()
        is_new = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() / 2**20 if is_new else 0.0
    if is_dataclass(thing):
        return sum(held_mib(getattr(thing, field.name), seen) for field in fields(thing))
    values = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()
    return sum(held_mib(value, seen) for value in values)


def load(folder: Path, edges: int, model: str, ranks: int) -> dict[str, Any]:
    """What the first of so many ranks reads of a store, alone: its share of the graph, and the rows of its nodes."""
    from pyg_dist.data.stored_graph import StoreOnRanks, rank_of_part, rows_of
    from pyg_dist.store.halo_reader import HaloStore
    from pyg_dist.store.manifest import Manifest

    before, code, watch = current_mib(), mapped_mib(), Stopwatch()
    forget_peak()
    store = HaloStore(folder / model, Manifest.load(folder / model))
    ranks_of = rank_of_part(store.path, [store], ranks)
    share = StoreOnRanks(store, ranks_of, "hybrid").share(0)
    parts = store.parts_of(0, ranks_of)
    rows = {name: rows_of(store, "node", name, parts, share.node_id) for name in store.manifest.node_attributes}
    store.close()
    taken, peak, held = watch.read(), peak_mib() - before, held_mib([share, rows], set())
    more = {"first_used_code_mib": mapped_mib() - code}  # the store's own pages were let go
    return taken | {"peak_mib": peak, "held_mib": held, "peak_over_held": peak / held} | more


def open_as_rank(folder: Path, edges: int, model: str, ranks: int) -> dict[str, Any]:
    """``DistributedData.open`` on one of several ranks."""
    import pyg_dist
    from pyg_dist import DistributedData

    pyg_dist.init()
    before, watch = current_mib(), Stopwatch()
    forget_peak()
    data: Any = DistributedData.open(folder / model)
    taken, peak = watch.read(), peak_mib() - before
    local = [data[name].to_local() for name in ("x", "y", "train_mask", "val_mask", "test_mask")]
    graph = data.graph
    held = held_mib([graph.edge_index if model == "grid" else graph.share, local], set())
    return taken | {"peak_mib": peak, "held_mib": held, "peak_over_held": peak / held}


def digests(folder: Path, edges: int, model: str) -> dict[str, Any]:
    """The time to read and digest every file, from the page cache."""
    from pyg_dist.store.manifest import Manifest
    from pyg_dist.store.reader import check_shard

    watch, manifest = Stopwatch(), Manifest.load(folder / model)
    for shard in manifest.shards.values():
        check_shard(folder / model, shard)
    size = sum(shard.bytes for shard in manifest.shards.values())
    return watch.read() | {"bytes": size}


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "make": make, "sort": sort, "convert": convert, "load": load, "open": open_as_rank, "digests": digests,
}  # fmt: skip


def measured(step: str, folder: Path, edges: int, **options: Any) -> dict[str, Any]:
    """A step in a process of its own; of ``open``, in as many as there are ranks."""
    command = [sys.executable, __file__, "--step", step, "--folder", str(folder), "--edges", str(edges)]
    command += ["--options", json.dumps(options)]
    env, ranks = os.environ | {"OMP_NUM_THREADS": "1"}, options["ranks"] if step == "open" else 1
    if step == "open":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(ranks)}
            env |= {"LOCAL_WORLD_SIZE": str(ranks)}
    running = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=env | ({"RANK": str(r), "LOCAL_RANK": str(r)} if step == "open" else {}),
        )
        for r in range(ranks)
    ]
    try:
        said = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    if any(process.returncode for process in running):
        raise SystemExit(f"{step} {options} failed")
    found: list[dict[str, Any]] = [json.loads(text.splitlines()[-1]) for text in said]
    return found[0] if ranks == 1 else {name: max(one[name] for one in found) for name in found[0]}


def plan(memory: str, models: list[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """The measurements in their order, by name."""
    steps: dict[str, tuple[str, dict[str, Any]]] = {"make": ("make", {}), "sort": ("sort", {})}
    for graph in ("edges.npy", "edges.txt"):
        steps[graph] = ("convert", {"graph": graph, "model": "random", "memory": memory})
    for model in models:
        steps[f"rmat, {model}"] = ("convert", {"graph": "rmat", "model": model, "memory": memory})
        for ranks in () if model == "grid" else (1, PARTS):
            steps[f"load {model}, 1 of {ranks}"] = ("load", {"model": model, "ranks": ranks})
        steps[f"digests {model}"] = ("digests", {"model": model})
        for ranks in (1, 2, 4) if model == "grid" else (2,):
            steps[f"open {model}, {ranks} ranks"] = ("open", {"model": model, "ranks": ranks})
    return steps


def add_ratios(found: dict[str, Any]) -> None:
    """What follows from the figures that are there."""
    for graph in ("edges.npy", "edges.txt"):
        if graph in found and "sort" in found:
            for kind, name in (("seconds", "over_sort"), ("processor_seconds", "processor_over_sort")):
                found[graph][name] = found[graph][kind] / found["sort"][kind]
    whole, one = (found.get(f"open grid, {ranks} ranks") for ranks in (1, 4))
    if whole and one:
        one["of_the_whole"] = {name: one[name] / whole[name] for name in COMPARED}
    for model in MODELS:
        whole, one = (found.get(f"load {model}, 1 of {ranks}") for ranks in (1, PARTS))
        if whole and one:
            one["of_the_whole"] = {name: one[name] / whole[name] for name in COMPARED}
        if whole and f"digests {model}" in found:
            one = found[f"digests {model}"]
            one["of_the_load"] = one["processor_seconds"] / whole["processor_seconds"]


def study(edges: int, memory: str, models: list[str], folder: Path, out: Path) -> None:
    """All figures of one size that ``out`` lacks."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (step, options) in plan(memory, models).items():
        whole = earlier_results(out) or {"results": {}}
        found = whole["results"].setdefault(str(edges), {"scale": scale_of(edges)})
        if name not in found:
            found[name] = measured(step, folder, edges, **options)
            add_ratios(found)
            whole["machine"] = describe()
            out.write_text(json.dumps(whole, indent=1) + "\n")
            print(edges, name, found[name], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="of the parts, or tiles")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "store.json")
    parser.add_argument("--clean", action="store_true", help="remove the graphs and stores of this size in the folder")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        torch.set_num_threads(1)
        print(json.dumps(STEPS[args.step](args.folder, args.edges, **args.options)))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("interrupted: call again to go on"))  # ends the processes, too
    folder = args.folder / f"store-{args.edges}"
    if args.clean:
        shutil.rmtree(folder)
    else:
        study(args.edges, args.memory, args.models, folder, args.out)


if __name__ == "__main__":
    main()
