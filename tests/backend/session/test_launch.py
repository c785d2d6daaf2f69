"""Every launcher's environment, and those that contradict each other."""

from __future__ import annotations

import pytest

from pyg_dist.backend.session.launch import Launch, Run, detect, first_host, identify
from pyg_dist.errors import LaunchError

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1234"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    **MASTER,
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
SBATCH = {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "node[1-4]"}
SRUN = {
    **SBATCH,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "node[2-4,7]",
}
SLURM_PORT = 15_000 + 101 * 71 + 2


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, Launch(0, 1, 0, "alone"), id="python"),
        pytest.param(MASTER, Launch(0, 1, 0, "alone"), id="a master alone is nobody's launch"),
        pytest.param(TORCHRUN, Launch(3, 8, 1, "torchrun", "10.0.0.1", 1234), id="torchrun"),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "8", **MASTER}, Launch(3, 8, 3, "env", "10.0.0.1", 1234), id="set by hand"
        ),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, Launch(0, 1, 0, "env"), id="one rank needs no master"),
        pytest.param(HYDRA, Launch(3, 8, 1, "mpi"), id="MPICH and Intel MPI"),
        pytest.param({**HYDRA, **MASTER}, Launch(3, 8, 1, "mpi", "10.0.0.1", 1234), id="MPI with a master"),
        pytest.param({"PMI_RANK": "0", "PMI_SIZE": "1"}, Launch(0, 1, 0, "mpi"), id="mpirun -n 1"),
        pytest.param(OPEN_MPI, Launch(3, 8, 1, "mpi"), id="Open MPI"),
        pytest.param({**OPEN_MPI, "PMIX_RANK": "3"}, Launch(3, 8, 1, "mpi"), id="Open MPI over PMIx"),
        pytest.param({**HYDRA, "RANK": "3", "WORLD_SIZE": "8"}, Launch(3, 8, 1, "mpi"), id="MPI, RANK set alike"),
        pytest.param(
            {**HYDRA, "RANK": "3", "WORLD_SIZE": "8", **MASTER},
            Launch(3, 8, 1, "env", "10.0.0.1", 1234),
            id="RANK set from MPI's, local rank from MPI",
        ),
        pytest.param(SBATCH, Launch(0, 1, 0, "alone"), id="sbatch script"),
        pytest.param(SRUN, Launch(3, 8, 1, "slurm", "node2", SLURM_PORT), id="srun"),
        pytest.param({**SRUN, **MASTER}, Launch(3, 8, 1, "slurm", "10.0.0.1", 1234), id="srun with a master"),
        pytest.param({**SRUN, **HYDRA}, Launch(3, 8, 1, "slurm", "node2", SLURM_PORT), id="srun with PMI"),
        pytest.param(
            {**SRUN, "SLURM_STEP_NODELIST": "node3"},
            Launch(3, 8, 1, "slurm", "127.0.0.1", SLURM_PORT),
            id="srun, one node",
        ),
        pytest.param(
            {**SRUN, "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", **HYDRA},
            Launch(3, 8, 1, "mpi"),
            id="mpirun in salloc",
        ),
        pytest.param(
            {**SRUN, "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4", **TORCHRUN},
            Launch(3, 8, 1, "torchrun", "10.0.0.1", 1234),
            id="torchrun, one agent per srun task",
        ),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "4", **TORCHRUN},
            Launch(3, 8, 1, "torchrun", "10.0.0.1", 1234),
            id="torchrun, one agent per mpirun rank",
        ),
        pytest.param(
            {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "RANK": "1", "WORLD_SIZE": "2", **MASTER},
            Launch(1, 2, 1, "env", "10.0.0.1", 1234),
            id="by hand in the shell of srun --pty",
        ),
    ],
)
def test_detect(environ: dict[str, str], expected: Launch) -> None:
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        pytest.param(
            {**HYDRA, "RANK": "0", "WORLD_SIZE": "2", **MASTER}, ["WORLD_SIZE=2", "PMI_SIZE=8"], id="leftover RANK"
        ),
        pytest.param(
            {**HYDRA, "RANK": "2", "WORLD_SIZE": "8", **MASTER}, ["RANK=2", "PMI_RANK=3"], id="other numbering"
        ),
        pytest.param(
            {"PMI_RANK": "0", "PMI_SIZE": "1", "RANK": "0", "WORLD_SIZE": "2", **MASTER},
            ["WORLD_SIZE=2", "PMI_SIZE=1"],
            id="leftover WORLD_SIZE under mpirun -n 1",
        ),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "3", **TORCHRUN},
            ["torchrun's", "WORLD_SIZE=8", "PMI_SIZE=3"],
            id="mpirun torchrun",
        ),
        pytest.param(
            {**SRUN, "SLURM_STEP_NUM_TASKS": "6", **HYDRA}, ["PMI_SIZE=8", "SLURM_STEP_NUM_TASKS=6"], id="srun mpirun"
        ),
        pytest.param(
            {**HYDRA, **OPEN_MPI, "PMI_SIZE": "4"}, ["PMI_SIZE=4", "OMPI_COMM_WORLD_SIZE=8"], id="two MPI libraries"
        ),
        pytest.param({"RANK": "1"}, ["WORLD_SIZE", "RANK=1"], id="RANK only"),
        pytest.param({"WORLD_SIZE": "2"}, ["RANK", "WORLD_SIZE=2"], id="WORLD_SIZE only"),
        pytest.param({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK", "got 2", "WORLD_SIZE=2"], id="rank out of range"),
        pytest.param({"RANK": "x", "WORLD_SIZE": "2"}, ["RANK", "'x'"], id="not a number"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR"], id="no master"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h"}, ["MASTER_PORT"], id="no port"),
        pytest.param({**SRUN, "SLURM_STEP_NODELIST": "node[1-"}, ["node[1-", "MASTER_ADDR"], id="broken node list"),
    ],
)
def test_contradictions_are_one_line(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        detect(environ)
    line = str(caught.value)
    assert "\n" not in line
    assert [word for word in words if word not in line] == []


NAME = ("MASTER_ADDR=10.0.0.1", "MASTER_PORT=1234")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, None, id="python"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, None, id="one rank"),
        pytest.param(TORCHRUN, Run(("TORCHELASTIC_RUN_ID=x", *NAME), "RANK", False), id="torchrun"),
        pytest.param(
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "8"},
            Run(("TORCHELASTIC_RUN_ID=x", *NAME), "RANK", True),
            id="torchrun on one machine",
        ),
        pytest.param(
            {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", **MASTER}, Run(NAME, "RANK", False), id="by hand"
        ),
        pytest.param(HYDRA, Run((), "PMI_RANK", False), id="MPICH on several machines"),
        pytest.param({**HYDRA, "MPI_LOCALNRANKS": "8"}, Run((), "PMI_RANK", True), id="MPICH on one machine"),
        pytest.param({**HYDRA, "PBS_JOBID": "7"}, Run(("PBS_JOBID=7",), "PMI_RANK", False), id="MPICH in a job"),
        pytest.param(
            {**OPEN_MPI, "PMIX_NAMESPACE": "n@1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
            Run(("PMIX_NAMESPACE=n@1",), "OMPI_COMM_WORLD_RANK", False),
            id="Open MPI",
        ),
        pytest.param(SRUN, Run(("SLURM_JOB_ID=71", "SLURM_STEP_ID=2"), "SLURM_PROCID", False), id="srun"),
    ],
)
def test_what_all_ranks_of_a_run_know(environ: dict[str, str], expected: Run | None) -> None:
    assert identify(environ) == expected


def test_slurm_ports_of_steps_differ() -> None:
    steps = [
        detect({**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}) for job in (1, 2) for step in (0, 1)
    ]
    assert len({step.master_port for step in steps}) == 4
    late = detect({**SRUN, "SLURM_JOB_ID": "999999999", "SLURM_STEP_ID": "4294967290"})
    assert late.master_port is not None
    assert 1024 < late.master_port < 32_768


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("node[01-03,07],gpu1", "node01"),
        ("node[7,9-12]", "node7"),
        ("a,b-1.example.org", "a"),
        ("r[1-2]n[09-11]x", "r1n09x"),
    ],
)
def test_first_host(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("nodes", ["", "node[1-2", "node]", "node[a-b]", "node[]", "node[1,]"])
def test_broken_node_lists(nodes: str) -> None:
    with pytest.raises(LaunchError, match="MASTER_ADDR"):
        first_host(nodes)
