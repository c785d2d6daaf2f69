"""Edges as a table in a file with types: a NumPy array, or Parquet, read with pyarrow in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import Array
from pyg_dist.partition.solver import package
from pyg_dist.store.format import dtype_name
from pyg_dist.store.source import EDGE_WEIGHT, Attribute, EdgeChunk, Source, edge_place
from pyg_dist.store.sources.edge_list import ASK, SOURCE, TARGET, WEIGHT, given_roles, roles_of


def mapped(path: Path) -> Array:
    """The array of an ``.npy`` file, of which a page is read when it is used."""
    try:
        whole: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"Expected a NumPy array in {path} (got: {error}): write it with numpy.save") from error
    return whole


class ArrayEdges(Source):
    """An ``.npy`` file of integers, ``[2, E]`` or ``[E, 2]``; of two edges it is read as ``[2, E]``."""

    num_edges: int

    def open(self) -> None:
        path = self.path
        whole = mapped(path)
        if whole.ndim != 2 or 2 not in whole.shape or whole.dtype.kind not in "iu":
            raise DataError(
                f"Expected integers [2, E] or [E, 2] in {path} (got {whole.dtype} {list(whole.shape)}): one column per "
                f"edge"
            )
        self.is_wide = whole.shape[0] == 2
        self.num_edges = whole.shape[1 if self.is_wide else 0]
        self.first_id = self.reading.first_id or 0
        self.understood = f"an array [{'2, E' if self.is_wide else 'E, 2'}]; ids from {self.first_id}"

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        for low in range(0, self.num_edges, size):
            whole = mapped(self.path)  # anew for each piece: pages are let go
            ends = (whole if self.is_wide else whole.T)[:, low : low + size].astype(np.int64) - self.first_id
            yield EdgeChunk(ends[0], ends[1], {}, edge_place(self.path, low))


class Parquet(Source):
    """A table with a row per edge; columns are known by their names, or, if there are two, by their order."""

    def open(self) -> None:
        path, reading = self.path, self.reading
        pyarrow = package("pyarrow", f"to read {path}", "pyarrow")
        parquet = package("pyarrow.parquet", f"to read {path}", "pyarrow")
        try:
            self.file = parquet.ParquetFile(path)
            names = list(self.file.schema_arrow.names)
            self.num_edges = int(self.file.metadata.num_rows)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"Expected a Parquet file in {path} (got: {error}): fetch it again") from error
        if reading.columns is not None:
            roles = given_roles(reading.columns, len(names))
        else:
            columns = [k for k, name in enumerate(names) if not name.startswith("__index_level")]  # of pandas
            pair = dict(zip(columns, (SOURCE, TARGET), strict=False)) if len(columns) == 2 else {}
            roles = roles_of(names) or [pair.get(k) for k in range(len(names)) if pair]
        if not roles:
            raise DataError(f"Expected columns source and target in {path} (got {', '.join(names)}): {ASK}")
        self.columns = {role: name for role, name in zip(roles, names, strict=True) if role is not None}
        for role, name in self.columns.items():
            if self._dtype(role).kind not in ("iuf" if role == WEIGHT else "iu"):
                raise DataError(
                    f"Expected numbers as {role} in column '{name}' of {path} (got "
                    f"{self.file.schema_arrow.field(name).type}): number the nodes from 0, or choose by --columns"
                )
        if WEIGHT in self.columns:
            self.edges = (Attribute(EDGE_WEIGHT.name, dtype_name(self._dtype(WEIGHT))),)
        self.first_id = reading.first_id or 0
        left_out = [name for name in names if name not in self.columns.values()]
        more = f" ({', '.join(left_out)} left out)" if left_out else ""
        shown = ", ".join(f"{name} as {role}" for role, name in self.columns.items())
        self.understood = f"columns {shown}{more}; ids from {self.first_id}"

    def _dtype(self, role: str) -> np.dtype[np.generic]:
        found: np.dtype[np.generic] = np.dtype(self.file.schema_arrow.field(self.columns[role]).type.to_pandas_dtype())
        return found

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        low = 0
        for batch in self.file.iter_batches(size, columns=list(self.columns.values())):
            found = {}
            for role, name in self.columns.items():
                column = batch.column(name)
                if column.null_count:
                    raise DataError(
                        f"Expected a number in each row of column '{name}' of {self.path} (got {column.null_count} "
                        f"nulls in rows {low} to {low + len(batch) - 1}): drop these rows"
                    )
                found[role] = column.to_numpy()
            weight = {EDGE_WEIGHT.name: found[WEIGHT]} if WEIGHT in found else {}
            source, target = (found[role].astype(np.int64) - self.first_id for role in (SOURCE, TARGET))
            yield EdgeChunk(source, target, weight, edge_place(self.path, low))
            low += len(batch)
