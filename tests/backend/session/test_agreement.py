"""Comparing, computing on one rank, and raising together."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from limits import TIMEOUT_SECONDS
from torch import Tensor
from workers import Pools, on_ranks

from pyg_dist import world_size
from pyg_dist.backend.session import agreement, session
from pyg_dist.backend.session.agreement import digest, on_main, raise_together, require_equal
from pyg_dist.errors import AgreementError, DataError, RankFailedError, describe_values


class StubbornError(Exception):
    """An exception that pickle cannot rebuild."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


@on_ranks(1, 3)
def test_equal_is_silent() -> None:
    session.init()
    require_equal({"bits": "32", "data": digest("x")}, "pass the same")
    require_equal({}, "")


def _different() -> str:
    session.init()
    given = {"layout": "halo", "bits": "8" if session.rank() == 1 else "32"}
    if session.rank() == 3:
        given["seed"] = "7"
    with pytest.raises(AgreementError) as caught:
        require_equal(given, "pass the same options")
    assert str(caught.value).endswith(f"[rank {session.rank()} of 4]")
    return caught.value.message


def test_differences_are_named_on_every_rank(workers: Pools) -> None:
    expected = (
        "Expected the same on every rank: bits (got 32 on ranks 0, 2-3, 8 on rank 1), "
        "seed (got nothing on ranks 0-2, 7 on rank 3); pass the same options"
    )
    assert workers(4).run(_different) == [expected] * 4


def test_many_values_make_a_readable_line() -> None:
    line = describe_values({f"value {rank}": [rank] for rank in range(512)})
    assert len(line) < 200
    assert "508 other values" in line


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6.0),
        torch.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([True, False]),
        torch.arange(4).bfloat16(),
        torch.tensor(3),
        torch.empty(0, 5),
        torch.ones(3, requires_grad=True),
    ],
)
def test_digest_of_tensors(tensor: Tensor) -> None:
    assert digest(tensor) == digest(tensor.detach().clone())
    assert digest(tensor) != digest(tensor.detach().to(torch.complex64))
    assert digest(tensor) != digest(tensor.detach().unsqueeze(0))
    if tensor.numel():
        assert digest(tensor) != digest(torch.logical_not(tensor.detach()).to(tensor.dtype))


def test_digest_of_other_things() -> None:
    assert digest("ab") == digest(b"ab") == digest(bytearray(b"ab")) == digest(memoryview(b"ab"))
    assert digest("ab") != digest("ba")
    array = np.arange(6).reshape(2, 3)
    assert digest(array) == digest(array.copy()) != digest(array.T)
    frozen = array.copy()
    frozen.flags.writeable = False
    assert digest(frozen) == digest(array)
    assert digest([0, 1, 2]) == digest(np.arange(3))


def test_one_line() -> None:
    assert agreement.one_line(RuntimeError("a\n  b")) == "RuntimeError: a b"
    assert agreement.one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert len(agreement.one_line(RuntimeError("frame\n" * 10_000))) < 1100


def test_digest_does_not_copy() -> None:
    tensor = torch.zeros(1 << 22)
    before = torch.tensor(tensor.data_ptr())
    assert agreement._bytes_of(tensor).data_ptr() == before


def _on_main(cases: list[tuple[torch.dtype, list[int]]]) -> list[Tensor]:
    session.init()
    torch.manual_seed(session.rank())
    return [on_main(lambda dtype=dtype, shape=shape: (100 * torch.rand(shape)).to(dtype)) for dtype, shape in cases]


@pytest.mark.parametrize("world_size", [1, 3])
def test_on_main_gives_everybody_the_result(workers: Pools, world_size: int) -> None:
    dtypes = torch.int32, torch.bool, torch.bfloat16, torch.float64
    cases = list(itertools.product(dtypes, ([7], [2, 3], [], [0, 4])))
    found = workers(world_size).run(_on_main, cases)
    for results in found:
        for (dtype, shape), result, first in zip(cases, results, found[0], strict=True):
            assert result.dtype == dtype
            assert list(result.shape) == shape
            assert torch.equal(result, first)


