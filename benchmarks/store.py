"""Writing a store of an R-MAT graph and opening it: seconds by edge, peaks of memory, beside sorting in memory.

    python benchmarks/store.py --edges 10000000 100000000 --out benchmarks/results/store.json

Each measurement is a process of its own. The baseline is a stable sort of the same edges by target with NumPy, in
memory, with sources and ids taken along. Peaks are of resident memory, mapped pages included; the imports' share, which
is measured beside them, is taken off.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import describe

PARTS = 16


def resident() -> int:
    """Bytes that are resident."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


class Watch:
    """The largest resident memory while it runs, sampled."""

    def __enter__(self) -> Watch:
        self.most, self._ends = resident(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._ends.wait(0.002):
            self.most = max(self.most, resident())

    def __exit__(self, *error: object) -> None:
        self._ends.set()
        self._thread.join()
        self.most = max(self.most, resident())


def make(folder: Path, edges: int, scale: int) -> None:
    """The same edges as ``.npy`` and as text."""
    from pyg_dist.store.sources import open_source

    chunks = list(open_source(f"rmat:scale={scale},edges={edges}").chunks(1 << 20))
    ends = np.stack([np.concatenate([c.source for c in chunks]), np.concatenate([c.target for c in chunks])])
    np.save(folder / "edges.npy", ends.astype(np.int32))
    with (folder / "edges.txt").open("w") as file:
        for low in range(0, edges, 1 << 20):
            file.write(
                "\n".join(map("%d %d".__mod__, zip(*ends[:, low : low + (1 << 20)].tolist(), strict=True))) + "\n"
            )


def sort(folder: Path, **_: Any) -> dict[str, Any]:
    """The baseline."""
    source, target = np.load(folder / "edges.npy").astype(np.int64)
    start = time.perf_counter()
    order = np.argsort(target, kind="stable")
    taken = source[order], target[order]
    return {"seconds": time.perf_counter() - start, "edges": len(taken[0])}


def convert(folder: Path, graph: str, model: str, memory: str, **_: Any) -> dict[str, Any]:
    """The command, in this process."""
    from pyg_dist.cli import main

    before, start = resident(), time.perf_counter()
    graph = graph if graph.startswith("rmat:") else str(folder / graph)
    with Watch() as watch:
        status = main(["partition", graph, str(folder / "store"), "--parts", str(PARTS), "--model", model,
                       "--memory", memory, "--force", "--json"])  # fmt: skip
    if status:
        raise SystemExit(status)
    return {"seconds": time.perf_counter() - start, "peak_above_imports": watch.most - before}


def load(folder: Path, ranks: int, rank: int, **_: Any) -> dict[str, Any]:
    """What one of so many ranks does to open the store, alone."""
    import torch

    from pyg_dist.data.stored_halo import node_rows, rank_of_part, stored_share
    from pyg_dist.store.halo_reader import HaloStore
    from pyg_dist.store.manifest import Manifest

    torch.set_num_threads(1)
    before, start = resident(), time.perf_counter()
    with Watch() as watch:
        store = HaloStore(folder / "store", Manifest.load(folder / "store"))
        ranks_of = rank_of_part(store, ranks)
        share = stored_share(store, rank, ranks_of, "hybrid")
        parts = store.parts_of(rank, ranks_of)
        rows = {name: node_rows(store, name, parts, share) for name in store.manifest.node_attributes}
        store.close()
    seconds = time.perf_counter() - start
    del store
    held = resident() - before
    assert rows is not None
    return {"seconds": seconds, "peak": watch.most - before, "held": held, "ratio": (watch.most - before) / held}


def digests(folder: Path, **_: Any) -> dict[str, Any]:
    """The time to read and digest every file, from the page cache."""
    from pyg_dist.report.stored_plan import check_store

    start = time.perf_counter()
    manifest = check_store(folder / "store")
    size = sum(shard.num_bytes for shard in manifest.shards.values())
    return {"seconds": time.perf_counter() - start, "bytes": size}


STEPS = {"sort": sort, "convert": convert, "load": load, "digests": digests}


def measured(step: str, folder: Path, **options: Any) -> dict[str, Any]:
    """A step in a process of its own."""
    command = [sys.executable, __file__, "--step", step, "--folder", str(folder), "--options", json.dumps(options)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    print(step, options, found, flush=True)
    return found


def study(edges: int, scale: int, memory: str, folder: Path) -> dict[str, Any]:
    """All figures of one size."""
    make(folder, edges, scale)
    found: dict[str, Any] = {"edges": edges, "scale": scale, "sort": measured("sort", folder)}
    for graph in ("edges.npy", "edges.txt"):
        found[graph] = measured("convert", folder, graph=graph, model="random", memory=memory)
        found[graph]["over_sort"] = found[graph]["seconds"] / found["sort"]["seconds"]
    rmat = f"rmat:scale={scale},edges={edges},features=128"
    for model in ("stream", "random"):
        found[f"rmat, {model}"] = measured("convert", folder, graph=rmat, model=model, memory=memory)
        found[f"rmat, {model}"]["seconds_per_edge"] = found[f"rmat, {model}"]["seconds"] / edges
    for ranks in (1, 2, PARTS):
        found[f"load, 1 of {ranks}"] = measured("load", folder, ranks=ranks, rank=0)
    whole, one = found["load, 1 of 1"], found[f"load, 1 of {PARTS}"]
    found["one share of the whole"] = {k: one[k] / whole[k] for k in ("seconds", "peak")}
    found["digests"] = measured("digests", folder)
    found["digests"]["of_the_load"] = found["digests"]["seconds"] / whole["seconds"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--scale", type=int, default=22)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--options", type=json.loads, default={}, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(json.dumps(STEPS[args.step](args.folder, **args.options)))
        return
    results = []
    for edges in args.edges:
        folder = Path(tempfile.mkdtemp(prefix="store", dir=args.folder))
        try:
            results.append(study(edges, args.scale, args.memory, folder))
        finally:
            shutil.rmtree(folder)
    if args.out:
        args.out.write_text(json.dumps({"machine": describe(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
