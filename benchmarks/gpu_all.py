"""Everything that only a machine with a GPU can show, in nine minutes: tests, products, bandwidths, epochs, sanitizers.

    python benchmarks/gpu_all.py                       # from a source tree; needs no network and no pymetis
    python benchmarks/gpu_all.py --parts tests spmm    # some parts
    python benchmarks/gpu_all.py --smoke               # the same on a CPU, tiny: whether it would run

Each part is a process of its own, which is ended when its time is over; ``results/gpu.json`` is written anew with
each result, so that a run that is cut keeps what it has. The libraries may have been built elsewhere (in
``pyg_dist/lib``, or of an installed package); where there is none, they are built here, for the GPU that is here.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpu_measure import Log, Place

ROOT = Path(__file__).resolve().parent.parent
PART_SECONDS = {"tests": 150, "spmm": 130, "bandwidth": 30, "epoch": 130, "sanitizer": 60}
"""They and a minute of building are nine minutes."""

MODULES = {"spmm": "gpu_spmm", "bandwidth": "gpu_bandwidth", "epoch": "gpu_epoch"}
SANITIZED = "test_products and (47 or 100) and float32 or test_packed_rows or test_rows or test_patterns or additive"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PART_SECONDS, default=list(PART_SECONDS))
    parser.add_argument("--smoke", action="store_true", help="on the CPU, tiny")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu.json")
    parser.add_argument("--only", choices=PART_SECONDS, help=argparse.SUPPRESS)  # in the part's own process
    args = parser.parse_args()
    if args.only:
        run_part(args.only, args.smoke, args.output)
        return
    end = time.monotonic() + 60 * args.minutes
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    build(needs_cuda=not args.smoke)
    args.output.unlink(missing_ok=True)
    again = ["--output", str(args.output), *(["--smoke"] if args.smoke else [])]
    for part in args.parts:
        left = end - time.monotonic()
        if left < 5:
            print(f"gpu_all: no time left for {part}")
            break
        begin = time.monotonic()
        limit = min(left, PART_SECONDS[part])
        process = subprocess.Popen(
            [sys.executable, __file__, "--only", part, *again], env=environment, start_new_session=True
        )
        try:
            status = f"status {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)  # its own processes, too
            process.wait()
            status = f"cut after {limit:.0f} s"
        Log(args.output, "parts").add(part, f"{status}, {time.monotonic() - begin:.0f} s")
    print(f"written: {args.output}")


def build(needs_cuda: bool) -> None:
    """Build the libraries into the source tree, unless they are there or installed."""
    folders = [ROOT / "pyg_dist"]
    spec = importlib.util.find_spec("pyg_dist")
    folders += [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    names = ["libpyg_dist.so", *(["libpyg_dist_cuda.so"] if needs_cuda else [])]
    if all(any((folder / "lib" / name).exists() for folder in folders) for name in names):
        return
    folder = ROOT / "build/gpu"
    configured = {
        "CMAKE_BUILD_TYPE": "Release",
        "SKBUILD_PROJECT_VERSION": "0.0.0",
        "SKBUILD_PROJECT_VERSION_FULL": "0.0.0+source",
        "CMAKE_CUDA_ARCHITECTURES": "native",
        "CMAKE_INSTALL_PREFIX": str(ROOT),
    }
    options = [f"-D{name}={value}" for name, value in configured.items()]
    environment = os.environ | ({"PYG_DIST_CUDA": "1"} if needs_cuda else {})
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(folder), *options],
        ["cmake", "--build", str(folder), "--parallel"],
        ["cmake", "--install", str(folder)],
    ):
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def run_part(part: str, is_smoke: bool, output: Path) -> None:
    """In a process of its own."""
    log = Log(output, part)
    if part == "tests":
        run_tests(log, is_smoke)
    elif part == "sanitizer":
        run_sanitizer(log, is_smoke)
    else:
        import machine  # which loads the library

        place = Place.of("cpu" if is_smoke else "cuda")
        on_gpu = {} if is_smoke else {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        Log(output, "machine").add(part, machine.describe() | on_gpu)
        importlib.import_module(MODULES[part]).run(place, log)


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *arguments]


def run_tests(log: Log, is_smoke: bool) -> None:
    """``pytest -m gpu``, several at a time where pytest-xdist is there."""
    workers = ["-n", "4", "--dist", "worksteal"] if importlib.util.find_spec("xdist") and not is_smoke else []
    environment = os.environ | ({"PYG_DIST_GPU_TESTS": "cpu"} if is_smoke else {})
    command = pytest_command("--durations", "10", "tests/gpu", *workers)
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(result.stdout[-6000:], result.stderr[-2000:])
    add_counts(log, "tests", result)


def run_sanitizer(log: Log, is_smoke: bool) -> None:
    """Small op tests under memcheck and racecheck, with an allocation of its own for each tensor."""
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYG_DIST_GPU_TESTS_SIZE": "2000"}
    tool = shutil.which("compute-sanitizer")
    if is_smoke:
        environment["PYG_DIST_GPU_TESTS"] = "cpu"
    for check in ("memcheck", "racecheck"):
        before = [] if is_smoke else [tool or "compute-sanitizer", "--tool", check, "--error-exitcode", "9"]
        command = [*before, *pytest_command("tests/gpu/test_ops_gpu.py", "-k", SANITIZED)]
        try:
            result = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=28
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            log.add(check, {"error": str(error)[:200]})
            continue
        add_counts(log, check, result)


def add_counts(log: Log, name: str, result: subprocess.CompletedProcess[str]) -> None:
    """What pytest says in its last line, what failed, and what a sanitizer says in its own."""
    lines = result.stdout.splitlines()
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|error|skipped)", line)]
    failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR "))]
    tool = [line for line in lines + result.stderr.splitlines() if re.search("(ERROR|RACECHECK) SUMMARY", line)]
    said = counts[-1:] or [result.stderr[-500:]]
    log.add(name, {"status": result.returncode, "counts": said, "failed": failed[:20], "tool": tool})


if __name__ == "__main__":
    main()
