"""What scripts do around gradients: optimizers, copies, wrappers, dtypes, modes; each on stock PyG and on ours.

See :mod:`against_stock` for how the rows lie. What a script returns is compared elementwise.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import NUM_CLASSES, NUM_FEATURES, Net, Results, Side, assert_same, compare, gradients, graph, sides
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.errors import MixedRowsError

# A bias before batch norm has no gradient but rounding, which Adam would blow up to the size of any other.
EPS = 1e-3


def step(side: Side, net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, *weight: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = side.loss(net(x, side.data.edge_index, *weight))
    loss.backward()
    optimizer.step()
    return loss.detach()


# ---- Optimizers ------------------------------------------------------------------------------------------------------


def adam_on_rows(side: Side) -> Results:
    """Features and edge weights that are parameters, beside those of the model; saved and restored on the way."""
    results: Results = {}
    for kind, options in (
        (torch.optim.Adam, {"weight_decay": 0.01, "eps": EPS}),
        (torch.optim.AdamW, {"eps": EPS}),
        (torch.optim.Adam, {"amsgrad": True, "eps": EPS}),
        (torch.optim.Adamax, {"eps": EPS}),
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.RMSprop, {"centered": True, "eps": EPS}),
    ):
        torch.manual_seed(2)
        net = Net(side)
        net.x, net.weight = nn.Parameter(side.data.x.clone()), nn.Parameter(side.data.edge_weight.clone())
        optimizer = kind(net.parameters(), lr=0.05, **options)
        losses = [step(side, net, optimizer, net.x, net.weight) for _ in range(3)]
        kept = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
        losses += [step(side, net, optimizer, net.x, net.weight) for _ in range(2)]
        net.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        losses += [step(side, net, optimizer, net.x, net.weight) for _ in range(2)]
        named = {**dict(net.named_parameters()), **{f"loss {k}": loss for k, loss in enumerate(losses)}}
        results |= {f"{kind.__name__} {list(options)} {name}": value.detach() for name, value in named.items()}
    return results


def clipped_steps(side: Side) -> Results:
    """Clipping, a schedule, and one parameter group with rows."""
    net, x = Net(side), nn.Parameter(side.data.x.clone())
    optimizer = torch.optim.Adam([{"params": net.parameters(), "lr": 0.01}, {"params": [x], "lr": 0.001}], eps=EPS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    norms = []
    for _ in range(4):
        optimizer.zero_grad()
        side.loss(net(x, side.data.edge_index)).backward()
        norms.append(nn.utils.clip_grad_norm_([*net.parameters(), x], 0.05))
        optimizer.step()
        schedule.step()
    return {"norms": torch.stack(norms), "x": x.detach(), **{n: p.detach() for n, p in net.named_parameters()}}


# ---- Several of everything -------------------------------------------------------------------------------------------


def several_models_and_graphs(side: Side) -> Results:
    """Two graphs, three models, one backward: a loss of both graphs, and another model on what the first has made."""
    other = random_graph(29, 140, NUM_FEATURES, NUM_CLASSES, seed=3)
    if not side.is_stock:
        import pyg_dist

        other = pyg_dist.DistributedData(other, partition=uneven_parts(29, pyg_dist.world_size(), seed=1))
    second = side._replace(data=other)
    shared, own = Net(side), Net(second)
    head = nn.Linear(NUM_CLASSES, NUM_CLASSES).double()
    x, z = side.features(), second.features()
    first_out, second_out = shared(x, side.data.edge_index), shared(z, other.edge_index) + own(z, other.edge_index)
    (side.loss(head(first_out)) + second.loss(second_out) + first_out.mean() * second_out.mean()).backward()
    results = {**gradients(shared, x=x, z=z), **gradients(head)}
    results |= {f"own {name}": value for name, value in gradients(own).items()}
    generator, discriminator = Net(side), Net(side)  # alternating, as adversarial training does
    made = F.pad(generator(side.data.x, side.data.edge_index), (0, 1))
    side.loss(discriminator(made.detach(), side.data.edge_index)).backward()
    results |= {f"discriminator {name}": value for name, value in gradients(discriminator).items()}
    (-side.loss(discriminator(made, side.data.edge_index))).backward()
    return results | {f"generator {name}": value for name, value in gradients(generator).items()}


# ---- Copies ----------------------------------------------------------------------------------------------------------


def early_stopping(side: Side) -> Results:
    """The best model is copied, trained past, and restored: whole, by state, and with the data."""
    net = Net(side)
    net.second = side.GCNConv(6, NUM_CLASSES, cached=True).double()
    net.embedding = nn.Parameter(side.data.x.clone())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1, eps=EPS)
    step(side, net, optimizer, net.embedding)
    best, state, data = copy.deepcopy(net), copy.deepcopy(net.state_dict()), copy.deepcopy(side.data)
    expected = net(net.embedding, side.data.edge_index).detach()
    for _ in range(3):
        step(side, net, optimizer, net.embedding)
    with torch.no_grad():
        side.data.x.add_(1.0)
    results = {"best": best(best.embedding, side.data.edge_index), "copied data": data.x.clone()}
    results["on copied data"] = best(data.x, data.edge_index)
    moved = net(net.embedding, side.data.edge_index).detach()
    assert not torch.allclose(moved, expected), "training has moved the model"
    net.load_state_dict(state)
    results["restored"] = net(net.embedding, side.data.edge_index)
    side.loss(results["best"]).backward()
    assert net.first.lin_l.weight.grad is not best.first.lin_l.weight.grad
    results |= gradients(best)
    return {name: None if value is None else value.detach() for name, value in results.items()}


def copies_of_tensors(side: Side) -> Results:
    """A leaf with its gradient, shared ones once, and a parameter as a parameter."""
    x = side.features()
    x.square().sum().backward()
    x.note = "kept"
    twin, again = copy.deepcopy([x, x])
    with torch.no_grad():
        x.zero_()
        x.grad.zero_()
    row_parameter = copy.deepcopy(nn.Parameter(side.data.x.clone()))
    (twin * row_parameter).sum().backward()
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(twin * 2)
    return {
        "twin": twin.detach(), "twin.grad": twin.grad, "same": twin is again, "note": twin.note,
        "is parameter": isinstance(row_parameter, nn.Parameter), "parameter.grad": row_parameter.grad,
        "requires_grad": twin.requires_grad,
    }  # fmt: skip


def saved_models(side: Side) -> Results:
    """A model in a file, whole and by state, loads into ours and into stock PyG."""
    net = nn.ModuleList([side.SAGEConv(NUM_FEATURES, 6), side.GCNConv(6, NUM_CLASSES, cached=True)]).double()

    def forward(model: Any) -> Tensor:
        out = model[1](model[0](side.data.x, side.data.edge_index).tanh(), side.data.edge_index)
        return out.detach()  # type: ignore[no-any-return]

    results, state, whole = {"out": forward(net)}, io.BytesIO(), io.BytesIO()
    torch.save(net.state_dict(), state)
    torch.save(net, whole)
    state.seek(0), whole.seek(0)
    again = nn.ModuleList([side.SAGEConv(NUM_FEATURES, 6), side.GCNConv(6, NUM_CLASSES)]).double()
    again.load_state_dict(torch.load(state, weights_only=True))
    results["from state"], results["from file"] = forward(again), forward(torch.load(whole, weights_only=False))
    return results | {name: value.shape for name, value in net.state_dict().items()}


def saved_to_one_path(path: str) -> None:
    """Every rank saves to one path and loads from it, as scripts do that stop early: all read whole files."""
    data = pyg_dist.DistributedData(graph(), partition="random")
    for step in range(60):
        state = {"sum": data.x.sum() * step, "weight": torch.full((1 << 12 + step % 5,), float(step))}
        torch.save(state, path)
        found = torch.load(path)
        assert_same(found, state)
    with ThreadPoolExecutor() as threads:  # checkpoints that are written beside training
        [*threads.map(torch.save, [state] * 20, [path] * 20)]
    assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
    with pytest.raises(MixedRowsError, match="cannot be pickled"):
        torch.save(data.x, path)
    assert torch.load(path)["weight"][0] == 59
    torch.save(data.num_nodes, os.devnull)
    own = Path(f"{path}.{pyg_dist.rank()}")
    own.touch()
    os.link(own, f"{own}.link")
    torch.save(1, own)  # as torch does: into the file, whatever its names
    assert torch.load(f"{own}.link") == 1
    own.unlink(), Path(f"{own}.link").unlink()


def test_saved_to_one_path(workers: Pools, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("best.pt", "best.pt.rank0")]  # one of them a script's own
    for file in files:
        file.touch(mode=0o600)
    workers(3).run(saved_to_one_path, str(files[0]))
    assert sorted(tmp_path.iterdir()) == files
    assert files[1].stat().st_size == 0


# ---- Modes, dtypes ---------------------------------------------------------------------------------------------------


def evaluation(side: Side) -> Results:
    """Evaluate first and between steps, under either mode, then train with the same masks."""
    net, x, results = Net(side), side.features(), {}
    for mode in (torch.no_grad, torch.inference_mode):
        net.eval()
        with mode():
            out = net(x, side.data.edge_index)
            assert not out.requires_grad
            results[f"{mode.__name__} loss"] = side.loss(out).clone()
            hits = out.argmax(dim=-1)[side.data.train_mask] == side.data.y[side.data.train_mask]
            results[f"{mode.__name__} accuracy"] = hits.double().mean().clone()
            results[f"{mode.__name__} first rows"] = out[torch.arange(5)].clone()
            results[f"{mode.__name__} std"] = out.std(0).clone()
        net.train()
        side.loss(net(x, side.data.edge_index)).backward()
    return results | gradients(net, x=x)


def evaluation_in_inference_mode_only(side: Side) -> Results:
    """The first look at masks, operators and lists is under inference mode, and training needs the same ones."""
    net, x, weight = Net(side), side.features(), side.data.edge_weight.detach().clone()
    largest, learned = side.SAGEConv(NUM_FEATURES, 3, aggr="max").double(), weight.clone().requires_grad_()
    ids, edge_index = torch.tensor([5, 40, 5]), side.data.edge_index

    def loss() -> Tensor:
        out = net(x, edge_index, weight) + net(x, edge_index, learned)
        rest = out[ids].square().sum() + largest(x, edge_index).norm()
        everything = out.full_tensor() if hasattr(out, "full_tensor") else out
        return side.loss(out) + rest + everything.tanh()[3].sum()

    with torch.inference_mode():
        loss()
    loss().backward()
    return {**gradients(net, x=x, learned=learned), **gradients(largest)}


def casts(side: Side) -> Results:
    """Of features, of the model, of outputs, with gradients through them."""
    net, x = Net(side), side.features()
    out = net(x.float().double(), side.data.edge_index)
    assert x.float().dtype == torch.float32
    side.loss(out.float().double()).backward()
    results = gradients(net, x=x)
    net.float()
    out = net(side.data.x.float(), side.data.edge_index)
    results["float out"] = out.detach()
    side.loss(out).backward()
    return results | {f"float {name}": value for name, value in gradients(net).items()}


def assigned_features(side: Side) -> Results:
    """``data.x = ...`` before training, and a row-wise transform."""
    from torch_geometric.transforms import NormalizeFeatures

    side.data.x = F.normalize(side.data.x.abs() + 1)
    transformed = NormalizeFeatures()(side.data)
    net = Net(side)
    out = net(transformed.x, transformed.edge_index)
    side.loss(out).backward()
    return {**gradients(net), "x": transformed.x, "out": out.detach()}


def lazy_layers(side: Side) -> Results:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = side.SAGEConv(-1, 6)
            self.pair = side.SAGEConv((-1, -1), 5)
            self.second = side.GCNConv(-1, NUM_CLASSES)

        def forward(self, x: Tensor, edge_index: Any) -> Tensor:
            x = self.first(x, edge_index).tanh()
            return self.second(self.pair((x, x), edge_index).tanh(), edge_index)

    net, x = Lazy().double(), side.features()
    first = net(x, side.data.edge_index).detach()
    side.loss(net(x, side.data.edge_index)).backward()
    return {"first": first, **gradients(net, x=x)}


def dropout_masks(side: Side) -> Results:
    """Ours are those of one process, at every p, for rows, selections, columns and cubes."""
    net, x = Net(side, p=0.5), side.features()
    side.loss(net(side.dropout(x, 0.2), side.data.edge_index)).backward()
    results = gradients(net, x=x)
    results["all"], results["none"] = side.dropout(x, 1.0).detach(), F.dropout(x, 0.9, training=False).detach()
    results["again"] = side.dropout(side.dropout(x, 0.5), 0.5).detach()
    results["cubes"] = side.dropout(x.view(-1, NUM_FEATURES, 1).expand(-1, -1, 3), 0.5).detach()
    kept = (results["again"] != 0).double().mean()
    assert 0.1 < float(kept) < 0.4
    return results


SCRIPTS = [
    adam_on_rows, clipped_steps, several_models_and_graphs, early_stopping, copies_of_tensors, saved_models,
    evaluation, evaluation_in_inference_mode_only, casts, assigned_features, lazy_layers, dropout_masks,
]  # fmt: skip


@pytest.mark.parametrize(
    ("world_size", "script"),
    [
        *(pytest.param(3, script, id=f"{script.__name__}-3") for script in SCRIPTS),
        *(pytest.param(1, script, id=f"{script.__name__}-1") for script in SCRIPTS[::3]),
    ],
)
def test_training(workers: Pools, world_size: int, script: Callable[[Side], Results]) -> None:
    workers(world_size).run(compare, script)


@on_ranks(3)
def test_pickle_is_refused() -> None:
    """A file would hold one rank's rows and look like all of them."""
    _, ours = sides()
    net = Net(ours)
    net.x = nn.Parameter(ours.data.x.clone())
    data = ours.data
    for thing in (data, data.x, data.edge_weight, data.edge_index, net, net.state_dict(), {"out": [data.x * 2]}):
        for write in (pickle.dumps, lambda value: torch.save(value, io.BytesIO()), copy.copy):
            if write is copy.copy and thing is not data.x:
                continue
            with pytest.raises(ValueError, match=r"cannot be pickled.*") as error:
                write(thing)
            assert "\n" not in str(error.value)
            assert "save" in str(error.value), "names the way out"


