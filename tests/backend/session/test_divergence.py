"""What proves that ranks diverge, and what does not: a pure function of where all ranks stand, tried for many ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.distributed as dist
from limits import BODY_SECONDS
from random_graphs import random_graph
from torch import fx, nn
from workers import Pools

import pyg_dist
from pyg_dist.backend.comm.checks.calls import Calls, Standing, Wait
from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.backend.comm.wires.c10d import C10dWire
from pyg_dist.backend.session import divergence
from pyg_dist.backend.session.divergence import DivergenceWatch, Place, diagnose
from pyg_dist.backend.session.state import current
from pyg_dist.conv import DistributedGCNConv
from pyg_dist.errors import DivergenceError


def place(
    numbers: dict[str, int],
    at: str = "a.py:1",
    waits: tuple[str, int] | None = None,
    peers: Sequence[int] = (),
    has_ended: bool = False,
) -> Place:
    recent = {} if waits is None else {waits[0]: {str(waits[1]): at}}
    return Place(numbers, recent, at, waits, tuple(peers), has_ended)


def test_the_first_different_call_is_named_with_both_lines() -> None:
    here = place({"0,1": 7}, "train.py:41, sum of 1 float32", ("0,1", 7), (0, 1))
    there = place({"0,1": 7}, "train.py:57, sum of 1 float32", ("0,1", 7), (0, 1))
    assert diagnose([here, here]) is None
    found = diagnose([here, there])
    assert found is not None
    assert "rank 0 at train.py:41, sum of 1 float32; rank 1 at train.py:57, sum of 1 float32" in found
    assert "\n" not in found


def test_calls_that_differ_before_the_one_waited_for() -> None:
    first = Place({"g": 6}, {"g": {"5": "a.py:1", "6": "a.py:9"}}, "a.py:9", ("g", 6), (0, 1))
    second = Place({"g": 5}, {"g": {"5": "a.py:2"}}, "a.py:2", ("g", 5), (0, 1))
    found = diagnose([first, second])
    assert found is not None
    assert "rank 0 at a.py:1; rank 1 at a.py:2" in found


def test_who_computes_is_no_evidence_however_many_wait() -> None:
    everyone = range(512)
    waiting = place({"all": 9}, "a.py:9", ("all", 9), everyone)
    slow = place({"all": 8}, "a.py:8")
    assert diagnose([slow, *[waiting] * 511]) is None


def test_who_waits_for_one_that_computes_is_no_evidence_either() -> None:
    places = [
        place({"0,1": 4, "1,2": 2}, "a.py:4", ("0,1", 4), (0, 1)),
        place({"0,1": 3, "1,2": 3}, "a.py:5", ("1,2", 3), (1, 2)),
        place({"1,2": 2}, "a.py:6"),
    ]
    assert diagnose(places) is None


def test_a_rank_that_has_ended_before_the_call() -> None:
    everyone = range(512)
    waiting = place({"all": 9}, "a.py:9", ("all", 9), everyone)
    ended = place({"all": 8}, "a.py:8", has_ended=True)
    found = diagnose([waiting, *[waiting] * 510, ended])
    assert found is not None
    assert "ranks 0-510 waiting at a.py:9; rank 511 ended after a.py:8" in found
    assert diagnose([waiting, place({"all": 9}, "a.py:9", has_ended=True)] + [waiting] * 510) is None


def test_a_circle_of_waits_in_different_groups() -> None:
    places = [
        place({"0,1": 4, "0,2": 6}, "a.py:4", ("0,1", 4), (0, 1)),
        place({"0,1": 3, "1,2": 3}, "a.py:5", ("1,2", 3), (1, 2)),
        place({"0,2": 7, "1,2": 2}, "a.py:6", ("0,2", 7), (0, 2)),
    ]
    found = diagnose(places)
    assert found is not None
    assert all(f"rank {rank} waiting at a.py:{4 + rank}" in found for rank in range(3))
    assert diagnose(places, [True, True, False]) is None  # maybe rank 2 waits no more


def test_neighbours_wait_for_neighbours_alone() -> None:
    places = [
        place({"all": 4}, "a.py:4", ("all", 4), (1,)),
        place({"all": 3}, "a.py:3"),
        place({"all": 3, "2,0": 1}, "a.py:5", ("2,0", 1), (2, 0)),
    ]
    assert diagnose(places) is None


def test_a_place_survives_the_store() -> None:
    standing = Standing()
    calls = standing.sequence((0, 3))
    calls.next("sum", torch.float32, 5)
    standing.wait = Wait(calls, calls.number)
    before = Place.of(standing, beat=2)
    assert Place.parse(before.to_json().encode()) == before
    assert before.waits == ("0,3", 1)
    assert before.peers == (0, 3)
    assert "test_divergence.py:" in before.waits_at
    assert "calls.next(" in before.waits_at
    assert before.waits_at.endswith("sum of 5 float32")


def test_the_end_of_a_wait_is_published_though_no_call_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(divergence, "PATIENCE_SECONDS", 1e9)
    standing = Standing()
    calls = standing.sequence((0, 1))
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    watch = DivergenceWatch(store, 0, 2, standing, fail=pytest.fail)

    def becomes(right: Callable[[Place], bool]) -> bool:
        until = time.monotonic() + BODY_SECONDS
        while not right(Place.parse(store.get("place/0"))) and time.monotonic() < until:
            time.sleep(0.01)
        return right(Place.parse(store.get("place/0")))

    try:
        calls.next("sum", torch.float32, 5)
        standing.wait = Wait(calls, calls.number)
        assert becomes(lambda place: place.waits == ("0,1", 1))
        standing.wait = None
        assert becomes(lambda place: place.waits is None)
    finally:
        watch.close()


def test_tags_tell_numbers_kinds_sizes_and_lines_apart() -> None:
    def tags() -> list[int]:
        calls = Calls((0, 1))
        return [
            calls.next("sum", torch.float32, 1), calls.next("sum", torch.float32, 1),
            Calls((0, 1)).next("max", torch.float32, 1), Calls((0, 1)).next("sum", torch.float64, 1),
            Calls((0, 1)).next("sum", torch.float32, 2), Calls((0, 2)).next("sum", torch.float32, 1),
            Calls((0, 1)).next("sum", torch.float32, 1),
        ]  # fmt: skip

    assert tags() == tags()
    assert len(set(tags())) == len(tags())
    assert all(0 <= tag < 1 << 31 for tag in tags())


def test_code_of_torch_fx_is_not_the_users_line() -> None:
    """Its files are numbered, and a rank may have traced more models than another."""

    def traced() -> fx.GraphModule:
        graph = fx.Graph()
        graph.output(graph.call_method("next", (graph.placeholder("calls"), "sum", torch.float32, 1)))
        return fx.GraphModule(nn.Module(), graph)

    assert len({model(Calls((0, 1))) for model in (traced(), traced())}) == 1


def trains_beside_untagged_calls() -> list[int]:
    """How many sums of a step compare the order: none while no call goes without a tag."""
    data = pyg_dist.DistributedData(random_graph(20, 60, 5, dtype=torch.float32))
    model = DistributedGCNConv(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> int:
        model(data.x, data.edge_index).sum().backward()
        before = world_group().calls.number
        optimizer.step()
        return world_group().calls.number - before

    counts = [step()]
    untagged = Group([C10dWire(dist.group.WORLD, "cpu")], "untagged")
    try:
        untagged.sum(torch.ones(2))
        counts += [step(), step()]
        if pyg_dist.rank() == 1:
            untagged.sum(torch.ones(2))
        else:
            untagged.sum(2 * torch.ones(2))
        with pytest.raises(
            DivergenceError, match=r"rank 0 at .*`untagged.sum\(2 \* .*; rank 1 at .*`untagged.sum\(torch"
        ):
            step()
    finally:
        current().of(Standing).sequences.pop(untagged.calls.name)
    counts.append(step())
    return counts


def test_calls_without_tags_are_compared_at_the_step(workers: Pools) -> None:
    assert workers(2).run(trains_beside_untagged_calls) == [[0, 1, 1, 0]] * 2
