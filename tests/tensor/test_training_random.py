"""Randomness is a function of the seed and of the node: world size, partition and checkpointing change no mask."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from against_stock import NUM_CLASSES, NUM_FEATURES, NUM_NODES, graph, parts
from bits import assert_same_bits
from torch import Tensor, nn
from torch_geometric.nn.aggr import MLPAggregation
from workers import Pools

import pyg_dist
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv

Values = dict[str, Tensor]


def drawn(partition: str | None) -> Values:
    """Everything random that a script may ask of rows and edges, in global order."""
    given = graph()
    owners = parts(given, pyg_dist.world_size()) if partition is None else partition
    data = pyg_dist.DistributedData(given, partition=owners)
    torch.manual_seed(5)
    x, mask = data.x.new_ones(NUM_NODES, NUM_FEATURES) + 0 * data.x, data.train_mask
    found = {
        "dropout": F.dropout(x),
        "another draw": F.dropout(x),
        "module": nn.Dropout(0.3)(x),
        "in place": F.dropout(x * 1, 0.3, inplace=True),
        "selected": F.dropout(x[mask]),
        "listed": F.dropout(x[torch.tensor([3, 9, 3, 46])]),
        "edges": F.dropout(data.edge_attr),
        "cubes": F.dropout(x.view(-1, NUM_FEATURES, 1).expand(-1, -1, 2)),
        "rand_like": torch.rand_like(x),
        "randn_like": torch.randn_like(data.edge_weight),
        "bernoulli": torch.bernoulli(x * 0.5),
        "normal_": torch.zeros_like(x).normal_(2.0, 3.0),
        "uniform_": torch.zeros_like(x).uniform_(2.0, 3.0),
        "initialised": nn.init.xavier_uniform_(torch.zeros_like(x)),
    }
    first, second = DistributedSAGEConv(NUM_FEATURES, 8).double(), DistributedGCNConv(8, NUM_CLASSES).double()
    out = second(F.dropout(first(data.x, data.edge_index).tanh()), data.edge_index)
    F.cross_entropy(out[mask], data.y[mask]).backward()
    found |= {name: p.grad for name, p in nn.ModuleList([first, second]).named_parameters()}
    found["generator"] = torch.get_rng_state()
    torch.manual_seed(6)
    found["another seed"] = F.dropout(x)
    return {name: v.detach().full_tensor() if hasattr(v, "full_tensor") else v for name, v in found.items()}


def test_masks_are_the_same_on_every_world_size_and_partition(workers: Pools) -> None:
    runs = {
        f"{world_size} ranks, {partition or 'uneven'}": found
        for world_size, partition in ((1, None), (2, "metis"), (3, None), (3, "random"))
        for found in workers(world_size).run(drawn, partition)
    }
    alone = runs["1 ranks, uneven"]
    for where, found in runs.items():
        for name, value in alone.items():
            what = f"{name} on {where}"
            if name in GRADIENTS:
                assert torch.allclose(found[name], value), what
            else:
                assert_same_bits(found[name], value, what)
    seen = [value for name, value in alone.items() if name not in GRADIENTS and value.dim() > 1]
    assert all(len(value.unique(dim=0)) > 1 for value in seen), "every row must draw for itself"
    assert not torch.equal(alone["dropout"], alone["another draw"])
    assert not torch.equal(alone["dropout"], alone["another seed"])
    assert 0.35 < float((alone["dropout"] == 0).double().mean()) < 0.65
    assert set(alone["dropout"].unique().tolist()) == {0.0, 2.0}


GRADIENTS = {"0.lin_l.weight", "0.lin_l.bias", "0.lin_r.weight", "1.lin.weight", "1.bias"}


def generators_after_an_aggregation_that_draws() -> tuple[Tensor, Any]:
    """Dropout inside of an aggregation draws for this rank's messages alone, however many there are."""
    given = graph()
    data = pyg_dist.DistributedData(given, partition=parts(given, pyg_dist.world_size()))
    torch.manual_seed(3)
    aggregation = MLPAggregation(
        NUM_FEATURES, NUM_FEATURES, 40, hidden_channels=4, num_layers=2, dropout=0.5, norm=None
    )
    conv = DistributedSAGEConv(NUM_FEATURES, 3, aggr=aggregation).double()
    before = torch.get_rng_state()
    conv.eval()(data.x, data.edge_index)
    assert torch.equal(torch.get_rng_state(), before), "nothing was drawn"
    conv.train()
    outs = [conv(data.x, data.edge_index).detach().full_tensor() for _ in range(2)]
    assert not torch.equal(*outs), "dropout was not active"
    return torch.get_rng_state(), F.dropout(data.x).full_tensor()


def test_ranks_stay_in_step_after_an_aggregation_that_draws(workers: Pools) -> None:
    ranks = workers(3).run(generators_after_an_aggregation_that_draws)
    for state, dropped in ranks[1:]:
        assert_same_bits(state, ranks[0][0])
        assert_same_bits(dropped, ranks[0][1])
