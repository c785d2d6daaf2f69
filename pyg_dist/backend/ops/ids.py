"""Lists of ids: the distinct ones, and their bytes in messages."""

from __future__ import annotations

from torch import Tensor

from pyg_dist.backend.ops.library import call, native


def distinct(known: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Where each value that is not known comes first, and the place of each value in the known ones and these.

    ``torch.cat([known, value[first]])[place]`` is ``value``, and values stand there in the order in which they come. By
    a hash table in O(n + k) time, a thread (``csrc/cpu/distinct.h``).

    Shapes: int64 ``[n], [k] -> [m], [k]``, on the CPU.

    Raises:
        DataError: ``known`` has a value twice, or a shape or dtype does not fit.

    Example:
        >>> [places.tolist() for places in distinct(torch.tensor([7, 3]), torch.tensor([5, 3, 5, 4]))]
        [[0, 3], [2, 1, 2, 3]]
    """
    return call(native.distinct.default, known.contiguous(), value.contiguous())


def encode_ids(rows: Tensor, count: Tensor, is_ascending: bool) -> tuple[Tensor, Tensor]:
    """The bytes of lists of rows of ids, and how many each list has: LEB128, a byte for each seven bits of a number.

    In ascending lists the first column has differences to the row before. Negative numbers take ten bytes.

    Shapes:
        - rows: int64 ``[n, columns]``, list after list; count: int64 ``[lists]``, the rows of each
        - output: uint8 ``[bytes]``, int64 ``[lists]``

    Example:
        >>> [x.tolist() for x in encode_ids(torch.tensor([[300], [301], [4]]), torch.tensor([2, 1]), True)]
        [[172, 2, 1, 4], [3, 1]]
    """
    return call(native.encode_ids.default, rows.contiguous(), count.contiguous(), is_ascending)


def decode_ids(content: Tensor, num_bytes: Tensor, num_columns: int, is_ascending: bool) -> tuple[Tensor, Tensor]:
    """The rows of :func:`encode_ids`, and how many each list has.

    Raises:
        DataError: The bytes are no such rows.

    Example:
        >>> content, num_bytes = encode_ids(torch.tensor([[300], [301], [4]]), torch.tensor([2, 1]), True)
        >>> [x.tolist() for x in decode_ids(content, num_bytes, 1, True)]
        [[[300], [301], [4]], [2, 1]]
    """
    return call(native.decode_ids.default, content.contiguous(), num_bytes.contiguous(), num_columns, is_ascending)
