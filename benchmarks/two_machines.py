"""Training over a slow network: ranks in two network namespaces, joined by a pair of rate-limited interfaces.

    python benchmarks/two_machines.py                                     # graph A, 1 Gbit/s and 200 Mbit/s; root
    python benchmarks/two_machines.py --graph small --rates 50 --epochs 1
    python benchmarks/two_machines.py --ranks-per-machine 2               # with the exchange in two levels
    python benchmarks/two_machines.py --ranks-per-machine 2 --partition metis-cover --graph hubs

Each namespace stands for a machine with one core: ranks reach those of the other over the link alone (``ip netns``,
``veth``, and a token bucket, ``tc ... tbf``, in both directions). An epoch is that of benchmarks/epoch.py: SAGE with 3
layers of 256, forward, loss, backward, Adam. Every variant has the parts that DistributedData finds for it. Beside each
time stands the processor time of the busier machine (``busy``), and what the plan predicts for a machine with such a
link. Its other constants are measured before each variant, since shared machines change within minutes, by ``python -m
pyg_dist bench`` of as many ranks in the same places, or are those of ``PYG_DIST_MACHINE``. Automatic parts are those
for the slowest link. All that is made is removed in the end. Where namespaces are not allowed, the script says so and
ends well.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import machine
import numpy as np
import power_law
from tqdm import tqdm

RESULTS = Path(__file__).resolve().parent / "results"
VARIANTS: dict[str, dict[str, Any]] = {
    "halo, post": {"exchange": "post", "hierarchy": "off"},
    "halo, post, 2 bits": {"exchange": "post", "bits": 2, "hierarchy": "off"},
    "halo, hybrid": {"hierarchy": "off"},
    "halo, 8 bits": {"bits": 8, "hierarchy": "off"},
    "halo, 2 bits": {"bits": 2, "hierarchy": "off"},
    "two levels": {"hierarchy": "on"},
    "two levels, 2 bits": {"bits": 2, "hierarchy": "on"},
    "grid": {"layout": "grid"},
}
NAMES = [f"pyg_dist_{os.getpid()}_{rank}" for rank in range(2)]
LINKS = [f"pgd{os.getpid() % 100_000}{'ab'[rank]}" for rank in range(2)]
ADDRESSES = ["10.213.77.1", "10.213.77.2"]
PORT = 29_577


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def two_machines() -> Iterator[None]:
    """Two namespaces and the link between them."""
    try:
        for name in NAMES:
            ip("netns", "add", name)
        ip("link", "add", LINKS[0], "netns", NAMES[0], "type", "veth", "peer", "name", LINKS[1], "netns", NAMES[1])
        for name, link, address in zip(NAMES, LINKS, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            for interface in (link, "lo"):
                ip("-n", name, "link", "set", interface, "up")
        yield
    finally:
        for name in NAMES:  # which takes its end of the link along, and so the link
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def limit(megabits: int) -> None:
    """Let the link carry so much in each direction."""
    for name, link in zip(NAMES, LINKS, strict=True):
        bucket = ["rate", f"{megabits}mbit", "burst", f"{max(32, megabits * 2)}kb", "latency", "200ms"]
        command = ["tc", "-n", name, "qdisc", "replace", "dev", link, "root", "tbf", *bucket]
        subprocess.run(command, check=True, capture_output=True, text=True)


def start(rank: int, on_each: int, port: int, *words: str, **streams: Any) -> subprocess.Popen[str]:
    """Start Python as a rank in its namespace, on its machine's core, with these words."""
    machine, cores = rank // on_each, sorted(os.sched_getaffinity(0))
    places = {
        "RANK": str(rank), "WORLD_SIZE": str(2 * on_each), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port),
        "LOCAL_RANK": str(rank % on_each), "PYG_DIST_MACHINES": ",".join(on_each * ["0"] + on_each * ["1"]),
    }  # fmt: skip
    environment = os.environ | places | {"GLOO_SOCKET_IFNAME": LINKS[machine], "OMP_NUM_THREADS": "1"}
    command = ["ip", "netns", "exec", NAMES[machine], sys.executable, *words]
    place = partial(os.sched_setaffinity, 0, {cores[machine % len(cores)]})
    return subprocess.Popen(command, env=environment, text=True, preexec_fn=place, **streams)


