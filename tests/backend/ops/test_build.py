"""What the build promises: one portable library, and one clear line when something is missing."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from limits import COMMAND_SECONDS

from pyg_dist.backend.ops import library
from pyg_dist.errors import LibraryNotBuiltError, UnsupportedError

ROOT = Path(__file__).parents[3]


def read_elf(*arguments: str) -> str:
    readelf = shutil.which("readelf")
    if readelf is None or not sys.platform.startswith("linux"):
        pytest.skip("needs readelf")
    result = subprocess.run(
        [readelf, "--wide", *arguments, str(library._find())],
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=True,
    )
    return result.stdout


def test_library_knows_neither_python_nor_the_building_machine() -> None:
    dynamic = read_elf("--dynamic")
    needed = set(re.findall(r"NEEDED.*\[(.+)\]", dynamic))
    assert "libtorch_cpu.so" in needed  # by name: found among what `import torch` has loaded
    assert not {name for name in needed if "python" in name}
    assert "RPATH" not in dynamic
    assert "RUNPATH" not in dynamic


def test_library_uses_the_stable_abi_only() -> None:
    symbols = read_elf("--dyn-syms", "--demangle")
    undefined = re.findall(r"UND (\S+)", symbols)
    of_torch = {name for name in undefined if re.match(r"aoti_|torch|at::|c10::", name)}
    assert of_torch  # or the expression above is wrong
    assert {name for name in of_torch if "::" in name} == set()
    # C functions that came after torch 2.10; the full list is in torch/csrc/stable/c/shim.h.
    newer = {"torch_from_blob", "torch_library_def_with_tags", "torch_library_set_python_module"}
    assert of_torch.isdisjoint(newer)


@pytest.mark.slow
@pytest.mark.parametrize("source", sorted((ROOT / "csrc/cpu").glob("*.simd.cpp")), ids=lambda path: path.name)
def test_kernels_leave_no_inline_function_to_the_linker(source: Path, tmp_path: Path) -> None:
    """The linker keeps one copy of an inline function or template for all callers, perhaps one with AVX-512 in it.

    Without optimisation, every one that is called is left.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    nm = shutil.which("nm")
    if compiler is None or nm is None:
        pytest.skip("needs a compiler and nm")
    compiled = tmp_path / "kernels.o"
    flags = ["-std=c++20", "-O0", "-fPIC", "-fno-exceptions", "-DPYG_DIST_LEVEL=baseline", "-I."]
    command = [compiler, *flags, "-c", str(source), "-o", str(compiled)]
    subprocess.run(command, cwd=ROOT / "csrc", timeout=COMMAND_SECONDS, check=True)
    symbols = subprocess.run(
        [nm, "--demangle", compiled], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=True
    ).stdout
    assert "pyg_dist::baseline::" in symbols
    shared = [name for name in re.findall(r" [VWu] (.+)", symbols) if "pyg_dist::baseline::" not in name]
    assert shared == []


