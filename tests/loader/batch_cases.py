"""Cases of batches: a graph, what is drawn from it, a conv; and what one process makes of them with PyG alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from random_graphs import uneven_parts
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import FAConv, GATConv, GCNConv, GINConv, GraphConv, SAGEConv, TAGConv
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import subgraph, to_torch_csr_tensor

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.loader import UniformVertexLoader
from pyg_dist.nn import NodeEmbedding


def quiet(call: Callable[[], Any]) -> Any:
    """What ``call`` returns, its warnings unheard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def distribute(graph: Data, parts: Tensor, **options: Any) -> Any:
    """The graph in the halo layout, by ``parts``."""
    return DistributedData(graph, partition=parts, **options)


def laid_out(graph: Data, mesh: dict[str, int] | None) -> Any:
    """The graph on a mesh, or for ``None`` in the halo layout by uneven parts."""
    if mesh is None or "part" in mesh:
        num_parts = pyg_dist.world_size() if mesh is None else mesh["part"]
        return distribute(graph, uneven_parts(graph.num_nodes, num_parts), mesh=mesh)
    return pyg_dist.DistributedData(graph, layout="grid", mesh=mesh)


class Case(NamedTuple):
    num_nodes: int
    edges: list[tuple[int, int]]
    owners: list[int]
    batch_size: int
    conv: str
    form: str
    exchange: str  # of the halo layout
    weights: str  # "none", "constant", "other" (no attribute of the data) or "learned"
    draws: str  # "uniform", "cover", "input" or "plain" (rescale=False)
    seed: int
    mesh: dict[str, int] | None = None  # of the grid


class Gates(FAConv):
    """Messages of its own: gates times the norm."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return super().forward(x, x, edge_index)[:, :3]  # type: ignore[no-any-return]


CONVS: dict[str, Callable[[int], Any]] = {
    "mean": lambda width: SAGEConv(width, 3),
    "sum": lambda width: SAGEConv(width, 3, aggr="sum"),
    "max": lambda width: SAGEConv(width, 3, aggr="max"),
    "gcn": lambda width: GCNConv(width, 3),
    "gcn without loops": lambda width: GCNConv(width, 3, add_self_loops=False),
    "improved gcn": lambda width: GCNConv(width, 3, improved=True),
    "sum gcn": lambda width: GCNConv(width, 3, normalize=False),
    "gat": lambda width: GATConv(width, 3, edge_dim=2),
    "gin": lambda width: GINConv(nn.Linear(width, 3)),
    "gates": lambda width: Gates(width, add_self_loops=False),
    "graph": lambda width: GraphConv(width, 3),
    "tag": lambda width: TAGConv(width, 3, K=1),
}
WEIGHTED = ("gcn", "gcn without loops", "improved gcn", "sum gcn", "graph", "tag")


def distributed(graph: Data, case: Case) -> Any:
    """The graph in the case's layout."""
    if case.mesh is not None and "part" not in case.mesh:
        return DistributedData(graph, layout="grid", mesh=case.mesh)
    return distribute(graph, torch.tensor(case.owners), exchange=case.exchange, mesh=case.mesh)


@st.composite
def cases(draw: Any, world_size: int, meshes: list[dict[str, int]] | None = None) -> Case:
    """Small graphs with everything that graphs can have, on the halo layout or on one of some meshes.

    Args:
        draw: of hypothesis.
        world_size: number of ranks that have nodes of their own.
        meshes: of the grid, or data groups of the halo layout (with ``"part"``).
    """
    num_nodes = draw(st.integers(2, 12))
    node = st.integers(0, num_nodes - 1)
    conv = draw(st.sampled_from(sorted(CONVS)))
    form = draw(st.sampled_from(["edge_index", "edge_index", "adj_t", "weighted adj_t"]))
    if conv in ("gat", "gates", "gin", "max"):  # which read the values of an adj_t otherwise than as weights
        form = "edge_index"
    weights = ["none"]
    if conv in WEIGHTED and form == "edge_index":
        weights = ["none", "constant"] + (["other", "learned"] if conv in ("sum gcn", "graph") else [])
    return Case(
        num_nodes,
        draw(st.lists(st.tuples(node, node), max_size=40)),
        draw(st.lists(st.integers(0, world_size - 1), min_size=num_nodes, max_size=num_nodes)),
        draw(st.integers(2, num_nodes)),
        conv,
        form,
        draw(st.sampled_from(["hybrid", "post", "pre"])),
        draw(st.sampled_from(weights)),
        draw(st.sampled_from(["uniform", "cover", "input", "plain"])),
        draw(st.integers(0, 3)),
        None if meshes is None else draw(st.sampled_from(meshes)),
    )


