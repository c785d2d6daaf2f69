"""Arrays in an ``.npz`` file, streamed from the zip without loading them whole."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from pyg_dist.errors import DataError

Array = np.ndarray[Any, Any]

_COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Member:
    """One array.

    Attributes:
        path: the ``.npz`` file.
        name: of the array.
        dtype: its type.
        shape: its shape.
        is_fortran: whether its first index runs fastest.
    """

    path: Path
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_fortran: bool

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    def pieces(self, num_bytes: int, first: int = 0) -> Iterator[Array]:
        """Consecutive rows from row ``first`` on, about ``num_bytes`` at a time.

        Raises:
            DataError: The zip is damaged.
        """
        if self.is_fortran and len(self.shape) > 1:
            yield from self._turned(num_bytes, first)
            return
        step = max(1, num_bytes // max(self.row_bytes, 1))
        with _reading(self.path), zipfile.ZipFile(self.path) as archive, _stream(archive, self.name) as (stream, *_):
            stream.seek(first * self.row_bytes, os.SEEK_CUR)
            for low in range(first, self.shape[0], step):
                yield self._read(stream, min(step, self.shape[0] - low))

    def _turned(self, num_bytes: int, first: int) -> Iterator[Array]:
        """Rows of an array whose columns lie one after another: it is unpacked to a temporary file first."""
        with tempfile.TemporaryFile() as file:
            with (
                _reading(self.path),
                zipfile.ZipFile(self.path) as archive,
                _stream(archive, self.name) as (stream, *_),
            ):
                shutil.copyfileobj(stream, file, _COPY_BYTES)
            file.flush()
            step = max(1, num_bytes // max(self.row_bytes, 1))
            for low in range(first, self.shape[0], step):  # mapped anew for each piece: pages are let go
                whole = np.memmap(file, self.dtype, "r", shape=self.shape, order="F")
                yield np.ascontiguousarray(whole[low : low + step])
                del whole

    def _read(self, stream: IO[bytes], count: int) -> Array:
        content = stream.read(count * self.row_bytes)
        if len(content) != count * self.row_bytes:
            raise DataError(f"Expected all of '{self.name}' in {self.path} (it breaks off): fetch it again")
        return np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])

    def array(self) -> Array:
        """All of it, in memory."""
        with _reading(self.path), np.load(self.path, allow_pickle=False) as file:
            whole: Array = file[self.name]
        return whole


def members(path: Path) -> dict[str, Member]:
    """The arrays of a file by name; only their headers are read.

    Raises:
        DataError: It is no ``.npz`` file, or holds Python objects.
    """
    found = {}
    with _reading(path), zipfile.ZipFile(path) as archive:
        for entry in archive.namelist():
            name = entry.removesuffix(".npy")
            with _stream(archive, name) as (_, shape, is_fortran, dtype):
                if dtype.hasobject:
                    raise DataError(
                        f"Expected numbers as '{name}' in {path} (got Python objects): they are not unpickled"
                    )
                found[name] = Member(path, name, dtype, shape, is_fortran)
    return found


@contextmanager
def _stream(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], bool, np.dtype[Any]]]:
    with archive.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        yield stream, *read(stream)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"Expected a file in {path} (there is none): check the name") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"Expected an .npz file in {path} (got: {error}): fetch it again") from error
