"""Slow, readable twins of the native ops, in plain torch and NumPy: what the kernels are tested against.

Same arguments, shapes and dtypes as :mod:`pyg_dist.backend.ops`. Random words are those of ``csrc/formats/keyed.h``,
bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pyg_dist.backend.ops.attention import AttentionInputs, AttentionSpec
from pyg_dist.backend.ops.keyed import mix, mixed_seed

_Words = npt.NDArray[np.uint64]  # 32-bit numbers; the products of two of them fit

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_DROPOUT, _UNIFORM, _NORMAL, _ROUNDING = 0, 1, 2, 3  # streams


def csr_from_edges(
    row: Tensor, col: Tensor, edge: Tensor | None, num_rows: int, num_cols: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A stable sort by row; ``edge`` or the places."""
    order = torch.argsort(row, stable=True)
    rowptr = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(row, minlength=num_rows).cumsum(0)])
    return rowptr, col[order].int(), order.int() if edge is None else edge[order]


def spmm_csr(
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    divide: bool = False,
    out: Tensor | None = None,
    accumulate: bool = True,
) -> Tensor:
    """``y[i] = row_scale[i] * sum_e weight[e] * col_scale[col[e]] * x[col[e]]``, added to or written into ``out``."""
    sums = _sum_dtype(x)
    if divide and col_scale is not None:
        x, col_scale = (x.to(sums) / _column(col_scale, x.to(sums))).to(x.dtype), None
    messages = x.to(sums)[col.long()]
    if weight is not None:
        messages = messages * _column(weight, messages)
    if col_scale is not None:
        messages = messages * _column(col_scale[col.long()], messages)
    num_rows = rowptr.numel() - 1
    y = messages.new_zeros(num_rows, *x.shape[1:]).index_add_(0, _row_of_edge(rowptr), messages)
    if row_scale is not None:
        y = y / _column(row_scale, y) if divide else y * _column(row_scale, y)
    if out is None:
        return y.to(x.dtype)
    return out.copy_(out.to(sums) + y if accumulate else y)


