"""The commands of ``python -m pyg_dist``, and :func:`~pyg_dist.cli.profile.profile`."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, by default that of the command line; return the exit status."""
    from pyg_dist.cli.commands import run  # which loads planning and stores: a script that trains needs neither

    return run(arguments)
