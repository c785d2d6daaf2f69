"""Which columns of a table are the ends and the weight of an edge, by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyg_dist.errors import OptionError

SOURCE, TARGET, WEIGHT = "source", "target", "weight"
_NAMES = {
    SOURCE: {"source", "src", "from", "u", "1", "a", "i"},
    TARGET: {"target", "dst", "dest", "destination", "to", "v", "2", "b", "j"},
    WEIGHT: {"weight", "weights", "w", "edgeweight", "rating", "sign"},
}


def roles_of(names: Sequence[str]) -> list[str | None] | None:
    """What each column is: source, target, weight, or None; None altogether: the names do not say it.

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
    """The same, of the option ``--columns``; columns that it does not name are left out.

    Raises:
        OptionError: It has not exactly one source and one target, or more columns than there are.
    """
    if any(columns.count(role) != 1 for role in (SOURCE, TARGET)) or columns.count(WEIGHT) > 1 or len(columns) > width:
        raise OptionError(
            f"Expected --columns with source and target, and weight at most once, of {width} columns (got "
            f"{','.join(columns)}): such as source,target,-,weight"
        )
    found = [name if name in _NAMES else None for name in columns]
    return found + [None] * (width - len(found))
