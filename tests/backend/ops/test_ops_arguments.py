"""What the native ops refuse, in one line each."""

from __future__ import annotations

import pytest
import torch

from pyg_dist.backend import ops
from pyg_dist.backend.ops import library
from pyg_dist.backend.ops.library import call
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.errors import DataError, OptionError, PygDistError, UnsupportedError

ROWPTR, COL, X = torch.tensor([0, 1, 2]), torch.tensor([0, 1], dtype=torch.int32), torch.ones(3, 4)
NATIVE = torch.ops.pyg_dist
INDEX, FALLING, FLAT = torch.tensor([0, 2]), torch.tensor([0, 3, 2]), torch.ones(8)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ops.spmm_csr(ROWPTR.int(), COL, X), "'rowptr'.*Long.*Int"),
        (lambda: ops.spmm_csr(ROWPTR, COL.long(), X), "'col'.*Int.*Long"),
        (lambda: ops.spmm_csr(ROWPTR[:0], COL, X), "'rowptr'.*one entry more"),
        (lambda: ops.spmm_csr(ROWPTR[:2], COL, X), "from 0 to the 2 entries.*got 0 to 1"),
        (lambda: ops.spmm_csr(ROWPTR[1:], COL, X), "got 1 to 2"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X[:0]), "'x' to have rows for 2 edges"),
        (lambda: ops.spmm_csr(FALLING, COL, X), "'rowptr' not to decrease, got 2 after 3 at position 2"),
        (lambda: ops.sddmm_csr(FALLING, COL, X[:2], X), "sddmm_csr: expected 'rowptr' not to decrease"),
        (lambda: ops.extreme_csr(FALLING, COL, X, "max"), "extreme_csr: expected 'rowptr' not to decrease"),
        (lambda: ops.quantize_csr(FALLING, COL, X, 4), "quantize_csr: expected 'rowptr' not to decrease"),
        (lambda: ops.quantize_csr(ROWPTR[:0], COL, X, 4), "quantize_csr.*'rowptr' to have one entry more"),
        (lambda: ops.extreme_csr_shares(ROWPTR, COL, X[:0], X[:2], X[:2]), "'x' to have rows for 2 edges, got none"),
        (lambda: ops.extreme_csr_grad(ROWPTR, COL, X[:2], X[:0], X[:0]), "'y' to have rows for 2 edges, got none"),
        (lambda: ops.extreme_csr_grad(ROWPTR, COL, X[:2], FLAT, FLAT), "'y' to be two-dimensional"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=X[:2]), "'out' to share no memory with 'x'"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, FLAT[:2], out=FLAT.view(2, 4)), "'out' to share no memory with 'weight'"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, row_scale=FLAT[6:], out=FLAT.view(2, 4)), "memory with 'row_scale'"),
        (lambda: ops.gather_rows(X, INDEX, out=X[1:]), "'out' to share no memory with 'x'"),
        (lambda: ops.scatter_add_rows(X, INDEX, X[1:]), "'out' to share no memory with 'rows'"),
        (lambda: ops.quantize_csr(ROWPTR, COL, X, 8, out=X.view(torch.uint8).view(6, 8)[:2]), "with 'x'"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X.int()), "'x' to be float32, float64, bfloat16 or float16, got Int"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, torch.ones(3)), "'weight' to have 2 entries, got 3"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, torch.ones(2).double()), "'weight'.*Float.*Double"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, row_scale=torch.ones(3)), "'row_scale' to have 2 entries"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, col_scale=torch.ones(2)), "'col_scale' to have 3 entries"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=torch.ones(3, 4)), r"'out' to have shape \[2, 4\], got \[3, 4\]"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=torch.ones(2, 4).double()), "'out' to have the dtype of 'x'"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=torch.ones(4, 2).t()), "rows of 'out' to be contiguous"),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, out=torch.ones(1, 4).expand(2, 4)), "rows of 'out' not to overlap"),
        (lambda: ops.spmm_csr(ROWPTR, COL, torch.tensor(1.0)), "without dimensions"),
        (lambda: ops.sddmm_csr(ROWPTR, COL, X, X), "'a' to have the 2 rows"),
        (lambda: ops.sddmm_csr(ROWPTR, COL, X[:2], X[:, :3]), "as many columns, got 4 and 3"),
        (lambda: ops.sddmm_csr(ROWPTR, COL, X[:2], X.double()), "'b' to have the dtype of 'a'"),
        (lambda: ops.gather_rows(X, INDEX + 1), r"\[0, 3\), got 3 at position 1"),
        (lambda: ops.gather_rows(X, INDEX - 1), r"\[0, 3\), got -1 at position 0"),
        (lambda: ops.gather_rows(X, INDEX.int()), "'index'.*Long.*Int"),
        (lambda: ops.gather_rows(X, INDEX, out=torch.ones(3, 4)), r"'out' to have shape \[2, 4\]"),
        (lambda: ops.scatter_add_rows(X.clone(), INDEX + 1, X[:2]), r"\[0, 3\), got 3 at position 1"),
        (lambda: ops.scatter_add_rows(X.clone(), INDEX, X), r"'rows' to have shape \[2, 4\], got \[3, 4\]"),
        (lambda: ops.scatter_add_rows(torch.ones(3, 2, 4)[:, :, :2], INDEX, torch.ones(2, 2, 2)), "contiguous rows"),
        (lambda: ops.keyed_dropout(X, torch.arange(2), 0.5, 0), "'key' to have 3 entries.*got 2"),
        (lambda: ops.keyed_dropout(X, torch.arange(3), 1.5, 0), r"'p' to lie in \[0, 1\], got 1.5"),
        (lambda: ops.keyed_dropout(X, torch.arange(3), 0.5, 0, -1), "'column_offset'.*got -1"),
        (lambda: ops.keyed_dropout(X.long(), torch.arange(3), 0.5, 0), "'x' to be float32.*got Long"),
        (lambda: ops.keyed_uniform(INDEX, -1, 0), "got 0 and -1"),
        (
            lambda: call(NATIVE.spmm_csr.default, ROWPTR, COL, X, None, None, None, False, 3, 32),
            r"'form' to be 0 .* got 3",
        ),
        (lambda: ops.spmm_csr(ROWPTR, COL, X, form=ops.SpmmWay(None, -1)), r"'prefetch_edges' to be in \[0, .* got -1"),
        (lambda: ops.empty_rows(X, -1, 4), r"output: expected sizes of 0 and more, .*, got \[-1, 4\]"),
        (lambda: ops.empty_rows(X, -(2**21), -4), r"expected sizes of 0 and more, .*, got \[-2097152, -4\]"),
        (lambda: ops.empty_rows(X, 2**40, 2**22 + 1), r"fewer than 2\^63 bytes, got \[1099511627776, 4194305\]"),
        (lambda: ops.empty_rows(X, 2**62, 2**62), r"fewer than 2\^63 bytes"),
        (lambda: ops.empty_rows(X, 0, 2**62), r"fewer than 2\^63 bytes"),
        (lambda: ops.gather_rows(X, INDEX * 2**62), r"\[0, 3\), got -9223372036854775808 at position 1"),
        (lambda: ops.keyed_uniform(INDEX, 3, 0, dtype=torch.int64), "'dtype' to be float32.*got Long"),
        (lambda: ops.keyed_normal(INDEX.int(), 3, 0), "'key'.*Long.*Int"),
    ],
)
def test_errors_are_one_line(call: object, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_other_columns_of_one_matrix_may_be_written() -> None:
    wide = torch.arange(24.0).view(3, 8)
    ops.spmm_csr(torch.tensor([0, 1, 2, 2]), COL, wide[:, 4:], out=wide[:, :4], accumulate=False)
    assert torch.equal(wide[:2, :4], wide[:2, 4:])
    assert not wide[2, :4].any()
    with pytest.raises(DataError, match="share no memory"):
        ops.spmm_csr(torch.tensor([0, 1, 2, 2]), COL, wide[:, 3:7], out=wide[:, :4])


@pytest.mark.parametrize(("row", "col"), [([0, 2], [0, 0]), ([0, -1], [0, 0]), ([0, 1], [3, 0]), ([0, 1], [0, -1])])
def test_a_pattern_has_its_entries_in_range(row: list[int], col: list[int]) -> None:
    with pytest.raises(DataError, match=r"rows in \[0, 2\) and columns in \[0, 3\)"):
        CSR.from_edges(torch.tensor(row), torch.tensor(col), torch.arange(2), 2, 3)


def test_a_failed_scatter_leaves_out_alone() -> None:
    out = torch.zeros(3, 2)
    with pytest.raises(DataError):
        ops.scatter_add_rows(out, torch.tensor([0, 3]), torch.ones(2, 2))
    assert not out.any()


def test_other_layouts_are_refused_in_one_line() -> None:
    with pytest.raises(UnsupportedError, match="spmm_csr: expected dense tensors on cpu") as caught:
        ops.spmm_csr(ROWPTR, COL, X.to_sparse())
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, PygDistError)


