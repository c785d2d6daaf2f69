"""Edges as a table: lines of text, whose separator, header and columns the first lines tell; or Parquet.

Commands print how a file was understood.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from pyg_dist.errors import DataError, OptionError, UnsupportedError
from pyg_dist.partition.inputs import Array
from pyg_dist.partition.solver import package
from pyg_dist.store.format import dtype_name
from pyg_dist.store.source import EDGE_WEIGHT, Attribute, EdgeChunk, FileSource, edge_place
from pyg_dist.store.sources.text import COMMENTS, QUOTES, Rows, Rule, Table, counted, first_lines

SOURCE, TARGET, WEIGHT = "source", "target", "weight"
_NAMES = {
    SOURCE: {"source", "src", "from", "u", "1", "a", "i"},
    TARGET: {"target", "dst", "dest", "destination", "to", "v", "2", "b", "j"},
    WEIGHT: {"weight", "weights", "w", "edgeweight", "rating", "sign"},
}
TIMES = 10**8
"""Numbers from here on, in an unnamed third column, are times: seconds since 1970, of 1973 and later."""
_MANY = 100
"""With so many lines an ascending column is no accident."""

_KONECT = re.compile(r"%\s*(sym|asym|bip)\s+([a-z]+)")
_BRACES = Rule(("{",), re.compile(r"\{[^{}\n]*\}"))
_WEIGHT_IN_BRACES = Rule(("{",), re.compile(r"\{[^{}\n]*?['\"]weight['\"]\s*:\s*([^,}\s]+)[^{}\n]*\}"), r"\1")
_KINDS = {SOURCE: "i8", TARGET: "i8", WEIGHT: "f8", None: "U1"}
_REMEDY = "mend the line; make edges of an adjacency list, and name a file in METIS' format .graph"
ASK = "say which is which, such as --columns source,target,weight (any other word leaves a column out)"


class TextEdges(FileSource):
    """A line for each edge: source and target, numbered from 0, and perhaps a weight.

    Columns are separated by ``;`` ``,`` ``|``, tabs or white space; a header, or a comment above the edges, may name
    them, and so may :attr:`Reading.columns`. What is in braces behind an edge is networkx's: its ``weight`` is used.
    KONECT's first line names its columns. Of three unnamed columns the last one is a weight. If all of it is
    :data:`TIMES` or more, it is left out; whole numbers that look like times or neighbours are refused. A first line
    may count nodes and edges.
    """

    def open(self) -> None:
        path, reading = self.path, self.reading
        lines = first_lines(path)
        self.konect = _KONECT.match(lines[0])
        text = "\n".join(lines)
        rules = [_WEIGHT_IN_BRACES] if _WEIGHT_IN_BRACES.pattern.search(text) else []
        table = Table(path, (), rules=(*rules, _BRACES, COMMENTS, QUOTES), remedy=_REMEDY)
        plain = table.plain(text).split("\n")
        body = [(number, line) for number, line in enumerate(plain, 1) if line.strip()]
        if not body:
            raise DataError(f"Expected edges in {path} (got an empty file): give a line for each edge")
        separator = _separator([line for _, line in body])
        fields = [_fields(line, separator) for _, line in body]
        names, head = self._names(lines, body, fields)
        if len(body) <= head:
            raise DataError(f"Expected edges in {path} (got a header alone): give a line for each edge")
        self.may_be_metis = not (names or reading.columns or self.konect or head)
        self.first_id = reading.first_id if reading.first_id is not None else int(self.konect is not None)
        self.notes: list[str] = []
        below = Table(path, (), separator, body[0][0], table.rules, _REMEDY)
        if self.may_be_metis and self._counts(body, fields, below):
            self.may_be_metis, head = False, 1
        samples = fields[head:]
        for (number, line), row in zip(body[head:], samples, strict=True):
            if len(row) != len(samples[0]):
                got = f"got {line.strip()[:60]!r}"
                raise DataError(f"Expected {counted(len(samples[0]))} in {path}, line {number} ({got}): {_REMEDY}")
        self._first_line = body[head][0]
        roles = self._roles(names, samples, bool(rules))
        columns = ((role or f"column {k}", _KINDS[role]) for k, role in enumerate(roles, 1))
        self.table = replace(below, columns=tuple(columns), head=below.head if head else 0)
        self.edges = (EDGE_WEIGHT,) if WEIGHT in roles else ()
        self.is_mirrored = self.konect is not None and self.konect[1] == "sym"
        if self.is_mirrored:
            self.notes.append("each edge stands for both directions")
        self.understood = "; ".join([self._shown(roles, names), f"ids from {self.first_id}", *self.notes])

    def _names(
        self, lines: list[str], body: list[tuple[int, str]], fields: list[list[str]]
    ) -> tuple[list[str] | None, int]:
        """The columns' names, if there are any, and the number of headers: none or one."""
        if (not fields[0][0] and len(fields[0]) > 2) or any(_is_word(field) for field in fields[0][:2]):
            return fields[0], 1
        above = lines[body[0][0] - 2] if body[0][0] > 1 else ""  # as in "# FromNodeId ToNodeId"
        words = re.split(r"[\s,;]+", above.strip().lstrip("#%/ \t"))
        return (words, 0) if len(words) == len(fields[0]) and roles_of(words) else (None, 0)

    def _counts(self, body: list[tuple[int, str]], fields: list[list[str]], below: Table) -> bool:
        """Whether the first line counts nodes and edges: as many lines follow, whose ids are in range (then noted).

        As an edge it would join nodes of which one, and others between the two, have no other edge. A line that could
        be both is refused. Only a file whose first line may be such a count is read further than its first block.
        """
        (line, text), widths = body[0], {len(row) for row in fields[1:]}
        given = re.split(r"[\s,;|]+", text.strip(" \t\r,;|"))
        is_possible = 2 <= len(given) <= 3 and all(re.fullmatch(r"\d{1,18}", field) for field in given)
        if not is_possible or len(widths) != 1 or (width := min(widths)) < 2:
            return False
        nodes, *others = map(int, given)
        is_apart = len(fields[0]) != width
        if len(given) == 3 and not is_apart:  # rows, columns and entries of a matrix
            others = others[1:] if others[0] == nodes else []
        if not nodes or not others:
            return False
        count, low, high = 0, nodes, 0
        columns = (SOURCE, "i8"), (TARGET, "i8"), *((f"column {k}", "U1") for k in range(3, width + 1))
        for rows in replace(below, columns=columns).rows():
            ends = np.stack([rows.values[SOURCE], rows.values[TARGET]])
            count, low, high = count + ends.shape[1], min(low, int(ends.min())), max(high, int(ends.max()))
            if count > max(others) or low < 0 or high > nodes:
                return False
        first = self.first_id if self.reading.first_id is not None else int(high == nodes)
        if count not in others or not first <= low <= high < nodes + first:
            return False
        if len(given) == 2:
            is_edge_too = nodes + first >= count - 1
        else:  # with a whole number as its weight, like those below
            is_edge_too = not is_apart and all(re.fullmatch(r"\d+", row[2]) for row in fields[1:])
        if is_edge_too and not is_apart:
            follows, is_metis = fields[1][0] == fields[0][1], first == 1 and nodes == count
            if follows or is_metis:
                return False
            raise DataError(
                f"Expected edges in {self.path}, line {line} (got {text.strip()!r}, which is an edge, or counts the "
                f"nodes and edges below): take the line out, or, if it is an edge, give --columns source,target"
                f"{',weight' * (width > 2)}"
            )
        self.num_nodes, self.num_edges, self.first_id = nodes, count, first
        self.notes.append(f"line {line} counts nodes and edges")
        return True

    def _roles(self, names: list[str] | None, samples: list[list[str]], is_attributed: bool) -> list[str | None]:
        width = len(samples[0])
        used = max(k + 1 for k in range(width) if k == 0 or any(row[k] for row in samples))  # the last may be empty

        def padded(*roles: str | None) -> list[str | None]:
            return [*roles, *[None] * (width - len(roles))]

        if self.reading.columns is not None:
            return given_roles(self.reading.columns, width)
        if self.konect is not None:
            return padded(SOURCE, TARGET, self._konect_weight())[:width]
        if names is not None:
            names = [*names, *[""] * width][:width]
            if found := roles_of(names):
                return found
            first = int(not names[0])  # an index
            if used - first == 2:
                return padded(*[None] * first, SOURCE, TARGET)
        elif used == 2:
            return padded(SOURCE, TARGET)
        elif used == 3:
            return padded(SOURCE, TARGET, WEIGHT if is_attributed else self._third(samples))
        got = counted(used) + (f" named {', '.join(names)}" if names else "")
        raise DataError(f"Expected 'source target' or 'source target weight' in {self.path}, line 1 (got {got}): {ASK}")

    def _konect_weight(self) -> str | None:
        """The role of the third column, by KONECT's first line."""
        kind, weights = self.konect.groups() if self.konect else ("", "")
        if kind == "bip" or weights == "dynamic":
            raise UnsupportedError(
                f"Expected edges within one set of nodes, none removed, in {self.path}, line 1 (got {kind} {weights}): "
                f"write the graph that you mean as 'source target' lines"
            )
        return None if weights == "unweighted" else WEIGHT

    def _third(self, samples: list[list[str]]) -> str | None:
        third = np.array([_number(row[2]) for row in samples])
        if np.isnan(third[0]) and samples[0][2].lower() != "nan":
            got = f"got {samples[0][2]!r}"
            raise DataError(f"Expected a number as weight in {self.path}, line {self._first_line} ({got}): {ASK}")
        if (third >= TIMES).all():
            self.notes.append("numbers of 10^8 and more are times")
            return None
        if not all(re.fullmatch(r"[+-]?\d+", row[2]) for row in samples):
            return WEIGHT
        try:
            ends = np.array([[int(field) for field in row[:2]] for row in samples])
        except (ValueError, OverflowError):
            return WEIGHT  # the line is named when it is read
        is_once = len(ends) == len(np.unique(ends[:, 0])) and 0 <= third.min() < third.max() <= ends.max()
        is_sorted = len(ends) >= _MANY and third[0] < third[-1] and (third[1:] >= third[:-1]).all()
        if is_once or is_sorted:
            what = "neighbours, each node stands first in one line" if is_once else "times, they never decrease"
            raise DataError(
                f"Expected 'source target weight' in {self.path} (got whole numbers last, perhaps {what}): {ASK}"
            )
        return WEIGHT

    def _shown(self, roles: list[str | None], names: list[str] | None) -> str:
        marks = {None: "white space", "\t": "tabs", ";": "semicolons", ",": "commas", "|": "bars"}
        left_out = [
            (names[k] if names and k < len(names) else "") or str(k + 1) for k, role in enumerate(roles) if role is None
        ]
        more = f" ({', '.join(left_out)} left out)" if left_out else ""
        return f"columns {', '.join(filter(None, roles))}{more} by {marks[self.table.separator]}"

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        first, count, low, high = np.zeros(0), 0, 1, 0
        for rows in self.table.rows():
            chunk = edges_of(rows, self.first_id)
            if self.may_be_metis:
                first = first if count else np.array(rows.values[0].tolist()[:3])
                ends = chunk.source, chunk.target
                count, low = count + len(rows.values), min(low, *(int(end.min()) for end in ends))
                high = max(high, *(int(end.max()) for end in ends))
            yield chunk.mirrored() if self.is_mirrored else chunk
        if self.may_be_metis and _is_metis(first, count - 1, len(self.table.columns), low >= 1 and high <= count - 1):
            raise DataError(
                f"Expected edges in {self.path} (got what METIS' format has: {count - 1} lines below a line that says "
                f"so): name it .graph, or, if these are edges, give --columns source,target"
            )