def sddmm_csr(rowptr: Tensor, col: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``d[e] = <a[i], b[col[e]]>``."""
    products = a.to(_sum_dtype(a))[_row_of_edge(rowptr)] * b.to(_sum_dtype(b))[col.long()]
    return products.flatten(1).sum(1) if products.ndim > 1 else products


def extreme_csr(rowptr: Tensor, col: Tensor, x: Tensor, reduce: str) -> Tensor:
    """``y[i] = max_e x[col[e]]``, zero without edges."""
    y = x.new_zeros(rowptr.numel() - 1, x.shape[1])
    for i, (begin, end) in enumerate(zip(rowptr.tolist(), rowptr.tolist()[1:], strict=False)):
        if end > begin:
            y[i] = getattr(x[col[begin:end].long()], f"a{reduce}")(0)
    return y


def extreme_csr_shares(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    """``s[i] = grad[i] / (number of ties + [y[i] == 0])``."""
    row = _row_of_edge(rowptr)
    ties = (x[col.long()] == y[row]).to(_sum_dtype(x))
    return grad.to(_sum_dtype(x)) / (y == 0).to(_sum_dtype(x)).index_add_(0, row, ties)


def extreme_csr_grad(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
    """``d[j] = sum_e s[col[e]] [x[j] == y[col[e]]]`` over the transposed pattern."""
    row, target = _row_of_edge(rowptr), col.long()
    won = shares[target] * (x[row] == y[target])
    return torch.zeros_like(x, dtype=shares.dtype).index_add_(0, row, won).to(x.dtype)


def attention_csr(
    rowptr: Tensor,
    col: Tensor,
    edge: Tensor,
    inputs: AttentionInputs,
    edge_key: Tensor | None,
    spec: AttentionSpec,
    is_part: bool = False,
) -> tuple[Tensor, Tensor]:
    """Row by row; the first two outputs alone. The gradients are autograd's."""
    num_rows, heads = rowptr.numel() - 1, spec.heads
    wide = [None if x is None else x.to(_sum_dtype(inputs.value)) for x in inputs]
    value = wide[0].view(inputs.value.shape[0], heads, -1)  # type: ignore[union-attr]
    keep = torch.ones(col.numel(), heads, dtype=value.dtype)
    if edge_key is not None and col.numel() > 0:
        keep = keyed_dropout(keep, edge_key[edge], spec.p, spec.seed)
    ys, zs = [], []
    for i in range(num_rows):
        own = slice(int(rowptr[i]), int(rowptr[i + 1]))
        j, t = col[own].long(), edge[own]
        f = value.new_zeros(t.numel(), 0) if wide[3] is None else wide[3][t]
        per_head = value.new_zeros(heads, 0) if wide[4] is None else wide[4][i % wide[4].shape[0]].view(heads, -1)
        if spec.form == "dynamic":
            ends = value[j] + wide[2][i].view(heads, -1)  # type: ignore[index]
            ends = ends if wide[4] is None else ends + (f @ wide[4]).view(-1, heads, value.shape[2])
            logits = (_leaky(ends, spec.slope) * wide[5].view(heads, -1)).sum(2)  # type: ignore[union-attr]
        else:
            key = wide[1].view(value.shape[0], heads, -1)[j]  # type: ignore[union-attr]
            query = key.new_zeros(heads, 1) if wide[2] is None else wide[2][i].view(heads, -1)
            logits = (key + query if spec.form == "additive" else key * query).sum(2) + f @ per_head.T
            logits = _leaky(logits, spec.slope) if spec.form == "additive" else logits * spec.scale
        alpha = logits.softmax(0)
        if is_part:
            alpha = alpha.masked_fill((logits == -torch.inf).all(0), 0.0)
        alpha = alpha * keep[own]
        ys.append((alpha.unsqueeze(2) * value[j]).sum(0).flatten())
        zs.append((alpha.unsqueeze(2) * f.unsqueeze(1)).sum(0).flatten())
    rows = [torch.stack(parts).to(inputs.value.dtype) for parts in (ys, zs)]
    return rows[0], rows[1]


def _leaky(u: Tensor, slope: float) -> Tensor:
    return torch.where(u > 0, u, u * slope)


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``y[r] = x[index[r]]``."""
    return x[index] if out is None else out.copy_(x[index])


def scatter_add_rows(out: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """``out[index[r]] += rows[r]``, one r after the other."""
    for r, i in enumerate(index.tolist()):
        out[i] += rows[r]
    return out


def philox(seed: int, row_key: Tensor, block: _Words, stream: int, num_rounds: int = 10) -> _Words:
    """Philox-4x32: ``[N]`` keys and ``[B]`` blocks give words ``[N, 4 B]``, those of one block side by side."""
    key = row_key.numpy().astype(np.uint64)[:, None]
    shape = (key.shape[0], block.size)
    c0, c1 = np.broadcast_to(key & _MASK, shape), np.broadcast_to(key >> _SHIFT, shape)
    c2, c3 = np.broadcast_to(block[None, :], shape), np.full(shape, stream, np.uint64)
    k0, k1 = seed % 2**32, (seed >> 32) % 2**32
    for _ in range(num_rounds):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _MASK
        c2, c3 = (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1).reshape(shape[0], -1)


def _words(
    key: Tensor, num_columns: int, seed: int, column_offset: int, stream: int, words_each: int
) -> tuple[_Words, ...]:
    """The words of columns ``column_offset ...``: one or two arrays ``[N, num_columns]``."""
    per_block = 4 // words_each
    first = column_offset // per_block
    last = -(-(column_offset + num_columns) // per_block)
    words = philox(seed, key, np.arange(first, last, dtype=np.uint64), stream)
    skipped = (column_offset - first * per_block) * words_each
    words = words[:, skipped : skipped + num_columns * words_each]
    return tuple(words[:, w::words_each] for w in range(words_each))


def keyed_dropout(x: Tensor, key: Tensor, p: float, seed: int, column_offset: int = 0) -> Tensor:
    """``y = x / (1 - p)`` where the element's word is at least p 2^32, else ``x * 0``."""
    threshold = round(p * 2**32)
    if threshold >= 2**32:
        return x * 0
    rows = x.reshape(x.shape[0], -1) if x.numel() else x.new_empty(x.shape[0], 0)
    (words,) = _words(key, rows.shape[1], seed, column_offset, _DROPOUT, 1)
    keep = torch.from_numpy(words >= threshold)
    y = rows.to(_sum_dtype(x)) * (keep.to(_sum_dtype(x)) * (1 / (1 - p)))
    return y.to(x.dtype).view_as(x)


def keyed_permutation(place: Tensor, size: int, seed: int) -> Tensor:
    """A Feistel network on the numbers of as many bits as ``size - 1`` has, walked until it is below ``size``."""
    num_bits = max((size - 1).bit_length(), 2)
    low_bits = num_bits // 2
    keys = [mixed_seed(seed, k) for k in range(24 if num_bits <= 8 else 8)]
    permuted = []
    for number in place.tolist():
        while True:
            high, low = divmod(number, 2**low_bits)
            for first, second in zip(keys[::2], keys[1::2], strict=True):
                high ^= mix(low ^ first) >> (64 - (num_bits - low_bits))
                low ^= mix(high ^ second) >> (64 - low_bits)
            number = high * 2**low_bits + low
            if number < size:
                break
        permuted.append(number)
    return torch.tensor(permuted, dtype=torch.int64)


def sample_rows(
    rowptr: Tensor, col: Tensor, place: Tensor | None, row: Tensor, key: Tensor, count: int, seed: int,
    replace: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Floyd's algorithm row by row, on the words of SplitMix64."""
    starts, entries = [0], []
    for r, k in zip(row.tolist(), key.tolist(), strict=True):
        first, last = int(rowptr[r]), int(rowptr[r + 1])
        degree, state = last - first, mixed_seed(seed, k)

        def below(n: int) -> int:
            nonlocal state
            state = (state + 0x9E3779B97F4A7C15) % 2**64
            return mix(state) * n >> 64

        if degree == 0 or count < 0 or (not replace and degree <= count):
            chosen = list(range(degree))
        elif replace:
            chosen = [below(degree) for _ in range(count)]
        else:
            chosen = []
            for j in range(degree - count, degree):
                x = below(j + 1)
                chosen.append(j if x in chosen else x)
        entries += [first + x for x in sorted(chosen)]
        starts.append(len(entries))
    entry = torch.tensor(entries, dtype=torch.int64)
    return torch.tensor(starts), col[entry], entry if place is None else place[entry].long()


def restrict_csr(
    rowptr: Tensor, col: Tensor, row: Tensor, column: Tensor, num_cols: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Row by row, then the entries sorted by column."""
    new_col = {int(c): place for place, c in enumerate(column)}
    kept = [
        (new_row, new_col[int(col[entry])], entry)
        for new_row, r in enumerate(row.tolist())
        for entry in range(int(rowptr[r]), int(rowptr[r + 1]))
        if int(col[entry]) in new_col
    ]
    out_row, out_col, entries = (torch.tensor([k[i] for k in kept], dtype=torch.int64) for i in range(3))
    new_rowptr, _, _ = csr_from_edges(out_row, out_col, None, row.numel(), column.numel())
    return new_rowptr, out_col.int(), entries, *transpose_csr(new_rowptr, out_col.int(), column.numel())


def transpose_csr(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """By a sort of the columns."""
    places = torch.arange(col.numel())
    return csr_from_edges(col, _row_of_edge(rowptr), places, num_cols, rowptr.numel() - 1)


def equals_transpose_csr(rowptr: Tensor, col: Tensor) -> bool:
    """By the transpose."""
    size = rowptr.numel() - 1
    return bool((col < size).all()) and all(map(torch.equal, transpose_csr(rowptr, col, size), (rowptr, col)))


def find_sorted(sorted: Tensor, value: Tensor) -> Tensor:
    """By a dictionary."""
    place = {int(v): k for k, v in enumerate(sorted)}
    return torch.tensor([place.get(int(v), -1) for v in value], dtype=torch.int64)


def distinct(known: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """By sets and a dictionary."""
    new = sorted(set(value.tolist()) - set(known.tolist()))
    place = {v: k for k, v in enumerate([*known.tolist(), *new])}
    values = value.tolist()
    first = [values.index(v) for v in new]
    return torch.tensor(first, dtype=torch.int64), torch.tensor([place[v] for v in values], dtype=torch.int64)


def add_places(place_of: Tensor, value: Tensor, next: int, again: Tensor) -> Tensor:
    """One value after the other."""
    new = sorted({v for v in value.tolist() if int(place_of[v]) < 0} | {*again.tolist()})
    for k, v in enumerate(new):
        place_of[v] = next + k
    return torch.tensor(new, dtype=torch.int64)


def find_numbers(
    id: Tensor, count: Tensor, first: Tensor, given: Tensor, given_number: Tensor, value: Tensor
) -> Tensor:
    """By a dictionary."""
    number_of = dict(zip(given.tolist(), given_number.tolist(), strict=True))
    lists = id.split(count.tolist()) if count.numel() else ()
    for group, begin in enumerate(first.tolist()):
        ids = sorted(i for of_group in lists[group :: first.numel()] for i in of_group.tolist())
        number_of |= {i: begin + k for k, i in enumerate(ids)}
    return torch.tensor([number_of.get(v, -1) for v in value.tolist()], dtype=torch.int64)


def encode_ids(rows: Tensor, count: Tensor, is_ascending: bool) -> list[int]:
    """Number by number; the bytes alone."""
    content = []
    for part in rows.split(count.tolist()) if count.numel() else ():
        if not len(part):
            continue
        before, numbers = 0, []
        for row in part.tolist():
            numbers += [(row[0] - before) % 2**64, *(value % 2**64 for value in row[1:])]
            before = row[0] if is_ascending else 0
        codes = [sum(number >= 256**k for k in (1, 2, 3)) for number in numbers]
        content += len(part).to_bytes(8, "little")
        for k in range(0, len(codes), 4):
            content.append(sum(code << (2 * j) for j, code in enumerate(codes[k : k + 4])))
        for number, code in zip(numbers, codes, strict=True):
            content += number.to_bytes(8, "little")[: (1, 2, 3, 8)[code]]
    return content


def bipartite_matching(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """One row after the other, by any augmenting path (Kuhn, 1955). The op's matching may be another of that size.

    What is reached grows along all entries, until it stays.
    """
    row_of: dict[int, int] = {}

    def is_matched(row: int, seen: set[int]) -> bool:
        for column in col[int(rowptr[row]) : int(rowptr[row + 1])].tolist():
            if column in seen:
                continue
            seen.add(column)
            if column not in row_of or is_matched(row_of[column], seen):
                row_of[column] = row
                return True
        return False

    for row in range(rowptr.numel() - 1):
        is_matched(row, set())
    col_of = torch.full((rowptr.numel() - 1,), -1, dtype=torch.int32)
    for column, row in row_of.items():
        col_of[row] = column
    row = torch.repeat_interleave(torch.arange(rowptr.numel() - 1), rowptr.diff()).tolist()
    entries = [*zip(row, col.tolist(), strict=True)]
    rows, columns = set((col_of < 0).nonzero().view(-1).tolist()), set(range(num_cols)) - set(row_of)
    for _ in range(rowptr.numel()):
        rows |= {row_of[c] for r, c in entries if r in rows and c in row_of}
        columns |= {int(col_of[r]) for r, c in entries if c in columns and col_of[r] >= 0}
    reached = (
        torch.tensor([x in some for x in range(n)]).bool() for some, n in ((rows, len(col_of)), (columns, num_cols))
    )
    return col_of, *reached


def norm_relu_dropout(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    norm: str | None,
    eps: float,
    relu: bool,
    p: float,
    seed: int,
    column_offset: int = 0,
) -> Tensor:
    """``dropout(relu(norm(x) * weight + bias))``, y alone; its gradients are autograd's. No key: the factor alone."""
    z = x.to(_sum_dtype(x))
    if norm == "layer":
        z = z - z.mean(1, keepdim=True)
    if norm is not None:
        z = z * (z.square().mean(1, keepdim=True) + eps).rsqrt()
    z = z if weight is None else z * weight
    z = z if bias is None else z + bias
    z = z.relu() if relu else z
    z = z / (1 - p) if key is None else z * keyed_dropout(torch.ones_like(z), key, p, seed, column_offset)
    return z.to(x.dtype)


def row_moments(x: Tensor, norm: str) -> tuple[Tensor, Tensor]:
    """Means and mean squared deviations, or an empty tensor and mean squares."""
    z = x.to(_sum_dtype(x))
    if norm == "rms":
        return z.new_empty(0), z.square().mean(1)
    return z.mean(1), (z - z.mean(1, keepdim=True)).square().mean(1)


def relu(x: Tensor, keeps_mask: bool) -> tuple[Tensor, Tensor]:
    """Zero where x is negative, else x, and, if requested, the bits of where x is positive or NaN."""
    bits = np.packbits((~(x <= 0)).numpy(), bitorder="little")
    return x.relu(), torch.from_numpy(bits)[: None if keeps_mask else 0]


def relu_grad(grad: Tensor, passed: Tensor) -> Tensor:
    """``grad`` where ``passed``."""
    bits = np.unpackbits(passed.numpy(), count=grad.numel(), bitorder="little")
    return torch.where(torch.from_numpy(bits).view_as(grad) != 0, grad, 0.0)


_TINY = np.float32(2.0**-100)


def _bfloat16(value: npt.NDArray[np.float32], upward: bool) -> npt.NDArray[np.float32]:
    """bfloat16 towards plus (values >= 0 only) or minus infinity, as float32."""
    away = np.uint32(0xFFFF) * ((value >= 0) if upward else (value < 0))
    bits: npt.NDArray[np.uint32] = (value.view(np.uint32) + away) & np.uint32(0xFFFF0000)
    return bits.astype(np.uint32).view(np.float32)


def quantize_csr(
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    bits: int,
    weight: Tensor | None = None,
    *,
    col_scale: Tensor | None = None,
    key: Tensor | None = None,
    seed: int = 0,
) -> Tensor:
    """The steps of ``csrc/formats/packed_rows.h``, for finite rows."""
    sums = spmm_csr(rowptr, col, x.to(_sum_dtype(x)), weight, col_scale=col_scale).float()
    if bits == 16:
        return sums.bfloat16().view(torch.uint8)
    if sums.shape[1] == 0:
        return sums.to(torch.uint8)
    h, levels = sums.numpy(), 2**bits - 1
    low, high = h.min(1), h.max(1)
    zero = np.where(np.abs(low) < _TINY, np.where(low < 0, -_TINY, np.float32(0)), _bfloat16(low, upward=False))
    wide = high.astype(np.float64) - zero
    scale = _bfloat16((wide * (1 / levels)).astype(np.float32), upward=True)
    short = scale.astype(np.float64) * levels < wide
    scale = np.where(short, _bfloat16(scale * np.float32(1.001), upward=True), scale)
    scale = np.where(scale < _TINY, np.where(wide > 0, _TINY, np.float32(0)), scale).astype(np.float32)
    inverse = np.where(wide > 0, np.float32(65536) / np.where(wide > 0, scale, 1), 0).astype(np.float32)
    random = np.uint32(32768) if key is None else _rounding_bits(key, h.shape[1], bits, seed)
    steps = ((h - zero[:, None]) * inverse[:, None]).astype(np.int32).astype(np.uint32)
    q = np.minimum((steps + random) >> 16, levels).astype(np.uint8)
    packed = np.zeros((q.shape[0], -(-q.shape[1] * bits // 8)), np.uint8)
    byte, shift = _places(q.shape[1], bits)
    for step in range(0, 8, bits):  # columns of one shift have bytes of their own
        packed[:, byte[shift == step]] |= q[:, shift == step] << np.uint8(step)
    parameters = np.stack([zero, scale], 1).astype(np.float32).view(np.uint32) >> 16
    return torch.from_numpy(np.concatenate([parameters.astype("<u2").view(np.uint8), packed], 1))


def _places(num_columns: int, bits: int) -> npt.NDArray[np.int64]:
    """The byte, behind the parameters, and the lowest bit there of each column's number: two rows."""
    column = np.arange(num_columns)
    begin = column // 64 * 64
    num_bytes = -(-np.minimum(num_columns - begin, 64) * bits // 8)
    stretch, byte = np.divmod(column - begin, num_bytes)
    places: npt.NDArray[np.int64] = np.stack([begin * bits // 8 + byte, bits * stretch])
    return places


def _rounding_bits(key: Tensor, num_columns: int, bits: int, seed: int) -> npt.NDArray[np.uint32]:
    """16 bits a column: two bytes of a word that four columns of its block share."""
    byte, shift = _places(num_columns, bits)
    block, byte = np.arange(num_columns) // 64, byte - np.arange(num_columns) // 64 * (8 * bits)
    words = philox(seed, key, np.arange(4 * -(-num_columns // 64), dtype=np.uint64), _ROUNDING, num_rounds=7)
    shared, quarter = words.astype(np.uint32)[:, 16 * block + byte % 16], byte // 16 + shift // 2
    turned = shared << (8 * quarter).astype(np.uint32) | shared >> ((32 - 8 * quarter) % 32).astype(np.uint32)
    upper: npt.NDArray[np.uint32] = turned >> np.uint32(16)
    return upper


def dequantize(packed: Tensor, num_columns: int, bits: int) -> Tensor:
    """``Z + S q``, float32 ``[M, F]``."""
    if bits == 16 or num_columns == 0:
        return packed.contiguous().view(torch.bfloat16).float().view(packed.shape[0], num_columns)
    zero, scale = packed[:, :4].contiguous().view(torch.bfloat16).float().unbind(1)
    byte, shift = torch.from_numpy(_places(num_columns, bits))
    q = (packed[:, 4:].int()[:, byte] >> shift) & (2**bits - 1)
    rows: Tensor = zero[:, None] + scale[:, None] * q
    return rows


def dequantize_csr_add(
    out: Tensor,
    rowptr: Tensor,
    col: Tensor,
    packed: Tensor,
    bits: int,
    weight: Tensor | None = None,
    *,
    row_scale: Tensor | None = None,
) -> Tensor:
    """``out[i] += row_scale[i] * sum_e weight[e] * (Z + S q)[col[e]]``."""
    rows = dequantize(packed, out.shape[1], bits).to(_sum_dtype(out))
    return spmm_csr(rowptr, col, rows, weight, row_scale=row_scale, out=out)


def keyed_uniform(
    key: Tensor, num_columns: int, seed: int, column_offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The upper 24 (float32), 53 (float64), 8 (bfloat16) or 11 (float16) bits of the element's words as a fraction."""
    if dtype == torch.float64:
        low, high = _words(key, num_columns, seed, column_offset, _UNIFORM, 2)
        return torch.from_numpy(((high << _SHIFT | low) >> np.uint64(11)) * 2.0**-53)
    (words,) = _words(key, num_columns, seed, column_offset, _UNIFORM, 1)
    bits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}[dtype]
    return torch.from_numpy((words >> np.uint64(32 - bits)) * 2.0**-bits).to(dtype)


def keyed_normal(
    key: Tensor, num_columns: int, seed: int, column_offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Box-Muller on the uniforms of a pair of columns: cosine in the even one, sine in the odd one."""
    first, last = column_offset // 2, -(-(column_offset + num_columns) // 2)
    num_columns_of_pairs = 2 * (last - first)
    if dtype == torch.float64:
        low, high = _words(key, num_columns_of_pairs, seed, 2 * first, _NORMAL, 2)
        bits, each = (high << _SHIFT | low) >> np.uint64(11), 2.0**-53
    else:
        (bits,) = _words(key, num_columns_of_pairs, seed, 2 * first, _NORMAL, 1)
        each = 2.0**-32
    u, v = (bits[:, 0::2] + 1.0) * each, bits[:, 1::2] * each
    radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * v
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(key.numel(), -1)
    skipped = column_offset - 2 * first
    return torch.from_numpy(pairs[:, skipped : skipped + num_columns].copy()).to(dtype)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_of_edge(rowptr: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(rowptr.numel() - 1), rowptr.diff())


def _column(factor: Tensor, rows: Tensor) -> Tensor:
    return factor.to(rows.dtype).view(-1, *(1,) * (rows.ndim - 1))