def _plain_on_main() -> list[object]:
    return [on_main(lambda value=value: value) for value in (None, 0.1 * world_size(), (True, {"a": [1, (2,)]}), [3])]


@pytest.mark.parametrize("world_size", [1, 3])
def test_on_main_gives_everybody_plain_values(workers: Pools, world_size: int) -> None:
    wanted = [None, 0.1 * world_size, (True, {"a": [1, (2,)]}), [3]]
    assert workers(world_size).run(_plain_on_main) == [wanted] * world_size


def _slow_on_main() -> float:
    from datetime import timedelta

    session.shutdown()
    session.init(timeout=timedelta(seconds=TIMEOUT_SECONDS))

    def slow() -> Tensor:
        time.sleep(TIMEOUT_SECONDS + 1.0)
        return torch.arange(3)

    start = time.process_time()
    assert on_main(slow).tolist() == [0, 1, 2]
    session_seconds = time.process_time() - start
    session.shutdown()
    return session_seconds


def test_waiting_for_main_takes_no_cpu_and_no_timeout(workers: Pools) -> None:
    assert max(workers(3).run(_slow_on_main)) < 0.5


def _main_raises(kind: str) -> tuple[str, str]:
    session.init()

    def fail() -> Tensor:
        raise {
            "ours": DataError("wrong\tdata"),
            "builtin": KeyError("key"),
            "stubborn": StubbornError(1, 2),
            "exit": SystemExit(3),
        }[kind]

    try:
        on_main(fail)
    except BaseException as error:
        raised = type(error).__name__, str(error)
    assert on_main(lambda: torch.ones(1)).item() == 1  # the ranks are still in step
    return raised


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(
    ("kind", "on_main_rank", "elsewhere"),
    [
        ("ours", ("DataError", "wrong\tdata [rank 0 of 3]"), ("DataError", "wrong\tdata [rank 0 of 3]")),
        ("builtin", ("KeyError", "'key'"), ("KeyError", "'key'")),
        (
            "stubborn",
            ("StubbornError", "1 and 2"),
            ("RankFailedError", "Rank 0 failed: StubbornError: 1 and 2 [rank 0 of 3]"),
        ),
        ("exit", ("SystemExit", "3"), ("RankFailedError", "Rank 0 failed: SystemExit: 3 [rank 0 of 3]")),
    ],
)
def test_what_main_raises_everybody_raises(
    workers: Pools, world_size: int, kind: str, on_main_rank: tuple[str, str], elsewhere: tuple[str, str]
) -> None:
    if world_size == 1:
        on_main_rank = on_main_rank[0], on_main_rank[1].replace(" [rank 0 of 3]", "")
    assert workers(world_size).run(_main_raises, kind) == [on_main_rank, *[elsewhere] * (world_size - 1)]


def _raise_together(failing: list[int]) -> tuple[str, str] | None:
    session.init()
    error = KeyError(f"of {session.rank()}") if session.rank() in failing else None
    try:
        raise_together(error)
    except (KeyError, RankFailedError) as raised:
        return type(raised).__name__, str(getattr(raised, "message", raised))
    return None


@pytest.mark.parametrize("world_size", [1, 3])
def test_raise_together(workers: Pools, world_size: int) -> None:
    pool = workers(world_size)
    assert pool.run(_raise_together, []) == [None] * world_size
    failing = sorted({world_size - 1, max(0, world_size - 2)})
    told = ("RankFailedError", f"Rank {failing[0]} failed: KeyError: 'of {failing[0]}'")
    expected = [("KeyError", f"'of {rank}'") if rank in failing else told for rank in range(world_size)]
    assert pool.run(_raise_together, failing) == expected
