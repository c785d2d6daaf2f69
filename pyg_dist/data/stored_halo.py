"""A halo store as this rank's share of a graph: edges, attributes and the plan, without the rest of the graph."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend.ops.memory import release_after, release_free_memory
from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import StoreError
from pyg_dist.halo.plan.cover import Cover, Ends, ExchangeKind, OneWay
from pyg_dist.halo.plan.plan import Plan, hash_of_digests, pairs_of
from pyg_dist.halo.plan.share import HaloShare, LocalEdges, share_of
from pyg_dist.halo.plan.sizes import BlockNumbers, ShareSizes, merged_parts
from pyg_dist.store.halo_reader import HaloStore


def block_numbers(store: HaloStore) -> BlockNumbers:
    """What the manifest says of the blocks."""
    names = ("edges", "rows", "sums", "post_edges", "post_rows", "pre_sums")
    return BlockNumbers(
        **{name: store.between(name) for name in names},
        nodes=torch.tensor(store.nodes_of),
        boundary=torch.tensor(store.boundary()),
    )


def stored_plan(store: HaloStore, exchange: ExchangeKind, bits: tuple[int, int], ranks_per_node: int | None) -> Plan:
    """The plan for as many ranks as parts, from the manifest alone (not collective)."""
    sizes, rows = block_numbers(store).sizes(exchange)
    made = store.manifest.plan
    identity = hash_of_digests(made["edges"], made["parts"], store.num_parts, exchange)
    return Plan(
        "halo", made["partition"], exchange, sizes, pairs_of(rows), identity, None, bits, ranks_per_node
    )  # fmt: skip


def rank_of_part(store: HaloStore, num_ranks: int) -> Tensor:
    """The rank of each part, int64 ``[P]``: parts with much traffic between them are merged where ranks are fewer.

    Raises:
        StoreError: There are more ranks than parts.
    """
    if num_ranks > store.num_parts:
        raise StoreError(
            f"Expected at most {store.num_parts} ranks for the parts in {store.path} (got {num_ranks}): python -m "
            f"pyg_dist partition GRAPH {store.path} --parts {num_ranks} --force"
        )
    if num_ranks == store.num_parts:
        return torch.arange(num_ranks)
    numbers = block_numbers(store)
    return merged_parts(numbers.post_rows + numbers.pre_sums, num_ranks)


def merged_hash(store: HaloStore, ranks: Tensor, exchange: ExchangeKind) -> str:
    """The hash of a plan of merged parts."""
    return digest(repr((store.manifest.digest, ranks.tolist(), exchange)))


def stored_share(store: HaloStore, rank: int, ranks: Tensor, exchange: ExchangeKind) -> HaloShare:
    """What ``rank`` owns, executes, sends and receives: what ``halo_share`` makes of the whole graph. Not collective.

    Reads the files of the rank's parts and its blocks of the others'. With a part on each rank the stored cover is
    used; for merged parts it is found anew, from the edges that cross between ranks alone.

    Raises:
        StoreError: What is needed is missing or damaged, or is not what the manifest says of it.
    """
    parts, num_ranks = store.parts_of(rank, ranks), int(ranks.max()) + 1
    load = torch.zeros(num_ranks, dtype=torch.int64).index_add_(0, ranks, store.edges_between.sum(0))
    node_id = store.node_id(parts)

    def cross(leaves: bool) -> tuple[OneWay, Cover]:
        found = store.cross(rank, ranks, leaves)
        rows, sums = (Ends(ends.node, ends.counts) for ends in (found.rows, found.sums))
        edges = OneWay(rank, leaves, found.edge_id, found.row, found.sum, rows, sums)
        left, right = found.rows.is_sent, found.sums.is_sent
        hybrid = edges.cover("hybrid", load) if left is None or right is None else Cover(left, right)
        release_after(edges.row.numel())  # of what matching has left
        return edges, hybrid

    share = share_of(
        rank, num_ranks, store.manifest.num_nodes, store.manifest.num_edges, node_id,
        store.on_boundary(rank, ranks, node_id), lambda: LocalEdges(*store.inside(parts)),
        lambda: cross(False), lambda: cross(True), exchange,
    )  # fmt: skip
    del node_id
    release_free_memory()
    if num_ranks == store.num_parts:
        sizes, between = block_numbers(store).sizes(exchange)
        found = ShareSizes.of(share)
        if sizes[rank] != found or tuple(between[rank].tolist()) != share.sum_transfer.send_counts:
            raise StoreError(
                f"Expected the numbers of part {rank} that the manifest of {store.path} has (got {found}, not "
                f"{sizes[rank]}): write the store again"
            )
    return share


def node_rows(store: HaloStore, name: str, parts: list[int], share: HaloShare) -> Tensor:
    """The rows of a node attribute in the share's order."""
    ascending, order = share.node_id.sort()
    ids = [store.tensor(f"nodes-{part:05d}", "node_id") for part in parts]
    return store.rows("nodes", name, parts, [order[torch.searchsorted(ascending, own)] for own in ids])


def edge_rows(store: HaloStore, name: str, parts: list[int], share: HaloShare) -> Tensor:
    """The rows of an edge attribute in the share's order of edges."""
    ascending, order = share.edge_id.sort()
    ids = [store.tensor(f"edges-{part:05d}", "edge_id") for part in parts]
    return store.rows("edges", name, parts, [order[torch.searchsorted(ascending, own)] for own in ids])
