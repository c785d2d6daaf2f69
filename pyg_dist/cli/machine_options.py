"""``--machine`` and ``--device``: whose constants a command prices by."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyg_dist.errors import OptionError
from pyg_dist.pricing.machine import Machine

DEVICES = ("cpu", "cuda")


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add both."""
    parser.add_argument("--machine", type=Path, help="constants of `bench`; default: those measured here")
    parser.add_argument("--device", choices=DEVICES, help="where products and messages are; default: cpu, or the one "
                        "of the constants")  # fmt: skip


def machine_of(args: argparse.Namespace) -> Machine:
    """The constants that were asked for: of a file, measured here for the device, or assumed of it.

    Raises:
        OptionError: They are of another device.
    """
    machine = Machine.load(args.machine, args.device or "cpu")
    if args.device not in (None, machine.device):
        raise OptionError(
            f"Expected constants of {args.device} for --device {args.device} (got those of {machine.device}): measure "
            f"them with `python -m pyg_dist bench --device {args.device}`, or leave the option out"
        )
    return machine
