"""Numbers in lines of text, compressed or not, read in blocks; errors name the line."""

from __future__ import annotations

import gzip
import warnings
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from pyg_dist.errors import DataError

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 1 << 22
_COMMENTS = b"#%"
_SPACE = 32
"""Bytes up to here separate numbers; commas are turned into spaces."""


@dataclass(frozen=True)
class Lines:
    """Consecutive lines of numbers.

    Attributes:
        values: ``[lines, columns]``.
        number: of each line in the file, from 1: ``[lines]``.
    """

    values: Array
    number: Array


def open_text(path: Path) -> BinaryIO:
    """The bytes of a file; of what it holds, where the name ends in ``.gz``."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def number_lines(
    path: Path, dtype: type[np.generic], columns: int | None = None, skip: int = 0, block_bytes: int = BLOCK_BYTES
) -> Iterator[Lines]:
    """The lines of a file; comments (``#``, ``%``) and empty lines are left out.

    Args:
        path: text, or text in gzip.
        dtype: int64 or float64.
        columns: numbers in a line; None: as many as in the first.
        skip: lines to leave out at the beginning.
        block_bytes: of text at a time.

    Raises:
        DataError: The file cannot be read, or a line has something else in it.
    """
    done = 0
    for text in _blocks(path, block_bytes):
        if done < skip:
            lines = text.split(b"\n")
            dropped = min(skip - done, len(lines) - 1)
            text, done = b"\n".join(lines[dropped:]), done + dropped
        if not text:
            continue
        text = text.replace(b",", b" ")
        is_plain = not any(mark in text for mark in (b"#", b"%"))
        found = _parsed(text, dtype, columns) if is_plain else None
        num_lines = text.count(b"\n")
        if found is None:
            kept = _kept(text)
            number = np.array([place for place, _ in kept], np.int64) + done + 1
            if kept:
                found = _parsed(b"\n".join(line for _, line in kept) + b"\n", dtype, columns)
                if found is None:
                    _explain(path, kept, dtype, columns, done)
        else:
            number = np.arange(done + 1, done + 1 + len(found))
        if found is not None:
            columns = found.shape[1]
            yield Lines(found, number)
        done += num_lines


def _blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """Whole lines."""
    rest, done = b"", 0
    try:
        with open_text(path) as file:
            while block := file.read(block_bytes):
                cut = block.rfind(b"\n") + 1
                if not cut:
                    rest += block
                    continue
                yield rest + block[:cut]
                done += block.count(b"\n")
                rest = block[cut:]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            f"Expected whole gzip in {path} (it breaks off after line {done}: {error}): fetch it again"
        ) from error
    except OSError as error:
        raise DataError(
            f"Expected a file to read in {path} (got: {error.strerror or error}): check the name"
        ) from error
    if rest:
        yield rest + b"\n"


def _parsed(text: bytes, dtype: type[np.generic], columns: int | None) -> Array | None:
    """The numbers ``[lines, columns]``; None: not every line has as many, or one has something else."""
    content = np.frombuffer(text, np.uint8)
    is_space = content <= _SPACE
    begins = ~is_space
    begins[1:] &= is_space[:-1]
    starts, ends = begins.nonzero()[0], (content == ord("\n")).nonzero()[0]
    if columns is None:
        columns = int(np.searchsorted(starts, ends[0]))
    if columns == 0 or len(starts) != columns * len(ends):
        return None
    if not ((starts[columns - 1 :: columns] < ends).all() and (starts[columns::columns] > ends[:-1]).all()):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what NumPy before 2.3 says of text that holds no numbers
            values = np.fromstring(text, dtype, sep=" ")
    except (ValueError, DeprecationWarning):
        return None
    return values.reshape(-1, columns) if len(values) == len(starts) else None


def _kept(text: bytes) -> list[tuple[int, bytes]]:
    """The lines that are neither empty nor comments, with their places."""
    lines = text.split(b"\n")[:-1]
    return [(place, line) for place, line in enumerate(lines) if line.strip() and line.lstrip()[0] not in _COMMENTS]


def _explain(
    path: Path, kept: list[tuple[int, bytes]], dtype: type[np.generic], columns: int | None, done: int
) -> NoReturn:
    """Raise the error of the first line that is wrong."""
    wanted = "whole numbers" if dtype is np.int64 else "numbers"
    columns = len(kept[0][1].split()) if columns is None else columns
    for place, line in kept:
        if _parsed(line + b"\n", dtype, columns) is None:
            shown = line.decode(errors="replace")[:60]
            raise DataError(
                f"Expected {columns} {wanted} in {path}, line {done + place + 1} (got {shown!r}): mend or drop the line"
            )
    raise DataError(f"Expected lines of {columns} {wanted} in {path} (got others): check the file")
