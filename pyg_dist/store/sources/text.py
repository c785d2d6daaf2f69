"""Numbers in lines of text, compressed or not, read in blocks by NumPy's tokenizer; errors name the line."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np

from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import Array
from pyg_dist.partition.solver import package

BLOCK = 1 << 20
"""Characters at a time."""
_PIECE = 1 << 13


class Rule(NamedTuple):
    """A replacement in a text before it is parsed."""

    marks: tuple[str, ...]  # only a text with one of these is searched for the pattern, which takes longer
    pattern: re.Pattern[str]  # is replaced
    other: str = ""  # by this


COMMENTS = Rule(("#", "%", "//"), re.compile(r"(?:^|[ \t]+)(?:#|%|//).*", re.MULTILINE))
"""Comments in lines of their own, or behind the numbers."""
QUOTES = Rule(
    ('"', "'"),
    re.compile(r"""(?:^|(?<=[,;|\s]))(["'])[ \t]*([^"'\s,;|]*)[ \t]*\1(?=\s*(?:[,;|\s]|$))""", re.MULTILINE),
    r"\2",
)
"""Quotes around one word."""
_PACKED = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd", ".zstd": "zstd"}
_WHAT = {"i8": "a whole number below 2^63", "f8": "a number"}


def unpacked(path: Path) -> Path:
    """The name without the suffix of a compression that :func:`open_text` undoes."""
    return path.with_suffix("") if path.suffix in _PACKED else path


@contextmanager
def open_text(path: Path) -> Iterator[IO[str]]:
    """The text of a file, unpacked where its name ends in ``.gz``, ``.bz2``, ``.xz`` or ``.zst``."""
    kind = _PACKED.get(path.suffix)
    try:
        with _opened(path, kind) as file:
            # utf-8-sig drops the byte order mark of Windows. Bytes that are no UTF-8 stand mostly in comments.
            yield io.TextIOWrapper(file, encoding="utf-8-sig", errors="replace")
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if kind is None or isinstance(error, FileNotFoundError):
            raise DataError(f"Expected a file to read in {path} (got: {error}): check the name") from error
        raise DataError(f"Expected whole {kind} in {path} (got: {error}): fetch it again") from error


def _opened(path: Path, kind: str | None) -> IO[bytes]:
    if kind != "zstd":
        opened: dict[str | None, Callable[[Path], object]]
        opened = {None: lambda p: p.open("rb"), "gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
        return cast(IO[bytes], opened[kind](path))
    pyarrow = package("pyarrow", f"to unpack {path}", "pyarrow")
    return cast(IO[bytes], pyarrow.input_stream(str(path), compression="zstd"))


def first_lines(path: Path) -> list[str]:
    """The lines at the beginning of a file, comments included, up to some that are no comments."""
    with open_text(path) as file:
        text = more = _read(file, 1 << 16, 0) or "\n"
        while more and not COMMENTS.pattern.sub("", more).strip():
            more = _read(file, 1 << 16, text.count("\n"))
            text += more
    if "\0" in text:
        raise DataError(f"Expected text in {path} (got zero bytes, of UTF-16 or of no text): save it as UTF-8")
    return text.removesuffix("\n").split("\n")


def counted(columns: int) -> str:
    """A number of columns, in words."""
    return f"{columns} column{'s' * (columns != 1)}"


def _read(file: IO[str], num_chars: int, done: int) -> str:
    """The next lines, about ``num_chars`` characters; errors name the last line read, counted after ``done`` others."""
    pieces, num_read = [], 0
    try:
        while num_read < num_chars and (piece := file.read(_PIECE)):
            pieces.append(piece)
            num_read += len(piece)
        return "".join([*pieces, file.readline()])
    except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        lines = done + sum(piece.count("\n") for piece in pieces)
        raise type(error)(f"it breaks off after line {lines}: {error}") from error


@dataclass(frozen=True)
class Rows:
    """Consecutive lines of numbers; empty ones are left out."""

    values: Array  # a record for each line, ``[lines]``
    path: Path  # the file
    done: int  # lines before these
    lines: list[str]  # these, and empty ones

    def line(self, number: int) -> int:
        """The number of a line in the file, from 1."""
        return self.done + [k for k, line in enumerate(self.lines, 1) if line and not line.isspace()][number]

    def place(self, number: int) -> str:
        """Where a line stands, in words."""
        return f"{self.path}, line {self.line(number)}"


@dataclass(frozen=True)
class Table:
    """A file whose lines are records of numbers. Empty lines are passed over."""

    path: Path  # the file
    # names and NumPy types of all columns of a line: ``"i8"``, ``"f8"``, or ``"U1"`` for one left out
    columns: tuple[tuple[str, str], ...]
    separator: str | None = None  # of columns; None: white space
    head: int = 0  # lines to pass over at the beginning
    rules: tuple[Rule, ...] = (COMMENTS, QUOTES)  # substitutions before lines are parsed
    remedy: str = "mend or drop the line"  # of the error about lines of another number of columns

    def rows(self, block: int = BLOCK) -> Iterator[Rows]:
        """All lines."""
        for done, lines in self.blocks(block):
            kept = [line for line in lines if line and not line.isspace()]
            if kept:
                rows = Rows(np.empty(0), self.path, done, lines)
                try:
                    values = self._parsed(kept)
                except ValueError:
                    self._refuse(kept, rows)
                    raise
                yield replace(rows, values=values)

    def blocks(self, block: int = BLOCK) -> Iterator[tuple[int, list[str]]]:
        """The number of lines before, and the next lines."""
        done = 0
        with open_text(self.path) as file:
            for _ in range(self.head):
                file.readline()
                done += 1
            while text := _read(file, block, done):
                lines = self.plain(text).split("\n")
                if not lines[-1]:
                    lines.pop()
                yield done, lines
                done += len(lines)

    def plain(self, text: str) -> str:
        """The text after all replacements."""
        for rule in self.rules:
            if any(mark in text for mark in rule.marks):
                text = rule.pattern.sub(rule.other, text)
        return text

    def _parsed(self, lines: list[str]) -> Array:
        quote = '"' if self.separator is not None and any('"' in line for line in lines) else None
        columns = list(self.columns)
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)  # of floats where integers go: older NumPy rounds them
            return np.loadtxt(lines, columns, comments=None, delimiter=self.separator, quotechar=quote, ndmin=1)

    def _refuse(self, lines: list[str], rows: Rows) -> None:
        """Raise the error of the first line that cannot be parsed."""
        for number, line in enumerate(lines):
            try:
                self._parsed([line])
            except ValueError as error:
                found = re.search(r"convert string (.*) to .* column (\d+)", str(error))
                expected, got, remedy = counted(len(self.columns)), repr(line.strip()[:60]), self.remedy
                if found is not None:
                    name, kind = self.columns[int(found[2]) - 1]
                    expected, got = f"{_WHAT[kind]} as {name}", f"{found[1]} in {got}"
                    remedy = "mend or drop the line"
                raise DataError(f"Expected {expected} in {rows.place(number)} (got {got}): {remedy}") from None


def same_columns(path: Path, kind: str, count: int) -> Table:
    """A table of commas whose columns are all of one type."""
    return Table(path, tuple((f"column {k + 1}", kind) for k in range(count)), ",", rules=())


def matrix(rows: Rows) -> Array:
    """Rows of such a table as ``[lines, columns]``."""
    whole: Array = rows.values.view(rows.values.dtype[0]).reshape(len(rows.values), -1)
    return whole
