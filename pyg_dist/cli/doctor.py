"""``python -m pyg_dist doctor``: the code paths in use on this machine, and the reasons for slower ones."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pyg_dist.backend.comm.wires import mpi
from pyg_dist.backend.ops import library
from pyg_dist.backend.ops.memory import has_pool
from pyg_dist.backend.session.session import installed_version
from pyg_dist.backend.session.settings import SETTINGS, SPMM_FORM, WIRE
from pyg_dist.cli.inputs import Commands
from pyg_dist.cli.stored_plan import check_store
from pyg_dist.pricing.base import fold

# The processor flags that each level of csrc/cpu/table.cpp needs, best level first; names as in /proc/cpuinfo.
_NEEDED: dict[str, tuple[str, ...]] = {
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "avx2": ("avx2", "fma"),
    "sve512": ("sve",),
    "sve256": ("sve",),
    "baseline": (),
}
_SETTINGS = tuple(setting.name for setting in SETTINGS)
_PACKAGES = ("pyg-dist", "torch", "torch_geometric", "numpy", "mpi4py", "pymetis", "mtkahypar")
_BF16_UNITS = "amx_bf16"
"""The units in which oneDNN multiplies float32 matrices as bfloat16. It does not do so with avx512_bf16 alone."""
_GPU_DRIVER = Path("/proc/driver/nvidia/version")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def examine() -> dict[str, object]:
    """The facts that decide which code paths run, ready for JSON; ``"remarks"`` lists what could be faster."""
    build, cpu_flags = library.build_info(), _cpu_flags()
    gpus, no_gpus = _gpus()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts: dict[str, object] = {
        "instruction_set": library.isa(),
        "instruction_sets_built": build["levels"].split(","),
        "gpu_kernels": library.devices().get("cuda"),
        "no_gpu_kernels": library.no_cuda(),
        "gpus": gpus,
        "no_gpus": no_gpus,
        "gpu_driver": _gpu_driver(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None,
        "wire": WIRE.value(),
        "mpi": " with ".join(mpi.library() or ()) or None,
        "compiler": build["compiler"],
        "built_for_torch": build["torch"],
        "cores": cores,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "last_cache_mib": library.last_cache_bytes() >> 20,
        "product_form": SPMM_FORM.value(),
        "bf16_matrix_units": _BF16_UNITS in cpu_flags,
        "matmul_precision": str(torch.backends.mkldnn.matmul.fp32_precision),  # type: ignore[attr-defined]
        "huge_pages": _huge_pages(),
        "memory_is_used_again": has_pool(),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in _PACKAGES},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("PYG_DIST_", "OMP_", "MKL_", "GOMP_", "KMP_", "GLIBC_TUNABLES", "THP_MEM"))
        },
    }
    return facts | {"remarks": list(remarks(facts, cpu_flags))}


def remarks(facts: Mapping[str, Any], cpu_flags: frozenset[str]) -> Iterable[str]:
    """One line for each path that is slower than it could be, with the reason and the remedy."""
    environment = facts["environment"]
    used, built = facts["instruction_set"], facts["instruction_sets_built"]
    for level in _NEEDED:
        if level == used:
            break
        if level not in built:
            continue
        missing = [flag for flag in _NEEDED[level] if flag not in cpu_flags]
        if environment.get("PYG_DIST_ISA") == used and not missing:
            yield f"kernels: {used}, not {level}, because PYG_DIST_ISA={used}: unset it"
        elif cpu_flags and missing:
            yield f"kernels: {used}, not {level}, because this processor lacks {' '.join(missing)}"
        elif level.startswith("sve"):
            yield f"kernels: {used}, not {level}, because this processor's vectors have another length"
    if facts["threads"] < facts["cores"]:
        reason = f"OMP_NUM_THREADS={environment['OMP_NUM_THREADS']}" if "OMP_NUM_THREADS" in environment else "torch"
        yield (
            f"threads: {facts['threads']} of {facts['cores']} cores, because of {reason}: right for several ranks on "
            f"one machine, slow for one rank"
        )
    elif facts["threads"] > facts["cores"]:
        yield (
            f"threads: {facts['threads']} on {facts['cores']} cores take turns: "
            f"set OMP_NUM_THREADS to the cores of a rank"
        )
    if facts["gpus"] and facts["no_gpu_kernels"]:
        yield f"gpu kernels: none that run, so that tensors on cuda are refused: {facts['no_gpu_kernels']}"
    if facts["gpus"] and not facts["nccl"]:
        yield "messages: through host memory, because this torch has no nccl: install one that has"
    if facts["bf16_matrix_units"] and facts["matmul_precision"] != "bf16":
        yield (
            "dense products: in float32, where this processor has bf16 matrix units: "
            'torch.backends.mkldnn.matmul.fp32_precision = "bf16" in the script uses them, approximately'
        )
    advises = "glibc.malloc.hugetlb=1" in environment.get("GLIBC_TUNABLES", "")
    advises |= environment.get("THP_MEM_ALLOC_ENABLE") == "1"
    if facts["huge_pages"] == "madvise" and not advises:
        yield (
            "memory: torch's own large tensors are written in small pages, a fault each: "
            "start with GLIBC_TUNABLES=glibc.malloc.hugetlb=1 or THP_MEM_ALLOC_ENABLE=1"
        )
    if not facts["memory_is_used_again"] and facts["system"].startswith("Linux"):
        yield (
            f"memory: large outputs of the kernels lie in fresh pages each time, because torch {torch.__version__} "
            f"takes no memory of others: upgrade to 2.11 or later"
        )
    if facts["huge_pages"] == "never":
        yield f"memory: small pages only, because {_HUGE_PAGES} says never: write madvise there"
    if facts["built_for_torch"].split("+")[0] > str(torch.__version__):
        yield (
            f"library: built with torch {facts['built_for_torch']}, running with the older {torch.__version__}: "
            f"rebuild it if it fails to load"
        )
    for name in environment:
        if name.startswith("PYG_DIST_") and name not in _SETTINGS:
            yield f"environment: {name} is not a setting of pyg_dist (there are {', '.join(_SETTINGS)})"


def describe(facts: Mapping[str, Any]) -> str:
    """The facts as lines of text."""
    mpi, wire, cache, form = facts["mpi"], facts["wire"], facts["last_cache_mib"], facts["product_form"]
    gpus = f"none: {facts['no_gpus']}"
    if facts["gpus"]:
        nccl = f"nccl {facts['nccl']}" if facts["nccl"] else "no nccl"
        gpus = f"{', '.join(facts['gpus'])}; driver {facts['gpu_driver'] or 'unknown'}, {nccl}"
    messages = f"by gloo; under mpirun by MPI ({mpi})" if mpi else "by gloo: no mpi4py, or no MPI library"
    if wire != "auto":
        messages = f"by {wire}, because PYG_DIST_WIRE says so ({mpi or 'no mpi4py'})"
    products = (
        "the first large sparse ones are timed in each form; PYG_DIST_LOG=debug and profile() say which was faster"
    )
    if form is not None:
        products = f"large sparse ones go {form}, because PYG_DIST_SPMM_FORM says so"
    units = "bf16 matrix units (AMX)" if facts["bf16_matrix_units"] else "no bf16 matrix units"
    versions = ", ".join(f"{name} {version or 'missing'}" for name, version in facts["versions"].items())
    lines = {
        "kernels": f"{facts['instruction_set']} (built: {', '.join(facts['instruction_sets_built'])}; "
                   f"{facts['compiler']})",
        "gpu kernels": facts["gpu_kernels"] or f"none: {facts['no_gpu_kernels']}",
        "gpus": gpus,
        "messages": messages,
        "threads": f"{facts['threads']} on {facts['cores']} cores, {facts['system']}",
        "cache": f"{f'{cache} MiB' if cache else 'of unknown size'} at the third level",
        "products": products,
        "dense": f"{units}, torch.backends.mkldnn.matmul.fp32_precision is {facts['matmul_precision']!r}",
        "huge pages": facts["huge_pages"],
        "versions": f"Python {facts['python']}, {versions}, built with torch {facts['built_for_torch']}",
        "environment": " ".join(f"{k}={v}" for k, v in facts["environment"].items()) or "nothing set",
    }  # fmt: skip
    notes = [f"slower than it could be: {remark}" for remark in facts["remarks"]]
    shown = [f"{name:<12} {value}" for name, value in lines.items()]
    return fold("\n".join([*shown, *(notes or ["nothing is slower than it could be"])]))


def add_command(commands: Commands) -> None:
    """Add ``doctor`` to the subcommands of an :mod:`argparse` parser."""
    parser = commands.add_parser("doctor", help="what is used on this machine, and why a slower path was taken")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--store", type=Path, help="check every file of this store by its digests instead")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    if args.store is not None:
        digest, shards = check_store(args.store)
        size = sum(shard.bytes for shard in shards)
        found = {"store": str(args.store), "files": len(shards), "bytes": size, "digest": digest}
        whole = f"{args.store}: {len(shards)} files, {size / 2**20:,.1f} MiB, all as the manifest says"
        print(json.dumps(found) if args.json else whole)
        return
    facts = examine()
    print(json.dumps(facts) if args.json else describe(facts))


def _gpus() -> tuple[list[str], str | None]:
    if torch.version.cuda is None:
        return [], f"torch {torch.__version__} has no CUDA"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # no device, no driver, or one too old: torch says which
        return [], str(error).splitlines()[0]
    found = [torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count())]
    return [f"{gpu.name} (sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.1f} GiB)" for gpu in found], None


def _gpu_driver() -> str | None:
    """The version of NVIDIA's driver, as its kernel module states it."""
    return next((word for word in _text(_GPU_DRIVER).split() if word[0].isdigit() and "." in word), None)


def _huge_pages() -> str:
    chosen = re.search(r"\[(\w+)\]", _text(_HUGE_PAGES))
    return chosen[1] if chosen else "unknown"


def _cpu_flags() -> frozenset[str]:
    flags = re.search(r"^(?:flags|Features).*?:(.*)", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return frozenset(flags[1].split() if flags else ())


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
