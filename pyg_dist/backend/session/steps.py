"""Progress of a set-up: its steps with their times in the log, and a bar if rank 0 has a terminal."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from pyg_dist.backend import out_of_memory
from pyg_dist.backend.session.settings import LOG
from pyg_dist.backend.session.state import current, is_main

logger = logging.getLogger("pyg_dist")


class _Bars(list["tqdm[None]"]):
    """The progress bars on the terminal."""


def configure_log() -> None:
    """Write the package's log to stderr if the setting PYG_DIST_LOG has a level. Not collective.

    Raises:
        OptionError: The setting is no level.
    """
    level = LOG.value()
    if level is None:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("pyg_dist: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False  # a script that configures logging, too, would print each line twice


@contextmanager
def set_up(what: str, num_steps: int) -> Iterator[None]:
    """Show a bar of so many :func:`step` in a terminal while the block runs, and log what it took. Not collective."""
    began = time.monotonic()
    has_terminal = is_main() and sys.stderr.isatty()
    bar = tqdm(total=num_steps, desc=what, unit="step", leave=False, disable=not has_terminal)
    bars = current().of(_Bars)
    bars.append(bar)
    try:
        yield
    finally:
        bars.pop()
        bar.close()
    _say("%s: %.1f s in all", what, time.monotonic() - began)


@contextmanager
def step(name: str) -> Iterator[None]:
    """Log, on rank 0, what a step of a set-up takes, and move the bar on. Not collective."""
    began = time.monotonic()
    session = current()
    bars = session.of(_Bars)
    if bars:
        bars[-1].set_postfix_str(name)
    session.steps.append(name)
    try:
        with out_of_memory.explained():
            yield
    finally:
        session.steps.pop()
    if bars:
        bars[-1].update()
    _say("%s: %.1f s", name, time.monotonic() - began)


def _say(message: str, *values: object) -> None:
    if is_main():
        logger.info(message, *values)