class Parquet(FileSource):
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

    def ends(self, size: int) -> Iterator[EdgeChunk]:
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


def edges_of(rows: Rows, first_id: int) -> EdgeChunk:
    """Edges from lines with a source, a target and perhaps a weight."""
    source, target = (np.ascontiguousarray(rows.values[name]) - first_id for name in (SOURCE, TARGET))
    if WEIGHT not in (rows.values.dtype.names or ()):
        return EdgeChunk(source, target, {}, rows.place)
    with np.errstate(over="ignore"):
        weight = rows.values[WEIGHT].astype(np.float32)
    if np.isinf(weight).any():
        k = int(np.isinf(weight).argmax())
        raise DataError(
            f"Expected a weight that float32 holds in {rows.place(k)} (got {rows.values[WEIGHT][k]}): mend the line"
        )
    return EdgeChunk(source, target, {EDGE_WEIGHT.name: weight}, rows.place)


def _separator(lines: list[str]) -> str | None:
    data = lines[1:] or lines
    for mark in ";,|":
        if all(mark in line for line in data):
            return mark
    is_tab = all("\t" in line and not re.search(r"[^\s][ ]+[^\s]", line) for line in data)
    return "\t" if is_tab else None


def _fields(line: str, separator: str | None) -> list[str]:
    if separator is None:
        return line.split()
    return [field.strip() for field in next(csv.reader([line], delimiter=separator, skipinitialspace=True))]


