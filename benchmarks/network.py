"""What a wire adds to MPI's own speed, and what MPI saves beside gloo: messages of 64 bytes to 64 MiB.

    mpirun -n 2 python benchmarks/network.py
    mpirun -n 2 python benchmarks/network.py --sizes --graph cora.npz --model gcn
    mpirun -n 2 python benchmarks/network.py --large

All variants live in one run and take turns, so that other programs on the machine disturb them alike. Each operation is
timed as the slowest rank has it; the median over the rounds counts, and ratios are medians of ratios within a round.

exchange
    each rank sends so many bytes to each other one: mpi4py's ``Isend`` and ``Irecv``, its persistent requests with one
    ``Startall``, its ``Ineighbor_alltoallv`` and, where the library has it, that collective made persistent; and the
    wires' ``exchange`` as the halo layout calls it.
all-to-all
    the same bytes by ``Ialltoallv`` and by the wires' ``all_to_all``.
sum
    an all-reduce of so many bytes: mpi4py's own, whose order of additions is the library's, and the wires', whose bits
    are equal.

epoch, unhidden
    of a model on a graph (``--graph``), its messages over gloo, and over MPI with and without the thread that moves
    large ones on (``PYG_DIST_MPI_PROGRESS``); and of an epoch the exchange that no product hides.

``--large``: one message of 2**31 + 8 bytes by the wire, whose ends are checked (8 GiB of memory).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import machine
import power_law
import torch
import torch.distributed as dist
import torch.nn.functional as F
from epoch_models import MODELS
from exchange import training
from mpi4py import MPI
from torch import Tensor
from torch_geometric.nn import GCN

import pyg_dist
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.comm.wires.gloo import GlooWire
from pyg_dist.backend.comm.wires.mpi import MpiWire
from pyg_dist.backend.comm.wires.wire import Wire
from pyg_dist.backend.session.settings import MPI_PROGRESS

RESULT = Path(__file__).resolve().parent / "results" / "network.json"
SIZES = (64, 4096, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
TURN_BYTES = 1 << 25
Operation = Callable[[], object]


def main() -> None:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--graph", help=f"{', '.join(power_law.SIZES)}, or a .npz file")
    parser.add_argument("--model", choices=[*MODELS, "small"], default="gcn", help="small: GCN, 2 layers, 16 columns")
    parser.add_argument("--bits", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=5, help="in a turn")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault(MPI_PROGRESS.name, "none")
    pyg_dist.init(wire="mpi")
    wires = {"wire": world_group().wire(torch.zeros(1)), "gloo": GlooWire(dist.group.WORLD)}
    if options.large:
        send_large(wires["wire"])
        return
    rows = [row for num_bytes in options.sizes for row in measure(wires, num_bytes, options.rounds)]
    if options.graph:
        variants = epochs(wires, options.graph, options.model, options.bits)
        rows += turns(0, "epoch", variants, options.rounds, options.epochs)
        rows += turns(0, "unhidden", variants, options.rounds, options.epochs, unhidden)
    if not pyg_dist.is_main():
        return
    library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
    report = {"machine": machine.describe(), "ranks": pyg_dist.world_size(), "library": library, "rows": rows}
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.stdout.write(
        f"{library}, {pyg_dist.world_size()} ranks\n      bytes  operation   variant        median us  over the first\n"
    )
    for row in rows:
        sys.stdout.write(
            f"{row['num_bytes']:11}  {row['operation']:10}  {row['variant']:13}  {row['median_us']:9.1f}  "
            f"{row['median_ratio']:14.2f}\n"
        )


def measure(wires: dict[str, Wire], num_bytes: int, num_rounds: int) -> list[dict[str, Any]]:
    """Of all operations and variants (collective)."""
    repeats = max(1, min(200, TURN_BYTES // (num_bytes * MPI.COMM_WORLD.size)))
    with ExitStack() as stack:
        return [
            *turns(num_bytes, "exchange", exchanges(wires, num_bytes, stack), num_rounds, repeats),
            *turns(num_bytes, "all-to-all", all_to_alls(wires, num_bytes), num_rounds, repeats),
            *turns(num_bytes, "sum", sums(wires, num_bytes), num_rounds, repeats),
        ]


def seconds(run: Operation, repeats: int) -> float:
    """One call's."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def unhidden(run: Operation, repeats: int) -> float:
    """The exchange's in an epoch, with overlap, on the slowest rank."""
    with pyg_dist.profile() as profiled:
        for _ in range(repeats):
            run()
    tables = [profiled.table(rank) for rank in range(len(profiled.seconds))]
    return max(sum(row["exchange"] for row in table) for table in tables) / repeats


def turns(
    num_bytes: int, operation: str, variants: dict[str, Operation], num_rounds: int, repeats: int,
    measured: Callable[[Operation, int], float] = seconds,
) -> list[dict[str, Any]]:  # fmt: skip
    """What variants take that run in turn, one a row (collective)."""
    comm, rows, order = MPI.COMM_WORLD, [], list(variants.items())
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(num_rounds + 1):
        begin = turn % len(variants)  # none is always the one that follows another
        for name, run in (*order[begin:], *order[:begin]):
            comm.Barrier()
            taken = comm.allreduce(measured(run, repeats), MPI.MAX)
            if turn:  # the first opens connections
                times[name].append(taken)
    first = next(iter(times.values()))
    for name, taken in times.items():
        ratio = statistics.median(mine / its for mine, its in zip(taken, first, strict=True))
        median = statistics.median(taken)
        rows.append(
            {
                "num_bytes": num_bytes, "operation": operation, "variant": name,
                "median_us": 1e6 * median, "median_ratio": ratio,
            }
        )  # fmt: skip
    return rows


