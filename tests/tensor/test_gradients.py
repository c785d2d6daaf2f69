"""What gives wrong gradients *without an error* when done naively: each trap is a script, run on stock PyG and on ours.

See :mod:`against_stock` for how the rows lie. What a script returns is compared elementwise in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from against_stock import NUM_CLASSES, NUM_FEATURES, NUM_NODES, Net, Results, Side, compare, gradients
from torch import Tensor, nn
from torch_geometric.nn import GATConv
from workers import Pools

import pyg_dist


def named(prefix: str, results: Results) -> Results:
    return {f"{prefix} {name}": value for name, value in results.items()}


def parameter(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


# ---- Plain tensors that are no leaves enter --------------------------------------------------------------------------


def centred_features(side: Side) -> Results:
    net, x = Net(side), side.features()
    side.loss(net(x - x.mean(0), side.data.edge_index)).backward()
    return gradients(net, x=x)


def gated_features(side: Side) -> Results:
    net, x, alpha, scalar = Net(side), side.features(), parameter(NUM_FEATURES), parameter()
    gated = x * alpha.sigmoid() + scalar.exp()
    side.loss(net(gated, side.data.edge_index)).backward()
    return gradients(net, x=x, alpha=alpha, scalar=scalar)


def batch_statistics(side: Side) -> Results:
    """Written out, and differentiated through mean, variance, extremes and norm."""
    net, x, scale = Net(side), side.features(), parameter(1)
    x_hat = (x - x.mean(0)) / (x.var(0) + scale.exp()).sqrt()
    x_hat = x_hat + x.amax(0) - x.min(dim=0).values + x.norm(dim=0) / x.std()
    side.loss(net(x_hat, side.data.edge_index)).backward()
    return gradients(net, x=x, scale=scale)


def readout_that_returns(side: Side) -> Results:
    """A sum over nodes goes through a plain network and meets the nodes again."""
    net, x, plain = Net(side), side.features(), nn.Linear(NUM_FEATURES, NUM_FEATURES).double()
    context = plain(x.mean(0, keepdim=True)).tanh()
    out = net(x + plain(context), side.data.edge_index)
    (side.loss(out) + context.square().sum()).backward()
    return {**gradients(net, x=x), **gradients(plain)}


def plain_rows_that_learn(side: Side) -> Results:
    """A plain parameter with a row per node, and a table that nodes look rows up in."""
    net, embedding, table = (
        Net(side),
        parameter(NUM_NODES, NUM_FEATURES),
        nn.Embedding(NUM_CLASSES, NUM_FEATURES).double(),
    )
    out = net(side.data.x + embedding + table(side.data.y) + embedding.mean(0), side.data.edge_index)
    side.loss(out).backward()
    return {**gradients(net, embedding=embedding), **gradients(table)}


def reparametrised_layer(side: Side) -> Results:
    """The weight that meets rows is computed from leaves at every call."""
    net = Net(side)
    nn.utils.parametrizations.weight_norm(net.first.lin_l)
    nn.utils.parametrizations.weight_norm(net.second.lin)
    x = side.features()
    side.loss(net(x, side.data.edge_index)).backward()
    return gradients(net, x=x)


def zeros_without_memory(side: Side) -> Results:
    """The derivative of sgn is a tensor of zeros that has no memory: it is gathered, and reaches a conv's kernels."""
    x, attention = side.features(), GATConv(NUM_FEATURES, NUM_CLASSES).double()
    attention = attention if side.is_stock else pyg_dist.distribute(attention)
    (of_sign,) = torch.autograd.grad(x.sgn().sum(), x)
    attention(x, side.data.edge_index).sgn().sum().backward()
    return {**gradients(attention, x=x), "of_sign": of_sign.clone() if side.is_stock else of_sign.full_tensor()}


# ---- One parameter, several uses -------------------------------------------------------------------------------------


