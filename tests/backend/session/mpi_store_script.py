"""Ranks of ``test_mpi_store.py``: what a store of torch's does, on one that MPI's messages reach."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from pyg_dist.backend.session.mpi_store import MpiStore

whole = MpiStore(timedelta(seconds=30))
rank, size = whole._comm.Get_rank(), whole._comm.Get_size()
store = dist.PrefixStore("a", dist.PrefixStore("b", whole))
store.set(f"of/{rank}", f"rank {rank}: \u00e9")
assert [value.decode() for value in store.multi_get([f"of/{r}" for r in range(size)])] == [
    f"rank {r}: \u00e9" for r in range(size)
]
if rank == size - 1:
    store.multi_set(["binary", "empty"], [bytes(range(256)), b""])
assert store.get("binary") == bytes(range(256))
assert store.get("empty") == b""

store.add("total", rank)
store.add("arrived", 1)
while store.add("arrived", 0) < size:
    time.sleep(0.001)
assert store.add("total", 0) == size * (size - 1) // 2
assert int(store.get("total")) == size * (size - 1) // 2
assert not store.check(["of/0", "nowhere"])
assert store.check(["of/0", "total"])

with pytest.raises(dist.DistStoreError, match=r"b/a/nowhere within 0\.05 s"):
    store.wait(["of/0", "nowhere"], timedelta(seconds=0.05))

key = f"turns/{rank}"
assert store.compare_set(key, "other", "x") == b"other"
assert not store.check([key])
assert store.compare_set(key, "", "x") == b"x"
assert store.compare_set(key, "x", "y") == b"y"
assert store.compare_set(key, "x", "z") == b"y"

gone = f"gone/{rank}"
store.set(gone, "x")
assert store.delete_key(gone)
assert not store.delete_key(gone)
assert not store.check([gone])

# A thread waits, in a store that is its own as far as it knows, while the others of its process and of others ask.
heard: list[bytes] = []
own = store.clone()
thread = threading.Thread(target=lambda: heard.append(own.get(f"inbox/{rank}")))
thread.start()
for _ in range(20):
    assert store.check(["of/0"])
assert not heard
store.add("asked", 1)
while store.add("asked", 0) < size:
    time.sleep(0.001)
store.set(f"inbox/{(rank + 1) % size}", str(rank))
thread.join()
assert heard == [str((rank - 1) % size).encode()]

whole.close()
sys.stdout.write(f"rank {rank}: done\n")