def graph_of(case: Case) -> Data:
    """The graph."""
    rng = torch.Generator().manual_seed(case.seed)
    edge_index = torch.tensor(case.edges, dtype=torch.int64).view(-1, 2).T.contiguous()
    num_edges = edge_index.shape[1]
    graph = Data(
        x=torch.randn(case.num_nodes, 4, generator=rng, dtype=torch.float64),
        y=torch.randint(0, 3, (case.num_nodes,), generator=rng),
        train_mask=torch.arange(case.num_nodes) % 2 == 0,
    )
    weight = torch.rand(num_edges, generator=rng, dtype=torch.float64) + 0.1
    if case.form == "edge_index":
        graph.edge_index, graph.edge_weight = edge_index, weight
        graph.edge_attr = torch.randn(num_edges, 2, generator=rng, dtype=torch.float64)
    else:
        graph.adj_t = to_torch_csr_tensor(
            edge_index.flip(0), weight if case.form.startswith("weighted") else None, (case.num_nodes, case.num_nodes)
        )
    return graph


def edges_of(graph: Data) -> tuple[Tensor, Tensor | None]:
    """Plain edges and values, those of ``adj_t`` in its own order."""
    if "edge_index" in graph:
        return graph.edge_index, None
    coo = graph.adj_t.to_sparse_coo().coalesce()
    return coo.indices().flip(0), coo.values().double()


def reference(conv: Any, graph: Data, case: Case, ids: Tensor, pairs: Any, x: Tensor, weight: Tensor | None) -> Tensor:
    """The conv on the subgraph: with the matrix of the whole graph, rescaled, where sums of rows are native."""
    edge_index, values = edges_of(graph)
    weight = values if weight is None else weight
    native = case.conv not in ("max", "gat", "gates") and pairs is not None
    if not native:
        edges, keep = subgraph(ids, edge_index, relabel_nodes=True, num_nodes=case.num_nodes, return_edge_mask=True)[
            ::2
        ]
        if isinstance(conv, GATConv):
            return conv(x, edges, graph.edge_attr[keep])
        if "adj_t" in graph:
            adj_t = torch.sparse_coo_tensor(edges.flip(0), values[keep], (ids.numel(), ids.numel())).coalesce()
            return conv(x, adj_t.to_sparse_csr())
        return conv(x, edges) if weight is None or case.conv not in WEIGHTED else conv(x, edges, weight[keep])
    num_nodes = case.num_nodes
    if isinstance(conv, (GCNConv, TAGConv)) and conv.normalize:
        improved, adds_loops = getattr(conv, "improved", False), getattr(conv, "add_self_loops", False)
        loops = 2.0 if improved and (weight is not None or "adj_t" in graph) else 1.0
        if "adj_t" in graph:  # a sparse tensor adds loops beside those that exist
            ones = torch.ones(num_nodes if adds_loops else 0, dtype=torch.float64)
            node = torch.arange(ones.numel())
            edge_index = torch.cat([edge_index, torch.stack([node, node])], dim=1)
            weight = torch.cat([weight, loops * ones])
            edge_index, weight = gcn_norm(edge_index, weight, num_nodes, False, False, dtype=x.dtype)
        else:
            edge_index, weight = gcn_norm(edge_index, weight, num_nodes, improved, adds_loops, dtype=x.dtype)
    elif weight is None or not (case.conv in WEIGHTED or "adj_t" in graph):
        weight = torch.ones(edge_index.shape[1], dtype=x.dtype)
    if case.conv == "mean":
        weight = weight / torch.bincount(edge_index[1], minlength=num_nodes).clamp(min=1)[edge_index[1]]
    kept = torch.isin(edge_index, ids).all(0)  # a pair that never meets has a probability of zero
    (source, target), weight = edge_index[:, kept], weight[kept]
    matrix = torch.zeros(num_nodes, num_nodes, dtype=x.dtype)
    matrix = matrix.index_put((target, source), weight * pairs.factor(source, target, weight.dtype), accumulate=True)
    out = matrix[ids][:, ids] @ x
    if isinstance(conv, GCNConv):
        return conv.lin(out) + conv.bias
    if isinstance(conv, GINConv):
        return conv.nn(out + (1 + conv.eps) * x)
    if isinstance(conv, TAGConv):
        return conv.lins[0](x) + conv.lins[1](out) + conv.bias
    if isinstance(conv, GraphConv):
        return conv.lin_rel(out) + conv.lin_root(x)
    return conv.lin_l(out) + conv.lin_r(x)


