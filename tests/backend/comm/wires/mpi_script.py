"""``mpi_script.py``: says which wire there is; ``mpi_script.py contract FOLDER``: the contract of wires, and rank 0's
sums; other words: what the test of that name is about.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[k]) for k in (1, 3)]

import psutil  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import pyg_dist  # noqa: E402
from pyg_dist.backend.comm.group import world_group  # noqa: E402
from pyg_dist.backend.comm.wires import mpi  # noqa: E402
from pyg_dist.backend.session.rendezvous import start_mpi  # noqa: E402


def say(words: str) -> None:
    sys.stdout.write(f"rank {pyg_dist.rank()}: {words}\n")
    sys.stdout.flush()


def num_sockets() -> int:
    return len(psutil.Process().net_connections("inet"))


if sys.argv[1:] == ["sockets"]:
    start_mpi()  # which may have some of its own
    before = num_sockets()
if sys.argv[1:] == ["waits too long"]:
    pyg_dist.init(timeout=timedelta(seconds=1))
pyg_dist.init()
wire = world_group().wire(torch.zeros(1))
case = sys.argv[1] if len(sys.argv) > 1 else ""
if case == "sockets":
    world_group().barrier()
    say(f"{num_sockets() - before} sockets")
    world_group().barrier()
    total = torch.ones(1)
    dist.all_reduce(total)
    say(f"sum {total.item():g}")
elif case == "waits too long":
    time.sleep(5.0 * pyg_dist.rank())
    world_group().barrier("a sum")
elif case == "progress":
    peer, large = 1 - pyg_dist.rank(), torch.full((1 << 22, 1), float(pyg_dist.rank()))
    for tag in range(3):
        out = torch.zeros_like(large)
        flight = wire.exchange(out, large, [(peer, 0, len(large))], [(peer, 0, len(large))], tag)
        time.sleep(0.2)
        # What has arrived was moved by another thread: this one has not called MPI since.
        arrived = out[-1].item() == peer
        for message in (*flight.arriving.values(), *flight.others):
            message.work.wait()
        assert bool((out == peer).all())
    say(f"arrived by itself: {arrived}")
elif case == "workers":
    from torch.utils.data import DataLoader, TensorDataset

    pairs = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2, multiprocessing_context="fork")
    for _ in range(2):
        total = sum(batch.sum() for (batch,) in pairs)
        say(f"sum {world_group().sum(total).item():g}")
elif case == "losses":
    import torch.nn.functional as F
    from torch_geometric.data import Data
    from torch_geometric.nn import GATConv

    from pyg_dist.conv import DistributedConv, DistributedSAGEConv

    generator = torch.Generator().manual_seed(0)
    graph = Data(
        x=torch.randn(60, 7, generator=generator),
        edge_index=torch.randint(60, (2, 400), generator=generator),
        y=torch.randint(3, (60,), generator=generator),
    )
    for layout in ("halo", "grid"):
        data = pyg_dist.DistributedData(graph, layout=layout, partition="random")
        torch.manual_seed(0)
        first, second = DistributedSAGEConv(7, 300), DistributedConv(GATConv(300, 3))
        optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()])
        for _ in range(3):
            optimizer.zero_grad()
            hidden = F.dropout(first(data.x, data.edge_index).relu(), 0.5)
            loss = F.cross_entropy(second(hidden, data.edge_index), data.y)
            loss.backward()
            optimizer.step()
            say(f"{layout} {loss.item().hex()}")
elif case == "contract":
    from test_wire_contract import BODIES, reduces

    assert type(wire).__name__ == "MpiWire", wire
    for body in BODIES:
        mpi._MOST_BYTES = 1 << 30 if body is reduces else 40  # as if messages were larger
        found = body(wire)
        world_group().barrier(body.__name__)
        if body is reduces and pyg_dist.is_main():
            torch.save(found, Path(sys.argv[2]) / "sums.pt")
        say(body.__name__)
else:
    say(type(wire).__name__)
