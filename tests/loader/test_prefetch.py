"""One thread makes the next item; it lasts, and it ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from pyg_dist.backend import on_device
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


def test_what_is_done_ahead() -> None:
    """After each item, by the same thread, and the end waits for it."""
    log: list[tuple[str, int, str]] = []
    go = threading.Event()

    def noted(kind: str, step: int) -> int:
        log.append((kind, step, threading.current_thread().name))
        return step

    def ahead(step: int) -> None:
        go.wait(30)
        noted("ahead", step)
        if step == 8:
            raise ValueError("step 8")

    items = Prefetcher(lambda step: noted("made", step), ahead=ahead)
    items.begin(4)
    assert items.take(4) == 4  # which does not wait for what is ahead
    items.begin(5)
    assert [what[:2] for what in log] == [("made", 4)]
    go.set()
    assert items.alone(lambda: [what[:2] for what in log]) == [("made", 4), ("ahead", 5), ("made", 5), ("ahead", 6)]
    assert len({name for *_, name in log}) == 1
    items.begin(6)
    items.close()
    assert log[-1][:2] == ("ahead", 7)
    items.begin(7)
    assert items.take(7) == 7
    items.begin(8)
    for take in (lambda: items.take(8), lambda: items.take(3), lambda: items.alone(list)):
        with pytest.raises(ValueError, match="step 8"):
            take()
    assert log[-1][:2] == ("ahead", 8)  # item 8 was not begun
    items.close()


class Streams:
    """In the place of torch.cuda: who waited for whom, and the current stream of each thread."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.here = threading.local()

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self.here, "stream", Stream(self, "training"))

    def stream(self, stream: Stream) -> Stream:
        return stream


class Stream:
    """What the loader asks of a stream."""

    def __init__(self, streams: Streams, name: str) -> None:
        self.streams, self.name = streams, name

    def wait_stream(self, other: Stream) -> None:
        self.streams.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.streams.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"the end of {self.name}"

    def __enter__(self) -> None:
        self.streams.here.stream = self

    def __exit__(self, *error: object) -> None:
        del self.streams.here.stream


def wait(items: Prefetcher[str]) -> None:
    """Until the thread has made what was begun."""
    assert items._next is not None
    items._next.future.result()


def test_items_of_a_gpu_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    for name in ("current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(streams, name))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(streams, "sampling"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: streams.log.append(f"device {device}"))

    def make(step: int) -> str:
        streams.log.append(f"step {step} on {streams.current_stream().name}")
        return f"item {step}"

    devices = [torch.device("cpu")]
    items = Prefetcher(make, lambda: devices[-1])
    assert items.take(0) == "item 0"
    items.begin(1)
    wait(items)
    devices.append(torch.device("cuda", 1))  # the data has moved
    assert items.take(1) == "item 1"
    items.begin(2)
    assert items.take(2) == "item 2"
    items.close()
    assert streams.log == [
        "step 0 on training",
        "step 1 on training",  # on the host, dropped
        "step 1 on training",
        "sampling waits for training",
        "device cuda:1",  # of the thread, before it uses any
        "step 2 on sampling",
        "training waits for the end of sampling",
    ]


def test_tensors_of_a_gpu_are_used_on_the_stream_that_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those made on the way, too: a view of one may be all that an item keeps. What is read is used on the thread's."""
    used: list[tuple[torch.Tensor, object]] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: used.append((x, stream)))
    of_training = [torch.zeros(6), torch.zeros(6)]
    with on_device._Notes("sampling") as notes:
        x = torch.arange(6)
        view = x.view(2, 3)[1]
        torch.stack(of_training)
    for made in (x, view):
        assert any(t is made for t in notes.tensors)
    for read in of_training:
        assert any(t is read and stream == "sampling" for t, stream in used)
