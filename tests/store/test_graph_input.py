"""Reading a PyG graph: every form of edges, where attributes belong, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData

from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.store.attributes import NanCount
from pyg_dist.store.graph_input import read_graph

EDGES = torch.tensor([[0, 1, 2, 2, 0], [1, 2, 0, 2, 1]])


def read(allow_nan: bool = True, **attributes: Any) -> Any:
    return read_graph(Data(**attributes), allow_nan, warn=True)


def graph(**attributes: Any) -> dict[str, Any]:
    return {"x": torch.randn(3, 4), "edge_index": EDGES, **attributes}


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        (graph(adj_t=torch.eye(3).to_sparse_csr()), "'edge_index' or 'adj_t' in data .got both."),
        (graph(edge_index=torch.tensor([[0, 3], [1, 0]])), "below num_nodes=3 .got 3."),
        (graph(edge_index=torch.tensor([[0, -1], [1, 0]])), "node ids from 0 .got -1."),
        (graph(edge_index=EDGES.float()), "integer node ids .got torch.float32."),
        (graph(edge_index=EDGES.t()), r"shape \[2, num_edges\] .got \[5, 2\]"),
        (graph(edge_index=EDGES[0]), r"shape \[2, num_edges\] .got \[5\]"),
        (graph(num_nodes=5), "num_nodes=5 rows .got 3."),
        (graph(train_mask=torch.ones(4, dtype=torch.bool)), "'train_mask' to have 3 rows"),
        (graph(val_mask=torch.ones(2, 10, dtype=torch.bool)), "'val_mask' to have 3 rows"),
        (graph(train_mask=torch.zeros(3, dtype=torch.bool)), "'train_mask' to select at least one node"),
        (graph(edge_attr=torch.ones(3, 2)), "'edge_attr' to have 5 rows"),
        (graph(edge_weight=torch.ones(4)), "'edge_weight' to have 5 rows"),
        ({"x": torch.randn(3, 4)}, "'edge_index' or a sparse 'adj_t'"),
    ],
)
def test_wrong_input(attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(**attributes)
    assert "\n" not in str(caught.value)


def test_what_is_not_one_homogeneous_graph() -> None:
    with pytest.raises(UnsupportedError, match="homogeneous"):
        read_graph(HeteroData(), True, warn=False)
    with pytest.raises(UnsupportedError, match="homogeneous"):
        read_graph(Batch.from_data_list([HeteroData()]), True, warn=False)
    with pytest.raises(UnsupportedError, match="dense"):
        read(**graph(x=torch.eye(3).to_sparse()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nan_features_warn_with_their_nodes(dtype: torch.dtype) -> None:
    nan = float("nan")
    x = torch.tensor([[0.0, 1.0], [nan, nan], [1.0, nan]], dtype=dtype)
    with pytest.warns(UserWarning, match=r"'x' is NaN at 2 of 3 nodes, the first one node 1 .entries: 3."):
        read(allow_nan=False, x=x, edge_index=EDGES)


def test_nan_is_counted_piece_by_piece() -> None:
    values = torch.zeros(100, 3)
    values[[40, 40, 77], [0, 2, 1]] = float("nan")
    pieces = [NanCount.of(piece, 7 * k) for k, piece in enumerate(values.split(7))]
    assert sum(pieces, NanCount()) == NanCount.of(values) == NanCount(3, 2, 40)
    assert NanCount.of(torch.tensor([float("inf"), -float("inf")])) == NanCount()
    assert NanCount.of(torch.zeros(0, 3)) == NanCount()


def test_every_form_of_edges(recwarn: pytest.WarningsRecorder) -> None:
    plain = read(**graph())
    for form in (EDGES.to(torch.int32), EdgeIndex(EDGES, sparse_size=(3, 3))):
        assert torch.equal(read(**graph(edge_index=form)).edge_index, plain.edge_index)
    value = torch.tensor([1.0, 2.0, 3.0, 4.0])
    distinct = EDGES[:, :4]
    adj_t = torch.sparse_coo_tensor(distinct.flip(0), value, (3, 3))
    for form in (adj_t.to_sparse_csr(), adj_t.to_sparse_csc(), adj_t):
        given = read(x=torch.randn(3, 4), adj_t=form)
        assert given.form.key == "adj_t"
        dense = torch.zeros(3, 3).index_put_((given.edge_index[1], given.edge_index[0]), given.adj_values)
        assert torch.equal(dense, adj_t.to_dense())
    ones = torch.sparse_coo_tensor(distinct.flip(0), torch.ones(4), (3, 3)).to_sparse_csr()
    assert read(x=torch.randn(3, 4), adj_t=ones).adj_values is None


def test_attributes_are_sorted_by_rows_and_name() -> None:
    given = read(
        **graph(
            y=torch.zeros(3),
            pos=torch.zeros(3, 2),
            edge_attr=torch.zeros(5, 2),
            flags=torch.zeros(5),
            name="graph",
            label=torch.zeros(1),
            split_index=torch.tensor([0, 1, 2]),
            train_mask=torch.ones(3, 10, dtype=torch.bool),
        )
    )
    assert set(given.node_attributes) == {"x", "y", "pos", "train_mask"}
    assert set(given.edge_attributes) == {"edge_attr", "flags"}
    assert set(given.other_attributes) == {"name", "label", "split_index"}


def test_names_decide_where_nodes_and_edges_are_as_many() -> None:
    given = read(x=torch.zeros(5, 1), edge_index=EDGES, edge_attr=torch.zeros(5), y=torch.zeros(5))
    assert set(given.node_attributes) == {"x", "y"}
    assert set(given.edge_attributes) == {"edge_attr"}


def test_nodes_are_counted_without_features() -> None:
    assert read(edge_index=EDGES, num_nodes=7).num_nodes == 7
    assert read(edge_index=EDGES, y=torch.zeros(4)).num_nodes in (3, 4)
    assert read(edge_index=EDGES).num_nodes == 3
