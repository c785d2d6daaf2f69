"""How long the rows of messages are and what they are keyed by; ``csrc/formats/packed_rows.h`` has how they lie.

No torch here: plans count with the same functions that messages are made by.
"""

from __future__ import annotations

SUM_KEY = 1 << 40
"""A row's key is its node's global id; a partial sum's adds this times (its maker's rank + 1)."""


def packed_row_bytes(num_columns: int, bits: int) -> int:
    """Bytes of a packed row: ``4 + ceil(F bits / 8)`` with its zero point and scale, or ``2 F`` for 16 bits."""
    if num_columns == 0:
        return 0
    return 2 * num_columns if bits == 16 else 4 + -(-num_columns * bits // 8)


def row_bytes(num_columns: int, element_size: int, bits: int) -> int:
    """Bytes of a row in a message: packed if that is shorter than the row as it is, which 32 bits stand for.

    The one rule for what is rounded: a column of float32 takes four bytes as it is and five in two bits.
    """
    exact = num_columns * element_size
    return exact if bits == 32 else min(exact, packed_row_bytes(num_columns, bits))


def is_packed(num_columns: int, element_size: int, bits: int) -> bool:
    """Whether such rows are packed: see :func:`row_bytes`."""
    return row_bytes(num_columns, element_size, bits) < num_columns * element_size


def node_of(key: int) -> int:
    """The global id of the node that a key stands for."""
    return key % SUM_KEY
