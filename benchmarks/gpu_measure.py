"""What the benchmarks on a GPU share: time by the device's events, graphs drawn there, and a file of results."""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RESULTS = Path(__file__).resolve().parent / "results" / "gpu.json"


@dataclass(frozen=True)
class Place:
    """Where to measure: a GPU, or in a trial the CPU, small and with one sample."""

    device: torch.device
    is_trial: bool

    @staticmethod
    def of(device: str) -> Place:
        return Place(torch.device(device), device == "cpu")

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any], target: float = 0.06, most: int = 30, is_queued: bool = True) -> float:
        """The median time of a call, by the device's events, after two calls that do not count.

        Short calls come several to a sample. Where ``is_queued``, they are launched while the device is kept busy, so
        that they run without the gaps of a host that launches more slowly than the device works: for single ops, ours
        and others' alike. Otherwise these gaps count, as they do for who trains. Inputs that fit a cache stay there.
        """
        run()
        self.finish()
        start = time.perf_counter()
        run()
        launched = time.perf_counter() - start
        self.finish()
        once = max(time.perf_counter() - start, 1e-6)
        if self.is_trial:
            return once
        calls = max(1, min(_MOST_CALLS, int(_SAMPLE_SECONDS / once)))
        taken = []
        for _ in range(max(5, min(most, int(target / once)))):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if is_queued:
                torch.cuda._sleep(int((1.5 * launched * calls + 2e-5) * _CYCLES_A_SECOND))
            begin.record()
            for _ in range(calls):
                run()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1000 / calls)
        return statistics.median(taken)

    def peak_mib(self, run: Callable[[], Any]) -> float:
        """The largest memory of torch's while ``run`` runs; 0 in a trial."""
        self.clear()
        if self.is_trial:
            run()
            return 0.0
        torch.cuda.reset_peak_memory_stats()
        run()
        self.finish()
        return torch.cuda.max_memory_allocated() / 2**20

    def clear(self) -> None:
        """Let go of the memory of what is gone, cycles included."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


# Of a sample of short calls; and how many of them at most, since a stream takes some 1,000 launches before it blocks.
_SAMPLE_SECONDS = 2e-3
_MOST_CALLS = 20
_CYCLES_A_SECOND = 2e9  # an H100's clock at its fastest is 1.98 GHz


@dataclass(frozen=True)
class Size:
    """Of a graph: nodes, edges in both directions, columns and classes of the set that it is like."""

    num_nodes: int
    num_edges: int
    num_features: int
    num_classes: int


SIZES = {
    "arxiv-like": Size(169_343, 2_315_598, 128, 40),
    "reddit-like": Size(232_965, 114_615_892, 602, 41),
    "products-like": Size(2_449_029, 123_718_280, 100, 47),
}
TRIAL_SIZES = {
    "arxiv-like": Size(400, 3_000, 16, 5),
    "reddit-like": Size(100, 4_000, 20, 4),
    "products-like": Size(600, 5_000, 12, 6),
}
EXPONENT = 0.6
"""P(node of rank r) ~ r^-0.6 for each end of an edge, as in ``power_law.py``."""


def sizes(place: Place) -> dict[str, Size]:
    """Of the graphs, by name."""
    return TRIAL_SIZES if place.is_trial else SIZES


@dataclass(frozen=True)
class Drawn:
    """A symmetric graph on the device, each link there in both directions: its rows' neighbours, ascending."""

    size: Size
    rowptr: Tensor
    col: Tensor

    @property
    def num_edges(self) -> int:
        return self.col.numel()

    def edge_index(self) -> Tensor:
        """int64 ``[2, E]``, sorted by target."""
        rows = torch.arange(self.size.num_nodes, device=self.col.device)
        target = torch.repeat_interleave(rows, self.rowptr.diff(), output_size=self.num_edges)
        return torch.stack([self.col.long(), target])


def draw(size: Size, place: Place, seed: int = 0) -> Drawn:
    """The graph of a size, drawn on the device; some edges fewer, where a link was drawn twice."""
    generator = torch.Generator(place.device).manual_seed(seed)
    number = torch.randperm(size.num_nodes, generator=generator, device=place.device)

    def ends() -> Tensor:
        u = torch.rand(size.num_edges // 2, generator=generator, device=place.device, dtype=torch.float64)
        rank = (u ** (1 / (1 - EXPONENT)) * size.num_nodes).long().clamp_(max=size.num_nodes - 1)
        return number[rank]

    a, b = ends(), ends()
    chosen = a != b
    a, b = a[chosen], b[chosen]
    key = torch.unique(torch.cat([a * size.num_nodes + b, b * size.num_nodes + a]))  # ascending: by row, then column
    row, col = key // size.num_nodes, (key % size.num_nodes).int()
    rowptr = torch.searchsorted(row, torch.arange(size.num_nodes + 1, device=place.device))
    return Drawn(size, rowptr, col)


class Log:
    """Results by part in one file, written anew with each that comes, by one process at a time.

    Args:
        path: of the file.
        part: whose results these are.
        is_quiet: whether not to print them, too.
    """

    def __init__(self, path: Path, part: str, is_quiet: bool = False) -> None:
        self._path, self._part, self._is_quiet = path, part, is_quiet

    def add(self, name: str, value: Any) -> None:
        """Keep a result; what there was of that name goes."""
        content = read(self._path)
        content.setdefault(self._part, {})[name] = value
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n")
        partial.replace(self._path)
        if not self._is_quiet:
            print(f"{self._part}: {name}: {json.dumps(value)[:300]}", flush=True)

    def attempt(self, name: str, run: Callable[[], Any]) -> Any:
        """Keep what ``run`` returns, or its error, of whatever class: one variant that fails ends no other."""
        try:
            value = run()
        except Exception as error:
            value = {"error": in_a_line(error)}
        if isinstance(value, dict) and "error" in value:  # and nothing holds the frames that held its tensors
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        self.add(name, value)
        return value


def in_a_line(error: BaseException) -> str:
    """The class of an error, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def read(path: Path) -> dict[str, Any]:
    """The file's content; nothing where there is no file."""
    return json.loads(path.read_text()) if path.exists() else {}


def geometric_mean(values: list[float]) -> float:
    """Of ratios."""
    return statistics.geometric_mean(values) if values else float("nan")
