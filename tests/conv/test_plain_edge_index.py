"""Given a plain ``edge_index``, our convs are PyG's: what its own tests for both convs ask, asked of ours."""

from __future__ import annotations

import copy
from typing import Any, Optional

import pytest
import torch
from bits import assert_same_bits
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import to_torch_csc_tensor

from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv

EDGE_INDEX = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 1]])


def twins(ours: Any, stock: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Our conv and the stock one with the same parameters."""
    torch.manual_seed(3)
    conv = ours(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    torch.manual_seed(3)
    twin = stock(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    assert {k: v.shape for k, v in conv.state_dict().items()} == {k: v.shape for k, v in twin.state_dict().items()}
    twin.load_state_dict(conv.state_dict())
    return conv, twin


def csr(edge_index: Tensor, value: Tensor | None = None, size: tuple[int, int] = (4, 4)) -> Tensor:
    """``adj_t`` as torch's CSR."""
    value = torch.ones(edge_index.shape[1]) if value is None else value
    return torch.sparse_coo_tensor(edge_index.flip(0), value, size[::-1]).to_sparse_csr()


@pytest.mark.parametrize("aggr", ["mean", "sum", "max", "std", "lstm", "median", ["mean", "max"]])
@pytest.mark.parametrize("project", [False, True])
def test_sage(aggr: Any, project: bool) -> None:
    edge_index = EDGE_INDEX[:, EDGE_INDEX[1].argsort(stable=True)]
    x = torch.randn(4, 8)
    conv, twin = twins(DistributedSAGEConv, SAGEConv, 8, 32, aggr=aggr, project=project)
    out = conv(x, edge_index)
    assert out.shape == (4, 32)
    assert type(out) is Tensor
    assert_same_bits(out, twin(x, edge_index))
    assert_same_bits(conv(x, edge_index, size=(4, 4)), out)
    if aggr in ("mean", "sum", "max"):
        torch.testing.assert_close(conv(x, csr(edge_index)), out, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(
            conv(x, EdgeIndex(edge_index, sparse_size=(4, 4), sort_order="col")), out, atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize(("ours", "stock"), [(DistributedSAGEConv, SAGEConv), (DistributedGCNConv, GCNConv)])
def test_it_is_a_drop_in(ours: Any, stock: Any) -> None:
    conv, twin = twins(ours, stock, 8, 32)
    assert isinstance(conv, stock)
    assert str(conv) == str(twin)
    assert [name for name, _ in conv.named_parameters()] == [name for name, _ in twin.named_parameters()]
    twin.load_state_dict(conv.state_dict(), strict=True)
    again = copy.deepcopy(conv)
    x = torch.randn(4, 8)
    assert_same_bits(again(x, EDGE_INDEX), conv(x, EDGE_INDEX))


def test_sage_on_two_kinds_of_nodes() -> None:
    source, target = torch.randn(4, 8), torch.randn(2, 16)
    conv, twin = twins(DistributedSAGEConv, SAGEConv, (8, 16), 32)
    out = conv((source, target), EDGE_INDEX)
    assert out.shape == (2, 32)
    assert_same_bits(out, twin((source, target), EDGE_INDEX))
    assert_same_bits(conv((source, target), EDGE_INDEX, size=(4, 2)), out)
    lonely = conv((source, None), EDGE_INDEX, size=(4, 2))
    assert_same_bits(lonely, twin((source, None), EDGE_INDEX, size=(4, 2)))


def test_sage_options() -> None:
    x = torch.randn(4, 8)
    for options in ({"normalize": True}, {"root_weight": False}, {"bias": False}):
        conv, twin = twins(DistributedSAGEConv, SAGEConv, 8, 32, **options)
        assert_same_bits(conv(x, EDGE_INDEX), twin(x, EDGE_INDEX))
    norms = twins(DistributedSAGEConv, SAGEConv, 8, 32, normalize=True)[0](x, EDGE_INDEX).norm(dim=-1)
    torch.testing.assert_close(norms, torch.ones(4))


def test_sage_with_unknown_input_width() -> None:
    torch.manual_seed(0)
    conv = DistributedSAGEConv(-1, 32, project=False)
    assert conv(torch.randn(4, 8), EDGE_INDEX).shape == (4, 32)
    with pytest.raises(ValueError, match="lazy initialization"):
        DistributedSAGEConv(-1, 32, project=True)


def test_sage_with_its_own_aggregation_module() -> None:
    from torch_geometric.nn.aggr import PowerMeanAggregation

    conv, twin = twins(DistributedSAGEConv, SAGEConv, 8, 32, aggr=PowerMeanAggregation())
    x = torch.rand(4, 8)
    assert_same_bits(conv(x, EDGE_INDEX), twin(x, EDGE_INDEX))


@pytest.mark.parametrize(
    "options",
    [{}, {"improved": True}, {"add_self_loops": False}, {"normalize": False}, {"cached": True}, {"bias": False}],
)
def test_gcn(options: dict[str, Any]) -> None:
    x, weight = torch.randn(4, 16), torch.rand(4)
    conv, twin = twins(DistributedGCNConv, GCNConv, 16, 32, **options)
    plain = conv(x, EDGE_INDEX)
    assert plain.shape == (4, 32)
    assert_same_bits(plain, twin(x, EDGE_INDEX))
    assert_same_bits(conv(x, EDGE_INDEX), plain)  # the second call may read the cache
    conv, twin = twins(DistributedGCNConv, GCNConv, 16, 32, **options)
    assert_same_bits(conv(x, EDGE_INDEX, weight), twin(x, EDGE_INDEX, weight))
    conv, twin = twins(DistributedGCNConv, GCNConv, 16, 32, **options)
    adj_t = csr(EDGE_INDEX, weight)
    if not (options.get("cached") or options == {}):  # PyG itself does not cache torch sparse tensors
        torch.testing.assert_close(conv(x, adj_t), twin(x, adj_t))


def test_gcn_refuses_what_pyg_refuses() -> None:
    with pytest.raises(ValueError, match="does not support adding self-loops"):
        DistributedGCNConv(16, 32, normalize=False, add_self_loops=True)
    with pytest.raises(ValueError, match="does not support bipartite"):
        DistributedGCNConv(16, 32)((torch.randn(4, 16), None), EDGE_INDEX)


def test_gcn_flow() -> None:
    x = torch.randn(4, 16)
    conv, twin = twins(DistributedGCNConv, GCNConv, 16, 32, flow="target_to_source")
    out = conv(x, EDGE_INDEX)
    assert_same_bits(out, twin(x, EDGE_INDEX))
    conv.flow = "source_to_target"
    torch.testing.assert_close(conv(x, EDGE_INDEX.flip(0)), out)


def test_gcn_gradients_by_edge_weight() -> None:
    x = torch.randn(4, 16)
    grads = []
    for conv in twins(DistributedGCNConv, GCNConv, 16, 1):
        weight = torch.tensor([0.5, 1.0, 2.0, 0.25], requires_grad=True)
        conv(x, EDGE_INDEX, weight).sum().backward()
        grads.append(weight.grad)
    assert_same_bits(grads[0], grads[1])


def test_static_graphs() -> None:
    """A batch of features on one graph, [B, N, F]."""
    x = torch.randn(3, 4, 8)
    for ours, stock in ((DistributedSAGEConv, SAGEConv), (DistributedGCNConv, GCNConv)):
        conv, twin = twins(ours, stock, 8, 16)
        out = conv(x, EDGE_INDEX)
        assert out.shape == (3, 4, 16)
        assert_same_bits(out, twin(x, EDGE_INDEX))


class Scripted(torch.nn.Module):
    """What TorchScript compiles: a model with both convs."""

    def __init__(self, sage: Any, gcn: Any) -> None:
        super().__init__()
        self.sage, self.gcn = sage, gcn

    def forward(self, x: Tensor, edge_index: Tensor, edge_weight: Optional[Tensor] = None) -> Tensor:  # noqa: UP045
        return self.gcn(self.sage(x, edge_index).relu(), edge_index, edge_weight)  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_torchscript() -> None:
    x, weight = torch.randn(4, 8), torch.rand(4)
    model = Scripted(DistributedSAGEConv(8, 16), DistributedGCNConv(16, 32))
    kept = copy.deepcopy(model)
    script = torch.jit.script(model)
    assert_same_bits(script(x, EDGE_INDEX), kept(x, EDGE_INDEX))
    assert_same_bits(script(x, EDGE_INDEX, weight), model(x, EDGE_INDEX, weight))
    sage = torch.jit.script(model.sage)
    assert_same_bits(sage(x, EDGE_INDEX, size=(4, 4)), model.sage(x, EDGE_INDEX))
    with torch.no_grad():
        model.sage.lin_l.weight.add_(1.0)
    assert_same_bits(script(x, EDGE_INDEX), model(x, EDGE_INDEX), "a script shares the parameters")
    assert type(model.gcn) is GCNConv, (
        "torch puts what it scripts into the model, which is why scripting.py tells of it"
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_torchscript_on_two_kinds_of_nodes() -> None:
    class Pair(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = DistributedSAGEConv((8, 16), 32)

        def forward(self, source: Tensor, target: Optional[Tensor], edge_index: Tensor) -> Tensor:  # noqa: UP045
            return self.conv((source, target), edge_index, (4, 2))  # type: ignore[no-any-return]

    model, source, target = Pair(), torch.randn(4, 8), torch.randn(2, 16)
    script = torch.jit.script(model)
    for second in (target, None):
        assert_same_bits(script(source, second, EDGE_INDEX), model(source, second, EDGE_INDEX))


@pytest.mark.parametrize(("ours", "stock"), [(DistributedSAGEConv, SAGEConv), (DistributedGCNConv, GCNConv)])
def test_compiled(ours: Any, stock: Any) -> None:
    conv, twin = twins(ours, stock, 8, 16)
    x = torch.randn(4, 8)
    compiled = torch.compile(conv, backend="eager")
    torch.testing.assert_close(compiled(x, EDGE_INDEX), twin(x, EDGE_INDEX))


@pytest.mark.parametrize("weighted", [False, True])
def test_transposed_sparse_tensors(weighted: bool) -> None:
    """CSC adjacencies, whose transpose is the CSR ``adj_t``, square and from one kind of nodes to another."""
    x, value = torch.randn(4, 8), torch.rand(6) if weighted else None
    star = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]])  # no loops, which PyG keeps or adds by the form
    adj = to_torch_csc_tensor(star, value, size=(4, 4))
    for ours, stock in ((DistributedSAGEConv, SAGEConv), (DistributedGCNConv, GCNConv)):
        conv, twin = twins(ours, stock, 8, 32)
        assert_same_bits(conv(x, adj.t()), twin(x, adj.t()))
        if not weighted or ours is DistributedGCNConv:
            torch.testing.assert_close(conv(x, adj.t()), conv(x, star, *[value] * weighted))
    conv, _ = twins(DistributedSAGEConv, SAGEConv, (8, 16), 32)
    pair = (torch.randn(4, 8), torch.randn(2, 16))
    if not weighted:
        torch.testing.assert_close(
            conv(pair, to_torch_csc_tensor(EDGE_INDEX, size=(4, 2)).t()), conv(pair, EDGE_INDEX, size=(4, 2))
        )


def test_gcn_cache() -> None:
    """The first graph's norm is kept, until the parameters are drawn anew."""
    x, other = torch.randn(4, 16), EDGE_INDEX.flip(0)
    conv, twin = twins(DistributedGCNConv, GCNConv, 16, 32, cached=True)
    first = conv(x, EDGE_INDEX)
    assert conv._cached_edge_index is not None
    assert_same_bits(conv(x, other), first)
    conv.reset_parameters()
    assert conv._cached_edge_index is None
    twin.load_state_dict(conv.state_dict())
    assert_same_bits(conv(x, other), twin(x, other))


def test_gcn_with_sparse_features() -> None:
    x = torch.sparse_coo_tensor(torch.tensor([[0, 0], [0, 1]]), torch.ones(2), (4, 16))
    conv, twin = twins(DistributedGCNConv, GCNConv, 16, 32)
    assert_same_bits(conv(x, EDGE_INDEX), twin(x, EDGE_INDEX))


def test_decomposed_layers() -> None:
    """Feature blocks one after another: the same numbers."""
    conv, twin = twins(DistributedGCNConv, GCNConv, 8, 32, decomposed_layers=2)
    whole, _ = twins(DistributedGCNConv, GCNConv, 8, 32)
    x = torch.randn(4, 8)
    assert_same_bits(conv(x, EDGE_INDEX), twin(x, EDGE_INDEX))
    torch.testing.assert_close(conv(x, EDGE_INDEX), whole(x, EDGE_INDEX))


@pytest.mark.parametrize(
    "aggr_kwargs",
    [
        {"mode": "cat"},
        {"mode": "proj", "mode_kwargs": {"in_channels": 8, "out_channels": 16}},
        {"mode": "attn", "mode_kwargs": {"in_channels": 8, "out_channels": 16, "num_heads": 4}},
        {"mode": "sum"},
    ],
    ids=lambda kwargs: kwargs["mode"],
)
def test_sage_with_several_aggregations(aggr_kwargs: dict[str, Any]) -> None:
    aggr_kwargs = {**aggr_kwargs, "aggrs_kwargs": [{}, {}, {}, {"learn": True, "t": 1.0}]}
    options = {"aggr": ["mean", "max", "sum", "softmax"], "aggr_kwargs": aggr_kwargs}
    conv, twin = twins(DistributedSAGEConv, SAGEConv, 8, 32, **options)
    x = torch.randn(4, 8)
    assert conv(x, EDGE_INDEX).shape == (4, 32)
    assert_same_bits(conv(x, EDGE_INDEX), twin(x, EDGE_INDEX))


def test_sage_with_lstm_wants_sorted_edges() -> None:
    conv = DistributedSAGEConv(8, 32, aggr="lstm")
    assert conv(torch.randn(4, 8), EDGE_INDEX).shape == (4, 32)
    with pytest.raises(ValueError, match="'index' tensor is not sorted"):
        conv(torch.randn(4, 8), EDGE_INDEX.flip(1))


def test_hooks_and_overrides_of_steps_work_on_plain_edges() -> None:
    class Doubled(DistributedSAGEConv):
        def message(self, x_j: Tensor) -> Tensor:
            return 2 * x_j

    torch.manual_seed(3)
    conv = Doubled(8, 32, aggr="sum", root_weight=False, bias=False)
    x = torch.randn(4, 8)
    twice = conv(x, EDGE_INDEX)
    conv.register_message_forward_hook(lambda module, inputs, out: out / 2)
    torch.testing.assert_close(2 * conv(x, EDGE_INDEX), twice)
