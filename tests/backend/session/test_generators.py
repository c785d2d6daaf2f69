"""An unseeded script draws alike on all ranks from its first line; a seeded one draws as without pyg_dist."""

from __future__ import annotations

import ast
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from launching import run_script

from pyg_dist.backend.session import generators, launch

SCRIPT = Path(__file__).with_name("draw_script.py")
NAMES = ("torch", "numpy", "Python")


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "words"), [("torchrun", ()), ("mpirun", ("apart",))])
def test_launched_ranks_draw_alike(launcher: str, words: tuple[str, ...]) -> None:
    """Torchrun's ranks know its run's id, those of mpirun the process that started them: no server may have."""
    ended = run_script(launcher, 2, SCRIPT, *words, is_forked=launcher == "torchrun")
    assert set(ended.codes) == {0}, ended.stderr
    first, second = ended.stdout.splitlines()
    assert first == second
    assert len({*ast.literal_eval(first)}) == 4
    assert ("drawn with numpy differs" in ended.stderr) == bool(words)


def test_mpiruns_of_one_shell_are_told_apart() -> None:
    found = [
        generators._launcher_process(launch.Run((), name, is_one_machine=True)) for name in ("NO_SUCH_VARIABLE", "PATH")
    ]
    assert found[0][0] == str(os.getppid())
    assert int(found[0][1]) > 0
    assert found[1] != found[0]  # an ancestor further up, or nobody
    assert generators._launcher_process(launch.Run((), "NO_SUCH_VARIABLE", is_one_machine=False)) == []


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Generators that nobody has seeded, and an environment without a launcher."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate(), np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.MT19937())
    torch.seed()
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr(generators, "_alike", None)
    yield monkeypatch
    np.random.set_bit_generator(states[3])
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def _start(monkeypatch: pytest.MonkeyPatch, **environ: str) -> dict[str, float]:
    monkeypatch.setattr("os.environ", environ)
    monkeypatch.setattr(generators, "_alike", None)
    generators.start_alike()
    return dict(zip(NAMES, (torch.rand(()).item(), np.random.random(), random.random()), strict=True))


def _ranks(run: str, rank: int) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": run, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def test_ranks_of_a_run_start_alike_and_runs_apart(fresh: pytest.MonkeyPatch) -> None:
    draws = []
    for run, rank in (("a", 0), ("a", 1), ("b", 0)):
        torch.seed()
        np.random.set_bit_generator(np.random.MT19937())
        draws.append(_start(fresh, **_ranks(run, rank)))
    assert draws[0] == draws[1]
    assert set(draws[0].values()).isdisjoint(draws[2].values())


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}, {"RANK": "x", "WORLD_SIZE": "2"}])
def test_one_rank_draws_as_without(fresh: pytest.MonkeyPatch, environ: dict[str, str]) -> None:
    torch_state, numpy_state, state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    expected = [torch.rand(()).item(), np.random.random(), random.random()]
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(state)
    assert [*_start(fresh, **environ).values()] == expected


@pytest.mark.parametrize("seeded", ["torch", "numpy"])
def test_what_is_seeded_before_the_import_stays(fresh: pytest.MonkeyPatch, seeded: str) -> None:
    random.seed(3)
    own = random.Random(3).random()
    if seeded == "torch":
        torch.manual_seed(3)
        expected = torch.rand((), generator=torch.Generator().manual_seed(3)).item()
    else:
        np.random.seed(3)
        expected = np.random.RandomState(3).random()
    first = _start(fresh, **_ranks("a", 0))
    assert first[seeded] == expected
    assert first["Python"] == own


def test_only_the_first_import_starts(fresh: pytest.MonkeyPatch) -> None:
    _start(fresh, **_ranks("a", 0))
    state = torch.get_rng_state()
    generators.start_alike()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("is_normal_held_back", [False, True])
def test_the_state_of_numpy_is_that_of_now(is_normal_held_back: bool) -> None:
    before = np.random.get_state()
    try:
        np.random.seed(1)
        np.random.randn(2 + is_normal_held_back)
        marked = np.random.get_state()
        for change in (
            lambda: None, np.random.rand, np.random.randn, np.random.randn, np.random.randn, lambda: np.random.seed(2),
            lambda: np.random.set_state(marked), lambda: np.random.bytes(3), lambda: np.random.permutation(700),
        ):  # fmt: skip
            change()
            for _ in range(3):
                found, now = generators.generator_states()[1], np.random.get_state()
                assert (found[0], *found[2:]) == (now[0], *now[2:])
                np.testing.assert_array_equal(found[1], now[1])
    finally:
        np.random.set_state(before)
