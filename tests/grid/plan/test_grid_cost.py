"""The cost model: bytes by hand, the volume of both forms of the sums, and what the planner makes of a machine."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from pyg_dist.backend.calibration import fit_spmm
from pyg_dist.backend.comm.wires.wire import Carriers
from pyg_dist.backend.session.state import current
from pyg_dist.errors import OptionError
from pyg_dist.grid.plan.cost import all_to_all_seconds, grid_plans, grid_table, memory_of, price_of
from pyg_dist.grid.plan.mesh_shape import MeshShape, nearest_cube
from pyg_dist.grid.plan.work import work_of
from pyg_dist.pricing.machine import Machine, machine_file
from pyg_dist.pricing.model import Model

MODEL = Model(num_nodes=64_000, num_entries=640_000, widths=(128, 128, 128, 128), input="learns")


def test_one_layer_by_hand() -> None:
    """Plexus, Alg. 1: 60 nodes, 8 columns in, 12 out, on 2 x 3 x 2; the aggregation comes first."""
    model = Model(60, 300, (8, 12), input="new", num_orders=1)
    shape = MeshShape(2, 3, 2)
    sent = work_of(model, shape, "all_reduce", rank=0).sent
    rows_z, columns_y = 60 // 2, 8 // 3
    gathered = 60 // 4 * columns_y * 4  # this rank's piece of x over z, to one other
    assert sent["z",] == gathered
    aggregated = (rows_z // 2 + rows_z // 2) * columns_y * 4  # half of H away, and the own half of the sum back
    assert sent["x",] == aggregated
    product = rows_z * 12 // 2  # Q over z and x, summed over y
    assert sent["y",] == (product - product // 3 + product // 3 * 2) * 4
    later = work_of(replace(model, input="remembered"), shape, "all_reduce", rank=0)
    assert (later.spmm, later.sent) == ([], {axes: n for axes, n in sent.items() if axes not in (("x",), ("z",))})


@pytest.mark.parametrize("side", [2, 4])
def test_scattered_sums_send_less(side: int) -> None:
    """A fifth to a quarter less on a cube; the first layer, whose input is scattered in both forms, gains nothing."""
    shape = MeshShape(side, side, side)
    scattered, to_all = (
        sum(n for axes, n in work_of(MODEL, shape, sums, 0).sent.items() if len(axes) == 1)
        for sums in ("reduce_scatter", "all_reduce")
    )
    assert 0.7 < scattered / to_all < 0.83


MACHINE = replace(
    Machine(), call_seconds=1.0, intra_latency=0.1, intra_bandwidth=100.0, inter_latency=10.0, inter_bandwidth=7.0,
    ranks_per_node=4, cores=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "axis", "rank", "inside", "outside", "sharing"),
    [
        # Plexus, 4.2: y, then x, then z lie within a machine; beyond it, those inside share the link.
        (MeshShape(x=2, y=2, z=2), "y", 0, 1, 0, 0),
        (MeshShape(x=2, y=2, z=2), "x", 5, 1, 0, 0),
        (MeshShape(x=2, y=2, z=2), "z", 3, 0, 1, 4),
        # Groups of three on machines of four: ranks 0, 1, 2 stay on theirs, 3 is alone, 4 and 5 share the second one.
        (MeshShape(x=2, y=3, z=1), "y", 0, 2, 0, 0),
        (MeshShape(x=2, y=3, z=1), "y", 3, 0, 2, 1),
        (MeshShape(x=2, y=3, z=1), "y", 5, 1, 1, 2),
        (MeshShape(x=8, y=1, z=1), "z", 0, 0, 0, 0),
    ],
)
def test_all_to_alls_by_hand(shape: MeshShape, axis: str, rank: int, inside: int, outside: int, sharing: int) -> None:
    partners = inside + outside
    turns = min(shape.size, 4) / 2
    near = turns * (3 * 1.0 + 3 * inside * 0.1 + 420.0 * inside / max(partners, 1) / 100.0)
    far = 3 * outside * 10.0 + 420.0 * outside / max(partners, 1) * sharing / 7.0
    expected = near + far if partners else 0.0
    assert all_to_all_seconds(shape, (axis,), rank, 420.0, 3, MACHINE) == pytest.approx(expected)


@pytest.mark.parametrize(("shape", "axis", "inside"), [
    (MeshShape(x=4, y=2, z=1), "x", 1),
    (MeshShape(x=1, y=8, z=1), "y", 3),
])  # fmt: skip
def test_two_steps_by_hand(shape: MeshShape, axis: str, inside: int) -> None:
    """Two machines of four ranks: one piece goes by the link to the other machine, both pieces to each rank inside."""
    pieces = 420.0 / (shape[axis] - 1)
    near = 2 * (2 * 3 * 1.0 + 3 * inside * 0.1 + 2 * inside * pieces / 100.0)
    far = 3 * 1 * 10.0 + pieces * 4 / 7.0
    assert all_to_all_seconds(shape, (axis,), 6, 420.0, 3, MACHINE) == pytest.approx(near + far)


def test_all_to_alls_of_all_ranks_by_hand() -> None:
    found = all_to_all_seconds(MeshShape(x=2, y=3, z=2), ("x", "y", "z"), 7, 110.0, 1, MACHINE)
    assert found == pytest.approx(2 * (1.0 + 3 * 0.1 + 30.0 / 100.0) + 8 * 10.0 + 80.0 * 4 / 7.0)


def test_every_mesh_is_priced() -> None:
    candidates = grid_plans(MODEL, 8, Machine())
    assert len(candidates) == 2 * 10
    assert [c.seconds for c in candidates] == sorted(c.seconds for c in candidates)
    table = grid_table(candidates, 8)
    assert len(table.splitlines()) == 21
    assert table.count("nearest cube") == 2
    assert [("chosen" in line) for line in table.splitlines()] == [False, True, *[False] * 19]
    with pytest.raises(OptionError, match="at least one rank"):
        grid_plans(MODEL, 0, Machine())
    assert json.loads(json.dumps(candidates[0].to_dict()))["mesh"].keys() == {"x", "y", "z"}


def test_a_slow_link_moves_the_choice() -> None:
    fast = replace(Machine(), ranks_per_node=8, inter_bandwidth=1e12, intra_bandwidth=1e12)
    slow = replace(fast, ranks_per_node=2, inter_bandwidth=1e6)
    best_fast, best_slow = grid_plans(MODEL, 8, fast)[0], grid_plans(MODEL, 8, slow)[0]
    assert best_slow.seconds > 10 * best_fast.seconds
    assert best_slow.seconds <= price_of(MODEL, nearest_cube(8), "reduce_scatter", slow).seconds


def test_memory_shrinks_with_ranks() -> None:
    shapes = [MeshShape(), MeshShape(2, 1, 2), MeshShape(4, 1, 4)]
    sizes = [memory_of(MODEL, shape, "reduce_scatter", 0) for shape in shapes]
    assert sizes[0] > 2 * sizes[1] > 2 * sizes[2]


def test_machine_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "machine.json"
    with pytest.raises(OptionError, match="pyg_dist bench"):
        Machine.load(path)
    monkeypatch.setenv("PYG_DIST_MACHINE", str(path))
    assert Machine.load() == Machine()
    machine = replace(Machine(), spmm=(1.0, 2.0, 3.0), cores=7, quantize_rate=Machine().stream_rate)
    assert machine.save() == path
    assert Machine.load() == machine == Machine.load(path)
    values = json.loads(path.read_text())
    del values["device"], values["quantize_rate"]  # as older files were: what is quantized was priced as a stream
    path.write_text(json.dumps(values))
    assert Machine.load() == machine
    monkeypatch.delenv("PYG_DIST_MACHINE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Machine.load(device="cuda") == Machine.default("cuda")
    assert Machine.load(device="cuda").source.startswith("assumed, products of one H100")
    assert replace(machine, device="cuda").save() == tmp_path / "pyg_dist/machine.cuda.json"
    assert Machine.load(device="cuda") == replace(machine, device="cuda")
    assert Machine.load() == Machine()
    machine.save()
    monkeypatch.setattr(current().of(Carriers), "mpi", timedelta(1))
    assert Machine.load() == machine, "gloo's, where those of MPI were not measured"
    by_mpi = replace(machine, call_seconds=1e-6)
    by_mpi.save(machine_file("cpu", "mpi"))
    assert Machine.load() == by_mpi
    for wrong in ({"cores": 3}, json.loads(machine.save(path).read_text()) | {"gemm_rate": "fast"}):
        path.write_text(json.dumps(wrong))
        with pytest.raises(OptionError, match="measure them"):
            Machine.load(path)


def test_fit_finds_the_terms() -> None:
    rng = np.random.default_rng(0)
    entries, rows = rng.integers(10**4, 10**6, 80), rng.integers(10**3, 10**5, 80)
    columns = rng.choice([8, 32, 128], 80)
    seconds = (3e-10 * entries * columns + 2e-9 * entries + 1e-9 * rows * columns) * rng.uniform(0.95, 1.05, 80)
    fit = fit_spmm(np.stack([entries, rows, rows, columns, seconds], 1).astype(float))
    assert fit.coefficients[0] == pytest.approx(3e-10, rel=0.1)
    assert fit.r2 > 0.95
