"""``mpi_script.py``: says which wire there is; ``mpi_script.py FOLDER``: the contract of wires, and rank 0's sums;
``mpi_script.py raise``: rank 1 raises while the others wait.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[k]) for k in (1, 3)]

import torch  # noqa: E402

import pyg_dist  # noqa: E402
from pyg_dist.backend.comm.group import world_group  # noqa: E402


def say(words: str) -> None:
    sys.stdout.write(f"rank {pyg_dist.rank()}: {words}\n")
    sys.stdout.flush()


pyg_dist.init()
wire = world_group().wire(torch.zeros(1))
if sys.argv[1:] == ["raise"]:
    if pyg_dist.rank() == 1:
        raise ValueError("this rank is odd")
    world_group().barrier()
elif sys.argv[1:]:
    from test_wire_contract import BODIES, reduces

    assert type(wire).__name__ == "MpiWire", wire
    for body in BODIES:
        found = body(wire)
        world_group().barrier(body.__name__)
        if body is reduces and pyg_dist.is_main():
            torch.save(found, Path(sys.argv[1]) / "sums.pt")
        say(body.__name__)
else:
    say(type(wire).__name__)
