"""A Python that starts in milliseconds: each process is forked from one that has imported the package.

``executable()`` is the path of a program that takes Python's arguments. It hands them to a server in the processes of
the tests, with its environment, folder and open files; the server forks, and the new process does what Python would do.
The program passes on signals, dies with its process, and ends as it ended. Launchers start it like any Python, and what
the process itself starts by ``sys.executable`` is forked too.

Python's end, of all modules and of what is static, takes half a second, most of a short script's time. What is
started by -m (launchers, pyg_dist's own commands) and scripts whose environment has ``ENDS_AT_ONCE`` wait for threads,
run ``atexit``, and end.

Two things differ from Python. The parent process is the server. Modules are imported already, so that how an import
behaves cannot be seen. Another ``PYG_DIST_ISA`` than the server's, and options other than -u and -B, start a true
Python.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import logging
import multiprocessing
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from workers import fork_server

ENDS_AT_ONCE = "PYG_DIST_TEST_ENDS_AT_ONCE"

_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
_PROGRAM = """#!{python} -ISE
import array, json, os, signal, socket, struct, sys
words = sys.argv[1:]
while words[:1] in (["-u"], ["-B"]):
    del words[0]
is_option = not words or (words[0].startswith("-") and words[0] not in ("-m", "-c"))
if is_option or os.environ.get("PYG_DIST_ISA") != {isa!r}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
def lost(error):
    last = open({address!r} + ".txt").read() if os.path.exists({address!r} + ".txt") else "nothing is known of its end"
    sys.exit(f"the server that forks the tests' processes is gone ({{error}}): {{last}}")
try:
    server.connect({address!r})
except OSError as error:
    lost(error)
files = []
for file in map(int, os.listdir("/proc/self/fd")):
    try:
        if file != server.fileno() and os.get_inheritable(file):
            files.append(file)
    except OSError:  # the listing's own
        pass
start = json.dumps([words, dict(os.environ), os.getcwd(), files]).encode()
for number in {signals!r}:
    signal.signal(number, lambda number, frame: server.send(bytes([number])))
server.sendmsg([struct.pack("i", len(start))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))])
server.sendall(start)
try:
    status = struct.unpack("i", server.recv(4))[0]
except (OSError, struct.error) as error:
    lost(error)
if os.WIFSIGNALED(status):
    signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != signal.SIGKILL else None
    os.kill(os.getpid(), os.WTERMSIG(status))
os._exit(os.WEXITSTATUS(status))
"""


@functools.cache
def executable() -> str:
    """Return the path of the program; the server starts with the first call and ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="pyg_dist_python_"))
    address, path = folder / "server", folder / "python"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen(64)
    isa, signals = os.environ.get("PYG_DIST_ISA"), [int(number) for number in _PASSED_ON]
    path.write_text(_PROGRAM.format(python=sys.executable, isa=isa, address=str(address), signals=signals))
    path.chmod(0o700)
    fork_server().Process(target=_serve, args=(listener, str(path)), daemon=True).start()
    listener.close()
    return str(path)


class _Server:
    """Starts processes for the programs that connect, and tells each how its process has ended."""

    def __init__(self, listener: socket.socket, program: str) -> None:
        self._listener = listener
        self._program = program
        self._selector = selectors.DefaultSelector()
        self.when_readable(listener.fileno(), self._accept)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                # Unless the one before has closed it, after which another may have its number.
                if self._selector.get_map().get(key.fd) is key:
                    key.data()

    def when_readable(self, file: int, call: Callable[[], None]) -> None:
        """Call a function whenever a file can be read."""
        self._selector.register(file, selectors.EVENT_READ, call)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        try:
            header, rights, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(253 * 4))
        except ConnectionResetError:
            header, rights = b"", []
        received = array.array("i")
        for _, _, data in rights:
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
        start = _received(connection, struct.unpack("i", header)[0] if len(header) == 4 else 0)
        if not start:  # the program was killed before it had said what to start
            for file in received:
                os.close(file)
            connection.close()
            return
        words, environ, folder, files = json.loads(start)
        process = os.fork()
        if process == 0:
            _place(dict(zip(files, received, strict=True)))
            _be_python(self._program, words, environ, folder)
        for file in received:
            os.close(file)
        end = os.pidfd_open(process)
        self.when_readable(connection.fileno(), lambda: self._pass_on(connection, process))
        self.when_readable(end, lambda: self._ended(connection, process, end))

    def _pass_on(self, connection: socket.socket, process: int) -> None:
        """Send the process the signals that its program got, or end it where the program is gone."""
        try:
            numbers = connection.recv(64)
        except ConnectionResetError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            os.kill(process, number)
        if not numbers:
            self._selector.unregister(connection)

    def _ended(self, connection: socket.socket, process: int, end: int) -> None:
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(KeyError):
            self._selector.unregister(connection)
        self._selector.unregister(end)
        os.close(end)
        with contextlib.suppress(ConnectionError):
            connection.sendall(struct.pack("i", status))
        connection.close()


