"""Launches of a script: under python, torchrun, mpirun, as ranks set up by hand, or forked.

"forked" is torchrun without Python's start: each rank is forked from a process that has imported the package, which
takes most of a short script's time. It ends as Python does. What looks at how a launcher or the import behaves takes
one of the others.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from limits import COMMAND_SECONDS
from workers import LAUNCHER_PREFIXES, fork_server

LAUNCHERS = ["torchrun", "mpirun", "by hand"]


@dataclass(frozen=True)
class Ended:
    """What a launch left behind: one exit code for a launcher, one a rank when started by hand."""

    codes: list[int]
    stdout: str
    stderr: str
    seconds: float


def run_script(launcher: str, num_ranks: int, script: Path, *args: str, timeout: float = COMMAND_SECONDS) -> Ended:
    """Run ``script`` with ``num_ranks`` ranks; kill it and fail the test after ``timeout`` seconds."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    root = Path(__file__).resolve().parent.parent
    environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(root), environ.get("PYTHONPATH", "")]))
    python = [sys.executable, str(script), *args]
    if launcher == "torchrun":
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return _run([([*torchrun, f"--nproc-per-node={num_ranks}", *python[1:]], environ)], timeout)
    if launcher == "mpirun":
        return _run([([_mpirun(), "-n", str(num_ranks), *python], environ)], timeout)
    if launcher == "python":
        return _run([(python, environ)], timeout)
    if launcher == "forked" and num_ranks == 1:
        return _fork(script, args, [environ], timeout)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]), WORLD_SIZE=str(num_ranks))
    environs = [{**environ, "RANK": str(rank)} for rank in range(num_ranks)]
    if launcher == "forked":
        local = {"LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
        environs = [{**environ, **local, "LOCAL_RANK": environ["RANK"]} for environ in environs]
        return _fork(script, args, environs, timeout)
    assert launcher == "by hand"
    return _run([(python, environ) for environ in environs], timeout)


def _mpirun() -> str:
    """Return the mpirun beside this Python, whose library mpi4py finds, or the one on the path."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun is installed")
    return found


def _fork(script: Path, args: tuple[str, ...], environs: list[dict[str, str]], timeout: float) -> Ended:
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        for path in outputs:
            path.touch()
        processes = [
            fork_server().Process(target=_main, args=(str(script), args, environ, os.getcwd(), *map(str, outputs)))
            for environ in environs
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(max(0.1, start + timeout - time.monotonic()))
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
        seconds = time.monotonic() - start
        stdout, stderr = (path.read_text() for path in outputs)
    if None in codes:
        pytest.fail(f"{script} had not ended after {timeout} s\n{stdout}\n{stderr}")
    return Ended([int(code or 0) for code in codes], stdout, stderr, seconds)


def _main(script: str, args: tuple[str, ...], environ: dict[str, str], folder: str, stdout: str, stderr: str) -> None:
    """Run the script as ``python SCRIPT`` would, and end as it would; the main function of a forked rank."""
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    for number, path in ((1, stdout), (2, stderr)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = [script, *args]
    sys.path[:0] = [str(Path(script).parent), *environ["PYTHONPATH"].split(os.pathsep)[:1]]
    torch.set_num_threads(1)
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # which multiprocessing leaves out: threads, atexit, modules, what is static


def _run(commands: list[tuple[list[str], dict[str, str]]], timeout: float) -> Ended:
    start = time.monotonic()
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        processes = [
            subprocess.Popen(command, env=environ, stdout=stdout, stderr=stderr, start_new_session=True)
            for command, environ in commands
        ]
        try:
            codes = [process.wait(max(0.1, start + timeout - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired:
            codes = []
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        seconds = time.monotonic() - start
        stdout.seek(0)
        stderr.seek(0)
        ended = Ended(codes, stdout.read(), stderr.read(), seconds)
    if not codes:
        pytest.fail(f"{commands[0][0]} had not ended after {timeout} s\n{ended.stdout}\n{ended.stderr}")
    return ended
