"""The sparse kernels against everything else that multiplies a CSR matrix by rows, and against the machine's memory.

    python benchmarks/spmm.py                                     # graph "small": a minute
    python benchmarks/spmm.py --graph A --widths 47 128 256 --threads 1
    python benchmarks/spmm.py --graph B.npz --transposed
    python benchmarks/spmm.py --graph B --only "pyg_dist float32" plain blocks --rounds 3    # the choice alone
    python benchmarks/spmm.py --graph B --widths 100 --mkl-as-on-intel    # MKL's faster code, on a processor of AMD

Variants take turns in one process. A sample during which another process had the cores is taken again: the system says
how long our threads waited for one (``/proc/self/task/*/schedstat``). What a sample waited even so stands in the JSON,
with its CPU time, which on one thread is a fair figure on a busy machine too.
Where torch_scatter is installed (``pip install '.[scatter]'``), its segment sum is one of them. Beside the products,
two figures of the same minute: the bandwidth of a plain copy, and that of gathering the rows of all edges in the
graph's own order, which is what a product without any reuse of cached rows would move.

"pyg_dist" takes the way that the first products have found to be the fastest one here: plain or by blocks of columns,
and how far ahead rows are asked for. "plain" and "blocks" are the two forms with rows asked for as far ahead as it
does; "ways" in the JSON says what each took. The last line says how much longer the chosen form takes than the other,
at most, and how far apart two measurements of the same way are. Results are kept by processor.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_measure
import gpu_spmm
import machine
import power_law
import torch
from gpu_measure import Log, Place
from torch_geometric.utils import scatter
from tqdm import tqdm

from pyg_dist.backend import ops
from pyg_dist.backend.sparse.csr import CSR

try:
    import torch_scatter
except ImportError:
    torch_scatter = None

RESULTS = Path(__file__).resolve().parent / "results"
BASELINE, MEAN, CHOSEN = "torch CSR (MKL)", "torch.sparse.mm, mean", "pyg_dist float32"
FORMS: tuple[ops.SpmmForm, ...] = ("plain", "blocks")
MESSAGES = ("gather", "torch_scatter", "PyG, edge_index")
MAX_MESSAGES = 4 << 30  # bytes: PyG's edge_index path makes a row per edge


@dataclass
class Samples:
    """Seconds of one variant by the clock and of the CPU, and the share of each sample that its threads waited."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def median_cpu(self) -> float:
        return statistics.median(self.cpu_seconds)