def _number(field: str) -> float:
    """The value of a field; NaN for other words, whose line is named when it is read."""
    try:
        return float(field)
    except ValueError:
        return float("nan")


def _is_word(field: str) -> bool:
    return bool(re.match(r"[^\W\d]", field)) and field.lower() not in ("nan", "inf", "infinity")


def _is_metis(first: Array, num_lines: int, width: int, are_nodes: bool) -> bool:
    """Whether lines of equal length are METIS' format: nodes, edges, format; then the neighbours of each node."""
    if len(first) < 2 or first[0] != num_lines or num_lines < 1:
        return False
    if width == 2:
        return bool(are_nodes and first[1] == num_lines)
    neighbours = {0: 3, 10: 2, 100: 2, 11: 1, 101: 1, 110: 1}.get(int(first[2]) if first[2] == first[2] else -1)
    return neighbours is not None and 2 * first[1] == neighbours * num_lines


def roles_of(names: Sequence[str]) -> list[str | None] | None:
    """The role of each column: source, target, weight, or ``None``. ``None`` alone: the names do not tell.

    ``FromNodeId``, ``source_node``, ``id_1`` and the like are known; of several weights the first one counts.
    """
    found: list[str | None] = [None] * len(names)
    for role, known in _NAMES.items():
        plain = (re.sub(r"[^a-z0-9]", "", name.lower()) for name in names)
        place = next((k for k, name in enumerate(plain) if {name, re.sub("node|vertex|id", "", name)} & known), None)
        if place is not None and found[place] is None:
            found[place] = role
        elif role != WEIGHT:
            return None
    return found


def given_roles(columns: Sequence[str], width: int) -> list[str | None]:
    """The role of each column by the option ``--columns``; further columns have none."""
    if any(columns.count(role) != 1 for role in (SOURCE, TARGET)) or columns.count(WEIGHT) > 1 or len(columns) > width:
        raise OptionError(
            f"Expected --columns with source and target, and weight at most once, of {width} columns (got "
            f"{','.join(columns)}): such as source,target,-,weight"
        )
    found = [name if name in _NAMES else None for name in columns]
    return found + [None] * (width - len(found))
