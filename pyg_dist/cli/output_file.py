"""Output files of commands, checked before the work starts."""

from __future__ import annotations

from pathlib import Path

from pyg_dist.errors import OptionError

SUFFIXES = (".png", ".svg", ".pdf")


def require_drawable(path: Path | None) -> None:
    """Refuse a file that matplotlib could not write in the end; None is no file. Not collective.

    Raises:
        OptionError: Its name ends otherwise than in :data:`SUFFIXES`, or its folder does not exist.
    """
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(f"Expected --plot with a name that ends in {', '.join(SUFFIXES)} (got {path.name!r})")
    require_folder("--plot", path)


def require_folder(option: str, path: Path | None) -> None:
    """Refuse a file in a folder that does not exist; None is no file. Not collective."""
    if path is not None and not path.parent.is_dir():
        raise OptionError(f"Expected {option} in a folder that exists (got {path.parent})")
