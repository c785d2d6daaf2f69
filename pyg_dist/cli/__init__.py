"""The command line, ``python -m pyg_dist COMMAND``, and :func:`~pyg_dist.cli.profile.profile`.

``partition`` writes a store, of which each rank reads its part; ``plan`` prints the messages, work, memory and cost of
training on P ranks; ``simulate`` estimates the cost from the number of nodes and edges alone; ``bench`` measures the
machine for both; ``doctor`` prints the kernels, devices and versions in use. Each command is a module here.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from tqdm import tqdm

from pyg_dist.errors import PygDistError

_PIPE_CLOSED = 128 + signal.SIGPIPE
"""A shell's exit status of a program that wrote to a closed pipe."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the command line; return the exit status."""
    # Imported here, since a script that trains needs neither planning nor stores.
    from pyg_dist import __version__
    from pyg_dist.cli import bench, doctor, partitioning, planning, simulation

    parser = argparse.ArgumentParser(prog="python -m pyg_dist", description="The command line of pyg_dist.")
    parser.add_argument("--version", action="version", version=f"pyg_dist {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (partitioning, planning, simulation, bench, doctor):
        command.add_command(commands)
    args = parser.parse_args(arguments)
    try:
        with _warnings_as_lines(args.command):
            args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed the pipe. Python would fail again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    except (PygDistError, OSError) as error:
        print(f"pyg_dist {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


@contextmanager
def _warnings_as_lines(command: str) -> Iterator[None]:
    """Context in which warnings are printed as one line each on stderr, above progress bars, like errors."""

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: TextIO | None = None, line: str | None = None,
    ) -> None:  # fmt: skip
        tqdm.write(f"pyg_dist {command}: {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
