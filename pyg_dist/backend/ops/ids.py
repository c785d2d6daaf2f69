"""Lists of ids: the distinct ones, and their bytes in messages."""

from __future__ import annotations

from torch import Tensor

from pyg_dist.backend.ops.library import call, native


def distinct(known: Tensor, value: Tensor, place_of: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Where each value that is not known comes first, and the place of each value in the known ones and these.

    ``torch.cat([known, value[first]])[place]`` is ``value``, and ``value[first]`` ascends. By a hash table, or by
    ``place_of``, and a radix sort in O(n + k) time, by one thread (``csrc/cpu/distinct.h``).

    Shapes: int64 ``[n]``, int64 or int32 ``[k]`` -> int64 ``[m]``, ``[k]``, on the CPU.

    Args:
        known: Distinct values.
        value: Any values.
        place_of: The place of each number in ``known``, or -1, int32 ``[span]``; new ones are added.

    Raises:
        DataError: ``known`` has a value twice, ``place_of`` no room for one, or a shape or dtype does not fit.

    Example:
        >>> [x.tolist() for x in distinct(torch.tensor([7, 3]), torch.tensor([5, 3, 5, 4]))]
        [[3, 0], [3, 1, 3, 2]]
    """
    return call(native.distinct.default, known.contiguous(), value.contiguous(), place_of)


def count_less(value: Tensor, number: Tensor, size: Tensor) -> Tensor:
    """How many numbers of several lists are less than each value. Lists and values ascend, which is not checked.

    Exact, in O(k log(m / k)) time (``csrc/cpu/count_less.h``).

    Shapes:
        - value: int64 ``[k]``; number: int64 ``[m]``, list after list; size: int64 ``[lists]``, the numbers of each
        - output: int64 ``[k]``

    Example:
        >>> count_less(torch.tensor([3, 8]), torch.tensor([1, 3, 9, 2]), torch.tensor([3, 1])).tolist()
        [2, 3]
    """
    return call(native.count_less.default, value.contiguous(), number.contiguous(), size.contiguous())


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