@on_ranks(3)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])  # a bias promotes, too
@pytest.mark.parametrize("whole_model", [False, True], ids=["autocast", "bfloat16"])
@pytest.mark.parametrize("conv_name", ["SAGEConv", "GCNConv"])
def test_low_precision(conv_name: str, whole_model: bool, bias: bool) -> None:
    """Under autocast, and with everything in bfloat16: dtypes are stock's, and errors are of the same size."""
    stock, ours = sides(torch.float32)

    def run(side: Side, dtype: torch.dtype) -> Results:
        torch.manual_seed(0)
        conv = getattr(side, conv_name)(NUM_FEATURES, NUM_CLASSES, bias=bias).to(
            dtype if whole_model else torch.float32
        )
        x = side.data.x.detach().to(dtype if whole_model else torch.float32).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=not whole_model and dtype == torch.bfloat16):
            out = conv(x, side.data.edge_index)
            loss = side.loss(out)
        loss.backward()
        found = {"out": out.detach(), "loss": loss.detach(), **gradients(conv, x=x)}
        return {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in found.items()}

    exact, want, got = run(stock, torch.float32), run(stock, torch.bfloat16), run(ours, torch.bfloat16)
    for name, value in got.items():
        assert value.dtype == want[name].dtype, f"{name} is {value.dtype}, expected {want[name].dtype}"
        scale = exact[name].abs().max()
        error, allowed = ((v.float() - exact[name]).abs().max() / scale for v in (value, want[name]))
        assert error <= 2 * allowed + 2**-7, f"{name} is off by {error:.1e}; stock in the same dtype by {allowed:.1e}"


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}], ids=str)
@on_ranks(3)
def test_inside_ddp(options: dict[str, Any]) -> None:
    """The wrapper averages equal gradients: it must not see partial ones, nor count anything twice."""
    stock, ours = sides()

    def run(side: Side) -> Results:
        torch.manual_seed(4)
        net, x = Net(side), side.features()
        wrapped = net if side.is_stock else DistributedDataParallel(net, **options)
        results: Results = {}
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for epoch in range(3):
            optimizer.zero_grad()
            penalty = 0.01 * sum(p.square().sum() for p in net.parameters())
            (side.loss(wrapped(x, side.data.edge_index)) + penalty).backward()
            results |= {f"{epoch} {name}": value for name, value in gradients(net, x=x).items()}
            optimizer.step()
        with contextlib.nullcontext() if side.is_stock else wrapped.no_sync():
            side.loss(wrapped(x, side.data.edge_index)).backward()
        return results | gradients(net, x=x)

    assert_same(run(ours), run(stock))
