"""Everything that only a machine with a GPU can show, in nine minutes: tests, products, bandwidths, epochs, sanitizers.

    python benchmarks/gpu_all.py                       # from a source tree; needs no network and no pymetis
    python benchmarks/gpu_all.py --parts tests spmm    # some parts
    python benchmarks/gpu_all.py --smoke               # the same on a CPU, tiny: whether it would run

Each part is ended when its time is over; ``results/gpu.json`` is written anew with each result, of a test as of a
product, so that a run that is cut keeps what it has. The libraries may have been built elsewhere (in ``pyg_dist/lib``,
or for an editable installation); where there is none, they are built here, for the GPU that is here.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from gpu_measure import Log, Place

ROOT = Path(__file__).resolve().parent.parent
CUDA = Path("/usr/local/cuda")

PART_SECONDS = {"tests": 170, "bandwidth": 20, "spmm": 95, "sanitizer": 80, "epoch": 540}
"""At most, in this order. With a minute of building, what is left for epochs is two minutes or more.

Set-up on the host takes 0.21 s of a processor for a million edges (measured with 10 million, on one thread of a Zen 4),
so some 30 s for each of the two large graphs; the largest one is the last thing that is measured.
"""

MODULES = {"spmm": "gpu_spmm", "bandwidth": "gpu_bandwidth", "epoch": "gpu_epoch"}
CHECKS = ("memcheck", "racecheck")
SANITIZED = (
    "test_products[torch.float32-47]", "test_products[torch.float32-100]", "test_extremes[torch.float32]",
    "test_rows", "test_norm_relu_dropout[torch.float32-layer]", "test_packed_rows_are_the_cpus[2]",
    "test_attention[torch.float32-additive]", "test_patterns",
)  # fmt: skip
"""One test for each kind of kernel: a sanitizer takes seconds to start, and checks a kernel a hundred times as long."""


@dataclass(frozen=True)
class Run:
    """What all parts share."""

    output: Path
    is_smoke: bool
    environment: dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PART_SECONDS, default=list(PART_SECONDS))
    parser.add_argument("--smoke", action="store_true", help="on the CPU, tiny")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/gpu.json")
    parser.add_argument("--only", choices=MODULES, help=argparse.SUPPRESS)  # in the part's own process
    args = parser.parse_args()
    run = Run(args.output.resolve(), args.smoke, environment_of_parts())
    if args.only:
        measure(args.only, run)
        return
    end = time.monotonic() + 60 * args.minutes
    run.output.unlink(missing_ok=True)
    log = Log(run.output, "parts")
    begin = time.monotonic()
    error = build(run.environment, needs_cuda=not args.smoke, seconds=end - begin)
    log.add("build", f"{error or 'done'}, {time.monotonic() - begin:.0f} s")
    if error:
        sys.exit("gpu_all: expected the libraries, but building them failed")
    for part in PART_SECONDS:
        if part not in args.parts:
            continue
        begin = time.monotonic()
        seconds = min(end - begin, PART_SECONDS[part])
        if seconds < 5:
            log.add(part, "no time left")
            continue
        status = PARTS.get(part, run_measurement)(part, run, seconds)
        log.add(part, f"{status}, {time.monotonic() - begin:.0f} s")
    print(f"written: {run.output}")


def environment_of_parts() -> dict[str, str]:
    """This process's, with the tree and the benchmarks where Python looks, and CUDA's tools and CMake on the path."""
    paths = [os.environ.get("PATH", ""), str(Path(sys.executable).parent)]
    paths += [str(folder) for folder in (CUDA / "bin", CUDA / "compute-sanitizer") if folder.is_dir()]
    modules = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PATH": os.pathsep.join(filter(None, paths)),
        "PYTHONPATH": os.pathsep.join(filter(None, modules)),
        "PYTHONUNBUFFERED": "1",
    }


def run_command(
    command: Iterable[str], environment: dict[str, str], seconds: float, see: Callable[[str], None] | None = None
) -> str:
    """Run a command for so many seconds at most and return how it ended. ``see`` gets its lines, as they come."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if see else {}
    process = subprocess.Popen(
        list(command), cwd=ROOT, env=environment, text=True, errors="replace", start_new_session=True, **pipes
    )

    def read() -> None:
        assert process.stdout is not None
        assert see is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            see(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    if see:
        reader.start()
    try:
        return f"status {process.wait(seconds)}"
    except subprocess.TimeoutExpired:
        return f"cut after {seconds:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        process.wait()
        if see:
            reader.join(2)  # unless somebody who left the group still holds the pipe


def build(environment: dict[str, str], needs_cuda: bool, seconds: float) -> str | None:
    """Build the libraries into the source tree, unless they are there. What went wrong, or None."""
    names = ["libpyg_dist.so", *(["libpyg_dist_cuda.so"] if needs_cuda else [])]
    if all(any((folder / "lib" / name).exists() for folder in package_folders()) for name in names):
        return None
    end = time.monotonic() + seconds
    environment = environment | ({"PYG_DIST_CUDA": "1"} if needs_cuda else {})
    for command in build_commands(ROOT / "build/gpu", environment["PATH"]):
        lines: list[str] = []
        try:
            status = run_command(command, environment, end - time.monotonic(), lines.append)
        except OSError as error:  # no CMake
            return str(error)
        if status != "status 0":
            return "\n".join([f"{' '.join(command[:3])}: {status}", *lines[-30:]])
    return None


def package_folders() -> list[Path]:
    """Where the parts find this tree's package: in it, and where an editable installation has its libraries."""
    sys.path.insert(0, str(ROOT))
    try:
        spec = importlib.util.find_spec("pyg_dist")
    finally:
        sys.path.pop(0)
    return [Path(folder) for folder in (spec.submodule_search_locations or () if spec else ())]


def build_commands(folder: Path, path: str) -> list[list[str]]:
    """How to configure, build and install, with Ninja where it is on the path."""
    configured = {
        "CMAKE_BUILD_TYPE": "Release",
        "SKBUILD_PROJECT_VERSION": "0.0.0",
        "SKBUILD_PROJECT_VERSION_FULL": "0.0.0+source",
        "CMAKE_CUDA_ARCHITECTURES": "native",
        "CMAKE_INSTALL_PREFIX": str(ROOT),
    }
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=path) else []
    options = [f"-D{name}={value}" for name, value in configured.items()]
    return [
        ["cmake", "--fresh", "-S", str(ROOT), "-B", str(folder), *generator, *options],
        ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1)],
        ["cmake", "--install", str(folder)],
    ]


