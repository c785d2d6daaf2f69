"""The cover is a cover, it is minimum, and it does not depend on what else is in the call."""

from __future__ import annotations

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching
from torch import Tensor

from pyg_dist.halo.plan.cover import Cover, minimum_vertex_cover

graphs = st.integers(1, 14).flatmap(
    lambda left: st.integers(1, 14).flatmap(
        lambda right: st.tuples(
            st.just(left),
            st.just(right),
            st.lists(st.tuples(st.integers(0, left - 1), st.integers(0, right - 1)), max_size=40),
        )
    )
)


def cover_of(num_left: int, num_right: int, edges: list[tuple[int, int]], prefer: Tensor | None = None) -> Cover:
    ends = torch.tensor(edges, dtype=torch.int64).view(-1, 2)
    cover = minimum_vertex_cover(ends[:, 0], ends[:, 1], num_left, num_right, prefer)
    assert (cover.left[ends[:, 0]] | cover.right[ends[:, 1]]).all(), "an edge has neither end in the cover"
    return cover


def size_of(cover: Cover) -> int:
    return int(cover.left.sum() + cover.right.sum())


@settings(max_examples=200, deadline=None, derandomize=True)
@given(graphs, st.booleans())
def test_as_small_as_networkx_says(graph: tuple[int, int, list[tuple[int, int]]], lean: bool) -> None:
    num_left, num_right, edges = graph
    reference = nx.Graph()
    reference.add_nodes_from(range(num_left), bipartite=0)
    reference.add_edges_from((source, num_left + target) for source, target in edges)
    matching = nx.bipartite.hopcroft_karp_matching(reference, top_nodes=range(num_left))
    cover = cover_of(num_left, num_right, edges, torch.full((num_left,), lean))
    assert size_of(cover) == len(matching) // 2
    assert size_of(cover) <= min(len({s for s, _ in edges}), len({t for _, t in edges}))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 900), st.integers(0, 10**6))
def test_as_large_as_the_maximum_matching(num_left: int, num_right: int, num_edges: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    edges = torch.stack([torch.randint(n, (num_edges,), generator=rng) for n in (num_left, num_right)], dim=1)
    matrix = csr_array((torch.ones(num_edges).numpy(), edges.T.numpy()), shape=(num_left, num_right))
    assert size_of(cover_of(num_left, num_right, edges.tolist())) == (maximum_bipartite_matching(matrix) >= 0).sum()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(graphs, min_size=1, max_size=6), st.integers(0, 10**6))
def test_blocks_do_not_disturb_each_other(blocks: list[tuple[int, int, list[tuple[int, int]]]], seed: int) -> None:
    """Each pair of ranks gets the same cover in one call for all pairs as in a call of its own, in any edge order."""
    rng = torch.Generator().manual_seed(seed)
    prefer = [bool(p) for p in torch.randint(2, (len(blocks),), generator=rng)]
    alone = [cover_of(*b, torch.full((b[0],), p)) for b, p in zip(blocks, prefer, strict=True)]
    edges, lefts, rights = [], 0, 0
    for num_left, num_right, block in blocks:
        edges += [(lefts + source, rights + target) for source, target in block]
        lefts, rights = lefts + num_left, rights + num_right
    edges = [edges[i] for i in torch.randperm(len(edges), generator=rng)]
    wanted = torch.cat([torch.full((b[0],), p) for b, p in zip(blocks, prefer, strict=True)])
    together = cover_of(lefts, rights, edges, wanted)
    assert torch.equal(together.left, torch.cat([c.left for c in alone]))
    assert torch.equal(together.right, torch.cat([c.right for c in alone]))


@pytest.mark.parametrize(
    ("edges", "left", "right"),
    [
        ([], [], []),
        ([(0, 0), (0, 1), (0, 2)], [0], []),  # one source for many targets: send its row
        ([(0, 0), (1, 0), (2, 0)], [], [0]),  # many sources for one target: send their sum
        ([(0, 0), (0, 1), (1, 2), (2, 2)], [0], [2]),
    ],
)
def test_what_is_forced(edges: list[tuple[int, int]], left: list[int], right: list[int]) -> None:
    for lean in (True, False):
        cover = cover_of(3, 3, edges, torch.full((3,), lean))
        assert cover.left.nonzero().view(-1).tolist() == left
        assert cover.right.nonzero().view(-1).tolist() == right


def test_a_long_alternating_path() -> None:
    """The search has no bound on its depth: 100,000 edges in a row."""
    step = torch.arange(50_000)
    edges = torch.cat([torch.stack([step, step], 1), torch.stack([step + 1, step], 1)])
    cover = cover_of(50_001, 50_000, edges.tolist())
    assert size_of(cover) == 50_000
    assert cover.right.all()


def test_repeated_edges() -> None:
    """The search has room for any number of them: SciPy's maximum matching writes past its stack here, and aborts."""
    edges = [(0, 0), (0, 1)] + [(1, 0)] * 100_000
    cover = cover_of(2, 2, edges)
    assert cover.left.tolist() == [True, True]
    assert size_of(cover) == 2


def test_lattice() -> None:
    """A mesh without some of its edges: SciPy's maximum matching does not end."""
    num_nodes, width = 30_000, 173
    rng = torch.Generator().manual_seed(0)
    source = torch.arange(num_nodes)[:, None].expand(-1, 4)
    target = source + torch.tensor([0, 1, width, -width])
    has = (target >= 0) & (target < num_nodes) & (torch.rand(target.shape, generator=rng) < 0.8)
    edges = torch.stack([source[has], torch.randperm(num_nodes, generator=rng)[target[has]]], dim=1)
    cover = cover_of(num_nodes, num_nodes, edges.tolist())
    turned = cover_of(num_nodes, num_nodes, edges.flip(1).tolist())
    assert size_of(cover) == size_of(turned)
