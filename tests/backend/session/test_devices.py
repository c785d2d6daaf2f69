"""Which GPU is a rank's, and what carries the messages of ranks that share one. No GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from workers import Pools

import pyg_dist
from pyg_dist.backend.comm.checks.calls import Standing
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.comm.wires.c10d import C10dWire
from pyg_dist.backend.session import devices
from pyg_dist.backend.session.state import current
from pyg_dist.errors import OptionError

OWN, SHARED, SOME = ["a 1", "a 2", "b 1"], ["a 1", "a 2", "a 1", "a 3"], ["a 1", "", "a 2"]


def test_nccl_is_taken_where_each_rank_has_a_gpu() -> None:
    assert devices.backend_for("auto", "auto", OWN) == "cpu:gloo,cuda:nccl"
    assert devices.backend_for("auto", "auto", SHARED) == "gloo"
    assert devices.backend_for("auto", "auto", SOME) == "gloo"
    assert devices.backend_for("auto", "auto", ["", ""]) == "gloo"
    assert devices.backend_for("nccl", "auto", OWN) == "nccl"
    assert devices.backend_for("gloo", "auto", SHARED) == "gloo"


def test_nccl_on_a_shared_gpu_is_refused() -> None:
    with pytest.raises(OptionError, match=r"a GPU for each rank with backend 'nccl' \(got ranks 0, 2 on shared ones\)"):
        devices.backend_for("nccl", "auto", SHARED)


def told(own: list[str]) -> list[str]:
    """What a rank knows of the others' GPUs."""
    pyg_dist.init()
    store = dist.PrefixStore(f"gpus of {own}", dist.distributed_c10d._get_default_store())
    return devices.gpus_of_all(store, pyg_dist.rank(), pyg_dist.world_size(), own[pyg_dist.rank()])


@pytest.mark.parametrize("gpus", [["a 1", "a 2"], ["a 1", "a 1"], ["a 1", ""], ["", ""]])
def test_ranks_tell_each_other(workers: Pools, gpus: list[str]) -> None:
    found = workers(2).run(told, gpus)
    assert {devices.backend_for("auto", "auto", of_all) for of_all in found} == {
        "cpu:gloo,cuda:nccl" if gpus == ["a 1", "a 2"] else "gloo"
    }


def calls_of_exchanges() -> tuple[list[str], list[float]]:
    """What a group without tags, as of nccl, calls in two exchanges; the last of three ranks has no neighbours."""
    pyg_dist.init()
    rank, calls = pyg_dist.rank(), []

    def noted(name: str) -> Any:
        call = getattr(dist, name)

        def run(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return call(*args, **options)

        return patch.object(dist, name, run)

    group = Group([C10dWire(dist.group.WORLD, "cpu")], "untagged")
    peers = [] if rank == 2 else [(1 - rank, 0, 1)]
    rows, out = torch.full((len(peers), 1), float(rank)), torch.empty(len(peers), 1)
    with noted("all_reduce"), noted("batch_isend_irecv"):
        for _ in range(2):
            Transport(group).to_neighbours(rows, peers, peers, out).wait()
    current().of(Standing).sequences.pop(group.calls.name)
    return calls, out.view(-1).tolist()


def test_all_ranks_open_connections_before_messages_of_some(workers: Pools) -> None:
    """The first batch of messages over nccl hangs where a rank has no part in it."""
    first, second, third = workers(3).run(calls_of_exchanges)
    exchanges = ["all_reduce", "batch_isend_irecv", "batch_isend_irecv"]
    assert (first, second, third) == ((exchanges, [1.0]), (exchanges, [0.0]), (["all_reduce"], []))


RANK_6 = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(("environ", "chosen"), [(RANK_6, [2]), ({}, [])])
def test_a_gpu_is_chosen_when_cuda_starts(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], chosen: list[int]
) -> None:
    queued: list[Callable[[], None]] = []
    found: list[int] = []
    monkeypatch.setattr("os.environ", environ)
    monkeypatch.setattr(torch.cuda, "_lazy_call", queued.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    devices.choose_when_started()
    assert not found  # before anybody uses CUDA
    for call in queued:
        call()
    assert found == chosen
