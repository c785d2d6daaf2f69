"""``doctor`` says what is used, and names the reason wherever something faster was passed over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from limits import COMMAND_SECONDS

from pyg_dist.backend.ops import library
from pyg_dist.cli import doctor, main

AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"})


def facts(**changes: Any) -> dict[str, Any]:
    built = ["baseline", "avx2", "avx512"]
    whole = {"instruction_set": "avx512", "instruction_sets_built": built, "threads": 2, "cores": 2}
    return {
        **whole,
        "gpus": [],
        "gpu_kernels": None,
        "no_gpu_kernels": "torch has no CUDA",
        "nccl": None,
        "bf16_matrix_units": False,
        "matmul_precision": "none",
        "huge_pages": "always",
        "memory_is_used_again": True,
        "built_for_torch": "2.10.0",
        "environment": {},
        **changes,
    }


def only(remarks: Any) -> str:
    (remark,) = remarks
    return str(remark)


def test_nothing_to_say_about_the_best_path() -> None:
    assert list(doctor.remarks(facts(), AVX512)) == []


def test_reasons() -> None:
    forced = facts(instruction_set="avx2", environment={"PYG_DIST_ISA": "avx2"})
    assert "not avx512, because PYG_DIST_ISA=avx2" in only(doctor.remarks(forced, AVX512))
    lacking = facts(instruction_set="avx2")
    assert "because this processor lacks avx512bw" in only(doctor.remarks(lacking, AVX512 - {"avx512bw"}))
    one = facts(threads=1, environment={"OMP_NUM_THREADS": "1"})
    assert "1 of 2 cores, because of OMP_NUM_THREADS=1" in only(doctor.remarks(one, AVX512))
    assert "3 on 2 cores take turns" in only(doctor.remarks(facts(threads=3), AVX512))
    assert "says never" in only(doctor.remarks(facts(huge_pages="never"), AVX512))
    old = facts(memory_is_used_again=False, system="Linux x86_64")
    assert "fresh pages each time" in only(doctor.remarks(old, AVX512))
    assert "start with GLIBC_TUNABLES" in only(doctor.remarks(facts(huge_pages="madvise"), AVX512))
    for setting in ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, {"THP_MEM_ALLOC_ENABLE": "1"}):
        assert not list(doctor.remarks(facts(huge_pages="madvise", environment=setting), AVX512))
    units = facts(bf16_matrix_units=True)
    assert 'matmul.fp32_precision = "bf16"' in only(doctor.remarks(units, AVX512))
    assert not list(doctor.remarks(units | {"matmul_precision": "bf16"}, AVX512))
    gpu = facts(gpus=["NVIDIA H200 (sm_90, 139.8 GiB)"], nccl="2.27.5")
    assert only(doctor.remarks(gpu, AVX512)).endswith("tensors on cuda are refused: torch has no CUDA")
    no_nccl = gpu | {"gpu_kernels": "80,90 of CUDA 13.0", "no_gpu_kernels": None, "nccl": None}
    assert "messages: through host memory" in only(doctor.remarks(no_nccl, AVX512))
    misspelt = facts(environment={"PYG_DIST_THREADS": "2"})
    assert "PYG_DIST_THREADS is not a setting" in only(doctor.remarks(misspelt, AVX512))


def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a machine that has some, as torch and the driver's module say it."""
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 << 30)
    version = tmp_path / "version"
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\nGCC version: 12.3\n")
    monkeypatch.setattr(doctor, "_GPU_DRIVER", version)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: gpu)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    one = "NVIDIA H200 (sm_90, 140.0 GiB)"
    assert f"gpus         {one}, {one}; driver 580.65.06, nccl 2.27.5" in doctor.describe(doctor.examine())
    monkeypatch.setattr(torch.cuda, "init", init_without_a_driver)
    assert "gpus         none: Found no NVIDIA driver" in doctor.describe(doctor.examine())


def init_without_a_driver() -> None:
    raise RuntimeError("Found no NVIDIA driver on your system. Please check ...\nmore")


def run(*arguments: str, **environment: str) -> str:
    command = [sys.executable, "-m", "pyg_dist", "doctor", *arguments]
    environ = {**os.environ, **environment}
    return subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
    ).stdout


@pytest.mark.parametrize(("flags", "has_units"), [({"amx_bf16", "amx_tile"}, True), ({"avx512_bf16"}, False)])
def test_precision_of_dense_products(
    monkeypatch: pytest.MonkeyPatch, matmul_precision: Callable[[str], None], flags: set[str], has_units: bool
) -> None:
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: AVX512 | flags)
    for precision in ("ieee", "bf16"):
        matmul_precision(precision)
        found = doctor.examine()
        assert (found["bf16_matrix_units"], found["matmul_precision"]) == (has_units, precision)
        assert any("dense products" in remark for remark in found["remarks"]) == (has_units and precision == "ieee")
        line = f"{'' if has_units else 'no '}bf16 matrix units"
        assert f"dense        {line}" in doctor.describe(found)
        assert f"fp32_precision is '{precision}'" in doctor.describe(found)


@pytest.mark.slow
def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(PYG_DIST_ISA="baseline", OMP_NUM_THREADS="1")
    assert out.startswith("kernels      baseline (built: baseline")
    if library.isa() != "baseline":
        assert "because PYG_DIST_ISA=baseline: unset it" in out
    capsys.readouterr()
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["instruction_set"] == library.isa()
    assert found["versions"]["torch"]


def test_how_the_form_of_products_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "products     the first large sparse ones are timed in each form" in doctor.describe(doctor.examine())
    monkeypatch.setenv("PYG_DIST_SPMM_FORM", "blocks")
    assert "products     large sparse ones go blocks, because PYG_DIST_SPMM_FORM" in doctor.describe(doctor.examine())