def test_avx2_is_chosen_where_all_that_it_is_compiled_for_is_there(tmp_path: Path) -> None:
    """Processors of an emulator, one without F16C or FMA among them; no kernel is called, so none is linked."""
    compiler, emulator = shutil.which(os.environ.get("CXX", "c++")), shutil.which("qemu-x86_64")
    if compiler is None or emulator is None or platform.machine() != "x86_64":
        pytest.skip("needs an x86-64, a compiler and qemu-x86_64")
    source, program = tmp_path / "isa.cpp", tmp_path / "isa"
    source.write_text('#include <cstdio>\n#include "cpu/table.h"\nint main() { std::puts(pyg_dist::kernels().isa); }\n')
    flags = ["-std=c++20", "-O0", "-static", "-DPYG_DIST_X86_LEVELS", "-Wl,--unresolved-symbols=ignore-all", "-I."]
    command = [compiler, *flags, str(source), "cpu/table.cpp", "-o", str(program)]
    subprocess.run(command, cwd=ROOT / "csrc", timeout=COMMAND_SECONDS, check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYG_DIST_ISA"}
    for processor, isa in (("Haswell", "avx2"), ("Haswell,-f16c", "baseline"), ("Haswell,-fma", "baseline")):
        said = subprocess.run(
            [emulator, "-cpu", processor, program], env=environment, capture_output=True, text=True,
            timeout=COMMAND_SECONDS, check=True,
        )  # fmt: skip
        assert said.stdout == f"{isa}\n", processor


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast"])
def test_fast_math_does_not_compile(flag: str) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("needs a compiler")
    command = [compiler, "-std=c++20", flag, "-fsyntax-only", "-I.", "cpu/relu.cpp"]
    result = subprocess.run(
        command, cwd=ROOT / "csrc", capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False
    )
    assert result.returncode != 0
    assert "expected IEEE arithmetic" in result.stderr


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = find_spec("pyg_dist")
    assert spec is not None
    monkeypatch.setattr(spec, "submodule_search_locations", [str(tmp_path)])
    monkeypatch.setattr(library, "find_spec", lambda name: spec)


def test_a_missing_library_is_one_line_with_the_remedy(no_library: None) -> None:
    with pytest.raises(LibraryNotBuiltError, match=r"expected the native library .*; run `make`") as caught:
        library._load("pyg_dist")
    assert "\n" not in str(caught.value)


def test_a_gpu_without_its_library_is_one_line_with_the_command(
    no_library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installation that has built none, where torch has CUDA: ``doctor`` and the first op on a GPU say it."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(library, "_why_no_cuda", library._load_cuda())
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    with pytest.raises(UnsupportedError, match=r"on cuda, .* run `PYG_DIST_CUDA=1 pip install") as caught:
        library._require_kernels("gather_rows", (torch.ones(1),))
    assert "\n" not in str(caught.value)


def test_a_broken_library_is_one_line_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / library._find().name
    broken.write_bytes(b"not a library")
    monkeypatch.setattr(library, "_find", lambda name: broken)
    with pytest.raises(LibraryNotBuiltError, match=r"expected a native library for torch .*; run `make`") as caught:
        library._load("pyg_dist")
    assert "\n" not in str(caught.value)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The files that the build reads, without an environment."""
    if shutil.which("make") is None or not (ROOT / "Makefile").exists():
        pytest.skip("needs make and the source tree")
    for name in ("Makefile", "CMakeLists.txt", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("csrc", "third_party", "tests/simt"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )


def pretend_that_dependencies_are_there(folder: Path, pip: str) -> None:
    """An environment whose `python -m pip` is the given shell script."""
    (folder / ".venv/bin").mkdir(parents=True)
    python = folder / ".venv/bin/python"
    python.write_text(f"#!/bin/sh\n{pip}\n")
    python.chmod(0o755)
    (folder / ".venv/.dependencies").touch()


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line of stderr apart from make's own last one."""
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make: ***")]
    assert len(lines) == 1, result.stderr
    return lines[0]


def test_make_names_a_missing_python(clone: Path) -> None:
    assert "expected Python 3.10 or newer, got 'no-such-python'" in complaint(
        make(clone, "test", "PYTHON=no-such-python")
    )


def test_make_names_an_old_python(clone: Path) -> None:
    old = clone / "old-python"
    old.write_text('#!/bin/sh\ntest "$1" = -V && echo Python 3.9.18\nexit 1\n')
    old.chmod(0o755)
    assert "expected Python 3.10 or newer, got './old-python' = Python 3.9.18" in complaint(
        make(clone, "test", "PYTHON=./old-python")
    )


def test_make_names_a_missing_compiler(clone: Path) -> None:
    line = complaint(make(clone, "test", f"PYTHON={sys.executable}", "CXX=no-such-compiler"))
    assert "expected a C++20 compiler, found no 'no-such-compiler'" in line
    assert not (clone / ".venv").exists()  # said before anything is downloaded


def test_make_names_a_missing_ensurepip(clone: Path) -> None:
    debian = clone / "debian-python"
    debian.write_text(
        "#!/bin/sh\ntest \"$1\" = -c && exit 0\necho; echo '    apt install python3.11-venv'; echo; exit 1\n"
    )
    debian.chmod(0o755)
    line = complaint(make(clone, "test", "PYTHON=./debian-python"))
    assert "making .venv failed: expected ensurepip: apt install python3.11-venv" in line


def test_make_names_a_missing_wheel_of_pymetis(clone: Path) -> None:
    """A pip that finds torch and the build tools, but no wheel of pymetis."""
    pretend_that_dependencies_are_there(clone, 'case "$*" in *pymetis*) echo "ERROR: none found"; exit 1;; esac')
    (clone / ".venv/.dependencies").unlink()
    (clone / ".venv/bin/pip").symlink_to("python")
    line = complaint(make(clone, "test", f"PYTHON={sys.executable}"))
    assert "installing METIS failed: ERROR: none found; expected a pymetis wheel for this Python: set PYTHON=" in line


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (["ERROR: No matching distribution found for numpy"], "No matching distribution found for numpy"),
        (["building", "/x/csrc/a.cpp:3:1: error: no such type", "ERROR: Failed building wheel"], "no such type"),
        (["CMake Error at CMakeLists.txt:3 (message):", "  pyg_dist needs GCC", "ERROR: subprocess"], "needs GCC"),
    ],
)
def test_make_says_in_one_line_why_the_installation_failed(clone: Path, log: list[str], cause: str) -> None:
    (clone / "log").write_text("\n".join(log) + "\n")
    pretend_that_dependencies_are_there(clone, f"cat {clone / 'log'}; exit 1")
    line = complaint(make(clone, "test"))
    assert re.fullmatch(rf"make: building .* failed: .*{cause}.*; the whole log is \.venv/install\.log", line)
    assert (clone / ".venv/install.log").read_text().splitlines() == log


def test_make_does_nothing_twice(clone: Path) -> None:
    pretend_that_dependencies_are_there(clone, 'case "$*" in *pytest*) ;; *) echo installed >> calls;; esac')
    for _ in range(2):
        assert make(clone, "test").returncode == 0
    assert (clone / "calls").read_text().splitlines() == ["installed"]
    source = clone / "csrc/schema.cpp"
    os.utime(source, (source.stat().st_mtime + 1e6,) * 2)
    assert make(clone, "test").returncode == 0
    assert (clone / "calls").read_text().splitlines() == ["installed"] * 2
