"""Where ranks meet: a port that is taken, who may connect, and a store that outlives ranks."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
from launching import free_port
from limits import COMMAND_SECONDS

from pyg_dist.backend.session import rendezvous
from pyg_dist.backend.session.launch import Launch
from pyg_dist.backend.session.rendezvous import meet
from pyg_dist.errors import LaunchError


def test_a_port_that_is_taken_is_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives up at once, and the message says after which time."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        found = Launch(0, 2, 0, "env", "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(LaunchError, match=rf"got, after \d+\.\d s of {COMMAND_SECONDS:g}: .*in use") as caught:
            meet(found, timedelta(seconds=COMMAND_SECONDS))
    assert "within" not in str(caught.value)


@pytest.mark.parametrize("closes", [False, True])
def test_another_program_on_the_port_is_told_by_those_who_ask_it(monkeypatch: pytest.MonkeyPatch, closes: bool) -> None:
    """Of one that says nothing torch would wait for ever; of one that hangs up, until the timeout."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(rendezvous, "_SILENT_SECONDS", 1.0)
    with socket.socket() as taken, ThreadPoolExecutor(1) as pool:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    taken.accept()[0].close()

        if closes:
            pool.submit(hang_up)
        found = Launch(1, 2, 1, "env", "127.0.0.1", taken.getsockname()[1])
        with pytest.raises(LaunchError, match=r"got, after .* another program listens there, which does not answer"):
            meet(found, timedelta(seconds=10))  # for which torch's thread stays
        taken.shutdown(socket.SHUT_RDWR)


def test_a_store_that_is_late_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    port, timeout = free_port(), timedelta(seconds=COMMAND_SECONDS)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(meet, Launch(1, 2, 1, "env", "127.0.0.1", port), timeout)
        time.sleep(1.0)
        held = meet(Launch(0, 2, 0, "env", "127.0.0.1", port), timeout)
        held.set("key", "value")
        assert asked.result().get("key") == b"value"


def test_the_store_of_one_machine_listens_on_the_loopback_interface_alone() -> None:
    store = rendezvous._store_on_loopback("127.0.0.1", 0, None, timedelta(seconds=5))
    listening = {c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.laddr.port == store.port}
    assert listening == {"127.0.0.1"}
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    other.set("key", "value")
    assert store.get("key") == b"value"


def test_each_round_of_ranks_has_its_own_part_of_the_agents_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ranks before them have left there, how many there were, and who comes first."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store, before = dist.HashStore(), list[dist.Store]()

    def join(rank: int, size: int, late: int) -> dist.Store:
        time.sleep(0.05 * (rank == late))
        return rendezvous.of_round(store, rank, size, timedelta(seconds=COMMAND_SECONDS))

    store.set("pyg_dist/question/2", "of a rank that was killed while it asked")
    for number, (size, late) in enumerate([(2, 0), (3, 2), (3, 0), (2, 1)]):
        with ThreadPoolExecutor(size) as pool:
            parts = [*pool.map(join, range(size), [size] * size, [late] * size)]
        parts[0].set("round", str(number))
        assert [part.get("round") for part in parts] == [str(number).encode()] * size
        assert [part.get("round") for part in before] == [str(k).encode() for k in range(number)]
        before.append(parts[-1])


def test_a_rank_that_never_comes_to_the_agents_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(TimeoutError, match="no word of ranks 1-2"):
        rendezvous.of_round(dist.HashStore(), 0, 3, timedelta(seconds=0.1))
