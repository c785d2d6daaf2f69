"""``python -m pyg_dist bench``: measure this machine's constants and store them for the planner.

Alone it starts a few loopback ranks for the network; under torchrun or mpirun it measures among those. Collective.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import torch

from pyg_dist.backend import calibration, host
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.comm.topology import machines
from pyg_dist.backend.comm.wires.wire import carrier
from pyg_dist.backend.session import session
from pyg_dist.cli.inputs import DEVICES, Commands
from pyg_dist.errors import LaunchError, OptionError
from pyg_dist.pricing.machine import Machine, machine_file

LOOPBACK_RANKS = 4
"""With fewer ranks all groups have one size, and the cost of a call cannot be told from the cost of a partner."""


def add_command(commands: Commands) -> None:
    """Add ``bench`` to the command line."""
    parser = commands.add_parser("bench", help="measure this machine's constants for plan, simulate and layout='auto'")
    parser.set_defaults(run=run)
    parser.add_argument("what", nargs="?", choices=["all", "rates", "network"], default="all",
                        help="rates: products and copies, one process; network: messages between ranks")  # fmt: skip
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where products and messages are; "
                        "constants are kept by device")  # fmt: skip
    parser.add_argument(
        "--output",
        type=Path,
        help=f"where to keep them; default: {machine_file()}, and machine.cuda.json, machine.mpi.json there",
    )
    parser.add_argument("--json", action="store_true", help="print the constants as JSON")


def run(args: argparse.Namespace) -> None:
    """Measure, merge with the stored constants, store, and print on rank 0."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("Expected a GPU for --device cuda (got none that torch finds): see python -m pyg_dist doctor")
    num_ranks = LOOPBACK_RANKS if args.device == "cpu" else torch.cuda.device_count()
    if session.world_size() == 1 and args.what != "rates" and num_ranks > 1:
        _start_loopback_ranks(args, num_ranks)
        return
    session.init()
    if args.device == "cpu":
        torch.set_num_threads(1)  # the constants are of one core per rank
    path = machine_file(args.device, carrier()) if args.output is None else args.output
    machine, remarks = Machine.default(args.device), []
    kept = [path] if args.output else [path, machine_file(args.device)]
    known = next(filter(Path.exists, kept), None)
    if known is not None:
        try:
            machine = replace(Machine.load(known), device=args.device)
        except OptionError:
            remarks.append(f"what {known} held was not a machine's constants: those not measured now are the defaults")
    if args.what != "network":
        machine = measure_rates(machine, remarks)
    if args.what != "rates" and world_group().size == num_ranks == 1:
        remarks.append("messages: not measured, there is one GPU; the constants are assumed")
    elif args.what != "rates":
        machine = measure_network(machine, remarks)
    day, kind = datetime.now(timezone.utc).date(), "cores" if args.device == "cpu" else torch.cuda.get_device_name()
    source = f"measured {day}, {args.what}, {machine.cores} {kind}, {world_group().size} ranks by {carrier()}"
    machine = replace(machine, source=source)
    if session.is_main():
        machine.save(path)
        if args.json:
            print(json.dumps(asdict(machine)))
        else:
            print(*remarks, *(f"{name:<16} {value}" for name, value in asdict(machine).items()), sep="\n")
            print(f"stored in {path}")


def measure_rates(machine: Machine, remarks: list[str]) -> Machine:
    """The machine with measured rates of products and copies, while all cores do the same (collective)."""
    world, device = world_group(), torch.device(machine.device)
    cores = _num_workers(machine)
    measures = session.local_rank() < cores
    fit = calibration.fit_spmm(calibration.spmm_samples(device=device)) if measures else None
    rates = [0.0, 0.0, 0.0]
    if measures:
        rates = [f(device=device) for f in (calibration.gemm_rate, calibration.stream_rate, calibration.quantize_rate)]
    if fit is not None:
        remarks.append(
            f"sparse products: held-out R2 {fit.r2:.2f} over 70/30 splits (Plexus' terms {fit.r2_of_paper:.2f})"
        )
    numbers = host.tensor([*(fit.coefficients if fit else (0.0,) * 3), *rates, float(measures)]).double()
    *sums, count = world.all_reduce_(numbers).tolist()
    a, b, c, dense, stream, quantize = (value / count for value in sums)
    measured = {"gemm_rate": dense, "stream_rate": stream, "quantize_rate": quantize, "cores": cores}
    return replace(machine, spmm=(a, b, c), **measured)


def measure_network(machine: Machine, remarks: list[str]) -> Machine:
    """The machine with measured messages inside and between machines, of two ranks or more (collective)."""
    world = world_group()
    if world.size < 2:
        raise LaunchError("Expected two ranks or more (got 1): torchrun --nproc-per-node 4 -m pyg_dist bench network")
    machine_of = machines()
    on_each = machine_of.count(machine_of[0])
    # A launch on one machine gives a lower bound of the ranks per machine; one on several gives the number.
    ranks_per_node = on_each if on_each < world.size else max(on_each, machine.ranks_per_node)
    machine = replace(machine, ranks_per_node=ranks_per_node, cores=_num_workers(machine))
    device = torch.device(machine.device)
    inside, between = (
        calibration.network_samples(world, calibration.groupings(machine_of, is_inside), device=device)
        for is_inside in (True, False)
    )
    # Where ranks share cores, others use the time in which one waits: a message costs its processor time.
    by_processor = machine.device == "cpu" and (on_each > machine.cores or not len(inside))
    if by_processor and len(between):  # a group of all ranks, since pairs cannot tell the cost of a call and a message
        everyone = calibration.network_samples(world, [[list(range(world.size))]], device=device)
        inside = np.concatenate([inside, between, everyone])
    if len(inside):
        fit = calibration.fit_network(inside, by_processor)
        of = "processor time of messages" if by_processor else "messages inside a machine"
        remarks.append(f"{of}: R2 {fit.r2:.2f} of {len(inside)} sizes")
        machine = replace(machine, call_seconds=fit.call, intra_latency=fit.latency, intra_bandwidth=fit.bandwidth)
    if not len(between):
        remarks.append("messages between machines: not measured, all ranks are on one; the constants are assumed")
        return machine
    fit = calibration.fit_network(between)
    remarks.append(f"messages between machines: R2 {fit.r2:.2f} of {len(between)} sizes")
    return replace(machine, inter_latency=fit.latency, inter_bandwidth=fit.bandwidth * on_each)


def _num_workers(machine: Machine) -> int:
    """The cores or GPUs of a machine that can run at the same time (collective)."""
    return torch.cuda.device_count() if machine.device == "cuda" else calibration.num_cores(world_group(), machines())


def _start_loopback_ranks(args: argparse.Namespace, num_ranks: int) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += ["-m", "pyg_dist", "bench", args.what, "--device", args.device]
    command += [*(["--output", str(args.output)] if args.output else []), *(["--json"] if args.json else [])]
    ended = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    if ended.returncode:
        raise LaunchError(f"Expected {num_ranks} loopback ranks to measure the network (they ended with status "
                          f"{ended.returncode}): their message stands above")  # fmt: skip