def shared_weights(side: Side) -> Results:
    """A conv used twice, two layers tied, and a layer applied to rows and to a plain tensor."""
    conv, other = (side.SAGEConv(NUM_FEATURES, NUM_FEATURES).double() for _ in range(2))
    other.lin_r.weight = conv.lin_l.weight
    head = nn.Linear(NUM_FEATURES, NUM_CLASSES).double()
    x, plain = side.features(), torch.ones(2, NUM_FEATURES, dtype=torch.float64)
    hidden = conv(conv(x, side.data.edge_index).tanh(), side.data.edge_index)
    out = head(other(hidden, side.data.edge_index))
    (side.loss(out) + head(plain).square().mean() + conv.lin_l(plain).sum()).backward()
    return gradients(nn.ModuleList([conv, other, head]), x=x)


def several_losses(side: Side) -> Results:
    """Of different masks and kinds, one of them over all nodes; summed, and each by itself."""
    net, x = Net(side), side.features()
    out = net(x, side.data.edge_index)
    (0.3 * side.loss(out) + side.loss(out, "other_mask")).backward(retain_graph=True)
    F.mse_loss(out, F.one_hot(side.data.y, NUM_CLASSES).double()).backward(retain_graph=True)
    torch.autograd.backward([out.square().mean(), out[side.data.train_mask].sum()])
    return gradients(net, x=x)


def accumulation(side: Side) -> Results:
    net, x, steps = Net(side), side.features(), []
    for step in range(3):
        (side.loss(net(x, side.data.edge_index), ("train_mask", "other_mask")[step % 2]) / 3).backward()
        steps.append(net.first.lin_l.weight.grad.clone())
    results = {**gradients(net, x=x), "after one step": steps[0], "after two": steps[1]}
    net.zero_grad(set_to_none=False)
    side.loss(net(x, side.data.edge_index)).backward()
    return results | named("again", gradients(net, x=x))


def retain_graph(side: Side) -> Results:
    net, x = Net(side), side.features()
    loss = side.loss(net(x, side.data.edge_index))
    loss.backward(retain_graph=True)
    once = gradients(net, x=x)
    loss.backward()
    return gradients(net, x=x) | named("once", once)


def penalty_on_parameters(side: Side) -> Results:
    """A term without rows counts once, not once per rank: beside a loss, in a backward of its own, and before."""
    net, x = Net(side), side.features()
    sum(p.square().sum() for p in net.parameters()).backward()
    first = gradients(net)
    loss = side.loss(net(x, side.data.edge_index))
    (loss + 0.1 * sum(p.abs().sum() for p in net.parameters())).backward()
    second = gradients(net, x=x)
    (net.first.lin_l.weight.norm() * loss.detach()).backward()
    return {
        **gradients(net, x=x),
        **{f"1 {k}": v for k, v in first.items()},
        **{f"2 {k}": v for k, v in second.items()},
    }


def frozen_parameters(side: Side) -> Results:
    """Frozen before, and unfrozen after a first step; and everything but the features frozen."""
    net, x = Net(side), side.features()
    net.first.requires_grad_(False)
    net.norm.weight.requires_grad_(False)
    side.loss(net(x, side.data.edge_index)).backward()
    first = gradients(net, x=x)
    net.requires_grad_(True)
    side.loss(net(side.data.x, side.data.edge_index)).backward()
    second = gradients(net, x=x)
    net.requires_grad_(False)
    side.loss(net(x, side.data.edge_index)).backward()
    return {
        **gradients(net, x=x),
        **{f"1 {k}": v for k, v in first.items()},
        **{f"2 {k}": v for k, v in second.items()},
    }


def unused_parameters(side: Side) -> Results:
    net, x, spare = Net(side), side.features(), nn.Linear(3, 3).double()
    net.spare = spare
    out = net(x, side.data.edge_index)
    unused = spare(torch.ones(1, 3, dtype=torch.float64))
    (side.loss(out) + 0 * unused.sum()).backward()
    return gradients(net, x=x)


# ---- Other ways to ask for gradients ---------------------------------------------------------------------------------


