"""How a run ends when something goes wrong: each fault several times, who says what, the status, and how long it takes.

    python benchmarks/faults.py                    # every fault ten times, started by hand
    python benchmarks/faults.py --launcher torchrun --times 3
    python benchmarks/faults.py --kills 200 --load 4   # kills in a row, beside so many busy processes
    python benchmarks/faults.py --restart cora.npz     # from a kill to the next epoch, by torchrun --max-restarts
    python benchmarks/faults.py --restart A            # likewise GraphSAGE on a generated graph, from a store
    python benchmarks/faults.py --soak 1200            # memory, threads and files of two ranks that train
    python benchmarks/faults.py --recorded             # losses of a run with a killed rank beside those without
    python benchmarks/faults.py --overhead cora.npz    # epochs with states in memory and without, in turns

Three ranks train a small GCN; in step 20 something happens to rank 1. *Seconds* are from then to the end of the last
process. A run is right if every status is as expected, each line of output that a rank had printed before is there,
and the expected words are in what the others say.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import machine
import power_law
from fault_ranks import FAULTS

import pyg_dist

RANKS = 3
RESULT = Path(__file__).resolve().parent / "results" / "faults.json"
TESTS = Path(__file__).resolve().parent.parent / "tests"


class Ended(NamedTuple):
    """A run that has ended."""

    codes: list[int]
    said: str
    seconds: float


def launch(launcher: str, ranks: int, *args: str, seconds: float = 0.0) -> Ended:
    """Start ``fault_ranks.py`` on some ranks, in processes forked from one with the imports, and wait for the last.

    ``seconds``: how long they train.
    """
    sys.path.insert(0, str(TESTS))
    import forked_python

    python = forked_python.executable()
    command = [python, str(Path(__file__).with_name("fault_ranks.py").resolve()), *args]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    environs = [environ]
    if launcher == "torchrun":
        torchrun = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command = [*torchrun, *command[1:]]
    elif launcher == "mpirun":
        command = [str(Path(sys.executable).with_name("mpirun")), "-n", str(ranks), *command]
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        place = {**environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        environs = [{**place, "RANK": str(rank)} for rank in range(ranks)]
    with tempfile.TemporaryFile("w+") as said:
        started = [subprocess.Popen(command, env=e, stdout=said, stderr=subprocess.STDOUT) for e in environs]
        codes = [process.wait(300 + seconds) for process in started]
        end = time.time()
        said.seek(0)
        text = said.read()
    begin = re.search(r"fault at (\S+)", text)
    return Ended(codes, text, end - float(begin[1]) if begin else 0.0)


def wrong(fault: str, launcher: str, ended: Ended) -> str:
    """What is not as it should be; "" if all is."""
    others = ended.codes if launcher != "by hand" else [code for rank, code in enumerate(ended.codes) if rank != 1]
    if not all(others):
        return f"status {ended.codes}"
    if -6 in ended.codes:
        return "an abort"
    if not re.search(FAULTS[fault].says, ended.said):
        return "not said"
    missing = [rank for rank in range(RANKS) if f"rank {rank} has come here" not in ended.said]
    return f"lost lines of {missing}" if missing and launcher == "by hand" else ""


def measure(launcher: str, times: int) -> dict[str, Any]:
    """Each fault so many times."""
    rows = {}
    for name, fault in FAULTS.items():
        ends = [launch(launcher, RANKS, "--fault", name) for _ in range(times)]
        seconds, faulty = [end.seconds for end in ends], [wrong(name, launcher, end) for end in ends]
        rows[name] = {
            "median_s": statistics.median(seconds), "worst_s": max(seconds), "bound_s": fault.bound,
            "wrong": [what for what in faulty if what],
        }  # fmt: skip
        sys.stdout.write(
            f"{name:26} median {rows[name]['median_s']:5.2f} s, worst {max(seconds):5.2f} s, bound {fault.bound:4.1f} s"
            f"{'; ' + ', '.join(filter(None, faulty)) if any(faulty) else ''}\n"
        )
        sys.stdout.flush()
    return rows


def busy() -> None:
    """Load."""
    while True:
        sum(range(10_000))


def kills(count: int, load: int) -> dict[str, Any]:
    """Kills in a row, and runs that nothing happens to in between, beside busy processes."""
    with ExitStack() as stack:
        for _ in range(load):
            process = multiprocessing.Process(target=busy, daemon=True)
            process.start()
            stack.callback(process.kill)
        found: list[str] = []
        seconds = []
        for number in range(count):
            ended = launch("by hand", RANKS, "--fault", "kill -9")
            found += filter(None, [wrong("kill -9", "by hand", ended)])
            seconds.append(ended.seconds)
            if number % 10 == 0 and any(launch("by hand", RANKS).codes):
                found.append("a false alarm")
            if number % 10 == 9 or number + 1 == count:
                row: dict[str, Any] = {"kills": number + 1, "load": load, "wrong": found}
                row |= {"median_s": statistics.median(seconds), "worst_s": max(seconds)}
                sys.stdout.write(f"{row}\n")
                sys.stdout.flush()
    return row


def soak(seconds: float) -> list[dict[str, int]]:
    """Resources of rank 0 of two that train for so long, at ten moments."""
    ended = launch("by hand", 2, "--seconds", str(seconds), seconds=seconds)
    found = [json.loads(text) for text in re.findall(r"soak (.*)", ended.said)]
    rows = found[:: max(1, len(found) // 10)]
    sys.stdout.write("\n".join(map(str, [ended.codes, *rows])) + "\n")
    return rows


def recorded() -> dict[str, list[str]]:
    """The lines of a run that nobody disturbs, and of one with a killed rank."""
    said = {}
    os.environ["PET_MAX_RESTARTS"] = "3"
    with tempfile.TemporaryDirectory() as folder:
        for name in ("whole", "killed"):
            ended = launch("torchrun", 4, "--recorded", f"{folder}/{name}")
            said[name] = [line for line in ended.said.splitlines() if re.match("epoch|.*lost its connection", line)]
            sys.stdout.write("\n".join([f"{name}: status {ended.codes}", *said[name], ""]))
    return said


def prepared(graph: str, folder: str) -> str:
    """An archive, or the store of a generated graph, in two parts."""
    if graph not in power_law.SIZES:
        return str(Path(graph).resolve())
    whole, store = f"{folder}/graph.safetensors", f"{folder}/store"
    pyg_dist.save_graph(power_law.load(graph), whole)
    command = [sys.executable, "-m", "pyg_dist", "partition", whole, store, "--parts", "2"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return store


def overhead(graph: str, ranks: int) -> dict[str, float]:
    """What an epoch takes with states in memory after each, and without, and what keeping one takes."""
    with tempfile.TemporaryDirectory() as folder:
        ended = launch("by hand", ranks, "--overhead", prepared(graph, folder), folder)
    if any(ended.codes):
        raise SystemExit(ended.said)
    seconds = json.loads(re.findall(r"overhead (.*)", ended.said)[0])
    row = {f"{name}_ms": 1e3 * statistics.median(of) for name, of in seconds.items()}
    row |= {"ranks": ranks, "epochs": len(seconds["with"])}
    row |= {"ratio": row["with_ms"] / row["without_ms"], "keep_share": row["keep_ms"] / row["without_ms"]}
    sys.stdout.write(f"{row}\n")
    return row


def restart(graph: str) -> dict[str, float]:
    """Parts of the time from ``kill -9`` of a rank of two to the next epoch, by torchrun."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1",
            str(Path(__file__).with_name("fault_ranks.py")), "--restarted", prepared(graph, folder), folder,
        ]  # fmt: skip
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": ""}  # as users have it
        subprocess.run(command, check=True, env=environ, stdout=subprocess.DEVNULL)
        marks = {path.name[3:]: float(path.read_text()) for path in Path(folder).glob("at *")}
    order = ["start", "imports", "graph", "state", "epoch"]
    row = {name: marks[name] - marks["kill"] for name in order}
    sys.stdout.write(f"seconds after the kill: {row}\n")
    return row


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launcher", choices=["by hand", "torchrun", "mpirun"], default="by hand")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside the kills")
    parser.add_argument("--soak", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--restart", metavar="GRAPH", help="an archive, or a name such as A: from a store")
    parser.add_argument("--overhead", metavar="GRAPH", help="likewise")
    parser.add_argument("--ranks", type=int, default=2, help="of which the overhead is measured")
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    found: dict[str, Any]
    if options.kills:
        found = {"kills": kills(options.kills, options.load)}
    elif options.soak:
        found = {"soak": soak(options.soak)}
    elif options.restart:
        found = {f"restart, {Path(options.restart).stem}": restart(options.restart)}
    elif options.recorded:
        found = {"recorded": recorded()}
    elif options.overhead:
        name = f"overhead, {Path(options.overhead).stem}, {options.ranks} ranks"
        found = {name: overhead(options.overhead, options.ranks)}
    else:
        found = {f"faults, {options.launcher}": measure(options.launcher, options.times)}
    of_each = {name: {"machine": machine.describe(), "found": of} for name, of in found.items()}
    known = machine.earlier_results(options.out) or {}
    options.out.write_text(json.dumps(known | of_each, indent=2) + "\n")


if __name__ == "__main__":
    main()