def _received(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or none where the other end is gone before."""
    start = bytearray()
    while len(start) < size:
        try:
            more = connection.recv(1 << 20)
        except ConnectionResetError:
            more = b""
        if not more:
            return b""
        start += more
    return bytes(start)


def _serve(listener: socket.socket, program: str) -> None:
    """The main function of the server's process, which ends with the one that has started it."""
    own = os.getpid()

    def end(*_: Any) -> None:
        if os.getpid() != own:  # a process that has just been forked, and was told to end
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        shutil.rmtree(Path(program).parent, ignore_errors=True)
        os._exit(0)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest
    signal.signal(signal.SIGTERM, end)
    server, parent = _Server(listener, program), multiprocessing.parent_process()
    assert parent is not None
    server.when_readable(parent.sentinel, end)
    try:
        server.run()
    except BaseException:
        Path(f"{listener.getsockname()}.txt").write_text(traceback.format_exc())
        raise


def _place(files: dict[int, int]) -> None:
    """Give the files that came the numbers that they had, and close all others."""
    above = max([2, *files, *files.values()]) + 1
    held = {number: above + place for place, number in enumerate(files)}
    for number, file in files.items():
        os.dup2(file, held[number])
    os.closerange(0, above)
    for number, file in held.items():
        os.dup2(file, number)
    os.closerange(above, os.sysconf("SC_OPEN_MAX"))


def _be_python(program: str, words: list[str], environ: dict[str, str], folder: str) -> None:
    """Do what Python does with these arguments, and end as it would."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=-1 if not os.isatty(1) else 1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.executable = program
    multiprocessing.spawn.set_executable(program)
    multiprocessing.current_process()._config.pop("daemon")  # type: ignore[attr-defined]
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    torch.set_num_threads(int(environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    torch.seed()
    np.random.set_bit_generator(np.random.MT19937())
    random.seed()
    logging.getLogger("pyg_dist").handlers.clear()
    importlib.import_module("pyg_dist.backend.session.steps").configure_log()
    generators: Any = importlib.import_module("pyg_dist.backend.session.generators")
    generators._alike = None
    generators.start_alike()
    importlib.import_module("pyg_dist.backend.session.leaving").way_out.watch_start()
    kind, *rest = words if words[0] in ("-m", "-c") else ["", *words]
    first = {"-m": folder, "-c": ""}.get(kind, str(Path(rest[0]).resolve().parent))
    path = [first, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:0] = path
    sys.argv = ["-c", *rest[1:]] if kind == "-c" else rest
    code = 0
    try:
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
        else:
            runpy.run_path(rest[0], run_name="__main__")
    except SystemExit as end:
        code = _exit_code(end)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        atexit._run_exitfuncs()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    if (kind == "-m" or ENDS_AT_ONCE in environ) and "mpi4py.MPI" not in sys.modules:
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):  # as Python does, which leaves alone what a script has closed
            if not stream.closed:
                stream.flush()
        os._exit(code)
    gc.collect()
    ctypes.pythonapi.Py_Exit(code)  # threads, atexit, modules, what is static


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return int(end.code or 0)
    print(end.code, file=sys.stderr)
    return 1
