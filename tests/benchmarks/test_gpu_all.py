"""``gpu_all.py``, all of whose ways are gone here, with stand-ins for what only a machine with a GPU has."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_all
import pytest
from gpu_measure import read


@pytest.fixture
def run(tmp_path: Path) -> gpu_all.Run:
    return gpu_all.Run(tmp_path / "gpu.json", is_smoke=True, environment=gpu_all.environment_of_parts())


def stub(folder: Path, name: str, *lines: str) -> str:
    """A command of that name in a folder; the path that finds it first."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("\n".join(["#!/bin/sh", *lines, ""]))
    (folder / name).chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


def test_ninja_is_taken_where_it_is(tmp_path: Path) -> None:
    with_make, *_ = gpu_all.build_commands(tmp_path, str(tmp_path))
    stub(tmp_path, "ninja")
    with_ninja, *_ = gpu_all.build_commands(tmp_path, str(tmp_path))
    assert "-G" not in with_make
    assert with_ninja[with_ninja.index("-G") + 1] == "Ninja"


@pytest.fixture
def empty_tree(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A source tree without libraries."""
    (tmp_path / "pyg_dist").mkdir()
    (tmp_path / "pyg_dist/__init__.py").touch()
    monkeypatch.setattr(gpu_all, "ROOT", tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "pyg_dist"]:
        monkeypatch.delitem(sys.modules, name)
    others = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    monkeypatch.setattr(sys, "meta_path", others)
    return tmp_path


def test_libraries_that_are_missing_are_built(empty_tree: Path) -> None:
    path = stub(empty_tree / "bin", "cmake", f'echo "$PYG_DIST_CUDA $@" >> {empty_tree}/calls')
    assert gpu_all.build({"PATH": path}, needs_cuda=True, seconds=600) is None
    configure, build, install = (empty_tree / "calls").read_text().splitlines()
    assert configure.startswith(f"1 --fresh -S {empty_tree} ")
    assert "-DCMAKE_CUDA_ARCHITECTURES=native" in configure
    assert build.startswith("1 --build ")
    assert install.startswith("1 --install ")
    (empty_tree / "pyg_dist/lib").mkdir()
    for name in ("libpyg_dist.so", "libpyg_dist_cuda.so"):
        (empty_tree / "pyg_dist/lib" / name).touch()
    (empty_tree / "calls").unlink()
    assert gpu_all.build({"PATH": path}, needs_cuda=True, seconds=600) is None
    assert not (empty_tree / "calls").exists()


def test_a_build_that_fails_is_in_the_results(
    empty_tree: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = stub(empty_tree / "bin", "cmake", "echo no compiler", "exit 3")
    monkeypatch.setenv("PATH", path)
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--output", str(tmp_path / "gpu.json")])
    with pytest.raises(SystemExit, match="expected the libraries"):
        gpu_all.main()
    assert "status 3\nno compiler" in read(tmp_path / "gpu.json")["parts"]["build"]


def test_the_parts_run_in_order_while_there_is_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[tuple[str, bool]] = []

    def part_of(part: str, run: gpu_all.Run, seconds: float) -> str:
        ran.append((part, seconds <= gpu_all.PART_SECONDS[part]))
        return "status 0"

    monkeypatch.setattr(gpu_all, "build", lambda *args, **kwargs: None)
    monkeypatch.setattr(gpu_all, "run_measurement", part_of)
    monkeypatch.setattr(gpu_all, "PARTS", dict.fromkeys(gpu_all.PARTS, part_of))
    output = tmp_path / "gpu.json"
    output.write_text("of an earlier run")
    monkeypatch.setattr(sys, "argv", ["gpu_all.py", "--smoke", "--output", str(output)])
    gpu_all.main()
    assert ran == [(part, True) for part in ("tests", "bandwidth", "spmm", "sanitizer", "epoch")]
    assert list(read(output)["parts"]) == ["build", *gpu_all.PART_SECONDS]
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--minutes", "0", "--parts", "spmm"])
    gpu_all.main()
    assert len(ran) == 5
    assert read(output)["parts"]["spmm"] == "no time left"


def test_a_part_of_measurements_runs_in_its_process(monkeypatch: pytest.MonkeyPatch, run: gpu_all.Run) -> None:
    commands: list[list[str]] = []

    def kept(command: list[str], environment: dict[str, str], seconds: float) -> str:
        commands.append(command)
        return "status 0"

    monkeypatch.setattr(gpu_all, "run_command", kept)
    assert gpu_all.run_measurement("bandwidth", run, 600) == "status 0"
    monkeypatch.setattr(sys, "argv", commands[0][1:])
    gpu_all.main()
    found = read(run.output)
    assert found["machine"]["bandwidth"]["torch"]
    assert found["bandwidth"]["gather_rows"]["GB/s"] > 0


def test_a_command_is_cut_with_all_that_it_has_started(tmp_path: Path) -> None:
    """The pipe of what it has started ends, too."""
    lines: list[str] = []
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(900)'])"
    status = gpu_all.run_command([sys.executable, "-c", script], dict(os.environ), 0.5, lines.append)
    assert status.startswith("cut after")
    command = [sys.executable, "-c", "print('one'); print('two'); raise SystemExit(4)"]
    assert gpu_all.run_command(command, dict(os.environ), 600, lines.append) == "status 4"
    assert lines == ["one", "two"]


KILLED = """
import os, pytest
pytestmark = pytest.mark.gpu
def test_passes(): pass
def test_fails(): raise ValueError("expected 3, got 4")
def test_is_skipped(): pytest.skip("no such thing")
def test_is_killed(): os.kill(os.getpid(), 9)
"""


@pytest.fixture
def killed_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: gpu_all.Run) -> gpu_all.Run:
    """Of tests the last of which does not end."""
    (tmp_path / "tests/gpu").mkdir(parents=True)
    (tmp_path / "tests/gpu/test_it.py").write_text(KILLED)
    monkeypatch.setattr(gpu_all, "ROOT", tmp_path)
    return run


def test_tests_that_are_killed_keep_what_they_have(killed_run: gpu_all.Run) -> None:
    run = killed_run
    assert gpu_all.run_tests("tests", run, 600) == "status -9"
    name = "tests/gpu/test_it.py::test_"
    assert read(run.output)["tests"]["tests"] == {
        "running": [f"{name}is_killed"],
        "passed": 1,
        "failed": {f"{name}fails": "ValueError: expected 3, got 4"},
        "skipped": {"Skipped: no such thing": 1},
    }


@pytest.mark.slow
def test_a_process_of_tests_that_is_killed_ends_no_other(killed_run: gpu_all.Run) -> None:
    """As on a GPU, several at a time."""
    pytest.importorskip("xdist")
    run = killed_run
    assert gpu_all.run_tests("tests", gpu_all.Run(run.output, False, run.environment), 600) == "status 1"
    found = read(run.output)["tests"]["tests"]
    assert (found["status"], found["passed"]) == (1, 1)
    assert sorted(name.split("::")[1] for name in found["failed"]) == ["test_fails", "test_is_killed"]


@pytest.mark.slow
def test_the_tests_for_gpus_pass_on_a_cpu_without_metis(run: gpu_all.Run) -> None:
    """What only their names promise elsewhere: ranks that share the device, messages of one rank on nccl, all ops."""
    folder = run.output.parent / "modules"
    folder.mkdir()
    (folder / "pymetis.py").write_text("raise ImportError('not here')\n")
    path = os.pathsep.join([str(folder), run.environment["PYTHONPATH"]])
    without = gpu_all.Run(run.output, run.is_smoke, run.environment | {"PYTHONPATH": path})
    status = gpu_all.run_tests("tests", without, 1800)
    found = read(run.output)["tests"]["tests"]
    assert (status, found["failed"]) == ("status 0", {})
    assert found["passed"] > 60
    assert found["skipped"] == {"Skipped: there is one device": 1, "Skipped: there is no driver": 1}


@pytest.fixture
def sanitizer(run: gpu_all.Run) -> gpu_all.Run:
    """A stand-in that says something before and after what it runs."""
    path = stub(
        run.output.parent / "bin", "compute-sanitizer",
        f'echo "$@" >> {run.output.parent}/calls',
        "echo ========= COMPUTE-SANITIZER",
        'while ! [ -x "$1" ]; do shift; done',
        '"$@"; status=$?',
        'echo "========= Invalid read of size 4"; echo "========= ERROR SUMMARY: 1 error"; exit $status',
    )  # fmt: skip
    return gpu_all.Run(run.output, run.is_smoke, run.environment | {"PATH": path})


@pytest.mark.slow
def test_a_sanitizer_looks_at_the_packages_kernels(monkeypatch: pytest.MonkeyPatch, sanitizer: gpu_all.Run) -> None:
    monkeypatch.setattr(gpu_all, "CHECKS", ("racecheck",))
    assert gpu_all.run_sanitizer("sanitizer", sanitizer, 1800) == "racecheck: status 0"
    found = read(sanitizer.output)["sanitizer"]
    assert found["racecheck, tests"] == {
        "status": 0, "passed": len(gpu_all.SANITIZED), "failed": {}, "skipped": {},
    }  # fmt: skip
    assert found["racecheck"]["summary"] == "========= ERROR SUMMARY: 1 error"
    assert found["racecheck"]["lines"] == ["========= COMPUTE-SANITIZER", "========= Invalid read of size 4"]
    (call,) = (sanitizer.output.parent / "calls").read_text().splitlines()
    assert call.startswith(f"--tool racecheck --kernel-name kns=pyg_dist --error-exitcode 9 {sys.executable} -m pytest")


def test_a_sanitizer_that_is_cut_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch, sanitizer: gpu_all.Run) -> None:
    def cut(command: list[str], environment: dict[str, str], seconds: float, see: Callable[[str], None]) -> str:
        see("========= Invalid read of size 4")
        return "cut after 40 s"

    monkeypatch.setattr(gpu_all, "run_command", cut)
    assert gpu_all.run_sanitizer("sanitizer", sanitizer, 80) == "memcheck: cut after 40 s, racecheck: cut after 40 s"
    found: dict[str, Any] = json.loads(sanitizer.output.read_text())["sanitizer"]
    for check in gpu_all.CHECKS:
        assert found[check]["lines"] == ["========= Invalid read of size 4"]


def test_without_a_sanitizer_the_part_says_so(run: gpu_all.Run) -> None:
    there = gpu_all.Run(run.output, False, run.environment | {"PATH": str(run.output.parent)})
    assert gpu_all.run_sanitizer("sanitizer", there, 80) == "expected compute-sanitizer on the path, found none"