@pytest.mark.parametrize("key", [torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA], ids=str)
def test_devices_are_checked_before_anything_is_read(key: torch._C.DispatchKey) -> None:
    """Meta tensors stand for those of a device: they have no memory that could be read."""

    def on_device(*args: object) -> object:
        return torch.ops.pyg_dist.gather_rows.default.redispatch(torch._C.DispatchKeySet(key), *args)

    assert torch.equal(call(on_device, X, INDEX), X[INDEX])
    with pytest.raises(DataError, match="gather_rows: expected all tensors on one device, got them on cpu and meta"):
        call(on_device, X, INDEX.to("meta"))
    with pytest.raises(UnsupportedError, match=r"gather_rows: expected tensors on cpu, .*, got them on meta; move"):
        call(on_device, X.to("meta"), INDEX.to("meta"))


def test_columns_beyond_32_bits_are_refused() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(OptionError, match=r"fewer than 2\^31 rows and columns .* use more ranks"):
        CSR.from_edges(none, none, none, 1, 2**31)


@pytest.mark.parametrize(
    ("capability", "driver", "words"),
    [
        ((8, 0), 13000, None),
        ((12, 0), 13020, None),
        ((9, 0), None, None),
        ((7, 5), 13000, r"T4 has compute capability 7\.5, and they were built for 8\.0 and above; take another GPU"),
        ((9, 0), 12040, r"the driver knows CUDA 12\.4, and they were built with CUDA 13\.0\.88; update the driver"),
    ],
)
def test_gpus_that_cannot_run_the_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], driver: int | None, words: str | None
) -> None:
    """In one line, in the place of whatever the first launch would raise."""
    monkeypatch.setattr(library, "devices", lambda: {"cuda": "80-real,90 of CUDA 13.0.88"})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(library, "driver_version", lambda: driver)
    monkeypatch.setattr(library, "_why_no_cuda", None)
    library._check_gpu()
    if words is None:
        assert library.no_cuda() is None
        return
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    with pytest.raises(
        UnsupportedError, match=f"^gather_rows: expected kernels for tensors on cuda, got .*{words}"
    ) as found:
        call(cannot_launch, X)
    assert str(found.value).endswith("or move tensors and data with .cpu()")
    assert "\n" not in str(found.value)


def test_a_driver_that_cannot_be_asked_has_no_version() -> None:
    assert library.driver_version("lib_that_is_not_there.so") is None
    assert library.driver_version("libc.so.6") is None


def cannot_launch(x: torch.Tensor) -> None:
    raise RuntimeError("cuda: no kernel image is available for execution on the device\nExceptions ...")


cannot_launch.__name__ = "gather_rows.default"
