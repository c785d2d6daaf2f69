"""``bench`` stores constants that plans are priced with; fits find what made the samples. Nothing looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import forked_python
import numpy as np
import pytest
import torch
from workers import Pools

import pyg_dist
from pyg_dist.backend import calibration
from pyg_dist.backend.calibration import fit_network
from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.cli import bench, main
from pyg_dist.errors import OptionError
from pyg_dist.pricing.base import WIDTH
from pyg_dist.pricing.machine import Machine


def samples(call: float, latency: float, bandwidth: float, partners: tuple[int, ...]) -> calibration.Samples:
    """Of processor time; twice as much elapses."""
    rng = np.random.default_rng(0)
    rows = []
    for p in partners:
        for n in calibration.MESSAGE_BYTES:
            seconds = (call + latency * p + n * p / (p + 1) / bandwidth) * rng.uniform(0.97, 1.03)
            rows.append((p, n * p / (p + 1), 2 * seconds, seconds))
    return np.array(rows)


def test_fit_finds_latencies_and_bandwidth() -> None:
    fit = fit_network(samples(1e-4, 5e-5, 2e9, (1, 3, 7)), by_processor=True)
    assert fit.call == pytest.approx(1e-4, rel=0.2)
    assert fit.latency == pytest.approx(5e-5, rel=0.2)
    assert fit.bandwidth == pytest.approx(2e9, rel=0.1)
    assert fit.r2 > 0.99


def test_what_one_size_of_groups_cannot_tell_is_shared() -> None:
    fit = fit_network(samples(1e-4, 1e-4, 2e9, (1,)), by_processor=True)
    assert fit.call == pytest.approx(fit.latency, rel=0.01)
    assert fit.call + fit.latency == pytest.approx(2e-4, rel=0.1)


def test_elapsed_time_and_processor_time_are_fitted_apart() -> None:
    taken = samples(1e-4, 5e-5, 2e9, (1, 3, 7))
    slow, fast = fit_network(taken), fit_network(taken, by_processor=True)
    assert slow[:3] == pytest.approx((2 * fast.call, 2 * fast.latency, fast.bandwidth / 2))


def test_noise_is_refused() -> None:
    taken = samples(1e-4, 5e-5, 2e9, (1,))
    taken[:, 2] = 1 / np.arange(1.0, len(taken) + 1)
    with pytest.raises(OptionError, match="quiet machine"):
        fit_network(taken)


@pytest.mark.slow
def test_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)  # a measurement's threads are its process's
    few = calibration.spmm_samples(sizes=((300, 5),))
    assert few.shape == (24, 5)
    monkeypatch.setattr(calibration, "spmm_samples", lambda device: few)
    path = tmp_path / "machine.json"
    assert main(["bench", "rates", "--output", str(path), "--json"]) == 0
    machine = Machine.load(path)
    assert json.loads(capsys.readouterr().out)["gemm_rate"] == machine.gemm_rate
    assert machine.source.startswith("measured 20")
    assert min(machine.stream_rate, machine.quantize_rate) > 0
    assert machine.intra_bandwidth == Machine().intra_bandwidth
    assert main(["bench", "rates", "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "held-out R2" in out
    assert max(len(line) for line in out.replace(str(path), "").splitlines()) <= WIDTH


def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) != 0
    assert "Expected a GPU for --device cuda (got none that torch finds)" in capsys.readouterr().err


def measure(machine_of: list[int], is_inside: bool) -> list[list[float]]:
    pyg_dist.init()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "MESSAGE_BYTES", (64, 4096))
        groups = calibration.groupings(machine_of, is_inside)
        return calibration.network_samples(world_group(), groups, repeats=2).tolist()  # type: ignore[no-any-return]


def test_groups_inside_and_between_machines(workers: Pools) -> None:
    """Four ranks, as if on two machines: pairs inside, pairs between; on one machine groups of two and of four."""
    for is_inside in (True, False):
        found = workers(4).run(measure, [7, 7, 9, 9], is_inside)
        assert found[0] == found[3], "the slowest rank's time, on every rank"
        assert [row[:2] for row in found[0]] == [[1, 32], [1, 2048]]
    one = workers(4).run(measure, [7, 7, 7, 7], True)[0]
    assert [row[:2] for row in one] == [[1, 32], [1, 2048], [3, 48], [3, 3072]]
    assert all(row[2] > 0 and row[3] > 0 for row in one)
    assert workers(4).run(measure, [7, 7, 7, 7], False)[0] == []


def network_of_a_job() -> tuple[float, ...]:
    """The constants of ranks that lie on two machines, and those that were known."""
    pyg_dist.init()
    remarks: list[str] = []

    def seconds(group: Group, num_bytes: int, *_: object) -> tuple[float, float]:
        return 1.0 + num_bytes, 0.25 * group.size + 1e-6 * num_bytes * (1 - 1 / group.size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "machines", lambda: (7, 7, 9, 9))
        patch.setattr(bench, "_num_workers", lambda machine: 1)
        patch.setattr(calibration, "_all_to_all_seconds", seconds)
        machine = bench.measure_network(Machine(), remarks)
    assert remarks[0].startswith("processor time of messages: R2 1.00 of 18 sizes"), remarks
    return (
        machine.call_seconds, machine.intra_latency, machine.intra_bandwidth, machine.ranks_per_node, machine.cores
    )  # fmt: skip


def test_messages_of_ranks_that_share_cores_are_counted_in_processor_time(workers: Pools) -> None:
    """Pairs inside and between, and all four, whose two partners more take half a second more."""
    for found in workers(4).run(network_of_a_job):
        assert found == pytest.approx((0.25, 0.25, 1e6, 2, 1), rel=0.1)


@pytest.mark.slow
def test_loopback_ranks_are_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", forked_python.executable())
    path = tmp_path / "machine.json"
    status = main(["bench", "network", "--output", str(path)])
    out, err = capfd.readouterr()
    if "quiet machine" in err:
        pytest.skip("the machine is too busy to tell large messages from small ones")
    assert status == 0, err
    machine = Machine.load(path)
    assert machine.intra_bandwidth > 0
    assert machine.spmm == Machine().spmm
    assert "between machines: not measured" in out
    assert out.count("stored in") == 1
    assert max(len(line) for line in out.replace(str(path), "").splitlines()) <= WIDTH
