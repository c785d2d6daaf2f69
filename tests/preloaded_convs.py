"""What PyG writes into a class of convs with its first object, written once before ranks are forked: see ``leftovers``.

It reads the sources of a class and compiles a template, in each process anew: a fifth of the time of tests whose ranks
make one object of each class.
"""

import gc
from collections.abc import Iterator

import torch_geometric.nn  # noqa: F401
from torch_geometric.nn import MessagePassing


def _below(kind: type) -> Iterator[type]:
    for found in kind.__subclasses__():
        yield found
        yield from _below(found)


for _kind in {kind for kind in _below(MessagePassing) if kind.__module__.startswith("torch_geometric.nn.")}:
    MessagePassing.__init__(_kind.__new__(_kind))
gc.collect()
gc.freeze()
