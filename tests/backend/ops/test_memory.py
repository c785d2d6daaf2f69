"""The pool of blocks behind large outputs: used again, bounded, and safe in the hands of others."""

from __future__ import annotations

import multiprocessing
import random
import resource
import subprocess
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forked_python
import pytest
import torch
from limits import COMMAND_SECONDS
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.ops import memory

HUGE_PAGE = 1 << 21
LARGE = 2 << 20  # kWorthIt of csrc/ops/cpu/block_pool.h

pytestmark = pytest.mark.skipif(not memory.has_pool(), reason="Linux and torch 2.11")


@pytest.fixture(autouse=True)
def before() -> Iterator[memory.BlockBytes]:
    """What is in use by others; nothing waits."""
    memory.release_free_memory()
    yield memory.block_bytes()
    memory.release_free_memory()


def large(num_bytes: int = LARGE) -> Tensor:
    return ops.empty_rows(torch.empty(0, 1), num_bytes // 4, 1)


def test_a_freed_block_is_used_again(before: memory.BlockBytes) -> None:
    block = large(2 * LARGE + 4).fill_(1)
    address = block.data_ptr()
    assert address % HUGE_PAGE == 0
    assert memory.block_bytes() == (before.in_use + 2 * LARGE + HUGE_PAGE, 0)
    del block
    assert memory.block_bytes() == (before.in_use, 2 * LARGE + HUGE_PAGE)
    first, second = large(LARGE), large(LARGE + 8)
    assert (first.data_ptr(), second.data_ptr()) == (address, address + LARGE), "smaller ones are cut from it"
    del first, second
    assert large(2 * LARGE + 8).data_ptr() == address, "free neighbours are one piece"
    assert memory.block_bytes() == (before.in_use, 2 * LARGE + HUGE_PAGE)
    memory.release_free_memory()
    assert memory.block_bytes() == before


@pytest.mark.parametrize("held", [1, 4])
def test_sizes_that_vary_meet_no_fresh_pages(held: int) -> None:
    """Thirty sizes in another order each round, some tensors alive at once: what was in use once is enough."""
    draw = random.Random(0)
    sizes = [draw.randrange(9 << 20, 31 << 20) for _ in range(30)]
    most = [large(size).fill_(1) for size in sorted(sizes)[-held:]]
    most.clear()
    faults = []
    for _ in range(6):
        start, alive = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, deque[Tensor]()
        draw.shuffle(sizes)
        for size in sizes:
            if len(alive) == held:
                alive.popleft()
            alive.append(large(size).fill_(1))
        alive.clear()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start)
    assert max(faults[2:]) < 5, f"expected fewer page faults than a fresh block has, got {faults} in rounds"