def run_measurement(part: str, run: Run, seconds: float) -> str:
    """In a process of its own."""
    smoke = ["--smoke"] if run.is_smoke else []
    command = [sys.executable, __file__, "--only", part, "--output", str(run.output), *smoke]
    return run_command(command, run.environment, seconds)


def measure(part: str, run: Run) -> None:
    """What that process does."""
    import machine  # which loads the library

    place = Place.of("cpu" if run.is_smoke else "cuda")
    on_gpu = {} if run.is_smoke else {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    Log(run.output, "machine").add(part, machine.describe() | on_gpu)
    importlib.import_module(MODULES[part]).run(place, Log(run.output, part))


def pytest_command(run: Run, part: str, name: str, *arguments: str) -> list[str]:
    """Without the options of pyproject.toml, some of which ask for plugins."""
    results = ["--results-file", str(run.output), "--results-part", part, "--results-name", name]
    options = ["-o", "addopts=", "-m", "gpu", "-v", "-p", "no:cacheprovider", "-p", "gpu_results"]
    return [sys.executable, "-m", "pytest", *options, *results, *arguments]


def run_tests(part: str, run: Run, seconds: float) -> str:
    """``pytest -m gpu``, several at a time where pytest-xdist is there; ``gpu_results.py`` writes what they say."""
    environment = dict(run.environment)
    workers: list[str] = []
    if run.is_smoke:
        environment["PYG_DIST_GPU_TESTS"] = "cpu"
    elif importlib.util.find_spec("xdist"):
        workers = ["-n", "4", "--dist", "worksteal"]
        environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // 4))
    command = pytest_command(run, part, "tests", "--durations", "10", "tests/gpu", *workers)
    return run_command(command, environment, seconds)


def run_sanitizer(part: str, run: Run, seconds: float) -> str:
    """Small op tests under memcheck and racecheck, with an allocation of its own for each tensor."""
    environment = run.environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYG_DIST_GPU_TESTS_SIZE": "2000"}
    if run.is_smoke:
        environment["PYG_DIST_GPU_TESTS"] = "cpu"
    tool = shutil.which("compute-sanitizer", path=environment["PATH"])
    if tool is None and not run.is_smoke:
        return "expected compute-sanitizer on the path, found none"
    end = time.monotonic() + seconds
    statuses = []
    for place, check in enumerate(CHECKS):
        said = Said()
        tests = [f"tests/gpu/test_ops_gpu.py::{name}" for name in SANITIZED]
        command = [*sanitizer_command(tool, check), *pytest_command(run, part, f"{check}, tests", *tests)]
        share = (end - time.monotonic()) / (len(CHECKS) - place)
        statuses.append(f"{check}: {run_command(command, environment, share, said.see)}")
        Log(run.output, part).add(check, {"ended": statuses[-1], "summary": said.summary, "lines": said.lines})
    return ", ".join(statuses)


def sanitizer_command(tool: str | None, check: str) -> list[str]:
    """What comes before a command, so that the tool looks at this package's kernels alone."""
    if tool is None:
        return []
    return [tool, "--tool", check, "--kernel-name", "kns=pyg_dist", "--error-exitcode", "9"]


class Said:
    """The lines of a sanitizer: the first ones, and the summary."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.summary: str | None = None

    def see(self, line: str) -> None:
        """Take one, which may be anybody's."""
        if not re.match("={9}(?!=)", line):  # longer ones are pytest's
            return
        if "SUMMARY" in line:
            self.summary = line
        elif len(self.lines) < 60:
            self.lines.append(line[:300])


PARTS: dict[str, Callable[[str, Run, float], str]] = {"tests": run_tests, "sanitizer": run_sanitizer}


if __name__ == "__main__":
    main()
