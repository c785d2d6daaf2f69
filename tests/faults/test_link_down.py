"""A link between two machines that is down for a while: training goes on after it, and no number differs."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import free_port, plain_environ, run_script
from limits import COMMAND_SECONDS

SCRIPT = Path(__file__).with_name("link_down_script.py")
TESTS = str(Path(__file__).resolve().parents[1])
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Two namespaces with a link between them, as benchmarks/two_machines.py makes them."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import two_machines

    try:
        with two_machines.two_machines():
            yield two_machines
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")


@pytest.mark.slow
def test_a_link_that_is_down_for_a_while(machines: Any, tmp_path: Path) -> None:
    whole = run_script("ranks", 2, SCRIPT)
    said, port, processes = tmp_path / "said", str(free_port()), []
    with said.open("w") as out:
        for rank, (name, link) in enumerate(zip(machines.NAMES, machines.LINKS, strict=True)):
            place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": machines.ADDRESSES[0], "MASTER_PORT": port}
            environ = {**plain_environ(), **place, "GLOO_SOCKET_IFNAME": link, "PYTHONPATH": TESTS}
            command = ["ip", "netns", "exec", name, sys.executable, str(SCRIPT)]
            processes.append(subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT))
        try:
            while "step 5 " not in said.read_text():
                assert not any(process.poll() for process in processes), said.read_text()
                time.sleep(0.01)
            for state, seconds in (("down", 1.0), ("up", 0.0)):
                machines.ip("-n", machines.NAMES[0], "link", "set", machines.LINKS[0], state)
                seen = said.read_text()
                time.sleep(seconds)
            assert "step 39 " not in seen, "the steps had ended before the link was up again"
            assert [process.wait(COMMAND_SECONDS) for process in processes] == [0, 0], said.read_text()
        finally:
            for process in processes:
                process.kill()
    steps = [line for line in said.read_text().splitlines() if line.startswith("step ")]  # torch warns of hosts
    assert steps == whole.stdout.splitlines()
