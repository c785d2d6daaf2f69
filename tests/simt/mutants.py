"""Takes one barrier or one bound after the other out of the kernels for GPUs: `make mutants`.

Arguments, if any, name the files of ``csrc/cuda`` whose mutants are tried.

Each mutant must fail ``tests/simt/kernels_trial.cpp``: one without a barrier under ThreadSanitizer (`make racecheck`),
one with another bound under AddressSanitizer, by a few cases or by all. Those that pass are printed. A bound of rows
with a comment beside it stays: the comment says why the trial cannot show that it is needed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
FLAGS = "-std=c++20 -O1 -g1".split()
INCLUDES = "-Itests/simt -Itests -Icsrc -x c++".split()
BARRIERS = {r"(?m)^ *(block|warp)_sync\(.*\);.*$": ""}
BOUNDS = {
    # Rows, edges, chunks, heads.
    r"(?m)>= ([\w.\->]*(?:num_\w+|count)(?: \+ [\w.]+)?)(?=\) return[^/\n]*$| \|\|[^/\n{]*$)": r"> \1",
    r"\be < end;": "e <= end;",  # edges of a row
    r"\be \+ kAhead <= end;": "e + kAhead <= end + 1;",
    r"\bk < p\.num_rows &&": "k <= p.num_rows &&",  # rows of a target
    r"(if \(\w+) < ((\w+\.)?count)\b": r"\1 <= \2",  # items
    r"\bat < p\.row_bytes": "at <= p.row_bytes",
    r"row < end\b": "row <= end",
    r"row < chunks_\.num_rows\(\)": "row <= chunks_.num_rows()",  # rows of a chunk
    r"starts_before\(row, k_ \+ 1\)": "starts_before(row, k_ + 2)",
    r"return at\(u\) < end;": "return at(u) <= end;",  # columns
}
COMPILED_FOR = {
    "row_reduction.cuh": ("spmm_csr.cu", "extreme_csr.cu"), "sum_edges.cuh": ("spmm_csr.cu",),
    "for_each.cuh": ("patterns.cu",), "attention.cuh": ("attention.cu",),
}  # fmt: skip
"""What shows a mutant of a header."""


FIXED_ADDRESSES = [*(["setarch", "-R"] if shutil.which("setarch") else [])]
"""GCC 12's ThreadSanitizer knows no others."""


class Mutant(NamedTuple):
    """A changed file, and where."""

    path: Path
    line: int
    text: str


class Trial:
    """The trial under one sanitizer."""

    def __init__(self, sanitizer: str, cases: Sequence[Sequence[str]], folder: Path, pool: ThreadPoolExecutor) -> None:
        self.flags, self.cases = [f"-fsanitize={sanitizer}"], cases
        self.folder = folder / sanitizer
        self.folder.mkdir()
        self.sources = [*sorted((ROOT / "csrc/cuda").glob("*.cu")), *sorted((ROOT / "tests/simt").glob("*.cpp"))]
        compiled = pool.map(lambda source: self.compile(source, self.folder / f"{source.name}.o"), self.sources)
        self.objects = dict(zip(self.sources, compiled, strict=True))

    def compile(self, source: Path, to: Path, *first: str) -> Path:
        is_scheduler = source.name == "fibers.cpp" and "thread" in self.flags[0]
        flags = ["-DPYG_DIST_SIMT_RACES"] if is_scheduler else self.flags
        command = ["c++", *FLAGS, *flags, *first, *INCLUDES, "-c", str(source), "-o", str(to)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        return to

    def survives(self, number: int, mutant: Mutant) -> str | None:
        path = mutant.path
        own = self.folder / f"{path.name}.{number}"
        (own / "cuda").mkdir(parents=True, exist_ok=True)
        written = own / "cuda" / path.name
        written.write_text(mutant.text)
        users = [ROOT / "csrc/cuda" / name for name in COMPILED_FOR.get(path.name, (path.name,))]
        sources = users if path.name in COMPILED_FOR else [written]
        made = [self.compile(source, own / f"{source.name}.o", f"-I{own}") for source in sources]
        others = [compiled for of, compiled in self.objects.items() if of not in users]
        others.sort(key=lambda compiled: compiled.name != "fibers.cpp.o")  # its copies of what all have come first
        trial = own / "trial"
        subprocess.run(["c++", *self.flags, *map(str, others), *map(str, made), "-o", str(trial)], check=True)
        passes = all(
            subprocess.run(
                [*FIXED_ADDRESSES, trial, *cases], capture_output=True, timeout=900, check=False,
                env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},
            ).returncode == 0
            for cases in self.cases
        )  # fmt: skip
        shutil.rmtree(own)
        shown = f"{path.name}:{mutant.line}"
        print(f"{shown}: {'passes' if passes else 'fails'}", flush=True)
        return shown if passes else None


def mutants(mutations: dict[str, str]) -> Iterator[Mutant]:
    for path in [*sorted((ROOT / "csrc/cuda").glob("*.cu")), *(ROOT / "csrc/cuda" / name for name in COMPILED_FOR)]:
        if sys.argv[1:] and path.name not in sys.argv[1:]:
            continue
        text = path.read_text()
        for pattern, replacement in mutations.items():
            for match in re.finditer(pattern, text):
                changed = text[: match.start()] + match.expand(replacement) + text[match.end() :]
                yield Mutant(path, text.count("\n", 0, match.start()) + 1, changed)


def main() -> None:
    survivors = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        for mutations, sanitizer, cases in ((BARRIERS, "thread", [["few"]]), (BOUNDS, "address", [["few"], []])):
            tried = [*mutants(mutations)]
            trial = Trial(sanitizer, cases, Path(name), pool)
            survivors += [shown for shown in pool.map(trial.survives, range(len(tried)), tried) if shown]
    if survivors:
        sys.exit(f"mutants: expected every one to fail the trial, these passed: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