def autograd_grad(side: Side) -> Results:
    net, x, alpha = Net(side), side.features(), parameter(NUM_FEATURES)
    gate = alpha.sigmoid()
    hidden = x * gate
    out = net(hidden, side.data.edge_index)
    inputs = {"x": x, "hidden": hidden, "gate": gate, "alpha": alpha, **dict(net.named_parameters())}
    loss = side.loss(out)
    found = torch.autograd.grad(loss, list(inputs.values()), retain_graph=True)
    results = dict(zip(inputs, found, strict=True))
    assert all(p.grad is None for p in net.parameters()), "autograd.grad stores nothing"
    (results["one"],) = torch.autograd.grad(loss, net.second.bias, retain_graph=True)
    unused = torch.autograd.grad(loss, [parameter(2), net.first.lin_l.bias], retain_graph=True, allow_unused=True)
    results["unused"], results["used"] = unused
    (results["by rows"],) = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    results["of two"] = torch.autograd.grad([loss, out.square().sum()], alpha, retain_graph=True)[0]
    loss.backward(inputs=[x, net.first.lin_l.weight])
    return results | gradients(net, x=x, alpha=alpha)


def backward_of_rows(side: Side) -> Results:
    """From an output with a row per node: a gradient that is distributed, and a plain one with all rows."""
    net, x = Net(side), side.features()
    out = net(x, side.data.edge_index)
    out.backward(out.detach().tanh(), retain_graph=True)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(NUM_NODES, NUM_CLASSES))
    return gradients(net, x=x)


def create_graph(side: Side) -> Results:
    """Gradients of gradients: by parameters, features and edge weights, through every kind of layer."""
    net, x, weight = Net(side), side.features(), side.data.edge_weight.detach().clone().requires_grad_()
    loss = side.loss(net(x, side.data.edge_index, weight))
    first = torch.autograd.grad(loss, [x, weight, *net.parameters()], create_graph=True)
    sum(g.square().sum() for g in first).backward()
    return {**gradients(net, x=x, weight=weight), **{f"first {k}": g.detach() for k, g in enumerate(first)}}


def gradient_penalty(side: Side) -> Results:
    """As in WGAN-GP: the norm of the gradient by the features is part of the loss."""
    net, x, alpha = Net(side), side.features(), parameter(NUM_FEATURES)
    loss = side.loss(net(x * alpha.sigmoid(), side.data.edge_index))
    (by_x,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + (by_x.norm(dim=1) - 1).square().mean()).backward()
    return gradients(net, x=x, alpha=alpha)


def backward_create_graph(side: Side) -> Results:
    net, x = Net(side), side.features()
    side.loss(net(x, side.data.edge_index)).backward(create_graph=True)
    first = gradients(net, x=x)
    sharpness = sum(p.grad.square().sum() for p in net.parameters()) + x.grad.square().sum()
    for tensor in (x, *net.parameters()):
        tensor.grad = None
    sharpness.backward()
    return gradients(net, x=x) | named("first", {name: value.detach() for name, value in first.items()})


def third_order(side: Side) -> Results:
    conv, x = side.GCNConv(NUM_FEATURES, 1).double(), side.features()
    value = conv(x, side.data.edge_index).tanh().square().mean()
    results = {}
    for order in range(3):
        found = torch.autograd.grad(value, [x, conv.lin.weight], create_graph=True)
        results |= {f"order {order}, {k}": gradient.detach() for k, gradient in enumerate(found)}
        value = sum(gradient.square().sum() for gradient in found)
    value.backward()
    return results | gradients(conv, x=x)


# ---- Between backward and step ---------------------------------------------------------------------------------------


def second_order_of_appended_rows(side: Side) -> Results:
    """Flat ones: where a rank has none, torch.cat leaves its tensors out of the graph of second derivatives."""
    net, x = Net(side), side.features()
    column = net.second(net.first(x, side.data.edge_index).tanh(), side.data.edge_index)[:, 0]
    (by_x,) = torch.autograd.grad(torch.cat([column, 2 * column]).tanh().sum(), [x], create_graph=True)
    by_x.square().sum().backward()
    return gradients(net, x=x)


def clipping(side: Side) -> Results:
    net, x = Net(side), side.features()
    (20 * side.loss(net(x, side.data.edge_index))).backward()
    tensors = [x, *net.parameters()]
    results: Results = {"norm": nn.utils.get_total_norm([p.grad for p in tensors])}
    results["clipped norm"] = nn.utils.clip_grad_norm_(tensors, 0.5)
    results |= gradients(net, x=x)
    results["largest"] = nn.utils.clip_grad_norm_(tensors, 0.1, norm_type=float("inf"))
    nn.utils.clip_grad_value_(tensors, 0.01)
    return results | named("by value", gradients(net, x=x))