class Rank:
    """A process in a namespace that does what it is told."""

    def __init__(self, rank: int, on_each: int, graph: str) -> None:
        words = [__file__, "--worker", "--graph", graph, "--ranks-per-machine", str(on_each)]
        self.process = start(rank, on_each, PORT, *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("Expected an answer of every rank (one has ended); its error stands above")
        return json.loads(line)


def serve(graph: str, on_each: int) -> None:
    """A rank: lays out a variant, or runs epochs of the last one."""
    import torch
    import torch.nn.functional as F
    from epoch_models import sage

    from pyg_dist import DistributedData
    from pyg_dist.conv import DistributedSAGEConv
    from pyg_dist.pricing.machine import Machine
    from pyg_dist.pricing.model import DROPOUT_PASSES, NORM_PASSES, Model

    torch.set_num_threads(1)
    whole = power_law.load(graph)
    num_classes = int(whole.y.max()) + 1
    stack = Model.of_layers(whole.num_nodes, whole.num_edges, whole.num_features, num_classes, (3, 256), "sage")
    stack = replace(stack, activation_passes=stack.activation_passes + NORM_PASSES + DROPOUT_PASSES)
    data: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if "options" in request:
            options = request["options"]
            given = {"partition": torch.from_numpy(np.load(request["parts"]))} if "parts" in request else {}
            data = DistributedData(whole, **given, **options)
            torch.manual_seed(0)
            model = sage(whole.num_features, num_classes, DistributedSAGEConv)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
            print(json.dumps({"done": True}), flush=True)
            continue
        link = replace(Machine.load(), inter_bandwidth=request["megabits"] * 1e6 / 8, ranks_per_node=on_each, cores=1)
        seconds, before, busy = [], copy.copy(data.traffic), time.process_time()
        for _ in range(request["epochs"]):
            began = time.perf_counter()
            optimizer.zero_grad()
            out = model(data.x, data.edge_index)
            loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
            loss.backward()
            optimizer.step()
            last = loss.item()
            seconds.append(time.perf_counter() - began)
        sent, crossed = (
            (getattr(data.traffic, name) - getattr(before, name)) / request["epochs"]
            for name in ("num_bytes", "num_bytes_between")
        )
        busy = (time.process_time() - busy) / request["epochs"]
        price = data.plan.price(stack, link)
        found = {"seconds": seconds, "loss": last, "sent": sent, "crossed": crossed, "busy": busy}
        found |= {"predicted": price.seconds, "price": vars(price)}
        print(json.dumps(found), flush=True)


def constants(file: Path | None, on_each: int) -> dict[str, Any]:
    """The machine's: as ranks in the same places measure them into a file; ``None``: those stored, or the defaults."""
    from pyg_dist.pricing.machine import Machine

    if file is not None:
        limit(10_000)
        words = ["-m", "pyg_dist", "bench", "--output", str(file)]
        ranks = [start(rank, on_each, PORT + 1, *words, stdout=subprocess.DEVNULL) for rank in range(2 * on_each)]
        if any([rank.wait(300) for rank in ranks]):
            raise RuntimeError("Expected ranks to measure the machine (one has failed); its error stands above")
        os.environ["PYG_DIST_MACHINE"] = str(file)  # for the ranks, too
    return asdict(Machine.load())


def parts_for(name: str, args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The file of the parts of a variant, found if it is not there; a grid has none."""
    from pyg_dist.plan.parts import FOR_SUMS, PartsOptions, find_parts
    from pyg_dist.pricing.machine import Machine

    options = VARIANTS[name]
    if "layout" in options:
        return {}
    exchange, hierarchy = options.get("exchange", "hybrid"), options["hierarchy"]
    method = "metis" if args.partition in FOR_SUMS and exchange == "post" else args.partition
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{args.graph}-{args.ranks_per_machine}-{method}-{exchange}-{hierarchy}.npy"
    if not file.exists():
        data = power_law.load(args.graph)
        slow = replace(Machine.load(), inter_bandwidth=min(args.rates) * 1e6 / 8, cores=1)
        wanted = PartsOptions(
            method, exchange=exchange, ranks_per_node=args.ranks_per_machine, hierarchy=hierarchy, machine=slow
        )
        num_ranks = 2 * args.ranks_per_machine
        owner = find_parts(data.edge_index, data.num_nodes, num_ranks, wanted, data.train_mask)
        np.save(file, owner.numpy())
    return {"parts": str(file)}


def measured(args: argparse.Namespace, parts: dict[str, dict[str, str]], file: Path | None) -> list[dict[str, Any]]:
    """A row for each rate and variant; the processes stay, and the link changes under them.

    Constants are measured into ``file``, where it is given.
    """
    rows = []
    ranks = [Rank(rank, args.ranks_per_machine, args.graph) for rank in range(2 * args.ranks_per_machine)]
    try:
        for name in tqdm(args.variants, desc="variants", disable=None):
            known = constants(file, args.ranks_per_machine)
            limit(10_000)
            for requests in (
                {"options": VARIANTS[name], **parts[name]},
                {"epochs": 1, "megabits": 10_000},
            ):  # the first epoch plans
                for rank in ranks:
                    rank.ask(**requests)
                [rank.answer() for rank in ranks]
            for megabits in args.rates:
                limit(megabits)
                for rank in ranks:
                    rank.ask(epochs=args.epochs, megabits=megabits)
                answers = [rank.answer() for rank in ranks]
                epochs = [max(pair) for pair in zip(*(answer["seconds"] for answer in answers), strict=True)]
                rows.append({
                    "megabits": megabits, "variant": name, "seconds": statistics.median(epochs), "epochs": epochs,
                    "predicted": answers[0]["predicted"], "price": answers[0]["price"], "busy": max(
                        sum(a["busy"] for a in answers[first : first + args.ranks_per_machine])
                        for first in (0, args.ranks_per_machine)
                    ), "sent_mib": sum(a["sent"] for a in answers) / 2**20,
                    "crossed_mib": sum(a["crossed"] for a in answers) / 2**20,
                    "loss": answers[0]["loss"], "constants": known,
                })  # fmt: skip
                print(report(rows[-1:]).splitlines()[1], flush=True)
    finally:
        for rank in ranks:
            rank.process.stdin.close()
        for rank in ranks:
            try:
                rank.process.wait(20)
            except subprocess.TimeoutExpired:
                rank.process.kill()
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    lines = ["Mbit/s  variant             s an epoch     busy  predicted   off  MiB sent   crossed  faster than post"]
    post = {row["megabits"]: row["seconds"] for row in rows if row["variant"] == "halo, post"}
    for row in sorted(rows, key=lambda row: -row["megabits"]):
        ratio = f"{post[row['megabits']] / row['seconds']:.2f}x" if row["megabits"] in post else "-"
        error = f"{row['predicted'] / row['seconds'] - 1:+.0%}"
        lines.append(f"{row['megabits']:>6}  {row['variant']:<18}  {row['seconds']:>10.2f}  {row['busy']:>7.2f}  "
                     f"{row['predicted']:>9.2f}  {error:>4}  {row['sent_mib']:>8.1f}  {row['crossed_mib']:>8.1f}  "
                     f"{ratio:>16}")  # fmt: skip
    return "\n".join(lines)


def allowed() -> str | None:
    """Why there can be no namespaces; None: there can."""
    try:
        with two_machines():
            limit(1000)
    except FileNotFoundError as error:
        return f"{error.filename} is not installed (iproute2)"
    except subprocess.CalledProcessError as error:
        return str(error.stderr).strip() or str(error)
    return None


def variants_for(on_each: int) -> list[str]:
    """All that so many ranks on a machine can run."""
    return [name for name in VARIANTS if on_each > 1 or "levels" not in name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="A", help=f"{', '.join(power_law.SIZES)}, or a .npz file")
    parser.add_argument("--rates", type=int, nargs="+", default=[1000, 200], help="Mbit/s in each direction")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="default: all; two levels need "
                        "several ranks on a machine")  # fmt: skip
    parser.add_argument("--ranks-per-machine", type=int, default=1)
    parser.add_argument("--partition", default="metis", help="how parts are found; of post METIS' where it is for sums")
    parser.add_argument("--assumed", action="store_true", help="predict by the stored constants, or the defaults")
    parser.add_argument("--parts", type=Path, help="folder where parts are kept for the next run")
    parser.add_argument("--output", type=Path, default=RESULTS / "two-machines.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.graph, args.ranks_per_machine)
        return
    args.variants = args.variants or variants_for(args.ranks_per_machine)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the namespaces are removed
    why = allowed()
    if why is not None:
        print(f"skipped: no network namespaces here: {why}")
        return
    with tempfile.TemporaryDirectory() as folder, two_machines():
        is_known = args.assumed or "PYG_DIST_MACHINE" in os.environ
        file = None if is_known else Path(folder) / "machine.json"
        constants(file, args.ranks_per_machine)
        parts = {name: parts_for(name, args, args.parts or Path(folder)) for name in args.variants}
        rows = measured(args, parts, file)
    print(report(rows))
    content = {
        "command": shlex.join(["python", "benchmarks/two_machines.py", *sys.argv[1:]]),
        "graph": args.graph,
        "partition": args.partition,
    }
    args.output.write_text(json.dumps(content | {"machine": machine.describe(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
