"""cuSPARSE's product of a CSR matrix with rows, by ctypes: each algorithm, prepared once, as a library would use it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import torch
from torch import Tensor

ALGORITHMS = {"ALG1": 4, "ALG2": 6, "ALG3": 12}  # CUSPARSE_SPMM_CSR_ALG1 ... of cusparse.h
_FLOAT, _INT32, _ZERO_BASED, _ROW_ORDER, _NO_TRANSPOSE = 0, 2, 0, 2, 0


def _library() -> ctypes.CDLL:
    """The one that torch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if "libcusparse.so" in path:
            return ctypes.CDLL(path)
    raise OSError("expected libcusparse among what torch has loaded, found none")


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"{what}: status {status}")


def product(rowptr: Tensor, col: Tensor, values: Tensor, x: Tensor, out: Tensor, algorithm: int) -> Callable[[], None]:
    """A function that writes the product into ``out``.

    Shapes:
        - rowptr: int32 ``[N + 1]``, col: int32 ``[E]``, values: float32 ``[E]``
        - x: float32 ``[M, F]``, out: float32 ``[N, F]``, contiguous
    """
    lib, handle = _library(), c_void_p()
    _check(lib.cusparseCreate(byref(handle)), "cusparseCreate")
    stream = c_void_p(torch.cuda.current_stream().cuda_stream)
    _check(lib.cusparseSetStream(handle, stream), "cusparseSetStream")
    matrix, rows, result = c_void_p(), c_void_p(), c_void_p()
    pointers = [c_void_p(tensor.data_ptr()) for tensor in (rowptr, col, values)]
    num_rows, num_cols, width = c_int64(out.shape[0]), c_int64(x.shape[0]), c_int64(x.shape[1])
    entries = c_int64(col.numel())
    types = c_int(_INT32), c_int(_INT32), c_int(_ZERO_BASED), c_int(_FLOAT)
    _check(lib.cusparseCreateCsr(byref(matrix), num_rows, num_cols, entries, *pointers, *types), "cusparseCreateCsr")
    for descriptor, tensor, count in ((rows, x, num_cols), (result, out, num_rows)):
        memory = c_void_p(tensor.data_ptr())
        layout = c_int(_FLOAT), c_int(_ROW_ORDER)
        _check(lib.cusparseCreateDnMat(byref(descriptor), count, width, width, memory, *layout), "cusparseCreateDnMat")
    one, zero, size = c_float(1), c_float(0), c_size_t()
    kinds = c_int(_NO_TRANSPOSE), c_int(_NO_TRANSPOSE)
    arguments = (handle, *kinds, byref(one), matrix, rows, byref(zero), result, c_int(_FLOAT), c_int(algorithm))
    _check(lib.cusparseSpMM_bufferSize(*arguments, byref(size)), "cusparseSpMM_bufferSize")
    buffer = torch.empty(max(size.value, 1), dtype=torch.uint8, device=x.device)
    _check(lib.cusparseSpMM_preprocess(*arguments, c_void_p(buffer.data_ptr())), "cusparseSpMM_preprocess")

    def run() -> None:
        _check(lib.cusparseSpMM(*arguments, c_void_p(buffer.data_ptr())), "cusparseSpMM")

    return run