def exchanges(wires: dict[str, Wire], num_bytes: int, stack: ExitStack) -> dict[str, Operation]:
    """To each other rank and from it."""
    comm = MPI.COMM_WORLD
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    sent, arrived = (torch.zeros(len(others), num_bytes, dtype=torch.uint8) for _ in range(2))
    out, into = sent.numpy(), arrived.numpy()

    def plain() -> None:
        requests = [comm.Irecv(into[k], other, 1) for k, other in enumerate(others)]
        requests += [comm.Isend(out[k], other, 1) for k, other in enumerate(others)]
        MPI.Request.Waitall(requests)

    persistent = [comm.Recv_init(into[k], other, 2) for k, other in enumerate(others)]
    persistent += [comm.Send_init(out[k], other, 2) for k, other in enumerate(others)]

    for request in persistent:
        stack.callback(request.Free)

    def start_all() -> None:
        MPI.Prequest.Startall(persistent)
        MPI.Prequest.Waitall(persistent)

    counts, starts = [num_bytes] * len(others), [k * num_bytes for k in range(len(others))]
    neighbours = comm.Create_dist_graph_adjacent(others, others)
    arguments = [[x.reshape(-1), counts, starts, MPI.BYTE] for x in (out, into)]
    found: dict[str, Operation] = {
        "Isend, Irecv": plain, "Startall": start_all,
        "neighbour": lambda: neighbours.Ineighbor_alltoallv(*arguments).Wait(),
    }  # fmt: skip
    if MPI.VERSION >= 4:
        collective = neighbours.Neighbor_alltoallv_init(*arguments)
        stack.callback(collective.Free)

        def started() -> None:
            collective.Start()
            collective.Wait()

        found["neighbour_init"] = started
    pieces = [(other, k, k + 1) for k, other in enumerate(others)]
    for name, wire in wires.items():
        found[name] = lambda wire=wire: finish(wire.exchange(arrived, sent, pieces, pieces, 3))
    return found


def all_to_alls(wires: dict[str, Wire], num_bytes: int) -> dict[str, Operation]:
    """The dense exchange."""
    comm = MPI.COMM_WORLD
    sent, arrived = (torch.zeros(comm.size, num_bytes, dtype=torch.uint8) for _ in range(2))
    counts, starts, ones = [num_bytes] * comm.size, [r * num_bytes for r in range(comm.size)], [1] * comm.size
    arguments = [[x.view(-1).numpy(), counts, starts, MPI.BYTE] for x in (sent, arrived)]
    found: dict[str, Operation] = {"Ialltoallv": lambda: comm.Ialltoallv(*arguments).Wait()}
    for name, wire in wires.items():
        found[name] = lambda wire=wire: finish(wire.all_to_all(arrived, sent, ones, ones, 4))
    return found


def sums(wires: dict[str, Wire], num_bytes: int) -> dict[str, Operation]:
    """Of float32."""
    comm, x = MPI.COMM_WORLD, torch.zeros(num_bytes // 4)
    total = torch.zeros_like(x).numpy()
    found: dict[str, Operation] = {"Allreduce": lambda: comm.Allreduce(x.numpy(), total)}
    for name, wire in wires.items():
        found[name] = lambda wire=wire: wire.all_reduce(x, "sum", 5)
    return found


def small_training(data: Any) -> Operation:
    """Of a model so small that calls decide."""
    torch.manual_seed(0)
    model = pyg_dist.distribute(GCN(data.num_features, 16, 2, int(data.y.max()) + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> None:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()

    return epoch


def epochs(wires: dict[str, Wire], graph: str, model: str, bits: int) -> dict[str, Operation]:
    """Of one model, whose messages go by one wire or another."""
    os.environ[MPI_PROGRESS.name] = "thread"
    assert isinstance(wires["wire"], MpiWire)
    by_thread = MpiWire(wires["wire"].ranks, timedelta(minutes=10))
    data = pyg_dist.DistributedData(power_law.load(graph), bits=bits)
    run = small_training(data) if model == "small" else training(data, model)

    def over(wire: Wire) -> Operation:
        def epoch() -> None:
            world_group()._wires["cpu"] = wire
            run()
            world_group()._wires["cpu"] = wires["wire"]

        return epoch

    return {"gloo": over(wires["gloo"]), "wire": over(wires["wire"]), "with a thread": over(by_thread)}


def finish(flight: Any) -> None:
    """Wait for all messages."""
    for message in (*flight.arriving.values(), *flight.others):
        message.work.wait()


def send_large(wire: Wire) -> None:
    """From rank 0 to rank 1."""
    num_bytes = (1 << 31) + 8
    x = torch.zeros(num_bytes, dtype=torch.uint8) if wire.rank < 2 else torch.zeros(0, dtype=torch.uint8)
    nothing = torch.zeros(0, dtype=torch.uint8)
    ends: Tensor = torch.arange(1, 5, dtype=torch.uint8)
    began = time.perf_counter()
    if wire.rank == 0:
        x[:4], x[-4:] = ends, ends
        finish(wire.exchange(nothing, x, [(1, 0, num_bytes)], [], 1))
    elif wire.rank == 1:
        finish(wire.exchange(x, nothing, [], [(0, 0, num_bytes)], 1))
        assert torch.equal(x[:4], ends)
        assert torch.equal(x[-4:], ends)
        sys.stdout.write(f"{num_bytes} bytes arrived after {time.perf_counter() - began:.1f} s\n")


if __name__ == "__main__":
    main()