def gradients_changed_in_place(side: Side) -> Results:
    """Each gradient has its own memory, as far as a script can tell."""
    net, x = Net(side), side.features()
    side.loss(net(x, side.data.edge_index)).backward()
    factor = parameter()
    net.first.lin_l.weight.grad.zero_()
    net.first.lin_r.weight.grad += factor.detach()
    net.second.bias.grad.mul_(factor)  # meta-learning: gradients with a history
    net.second.bias.grad.sum().backward()
    net.second.bias.grad = None
    side.loss(net(x, side.data.edge_index)).backward()
    return gradients(net, x=x, factor=factor)


def features_of_the_graph(side: Side) -> Results:
    """``data.x`` itself wants a gradient, is moved along it in place, and is a constant again."""
    net, x = Net(side), side.data.x
    results: Results = {}
    for step in range(5):
        x.requires_grad_(step in (1, 2))
        with torch.autograd.set_detect_anomaly(step == 2, check_nan=True):
            side.loss(net(side.data.x, side.data.edge_index)).backward()
        results |= named(f"{step}", gradients(net, x=x))
        if x.requires_grad:
            with torch.no_grad():
                x.add_(0.1 * x.grad.sign())
        del x.grad
    return results | {"x": x.detach()}


# ---- Edge weights and selections -------------------------------------------------------------------------------------


def edge_weights(side: Side) -> Results:
    """Computed from edge features, a distributed leaf, and a plain parameter with a value per edge."""
    net, mlp, leaf = Net(side), nn.Linear(3, 1).double(), side.data.edge_weight.detach().clone().requires_grad_()
    plain = torch.rand(side.data.num_edges, dtype=torch.float64).requires_grad_()
    computed = mlp(side.data.edge_attr).sigmoid().view(-1)
    out = sum(
        net(side.data.x, side.data.edge_index, w) for w in (computed, leaf, plain, computed * leaf + plain.mean())
    )
    (side.loss(out) + 0.1 * leaf.square().mean() + plain.sum()).backward()
    return {**gradients(net, leaf=leaf, plain=plain), **gradients(mlp)}


def selections(side: Side) -> Results:
    """Masks of lists, lists of masks, unsorted and repeated ids; a loss on each."""
    net, x = Net(side), side.features()
    out, mask, y = net(x, side.data.edge_index), side.data.train_mask, side.data.y
    position = torch.tensor([3, 0, 3, 2])
    ids = torch.tensor([40, 2, 2, 17, 9, 40, -1])
    picks = {
        "out[mask][index]": (out[mask][position], y[mask][position]),
        "out[index]": (out[ids], y[ids]),
        "out[index][mask]": (out[ids][y[ids] > 0], y[ids][y[ids] > 0]),
        "out[mask][mask]": (out[mask][y[mask] > 1], y[mask][y[mask] > 1]),
        "out[array]": (out[ids.numpy()], y[ids.numpy()]),
        "out[slice]": (out[5:30:3], y[5:30:3]),
    }
    losses = {name: F.cross_entropy(*pair) for name, pair in picks.items()}
    sum(losses.values()).backward()
    return {**gradients(net, x=x), **losses, **{f"{name} values": pair[0].detach() for name, pair in picks.items()}}


SCRIPTS = [
    centred_features, gated_features, batch_statistics, readout_that_returns, plain_rows_that_learn,
    reparametrised_layer, zeros_without_memory, shared_weights, several_losses, accumulation, retain_graph,
    penalty_on_parameters, frozen_parameters, unused_parameters, autograd_grad, backward_of_rows, create_graph,
    gradient_penalty, backward_create_graph, third_order, second_order_of_appended_rows, clipping,
    gradients_changed_in_place, features_of_the_graph, edge_weights, selections,
]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_gradients(workers: Pools, world_size: int, script: Callable[[Side], Results]) -> None:
    workers(world_size).run(compare, script)
