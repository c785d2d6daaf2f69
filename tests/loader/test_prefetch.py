"""One thread makes the next item; it lasts, and it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from pyg_dist.backend.session import session
from pyg_dist.loader.prefetch import Prefetcher


def name_of_thread(step: int) -> tuple[int, str]:
    return step, threading.current_thread().name


def thread_of(items: Prefetcher[tuple[int, str]]) -> threading.Thread:
    items.begin(0)
    _, name = items.take(0)
    return next(thread for thread in threading.enumerate() if thread.name == name)


def test_one_thread_makes_what_was_begun() -> None:
    items = Prefetcher(name_of_thread)
    step, here = items.take(5)
    assert (step, here) == (5, threading.current_thread().name)
    names = set()
    for step in range(4):
        items.begin(step)
        made, name = items.take(step)
        assert made == step
        names.add(name)
    assert len(names) == 1
    assert here not in names
    items.begin(7)
    assert items.take(8) == (8, here)  # a restart: what was begun is dropped
    items.close()


@pytest.mark.parametrize("end", [Prefetcher.close, lambda items: session.shutdown(), None])
def test_the_thread_ends(end: Callable[[Prefetcher[tuple[int, str]]], None] | None) -> None:
    """By itself, with the session, and with the last reference."""
    items = Prefetcher(name_of_thread)
    thread = thread_of(items)
    assert thread.is_alive()
    if end is None:
        del items
    else:
        end(items)
        end(items)
    thread.join(30)
    assert not thread.is_alive()
    if end is not None:
        again = thread_of(items)
        assert again.is_alive()
        items.close()


def test_an_exception_reaches_take() -> None:
    def broken(step: int) -> int:
        raise ValueError(f"step {step}")

    items = Prefetcher(broken)
    items.begin(2)
    with pytest.raises(ValueError, match="step 2"):
        items.take(2)
    items.close()