def run_mkl_as_on_intel() -> None:
    """Let MKL run the code that it has for Intel's processors on those of others, too (x86, the MKL within torch).

    It asks two functions who has made the processor; in this process they now say Intel.
    """
    torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    protect, page = ctypes.CDLL(None).mprotect, mmap.PAGESIZE
    for name in ("mkl_serv_intel_cpu", "mkl_serv_intel_cpu_true"):
        start = ctypes.cast(getattr(torch_cpu, name), ctypes.c_void_p).value or 0
        if protect(ctypes.c_void_p(start // page * page), 2 * page, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC):
            raise OSError("Expected code of MKL that may be written (got a refusal of the system)")
        ctypes.memmove(start, b"\xb8\x01\x00\x00\x00\xc3", 6)  # mov eax, 1; ret


def waited_seconds() -> float:
    """How long this process' threads have been ready without a core, in total; 0 where the system does not say."""
    total = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(path.read_text().split()[1])
        except (OSError, IndexError):  # a thread that has just ended
            continue
    return total * 1e-9


def measure(variants: dict[str, Callable[[], Any]], rounds: int, retries: int, max_waited: float) -> dict[str, Samples]:
    """Take ``rounds`` samples of each variant in turns; of a sample's ``retries``, the least disturbed one counts.

    A call that does not count comes before them: what a training epoch repeats finds its memory as its last call left
    it, which in these turns would be another variant's.
    """
    samples = {name: Samples() for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            run()
            tries = []
            for _ in range(retries):
                waited, cpu, start = waited_seconds(), time.process_time(), time.perf_counter()
                run()
                seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
                tries.append(((waited_seconds() - waited) / seconds, seconds, cpu_seconds))
                if tries[-1][0] <= max_waited:
                    break
            share, seconds, cpu_seconds = min(tries)
            samples[name].seconds.append(seconds)
            samples[name].cpu_seconds.append(cpu_seconds)
            samples[name].waited.append(round(share, 3))
    return samples


def variants_of(
    pattern: CSR, width: int, is_wanted: Callable[[str], bool]
) -> tuple[dict[str, Callable[[], Any]], dict[str, ops.SpmmWay]]:
    """All wanted ways to compute the same product that fit in memory, and how ours go about it."""
    shape = (pattern.num_rows, pattern.num_cols)
    x = torch.randn(pattern.num_cols, width)
    chosen: dict[str, Callable[[], Any]] = {}
    ways: dict[str, ops.SpmmWay] = {}
    if is_wanted(BASELINE) or is_wanted(MEAN):
        sparse = torch.sparse_csr_tensor(pattern.rowptr, pattern.col.long(), torch.ones(pattern.num_entries), shape)
        chosen[BASELINE] = lambda: sparse @ x
        chosen[MEAN] = lambda: torch.sparse.mm(sparse, x, "mean")
    for dtype in (torch.float32, torch.bfloat16):
        name, rows = f"pyg_dist {str(dtype).removeprefix('torch.')}", x.to(dtype)
        if is_wanted(name):
            pattern.choose_form(rows)
            ways[name] = pattern.form(rows) or ops.SpmmWay()
            check_sums(pattern, rows)
            chosen[name] = partial(pattern.multiply, rows)
    way = pattern.form(x)
    if way is not None and way.form is not None:
        for form in FORMS:
            ways[form] = way._replace(form=form)
            chosen[form] = partial(ops.spmm_csr, pattern.rowptr, pattern.col, x, form=ways[form])
    out = torch.empty_like(x)
    chosen["copy"] = lambda: out.copy_(x)
    if pattern.num_entries * width * 4 <= MAX_MESSAGES and any(map(is_wanted, MESSAGES)):
        index, target, rowptr = pattern.col.long(), pattern.row(), pattern.rowptr
        gathered = torch.empty(pattern.num_entries, width)
        chosen["gather"] = lambda: torch.index_select(x, 0, index, out=gathered)
        if torch_scatter is not None:
            chosen["torch_scatter"] = lambda: torch_scatter.segment_csr(x.index_select(0, index), rowptr)
        chosen["PyG, edge_index"] = lambda: scatter(x.index_select(0, index), target, dim_size=shape[0], reduce="sum")
    return {name: run for name, run in chosen.items() if is_wanted(name)}, ways


def check_sums(pattern: CSR, x: torch.Tensor, num_rows: int = 200) -> None:
    """Compare some rows of a product with their sums in float64: a fast wrong product is no result.

    Sums in float32 over C's largest hub, 34,049 edges, are off by 1.0e-3 (MKL's by 2.3e-3).
    """
    y = pattern.multiply(x)
    for row in torch.randint(pattern.num_rows, (num_rows,)).tolist():
        first, last = pattern.rowptr[row : row + 2].tolist()
        exact = x.index_select(0, pattern.col[first:last]).double().sum(0)
        torch.testing.assert_close(y[row].double(), exact, rtol=1e-4 if x.dtype == torch.float32 else 1e-2, atol=1e-2)


def over_forced(samples: dict[str, Samples], form: str | None) -> dict[str, float] | None:
    """How much longer the chosen form takes than the faster of both; None: not all were measured.

    "choice" compares the two forced forms, one of which is the chosen one. "same way again" is pyg_dist's own time over
    that of the same way forced: the same instructions, so how far it is from 1 is what the measurement cannot tell.
    """
    if form is None or any(name not in samples for name in (CHOSEN, *FORMS)):
        return None
    chosen = samples[form].median
    return {
        "choice": round(chosen / min(samples[form].median for form in FORMS), 4),
        "same way again": round(samples[CHOSEN].median / chosen, 4),
    }


def report(pattern: CSR, width: int, samples: dict[str, Samples]) -> list[str]:
    """Milliseconds, ratios to MKL's time (smaller is better), and the bandwidth of the two memory figures."""
    base = samples.get(BASELINE)
    moved = {"copy": 8 * pattern.num_cols * width, "gather": 8 * pattern.num_entries * width}
    lines = []
    for name, taken in samples.items():
        rate = ""
        if name in moved:
            rate = f"  {moved[name] / taken.median / 1e9:.1f} GB/s"
        elif base is not None:
            rate = f"  {taken.median / base.median:.3f} of MKL, {taken.median_cpu / base.median_cpu:.3f} by CPU time"
        clock = f"{1000 * taken.median:>8.1f} ms {1000 * taken.median_cpu:>8.1f} ms CPU"
        lines.append(f"{width:>5} {name:22}{clock}{rate}, waited {max(taken.waited):.0%}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="small", help=f"{', '.join(power_law.SIZES)}, or a .npz file")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 47, 64, 100, 128, 256, 602])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--transposed", action="store_true", help="multiply by the transpose, as the backward does")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each variant")
    parser.add_argument("--retries", type=int, default=10, help="tries for each sample")
    parser.add_argument("--max-waited", type=float, default=0.03, help="share of a sample that may be spent waiting")
    parser.add_argument("--only", nargs="+", help="variants to measure, of all")
    parser.add_argument("--mkl-as-on-intel", action="store_true", help="let MKL run its code for Intel's processors")
    parser.add_argument("--skip", nargs="*", default=[], help="variants to leave out")
    parser.add_argument(
        "--output", type=Path, help="the JSON file (default: benchmarks/results/spmm-GRAPH-PROCESSOR.json)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: gpu_spmm.py, on its own graphs")
    args = parser.parse_args()
    if args.device == "cuda":
        gpu_spmm.run(Place.of("cuda"), Log(args.output or gpu_measure.RESULTS, "spmm"))
        return

    if args.mkl_as_on_intel:
        run_mkl_as_on_intel()
    warnings.filterwarnings("ignore", message="Sparse")
    description = machine.describe()
    data = power_law.load(args.graph)
    source, target = data.edge_index
    pattern = CSR.from_edges(target, source, None, data.num_nodes, data.num_nodes)
    pattern = pattern.transposed if args.transposed else pattern
    results: list[dict[str, Any]] = []
    for num_threads in args.threads:
        torch.set_num_threads(num_threads)
        pattern = replace(pattern)  # one that has chosen nothing yet
        print(f"{args.graph}: {pattern.num_rows} rows, {pattern.num_entries} edges, {num_threads} threads")
        for width in tqdm(args.widths, desc="widths", disable=None):
            chosen, ways = variants_of(
                pattern, width, lambda name: (not args.only or name in args.only) and name not in args.skip
            )
            samples = measure(chosen, args.rounds, args.retries, args.max_waited)
            print("\n".join(report(pattern, width, samples)), flush=True)
            results.append(
                {
                    "threads": num_threads,
                    "width": width,
                    "ways": {name: way._asdict() for name, way in ways.items()},
                    "over_forced": over_forced(samples, ways[CHOSEN].form if CHOSEN in ways else None),
                    "samples": {name: asdict(taken) for name, taken in samples.items()},
                }
            )
    if compared := [result for result in results if result["over_forced"] is not None]:
        worst = max(compared, key=lambda result: result["over_forced"]["choice"])
        again = [result["over_forced"]["same way again"] for result in compared]
        print(
            f"the chosen form takes at most {worst['over_forced']['choice']:.3f} of the faster one's time "
            f"(width {worst['width']}, {worst['threads']} threads); the same way measured again takes {min(again):.3f} "
            f"to {max(again):.3f}"
        )

    graph = f"{Path(args.graph).stem}{'-transposed' if args.transposed else ''}"
    output = args.output or RESULTS / f"spmm-{graph}-{machine.processor()}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "benchmarks/spmm.py", *sys.argv[1:]])
    output.write_text(json.dumps({"command": command, "machine": description, "results": results}, indent=2) + "\n")
    print(f"written: {output}")


if __name__ == "__main__":
    main()
