"""Rows, edges and data in other processes of a rank: each try ends with a line, and none waits.

    process_script.py

It prints, on every rank, what each try has raised where the script waits.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch_geometric.data import Data
from torch_geometric.loader import RandomNodeLoader

import pyg_dist
from pyg_dist import DistributedData

if __name__ == "__main__":
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)
    node = torch.arange(12)
    graph = Data(x=torch.ones(12, 2), y=node % 3, edge_index=torch.stack([node, node.roll(1)]))
    data = DistributedData(graph, partition="random")
    fork, spawn = (multiprocessing.get_context(method) for method in ("fork", "spawn"))

    def loaded(loader: Any) -> list[Any]:
        """All batches."""
        return [*loader]

    def from_worker(thing: Any) -> Any:
        """What a worker sends back as it is."""
        return loaded(DataLoader([thing], batch_size=None, num_workers=1, collate_fn=lambda item: item))

    def through_queue(thing: Any) -> Any:
        """What this process sends to itself."""
        queue = torch.multiprocessing.get_context("fork").Queue()
        queue.put(thing)
        return queue.get()

    def from_pool(call: Callable[[], Any]) -> Any:
        """What a process of a pool returns."""
        with concurrent.futures.ProcessPoolExecutor(1, fork) as pool:
            return pool.submit(returned, call.__name__).result()

    def rows() -> Any:
        """A node tensor."""
        return data.x

    def total() -> Any:
        """A number of all ranks."""
        return data.x.sum().item()

    def returned(name: str) -> Any:
        """What one of these returns: found by its name in the forked process."""
        return {"rows": rows, "total": total}[name]()

    tries: dict[str, Callable[[], Any]] = {
        "RandomNodeLoader": lambda: loaded(RandomNodeLoader(data, num_parts=3, num_workers=1)),
        "rows from a worker": lambda: from_worker(data.x),
        "edges from a worker": lambda: from_worker(data.edge_index),
        "data from a worker": lambda: from_worker(data),
        "a sum in a worker": lambda: loaded(
            DataLoader([0], batch_size=None, num_workers=1, collate_fn=lambda _: total())
        ),
        "to a spawned worker": lambda: loaded(
            DataLoader([data.x], batch_size=None, num_workers=1, multiprocessing_context=spawn)
        ),
        "a queue": lambda: through_queue(data.x),
        "to a pool": lambda: concurrent.futures.ProcessPoolExecutor(1, fork).submit(len, data.x).result(),
        "from a pool": lambda: from_pool(rows),
        "a sum in a pool": lambda: from_pool(total),
    }
    for name, call in tries.items():
        before = {*multiprocessing.active_children()}
        try:
            line = f"nothing: {call()}"
        except Exception as error:
            told = [line for line in str(error).splitlines() if "num_workers=0" in line]
            line = f"{type(error).__name__}: {told[-1]}"
        if name.endswith("from a worker"):  # it ends with the error
            assert {*multiprocessing.active_children()} <= before, name
        sys.stdout.write(f"{name} | {line}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{pyg_dist.rank()} goes on: {total()}\n")
    sys.stdout.flush()
