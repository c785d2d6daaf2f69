"""Stores for tests: a ``Data`` written to disk, and what a rank holds, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from bits import have_same_bits
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_dist import save_graph
from pyg_dist.cli.conversion import StoreOptions, write_halo_store
from pyg_dist.store.sources import open_source

T = TypeVar("T")


def planned_together(num_ranks: int, plan: Callable[[int, Callable[[Tensor, Sequence[int]], Tensor]], T]) -> list[T]:
    """What ``plan(rank, send)`` is on each rank, in threads that send to one another once."""
    tables: list[tuple[Tensor, ...]] = [()] * num_ranks
    all_have_sent = threading.Barrier(num_ranks, timeout=60)

    def together(rank: int) -> T:
        def send(rows: Tensor, counts: Sequence[int]) -> Tensor:
            tables[rank] = rows.split(list(counts))
            all_have_sent.wait()
            return torch.cat([pieces[rank] for pieces in tables])

        return plan(rank, send)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(together, range(num_ranks)))


def skewed_graph(num_nodes: int = 200, num_edges: int = 1500, seed: int = 0) -> Data:
    """Loops, duplicates, isolated nodes, skewed degrees; attributes of many types."""
    rng = torch.Generator().manual_seed(seed)
    ends = (torch.rand(2, num_edges, generator=rng) ** 2 * (num_nodes - 5)).long()
    mask = torch.rand(num_nodes, 3, generator=rng) < 0.5
    return Data(
        x=torch.randn(num_nodes, 7, generator=rng),
        y=torch.randint(4, (num_nodes,), generator=rng),
        edge_index=ends,
        edge_weight=torch.rand(num_edges, generator=rng),
        edge_attr=torch.randn(num_edges, 2, generator=rng).to(torch.bfloat16),
        train_mask=mask[:, 0],
        splits=mask,
        half=torch.randn(num_nodes, 2, generator=rng).half(),
        num_nodes=num_nodes,
        scale=torch.tensor(3.0),
        table=torch.arange(5),
        name="skewed",
    )


def typed_graph() -> HeteroData:
    """A type with fewer nodes than parts, one without features, one without edges; weights, NaN, an empty relation."""
    rng, data = torch.Generator().manual_seed(0), HeteroData()
    for kind, size in {"paper": 40, "author": 25, "venue": 3, "lonely": 6}.items():
        data[kind].y = torch.randint(0, 4, (size,), generator=rng)
        data[kind].train_mask = torch.rand(size, generator=rng) < 0.5 * (kind != "author")
        data[kind].x = torch.randn(size, 5, generator=rng, dtype=torch.float64)
    del data["author"].x
    data["author"].num_nodes = 25
    data["paper"].half = torch.randn(40, 2, generator=rng).bfloat16()
    data["paper"].half[3] = torch.nan
    data["venue"].index_of, data["venue"].note = torch.arange(2), "three"
    data.scale, data.name, data.of_papers = torch.tensor(2.5), "typed", torch.arange(40)
    for relation, number in {
        ("author", "writes", "paper"): 90, ("paper", "cites", "paper"): 120, ("venue", "has", "paper"): 50,
        ("paper", "in", "venue"): 50, ("author", "knows", "author"): 0,
    }.items():  # fmt: skip
        ends = [torch.randint(0, int(data[kind].num_nodes), (number,), generator=rng) for kind in relation[::2]]
        data[relation].edge_index = torch.stack(ends)
        data[relation].edge_weight = torch.rand(number, generator=rng, dtype=torch.float64)
    return data


def write(data: Data, folder: Path, parts: Tensor, num_parts: int, **options: Any) -> Path:
    """The halo store of a graph with given parts."""
    folder.mkdir(parents=True, exist_ok=True)
    save_graph(data, folder / "graph.safetensors")
    np.save(folder / "parts.npy", parts.numpy())
    options = {"parts": num_parts, "method": str(folder / "parts.npy")} | options
    write_halo_store(open_source(str(folder / "graph.safetensors")), folder / "store", StoreOptions(**options))
    return folder / "store"


def content(thing: Any, name: str = "", found: dict[str, Any] | None = None) -> dict[str, Any]:
    """Everything in a dataclass, tensors by name, for comparison to the bit."""
    found = {} if found is None else found
    if is_dataclass(thing):
        for field in fields(thing):
            content(getattr(thing, field.name), f"{name}.{field.name}", found)
    else:
        found[name] = thing
    return found


def differences(one: Any, other: Any) -> list[str]:
    """The names of what differs between two dataclasses."""
    a, b = content(one), content(other)
    assert a.keys() == b.keys()
    return [name for name in a if not same(a[name], b[name])]


def same(a: Any, b: Any) -> bool:
    """Equal, in type, shape and bits."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and have_same_bits(a, b)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
