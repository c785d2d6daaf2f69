"""What a set-up says: times of its steps on rank 0 in the log, a bar in a terminal, and nothing otherwise."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import forked_python
import pytest
from launching import run_script

from pyg_dist.backend.session import steps
from pyg_dist.errors import OptionError

SCRIPT = """
import torch
from torch_geometric.data import Data
from pyg_dist import DistributedData
DistributedData(Data(x=torch.eye(6), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])), partition="random")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_nothing_is_said_unless_asked_for(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYG_DIST_LOG", raising=False)
    ended = run_script("ranks", 1, script, ends_whole=True)
    assert ended.codes == [0]
    assert (ended.stdout, ended.stderr) == ("", "")


def test_the_log_has_each_step_once(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_DIST_LOG", "info")
    ended = run_script("by hand", 2, script)
    assert ended.codes == [0, 0]
    said = re.findall(r"^pyg_dist: (.*): \d+\.\d s( in all)?$", ended.stderr, re.M)
    assert [name for name, _ in said] == [
        "read and check",
        "compare the ranks' inputs",
        "partition (random, 2 parts)",
        "lay out (halo)",
        "DistributedData",
    ]
    assert [bool(end) for _, end in said] == [False] * 4 + [True]


def test_a_terminal_gets_a_bar(script: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))  # tqdm draws nothing on no rows
    process = subprocess.Popen([forked_python.executable(), str(script)], stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # how Linux ends a terminal that nobody writes to any more
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait() == 0
    assert b"DistributedData" in shown
    assert b"partition (random" in shown
    assert b"lay out (halo)" in shown
    assert b"3/4" in shown


def test_a_level_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_DIST_LOG", "loud")
    with pytest.raises(OptionError, match=r"Expected PYG_DIST_LOG to be debug, info, warning or error .got 'loud'."):
        steps.configure_log()
