"""Takes one barrier or one bound after the other out of the kernels for GPUs: `make mutants`.

Arguments, if any, name the files of ``csrc/cuda`` whose mutants are tried.

Each mutant must fail ``tests/simt/kernels_trial.cpp`` under AddressSanitizer; those that pass are printed. A barrier
or a bound of rows with a comment beside it stays: the comment says why the trial cannot show that it is needed.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLAGS = "-std=c++20 -O1 -g -fsanitize=address -fno-sanitize-recover=all -Itests/simt -Itests".split()
MUTATIONS = {
    r"(?m)^ *(block|warp)_sync\(.*\);$": "",  # a barrier
    # Rows, edges, chunks, heads.
    r"(?m)>= ([\w.\->]*(?:num_\w+|count)(?: \+ [\w.]+)?)(?=\) return[^/\n]*$| \|\|[^/\n{]*$)": r"> \1",
    r"\be < end;": "e <= end;",  # edges of a row
    r"\be \+ kAhead <= end;": "e + kAhead <= end + 1;",
    r"\bk < p\.num_rows &&": "k <= p.num_rows &&",  # rows of a target
    r"(if \(\w+) < ((\w+\.)?count)\b": r"\1 <= \2",  # items
    r"\bat < p\.row_bytes": "at <= p.row_bytes",
    r"row < (next_|end)\b": r"row <= \1",
    r"return at\(u\) < end;": "return at(u) <= end;",  # columns
}
COMPILED_FOR = {
    "row_reduction.cuh": ("spmm_csr.cu", "extreme_csr.cu"), "sum_edges.cuh": ("spmm_csr.cu",),
    "scan.cuh": ("sort.cu",), "for_each.cuh": ("patterns.cu",), "attention.cuh": ("attention.cu",),
}  # fmt: skip
"""What shows a mutant of a header."""


def compile_(source: Path, to: Path, *first: str) -> Path:
    command = ["c++", *FLAGS[:-2], *first, *FLAGS[-2:], "-Icsrc", "-x", "c++", "-c", str(source), "-o", str(to)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return to


def mutants() -> Iterator[tuple[Path, int, str]]:
    """File, line and text."""
    for path in [*sorted((ROOT / "csrc/cuda").glob("*.cu")), *(ROOT / "csrc/cuda" / name for name in COMPILED_FOR)]:
        text = path.read_text()
        for pattern, replacement in MUTATIONS.items():
            for match in re.finditer(pattern, text):
                changed = text[: match.start()] + match.expand(replacement) + text[match.end() :]
                yield path, text.count("\n", 0, match.start()) + 1, changed


def main() -> None:
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool:
        folder = Path(name)
        sources = [*(ROOT / "csrc/cuda").glob("*.cu"), *(ROOT / "tests/simt").glob("*.cpp")]
        objects = dict(
            zip(sources, pool.map(lambda path: compile_(path, folder / f"{path.name}.o"), sources), strict=True)
        )

        def survives(number: int, mutant: tuple[Path, int, str]) -> str | None:
            path, line, changed = mutant
            own = folder / f"{path.name}.{number}"
            (own / "cuda").mkdir(parents=True, exist_ok=True)
            written = own / "cuda" / path.name
            written.write_text(changed)
            users = [ROOT / "csrc/cuda" / name for name in COMPILED_FOR.get(path.name, (path.name,))]
            sources = users if path.name in COMPILED_FOR else [written]
            made = [compile_(source, own / f"{source.name}.o", f"-I{own}") for source in sources]
            linked = [*made, *(compiled for of, compiled in objects.items() if of not in users)]
            trial = own / "trial"
            subprocess.run(["c++", "-fsanitize=address", *map(str, linked), "-o", str(trial)], check=True)
            result = subprocess.run([trial], capture_output=True, timeout=900, check=False)
            shown = f"{path.name}:{line}"
            print(f"{shown}: {'passes' if result.returncode == 0 else 'fails'}", flush=True)
            return shown if result.returncode == 0 else None

        tried = [mutant for mutant in mutants() if not sys.argv[1:] or mutant[0].name in sys.argv[1:]]
        survivors = [shown for shown in pool.map(survives, range(len(tried)), tried) if shown]
    if survivors:
        sys.exit(f"mutants: expected every one to fail the trial, these passed: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
