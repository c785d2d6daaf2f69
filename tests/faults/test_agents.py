"""Agents of torchrun that come and go: the run goes on with those that are there, and each epoch is the same."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import forked_python
import pytest
from launching import free_port, plain_environ
from limits import COMMAND_SECONDS

SCRIPT = Path(__file__).with_name("agent_script.py")
CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10"


class Job:
    """A job of one rank a machine; all machines are this one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.agents = folder, list[subprocess.Popen[bytes]]()
        self.command = [
            forked_python.executable(), "-m", "torch.distributed.run", "--nnodes=1:4", "--nproc-per-node=1",
            "--max-restarts=3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=7",
            "--local-addr=127.0.0.1", f"--rdzv-conf={CONF}", str(SCRIPT), str(folder / "run"), str(folder / "enough"),
        ]  # fmt: skip

    def join(self) -> None:
        """One machine more."""
        environ = {**plain_environ(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with (self.folder / f"of {len(self.agents)}").open("w") as said:
            self.agents.append(subprocess.Popen(self.command, env=environ, stdout=said, stderr=subprocess.STDOUT))

    def epochs(self) -> list[tuple[int, int, float]]:
        """Number, ranks and loss of each that was trained."""
        said = "".join(path.read_text() for path in sorted(self.folder.glob("of *")))
        found = re.findall(r"epoch (\d+) on (\d+) ranks, loss (\S+)\n", said)
        return [(int(number), int(ranks), float.fromhex(loss)) for number, ranks, loss in found]

    def trains_on(self, num_ranks: int) -> None:
        """Wait until so many ranks have trained three epochs more."""
        before, end = len(self.epochs()), time.monotonic() + COMMAND_SECONDS / 5
        while sum(ranks == num_ranks for _, ranks, _ in self.epochs()[before:]) < 3:
            assert time.monotonic() < end, "".join(path.read_text() for path in self.folder.glob("of *"))
            time.sleep(0.1)

    def kill_rank(self, number: int) -> None:
        """Kill the newest rank of an agent, which has printed its process."""
        *_, process = re.findall(r"process (\d+)", (self.folder / f"of {number}").read_text())
        os.kill(int(process), signal.SIGKILL)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path)
    yield job
    for agent in job.agents:
        agent.kill()
        agent.wait()


@pytest.mark.slow
def test_machines_join_fail_and_are_taken_away(job: Job) -> None:
    job.join()
    job.trains_on(1)
    job.join()
    job.trains_on(2)
    job.kill_rank(1)
    job.trains_on(2)
    job.join()
    job.trains_on(3)
    job.agents[2].kill()  # the machine is lost
    job.kill_rank(2)
    job.trains_on(2)
    job.agents[1].send_signal(signal.SIGTERM)  # the machine is taken away
    job.trains_on(1)
    (job.folder / "enough").touch()
    assert job.agents[0].wait(COMMAND_SECONDS) == 0
    losses = defaultdict(list)
    for number, _, loss in job.epochs():
        losses[number].append(loss)
    assert sorted(losses) == [*range(1, max(losses) + 1)]
    assert sum(len(again) - 1 for again in losses.values()) <= 5, "more than one epoch was lost in a change"
    for again in losses.values():
        assert again == pytest.approx([again[0]] * len(again), abs=1e-10, rel=0)
