"""The machine that plans are priced for, the same on every rank."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import on_main
from pyg_dist.pricing.machine import Machine


def common_machine(device: str = "cpu") -> Machine:
    """Rank 0's constants of a kind of device, with the ranks that really run on each machine (collective)."""

    def constants() -> Tensor:
        found = Machine.load(device=device)
        return torch.tensor(list(json.dumps(asdict(found)).encode()), dtype=torch.uint8)

    machine = Machine.of_dict(json.loads(bytes(on_main(constants).tolist())))
    on_each = ranks_per_node()
    return machine if on_each is None else machine.with_ranks_per_node(on_each)


def ranks_per_node() -> int | None:
    """Ranks on each machine, or None where they do not lie there one after another, in equal numbers (collective).

    The last machine may have fewer. Where a launcher does not say which ranks share a machine, all do.
    """
    local = world_group().gather_counts(session.local_rank())
    most = max(local) + 1
    return most if local == [rank % most for rank in range(len(local))] else None
