"""What the launches of test_session and test_failure run: one case by name, and the rank that it concerns."""

from __future__ import annotations

import atexit
import importlib.util
import os
import signal
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# Only the backend is on trial; without the façade above it (and PyG) a rank starts in a third of the time.
spec = importlib.util.find_spec("pyg_dist")
assert spec is not None
sys.modules["pyg_dist"] = importlib.util.module_from_spec(spec)

from pyg_dist.backend.comm.group import Group  # noqa: E402
from pyg_dist.backend.comm.transport import Transport  # noqa: E402
from pyg_dist.backend.comm.wires.factory import wires_of  # noqa: E402
from pyg_dist.backend.session import agreement, failure, leaving, session  # noqa: E402
from pyg_dist.halo.exchange import exchange_of  # noqa: E402


def say(line: str) -> None:
    """Write a line at once, so that the ranks' lines do not mix."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def all_reduce() -> float:
    """Sum the ranks plus one."""
    ones = torch.tensor([session.rank() + 1.0])
    if session.world_size() > 1:
        dist.all_reduce(ones)
    return ones.item()


def raise_in_thread() -> None:
    """The function of a thread."""
    raise RuntimeError("the fault of a thread")


FOREVER = timedelta(hours=9)  # no test waits as long

case, concerned = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else -1
before = session.rank(), session.world_size()
if case == "ends with a group of its own":
    dist.init_process_group("gloo", timeout=FOREVER)
if case == "exits":  # whose other ranks wait for it in vain, twice
    failure._END_SECONDS = 2.0
if case != "all raise":  # rank 0 has no mistake of its own, for which another would wait
    failure._SAME_SECONDS = 0.1
session.init(timeout=session.DEFAULT_TIMEOUT if dist.is_initialized() else FOREVER)
assert (session.rank(), session.world_size()) == before
is_concerned = session.rank() == concerned
all_reduce()

if case.startswith("ends with"):
    all_reduce()
elif case == "ends":
    say(f"rank {session.rank()} of {session.world_size()}, local {session.local_rank()}, sum {all_reduce():g}")
elif case == "ends early":
    time.sleep(0.0 if is_concerned else 1.0)
elif case == "raises":
    if is_concerned:
        raise RuntimeError(f"the fault of rank {concerned}\nand more")
    all_reduce()
elif case == "all raise":
    all_reduce()
    raise RuntimeError("the fault of all" if session.rank() != concerned else "another fault")
elif case == "raises with work in flight":
    work = dist.all_reduce(torch.ones(1000), async_op=True)
    if is_concerned:
        pending = dist.all_reduce(torch.ones(1000), async_op=True)
        raise RuntimeError(f"the fault of rank {concerned}")
    work.wait()
    time.sleep(FOREVER.total_seconds())
elif case == "raises while rank 0 computes":
    if is_concerned:
        raise RuntimeError(f"the fault of rank {concerned}")
    agreement.on_main(lambda: time.sleep(FOREVER.total_seconds()) or torch.ones(1))
elif case == "sends NaN in two bits":
    from pyg_dist.backend.comm.codec import quantized
    from pyg_dist.backend.comm.group import world_group
    from pyg_dist.backend.sparse.matrix import Matrix
    from pyg_dist.halo.plan.share import halo_share
    from pyg_dist.halo.transfer import Codecs, HaloTransfer

    node = torch.arange(30)  # a ring, of which every rank has each third node
    lists = halo_share(torch.stack([node, node.roll(1)]), node % 3, session.rank(), 3, "post").row_transfer
    transport = Transport(world_group())
    exchange = exchange_of(transport, lists.send_counts, lists.recv_counts)
    halo = HaloTransfer(Matrix(lists.outgoing), exchange, Matrix(lists.incoming), transport)
    halo = halo.coded(Codecs(quantized((2, 2), (lists.outgoing_key, lists.incoming_key), 1, lambda: "the layer")))
    x = torch.ones(10, 8)
    for step in range(3):
        if is_concerned and step == 1:
            x[4] = float("nan")
        halo.add(halo.send(x), torch.zeros(10, 8))
elif case == "is killed":
    if is_concerned:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce()
elif case == "is killed in an exchange":
    counts = tuple(0 if r == session.rank() else 4 for r in range(3))
    messages = 6 if "all-to-all" in sys.argv else 0
    exchange = exchange_of(Transport(Group(wires_of(dist.group.WORLD))), counts, counts, messages)
    if is_concerned:
        time.sleep(1.0)  # the others wait for its message by then
        os.kill(os.getpid(), signal.SIGKILL)
    if "later" in sys.argv:
        time.sleep(3.0)  # the connection is known to be gone by then
        Group(wires_of(dist.group.WORLD)).sum(torch.ones(2))
    exchange.start(torch.ones(8, 5)).wait()
elif case == "writes and raises":
    atexit.register(say, f"a handler of rank {session.rank()}")
    sys.stdout.write(f"the last line of rank {session.rank()}\n")
    if is_concerned:
        time.sleep(0.5)  # the others wait by then
        raise RuntimeError(f"the fault of rank {concerned}")
    all_reduce()
elif case == "raises and hangs":
    if is_concerned:
        leaving._LEAVE_SECONDS = 1.0
        atexit.register(time.sleep, FOREVER.total_seconds())
        raise RuntimeError(f"the fault of rank {concerned}")
    all_reduce()
elif case.startswith("a thread"):
    name = "a thread of the script's" if "script" in case else "pyg_dist sampling"
    if is_concerned:
        threading.Thread(target=raise_in_thread, name=name).start()
    if "script" not in case:
        time.sleep(FOREVER.total_seconds())
elif case == "is to stop":
    step = 0
    while not leaving.stop_requested():
        if is_concerned and step == 3:
            os.kill(os.getpid(), getattr(signal, sys.argv[3]))
        step += 1
    say(f"step {step}")
elif case == "leaves":
    if not is_concerned:
        Group(wires_of(dist.group.WORLD)).barrier()
elif case == "exits":
    if is_concerned:
        sys.exit(3)
elif case == "is interrupted":
    if is_concerned:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(FOREVER.total_seconds())
else:
    raise AssertionError(case)