def test_what_is_moved_leaves_the_kernel_with_few_areas(before: memory.BlockBytes) -> None:
    """Whole pieces are moved: of single pages it would be an area for each, of which Linux allows a process 65,530."""
    pieces = [large(32 << 20) for _ in range(32)]
    for piece in pieces:
        piece[:: HUGE_PAGE // 4] = 1  # the kernel joins areas that nobody has touched
    areas = _num_areas()
    del pieces[::2], piece
    moved = [large(64 << 20) for _ in range(8)]
    assert memory.block_bytes() == (before.in_use + 16 * (32 << 20) + 8 * (64 << 20), 0)
    assert _num_areas() - areas < 100, "256 pages were moved, in 16 pieces"
    del pieces, moved


def _num_areas() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def test_a_peak_is_forgotten(before: memory.BlockBytes) -> None:
    peak = large(16 * LARGE)
    del peak
    for _ in range(2048):
        large()
    assert memory.block_bytes() == (before.in_use, LARGE)


def test_small_outputs_are_torchs_own(before: memory.BlockBytes) -> None:
    small = large(LARGE - 4)
    assert memory.block_bytes() == before
    assert small.resize_(LARGE, 1).shape == (LARGE, 1)


def test_the_pool_never_holds_more_than_was_in_use_at_once(before: memory.BlockBytes) -> None:
    draw, tensors, most = random.Random(0), [], before.in_use
    for _ in range(2000):
        if tensors and draw.random() < 0.5:
            tensors.pop(draw.randrange(len(tensors)))
        elif len(tensors) < 20:
            tensors.append(large(LARGE + HUGE_PAGE * draw.randrange(6)))
        held = memory.block_bytes()
        most = max(most, held.in_use)
        assert sum(held) <= most
    tensors.clear()
    assert 0 < memory.block_bytes().waiting <= most
    memory.release_free_memory()
    assert memory.block_bytes() == before


def test_views_and_others_hold_a_block(before: memory.BlockBytes) -> None:
    x = large().fill_(3)
    view, array = x[5:], x.numpy()
    del x
    assert memory.block_bytes().waiting == 0
    del view
    assert array.sum(dtype="f8") == 3 * array.size
    del array
    assert memory.block_bytes() == (before.in_use, LARGE)


def test_storages_that_change(before: memory.BlockBytes) -> None:
    x = large()
    with pytest.raises(RuntimeError, match="not resizable"):
        x.resize_(LARGE, 1)
    assert x.resize_(3, 1).shape == (3, 1)
    x.set_(torch.zeros(3))  # type: ignore[call-overload]
    assert memory.block_bytes() == (before.in_use, LARGE)
    shared = large().fill_(2).share_memory_()
    assert shared.is_shared()
    assert bool((shared == 2).all())
    assert memory.block_bytes() == (before.in_use, LARGE)


def test_gradients_lie_in_blocks(before: memory.BlockBytes) -> None:
    x = large().fill_(1).requires_grad_()
    ops.keyed_dropout(x, torch.arange(x.shape[0]), 0.5, 7).sum().backward()
    assert x.grad is not None
    assert set(x.grad.unique().tolist()) == {0.0, 2.0}
    assert memory.block_bytes().in_use == before.in_use + 2 * LARGE


def test_threads(before: memory.BlockBytes) -> None:
    def work(number: int) -> bool:
        return all(bool((large().fill_(number) == number).all()) for _ in range(20))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(8)))
    assert memory.block_bytes().in_use == before.in_use


def _child(kept: Tensor, queue: multiprocessing.SimpleQueue[float]) -> None:
    torch.set_num_threads(1)
    queue.put(float(kept[0, 0]) + float(large().fill_(1)[0, 0]))


def test_a_fork_has_a_pool_of_its_own(before: memory.BlockBytes) -> None:
    kept = large().fill_(4)
    large()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_child, args=(kept, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == 5
    assert memory.block_bytes() == (before.in_use + LARGE, LARGE)


AT_EXIT = """
import torch
from pyg_dist.backend import ops
kept = ops.empty_rows(torch.empty(0, 1), 3_000_000, 1)
torch.kept = kept[7:]  # outlives the interpreter's own clean-up
"""

SHORT = """
import resource, torch
from pyg_dist.backend import ops
from pyg_dist.backend.ops import memory
like = torch.empty(0, 1)
blocks = [ops.empty_rows(like, (8 + 2 * k << 20) // 4, 1) for k in range(20)]
waiting = sum(block.numel() * 4 for block in blocks)
del blocks
_, hard = resource.getrlimit(resource.RLIMIT_AS)
now = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + (16 << 20), hard))
block = ops.empty_rows(like, (64 << 20) // 4, 1)  # the waiting ones make room
assert memory.block_bytes() == (64 << 20, memory.block_bytes().waiting), memory.block_bytes()
assert memory.block_bytes().waiting < waiting
try:
    ops.empty_rows(like, 1 << 30, 1)
except RuntimeError:  # torch's own
    pass
else:
    raise AssertionError
assert memory.block_bytes() == (64 << 20, 0)
"""


@pytest.mark.parametrize("script", [AT_EXIT, SHORT], ids=["at exit", "short of memory"])
def test_in_a_process_of_its_own(script: str) -> None:
    subprocess.run([forked_python.executable(), "-c", script], timeout=COMMAND_SECONDS, check=True)
