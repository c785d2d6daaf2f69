"""``pyg_dist.profile()``: the time of every rank, by layer and phase."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from pyg_dist.backend import host, timing
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session import session
from pyg_dist.backend.sparse.csr import timed_forms
from pyg_dist.backend.timing import OUTSIDE, PHASES, Recorder, Span, phase
from pyg_dist.errors import OptionError
from pyg_dist.pricing.base import aligned
from pyg_dist.pricing.plot import Bars, draw, write_page

_aten = torch.ops.aten
_DENSE = {_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.linear}


class Profile:
    """The records of :func:`profile`; complete, and equal on every rank, once its block has ended.

    Attributes:
        layers: names of the layers; number 0 is everything outside of them.
        seconds: how long the block took, by rank.
        spans: the timed phases, by rank, in the order in which they ended. Times count from the start of the block.
        sent_bytes: bytes of halos and tiles that each rank has sent.
        id_bytes: bytes of ids that each rank has sent to draw mini-batches.
        hidden_seconds: seconds that the prefetching thread has worked on mini-batches, by rank. Waiting for it is the
            phase ``sampling``.
        peak_bytes: the largest memory of each process so far, by rank; 0 where the system does not say.
        product_forms: for each rank the forms of large sparse products that it has timed so far, a line each: the one
            that is taken, and the times that chose it.

    Example:
        >>> with pyg_dist.profile() as profiled:
        ...     out = model(data.x, data.edge_index)
        >>> len(profiled.seconds), [name.split(":")[0] for name in profiled.layers]
        (1, ['(outside)', '1', '2'])
    """

    def __init__(self) -> None:
        self.layers = ["(outside)"]
        self.seconds: list[float] = []
        self.spans: list[list[Span]] = []
        self.sent_bytes: list[int] = []
        self.id_bytes: list[int] = []
        self.hidden_seconds: list[float] = []
        self.peak_bytes: list[int] = []
        self.product_forms: list[list[str]] = []

    def __str__(self) -> str:
        """A summary over the ranks: ``print(profile)``; :meth:`describe` has a line per rank."""
        tables = [self.table(rank) for rank in range(len(self.seconds))]
        if not tables:
            return "a profile that has not ended"
        total = sum(self.seconds) / len(tables)
        lines = [["layer", "phase", "mean ms", "share", "min ms", "max ms"]]
        for layer in [*range(1, len(self.layers)), OUTSIDE]:
            for name in PHASES:
                found = [table[layer][name] for table in tables]
                if max(found) >= 0.0005 * total:
                    times = [f"{1000 * seconds:.1f}" for seconds in (min(found), max(found))]
                    mean = sum(found) / len(found)
                    lines.append([self.layers[layer], name, f"{1000 * mean:.1f}", f"{mean / total:.0%}", *times])
        ranks = f"{len(tables)} rank{'s' if len(tables) > 1 else ''}"
        totals = [f"{ranks}: {1000 * min(self.seconds):.1f} to {1000 * max(self.seconds):.1f} ms"]
        if any(self.hidden_seconds):
            low, high = (1000 * choose(self.hidden_seconds) for choose in (min, max))
            totals.append(f"batches made beside them {low:.1f} to {high:.1f} ms")
        counted = {"sent": self.sent_bytes, "ids": self.id_bytes, "peak memory of a process": self.peak_bytes}
        for name, values in counted.items():
            if any(values):
                totals.append(f"{name} {min(values) / 2**20:,.1f} to {max(values) / 2**20:,.1f} MiB")
        return "\n".join([*aligned(lines, left=(0, 1), elastic=0), ", ".join(totals)])

    def table(self, rank: int) -> list[dict[str, float]]:
        """Seconds by layer and phase of one rank; together they are the seconds of the block."""
        rows = [dict.fromkeys(PHASES, 0.0) for _ in self.layers]
        for span in self.spans[rank]:
            rows[span.layer][PHASES[span.phase]] += span.own
        # A layer's time is covered by its spans; outside of layers there is time that no span covers.
        rows[OUTSIDE]["other"] += self.seconds[rank] - sum(span.own for span in self.spans[rank])
        return rows

    def to_dict(self) -> dict[str, object]:
        """Plain numbers for programs, in seconds."""
        names = ("seconds", "sent_bytes", "id_bytes", "hidden_seconds", "peak_bytes", "product_forms")

        def of(rank: int) -> dict[str, object]:
            layers = dict(zip(self.layers, self.table(rank), strict=True))
            return {name: getattr(self, name)[rank] for name in names} | {"layers": layers}

        return {"ranks": [of(rank) for rank in range(len(self.seconds))]}

    def describe(self) -> str:
        """A table in milliseconds: a line per rank and layer, a column for each phase that took time."""
        tables = [self.table(rank) for rank in range(len(self.seconds))]
        shown = [p for p in PHASES if any(row[p] for table in tables for row in table)]
        lines = [["rank", "layer", *shown, "all"]]

        def add(rank: str, layer: str, row: dict[str, float]) -> None:
            lines.append([rank, layer, *(f"{1000 * row[p]:.1f}" for p in shown), f"{1000 * sum(row.values()):.1f}"])

        for rank, table in enumerate(tables):
            for layer in [*range(1, len(table)), OUTSIDE]:
                add(str(rank), self.layers[layer], table[layer])
            add(str(rank), "all", {p: sum(row[p] for row in table) for p in PHASES})
        forms = [f"rank {rank}: product of {form}" for rank, known in enumerate(self.product_forms) for form in known]
        return "\n".join([*aligned(lines, left=(1,), elastic=1), *forms])

    def export_chrome_trace(self, path: str | Path) -> None:
        """Write the spans of all ranks for chrome://tracing or Perfetto. Not collective: call it on one rank.

        The ranks' clocks are set to zero by a barrier.
        """
        events: list[dict[str, object]] = []
        for rank, spans in enumerate(self.spans):
            events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
            for layer, name in enumerate(self.layers):
                row = {"pid": rank, "tid": layer}
                events.append({"name": "thread_name", "ph": "M", **row, "args": {"name": name}})
                events.append({"name": "thread_sort_index", "ph": "M", **row, "args": {"sort_index": layer}})
            for span in spans:
                times = {"ts": 1e6 * span.begin, "dur": 1e6 * span.seconds}
                where = {"pid": rank, "tid": span.layer, "args": {"layer": self.layers[span.layer]}}
                events.append({"name": PHASES[span.phase], "cat": "pyg_dist", "ph": "X", **times, **where})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def plot(self, path: str | Path) -> None:
        """Draw each rank's time by phase, and the bytes it has sent; the suffix chooses the format. Not collective.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        tables = [self.table(rank) for rank in range(len(self.seconds))]
        by_phase = {name: [1000 * sum(row[name] for row in table) for table in tables] for name in PHASES}
        shown = {name: values for name, values in by_phase.items() if any(values)}
        sent = {"sent": [count / 2**20 for count in self.sent_bytes]}
        draw(path, "profile", None, Bars("time", shown, "ms", is_stacked=True), Bars("sent", sent, "MiB"))

    def to_html(self, path: str | Path) -> None:
        """Write one page with the summary, the table and the picture. Not collective: call it on one rank.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        write_page(path, "profile", f"{self}\n\n{self.describe()}", [self.plot])


@contextmanager
def profile(overlap: bool = True) -> Iterator[Profile]:
    """Record the time of the block by rank, layer and phase. Collective: every rank runs the block.

    A *layer* is a Distributed conv, numbered when it first runs; its backward counts as the same layer. The phases are
    those of :mod:`pyg_dist.backend.timing`. A few epochs are enough; run the first one before the block, since it also
    plans. Recording takes some microseconds per phase, and as much per torch operator. ``torch.profiler`` shows the
    same phases as labels ``pyg_dist: ...``, with or without this block. If the process uses CUDA, times are those of
    the GPU's current stream.

    Args:
        overlap: True: run as without profiling; ``exchange`` is the communication that overlap does not hide, and
            includes waiting for slower ranks. False (as in SuperGCN, 8.6): every exchange starts when all ranks have
            come to it and ends before anything else begins, so that ``wait`` is imbalance and ``exchange`` all of the
            communication. Halo layout only; the grid's sums are timed as they run.

    Raises:
        OptionError: Inside of another ``profile()``.

    Example:
        >>> with pyg_dist.profile() as profiled:
        ...     out = model(data.x, data.edge_index)
        >>> print(profiled.describe())  # doctest: +ELLIPSIS
        rank  layer ...
    """
    if timing.is_recording():
        raise OptionError("Expected one pyg_dist.profile() at a time (got one inside of another): end the first one")
    session.init()
    world, result = world_group(), Profile()
    world.all_reduce_(host.zeros(1))
    recorder = Recorder(overlap)
    timing.record(recorder)
    try:
        with _layers(recorder, result.layers), _TimeDense():  # type: ignore[no-untyped-call]
            yield result
    finally:
        timing.record(None)
    seconds, spans = recorder.end()
    told = {
        "seconds": seconds, "sent_bytes": recorder.sent_bytes, "id_bytes": recorder.id_bytes, "spans": spans,
        "hidden_seconds": recorder.hidden_seconds, "peak_bytes": peak_bytes(), "product_forms": timed_forms(),
    }  # fmt: skip
    of_ranks = [json.loads(content) for content in world.gather_bytes(json.dumps(told).encode())]
    for name in told:
        setattr(result, name, [of_rank[name] for of_rank in of_ranks])
    result.spans = [[Span(*span) for span in of_rank["spans"]] for of_rank in of_ranks]


def peak_bytes() -> int:
    """The largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def _layers(recorder: Recorder, names: list[str]) -> Iterator[None]:
    """Context in which the recorder is told which distributed conv runs; adds their names to ``names``."""
    number: dict[nn.Module, int] = {}
    running: list[tuple[nn.Module, ExitStack]] = []

    def before(module: nn.Module, inputs: object) -> None:
        if not getattr(module, "is_distributed", False):
            return
        if module not in number:
            number[module] = len(names)
            names.append(f"{len(names)}: {module}".splitlines()[0])
        stack = ExitStack()
        stack.callback(recorder.end_layer, recorder.begin_layer(number[module]))
        stack.enter_context(phase("other"))
        running.append((module, stack))

    def after(module: nn.Module, inputs: object, output: object) -> None:
        if running and running[-1][0] is module:
            running.pop()[1].close()

    with ExitStack() as hooks:
        for hook in (register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)):
            hooks.callback(hook.remove)
        yield


class _TimeDense(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if func.overloadpacket not in _DENSE:
            return func(*args, **(kwargs or {}))
        with phase("dense"):
            return func(*args, **(kwargs or {}))