def loader_of(case: Case, data: Any, graph: Data) -> Any:
    """A loader of the case; where batches that cover the nodes would have fewer than two, one that does not."""
    num_groups = (case.mesh or {}).get("data", 1)
    if case.draws == "cover":
        num_batches = -(-case.num_nodes // (case.batch_size * num_groups)) * num_groups
        if case.num_nodes >= 2 * num_batches:
            return quiet(lambda: UniformVertexLoader(data, case.batch_size, cover=True))
    options = {"input": {"input_nodes": graph.train_mask}, "plain": {"rescale": False}}.get(case.draws, {})
    return quiet(lambda: UniformVertexLoader(data, case.batch_size, num_steps=2, **options))


def check_attributes(case: Case, graph: Data, batch: Any, samples: list[Tensor]) -> None:
    """Compare a batch with the disjoint union of PyG's subgraphs on the groups' samples."""
    ids = torch.cat(samples)
    assert torch.equal(batch.n_id.full_tensor(), ids)
    assert batch.num_nodes == ids.numel()
    assert torch.equal(batch.x.full_tensor(), graph.x[ids])
    assert torch.equal(batch.y.full_tensor(), graph.y[ids])
    plain, _ = edges_of(graph)
    edges, kept, first = [], [], 0
    for nodes in samples:
        cut, _, keep = subgraph(nodes, plain, relabel_nodes=True, num_nodes=case.num_nodes, return_edge_mask=True)
        edges.append(cut + first)
        kept.append(keep.nonzero().view(-1))
        first += nodes.numel()
    edge_index, e_id = torch.cat(edges, dim=1), torch.cat(kept)
    assert batch.num_edges == e_id.numel()
    assert torch.equal(batch.e_id.full_tensor(), e_id)
    if "edge_index" in graph:
        assert torch.equal(batch.edge_index.full_tensor(), edge_index)
        assert torch.equal(batch.edge_attr.full_tensor(), graph.edge_attr[e_id])
        assert torch.equal(batch.edge_weight.full_tensor(), graph.edge_weight[e_id])


def one_step(case: Case) -> str:
    """Compare steps on two batches with those of one process: the outputs, the losses, and every gradient."""
    graph = graph_of(case)
    learns = case.weights == "learned"
    if learns:
        graph.edge_weight.requires_grad_()
    data = distributed(graph, case)
    loader = loader_of(case, data, graph)
    table = torch.linspace(-1, 1, case.num_nodes * 2, dtype=torch.float64).view(-1, 2)
    embedding = nn.Parameter(table.clone())
    own = NodeEmbedding(data, 2, dtype=torch.float64)
    own.load_state_dict({"weight": table})
    torch.manual_seed(0)
    conv, norm = CONVS[case.conv](6).double(), nn.BatchNorm1d(3).double()
    twin, twin_norm = copy.deepcopy(conv), copy.deepcopy(norm)
    model = pyg_dist.distribute(conv)
    close = {"rtol": 0, "atol": 1e-10}
    for step, batch in enumerate(loader):
        samples = [replace(loader.sampler, group=g).sample(step) for g in range(loader.sampler.num_groups)]
        ids = torch.cat([sample.node_id for sample in samples])
        check_attributes(case, graph, batch, [sample.node_id for sample in samples])
        weight = {"none": None, "constant": batch.get("edge_weight"), "learned": batch.get("edge_weight")}.get(
            case.weights
        )
        if case.weights == "other":
            weight = batch.edge_weight * 1.0
        x = torch.cat([batch.x, own.weight[batch.n_id]], dim=1)
        handle = batch.edge_index if "edge_index" in batch else batch.adj_t
        if case.conv == "gat":
            weight = batch.edge_attr
        out = norm(model(x, handle) if weight is None else model(x, handle, weight))
        loss = F.cross_entropy(out, batch.y)

        pieces = []
        for sample in samples:
            x = torch.cat([graph.x[sample.node_id], embedding[sample.node_id]], dim=1)
            weight = None if case.weights == "none" else graph.edge_weight
            pieces.append(reference(twin, graph, case, sample.node_id, sample.scale, x, weight))
        expected = twin_norm(torch.cat(pieces))
        expected_loss = F.cross_entropy(expected, graph.y[ids])
        torch.testing.assert_close(out.full_tensor(), expected, **close)
        torch.testing.assert_close(loss, expected_loss, **close)
        loss.backward()
        expected_loss.backward()
    parameters = zip(
        [*conv.parameters(), *norm.parameters()], [*twin.parameters(), *twin_norm.parameters()], strict=True
    )
    for mine, its in parameters:
        torch.testing.assert_close(mine.grad, its.grad, **close)
    torch.testing.assert_close(norm.running_var, twin_norm.running_var, **close)
    torch.testing.assert_close(own.weight.grad.full_tensor(), embedding.grad, **close)
    if learns:
        mine = data.edge_weight.grad
        torch.testing.assert_close(mine.full_tensor(), graph.edge_weight.grad, **close)
    return "same"
