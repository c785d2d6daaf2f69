"""Launches of a script: under python, torchrun, mpirun, or as ranks set up by hand.

Each process, torchrun's own too, is forked from one that has imported the package (see ``forked_python``): the imports
would take most of a short script's time. What looks at the import takes ``is_forked=False``.

"ranks" gives the ranks what torchrun would tell them, without a launcher that watches them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import forked_python
import pytest
from limits import COMMAND_SECONDS
from workers import LAUNCHER_PREFIXES

# What gloo of torch 2.10 prints of its connections, and Triton of torch for CUDA of what a forked process leaves.
_OTHERS = re.compile(
    r"^(\[Gloo\]|nanobind: | - leaked | - \.\.\. skipped remainder|See https://nanobind).*(\n|$)", re.MULTILINE
)


@dataclass(frozen=True)
class Ended:
    """What a launch left behind: one exit code for a launcher, one a rank when started by hand."""

    codes: list[int]
    stdout: str
    stderr: str
    seconds: float


def run_script(
    launcher: str,
    num_ranks: int,
    script: Path,
    *args: str,
    timeout: float = COMMAND_SECONDS,
    is_forked: bool = True,
    ends_whole: bool = False,
) -> Ended:
    """Run ``script`` with ``num_ranks`` ranks; kill it and fail the test after ``timeout`` seconds.

    ``ends_whole``: how Python ends is part of the test, see ``forked_python``.
    """
    environ = plain_environ()
    if not ends_whole and launcher != "mpirun":  # it may take a rank that ends at once for one that was killed
        environ[forked_python.ENDS_AT_ONCE] = "1"
    executable = forked_python.executable() if is_forked else sys.executable
    python = [executable, str(script), *args]
    if launcher == "torchrun":
        torchrun = [executable, "-m", "torch.distributed.run", "--standalone"]
        return _run([([*torchrun, f"--nproc-per-node={num_ranks}", *python[1:]], environ)], timeout)
    if launcher == "mpirun":
        return _run([([*mpirun(num_ranks), *python], environ)], timeout)
    if launcher == "python" or (launcher == "ranks" and num_ranks == 1):
        return _run([(python, environ)], timeout)
    environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE=str(num_ranks))
    environs = [{**environ, "RANK": str(rank)} for rank in range(num_ranks)]
    if launcher == "ranks":
        local = {"LOCAL_WORLD_SIZE": str(num_ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests"}
        environs = [{**environ, **local, "LOCAL_RANK": environ["RANK"]} for environ in environs]
    else:
        assert launcher == "by hand"
    return _run([(python, environ) for environ in environs], timeout)


def free_port() -> int:
    """One that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def plain_environ() -> dict[str, str]:
    """The environment of a launch: without a launcher around the tests, and with what Open MPI asks of few cores."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    root = Path(__file__).resolve().parent.parent
    environ.update(OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join([str(root), environ.get("PYTHONPATH", "")]))
    environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    environ.update(PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe")
    return environ


def mpirun(num_ranks: int) -> list[str]:
    """The command before a program: the mpirun beside this Python, whose library mpi4py finds, or one on the path."""
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        pytest.skip("no mpirun is installed")
    return [found, "-n", str(num_ranks)]


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
        ended = Ended(codes, _OTHERS.sub("", stdout.read()), _OTHERS.sub("", stderr.read()), seconds)
    if not codes:
        pytest.fail(f"{commands[0][0]} had not ended after {timeout} s\n{ended.stdout}\n{ended.stderr}")
    return ended
