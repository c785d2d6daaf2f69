"""Rank, world size and where ranks are to meet: from the launcher's environment variables.

:func:`detect` is a pure function of the environment. Three kinds of launcher may be nested, from the inside out:

===========  ====================================================================================================
script       ``RANK`` and ``WORLD_SIZE``: torchrun's (``TORCHELASTIC_RUN_ID`` is set) or set by hand
MPI          ``PMI_*`` (MPICH's Hydra, Intel MPI, Cray PALS) or ``OMPI_COMM_WORLD_*`` (Open MPI, PMIx)
Slurm        ``SLURM_PROCID`` and ``SLURM_STEP_NUM_TASKS``: a step of ``srun``. The variables of an sbatch script or an
             salloc shell alone start nothing, so plain ``python`` there is one rank.
===========  ====================================================================================================

An inner launcher wins if the outer one started one process, one agent per node, or as many processes as there are
ranks. Anything else is leftover environment, and an error that names both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pyg_dist.errors import LaunchError

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Launcher = Literal["alone", "torchrun", "env", "mpi", "slurm"]

# Variables that are equal on all ranks of a run: the run's name first, then the job's, which several runs may share.
_COMMON: dict[Launcher, tuple[str, ...]] = {
    "alone": (),
    "torchrun": ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    "env": ("MASTER_ADDR", "MASTER_PORT"),
    "mpi": (
        *("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PALS_APID", "PMI_JOBID"),
        *("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "MASTER_ADDR", "MASTER_PORT"),
    ),
    "slurm": ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_STEP_ID", "SLURM_STEPID"),
}

# Where the launcher is one process a machine, the number of ranks that it has started here.
_LOCAL_SIZES: dict[Launcher, tuple[str, ...]] = {
    "torchrun": ("LOCAL_WORLD_SIZE",),
    "mpi": ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}

# Below Linux' ephemeral ports (32768-60999), which other programs are given at random.
_SLURM_FIRST_PORT, _SLURM_NUM_PORTS = 15_000, 16_384


@dataclass(frozen=True)
class Launch:
    """A rank's place as its launcher states it."""

    rank: int
    world_size: int
    local_rank: int  # on this machine; ``rank`` where the launcher does not say
    launcher: Launcher
    master_addr: str | None = None  # where to meet; None where the ranks have to agree on it (mpirun, alone)
    master_port: int | None = None


@dataclass(frozen=True)
class Run:
    """A run's identity, which all of its ranks know without a message."""

    words: tuple[str, ...]  # the launcher's
    rank_variable: str  # numbers the ranks
    is_one_machine: bool


@dataclass(frozen=True)
class _Claim:
    """The place that one launcher states, and the names of its variables, for error messages."""

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int | None
    source: str

    @property
    def place(self) -> tuple[int, int]:
        return self.rank, self.world_size

    @property
    def rank_variable(self) -> str:
        return self.source.split("/")[0]

    def __str__(self) -> str:
        rank_name, size_name = self.source.split("/")
        owner = {"torchrun": "torchrun's ", "mpi": "mpirun's ", "slurm": "srun's "}.get(self.launcher, "")
        return f"{owner}{rank_name}={self.rank}, {size_name}={self.world_size}"


def detect(environ: Mapping[str, str]) -> Launch:
    """Return this process's place according to the environment ``environ``. Not collective.

    Raises:
        LaunchError: If launchers contradict each other, a variable is not a number, or a meeting point is missing.
    """
    claim, outer_local_rank = _choose(environ)
    addr, port = environ.get("MASTER_ADDR") or None, _integer(environ, "MASTER_PORT")
    if claim is None:
        return Launch(0, 1, 0, "alone")
    if claim.launcher == "slurm":
        addr, port = addr or _slurm_host(environ), port or _slurm_port(environ)
    if not (addr and port):
        if claim.world_size > 1 and claim.launcher != "mpi":
            missing = "MASTER_PORT" if addr else "MASTER_ADDR"
            raise LaunchError(f"Expected MASTER_ADDR and MASTER_PORT with {claim} (got no {missing}); or use torchrun")
        addr, port = None, None
    candidates = (claim.local_rank, outer_local_rank, claim.rank)
    local_rank = next(number for number in candidates if number is not None)
    return Launch(claim.rank, claim.world_size, local_rank, claim.launcher, addr, port)


def identify(environ: Mapping[str, str]) -> Run | None:
    """Return an identity of this run, the same on all of its ranks; None at one rank. Not collective."""
    claim, _ = _choose(environ)
    if claim is None or claim.world_size == 1:
        return None
    words = tuple(f"{name}={environ[name]}" for name in _COMMON[claim.launcher] if environ.get(name))
    local_sizes = (_integer(environ, name) for name in _LOCAL_SIZES.get(claim.launcher, ()))
    return Run(words, claim.rank_variable, claim.world_size in local_sizes)


def num_restarts(environ: Mapping[str, str]) -> int:
    """How many times torchrun starts the ranks again when one of them fails. Not collective."""
    return _integer(environ, "TORCHELASTIC_MAX_RESTARTS") or 0


def _choose(environ: Mapping[str, str]) -> tuple[_Claim | None, int | None]:
    """Return the launcher whose ranks these are, and the local rank by one around it that has the same ranks."""
    launcher: Launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "env"
    script = _claim(launcher, environ, "RANK", "WORLD_SIZE", "LOCAL_RANK")
    mpi, slurm = _mpi_claim(environ), _slurm_claim(environ)
    outer = mpi or slurm
    if mpi and slurm:
        _check_nested(mpi, slurm, num_agents=_integer(environ, "SLURM_STEP_NUM_NODES"))
        if mpi.world_size == slurm.world_size:
            # srun's own PMI: the same ranks, and Slurm knows a meeting point without mpi4py.
            outer = slurm
    if not (script and outer):
        return script or outer, None
    _check_nested(script, outer, num_agents=_integer(environ, "GROUP_WORLD_SIZE"))
    if script.place != outer.place:
        return script, None
    has_meeting_point = environ.get("MASTER_ADDR") and _integer(environ, "MASTER_PORT")
    return script if has_meeting_point else outer, outer.local_rank


def _mpi_claim(environ: Mapping[str, str]) -> _Claim | None:
    hydra = _claim("mpi", environ, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
    open_mpi = _claim("mpi", environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
    if hydra and open_mpi:
        _check_nested(open_mpi, hydra, num_agents=None)
    return open_mpi or hydra


def _slurm_claim(environ: Mapping[str, str]) -> _Claim | None:
    if "SLURM_STEP_NUM_TASKS" not in environ:  # SLURM_PROCID is also set in sbatch scripts
        return None
    return _claim("slurm", environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


def _claim(
    launcher: Launcher, environ: Mapping[str, str], rank_name: str, size_name: str, local_name: str
) -> _Claim | None:
    rank, world_size = _integer(environ, rank_name), _integer(environ, size_name)
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        there, missing = (size_name, rank_name) if rank is None else (rank_name, size_name)
        raise LaunchError(
            f"Expected {rank_name} and {size_name} (got only {there}={environ[there]}); set {missing} or unset {there}"
        )
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"Expected 0 <= {rank_name} < {size_name} (got {rank}, {size_name}={world_size}); correct or unset them"
        )
    return _Claim(launcher, rank, world_size, _integer(environ, local_name), f"{rank_name}/{size_name}")


def _check_nested(inner: _Claim, outer: _Claim, num_agents: int | None) -> None:
    """Raise unless ``inner`` can run inside ``outer``, which starts ``num_agents`` agents if it starts launchers."""
    if inner.place == outer.place:
        return
    if inner.launcher in ("torchrun", "mpi") and outer.world_size in (num_agents, inner.world_size):
        return
    # `srun --pty` opens shells, `mpirun -n 1` starts agents; ranks set by hand cannot fit into one process of mpirun.
    if outer.world_size == 1 and not (inner.launcher == "env" and outer.launcher == "mpi"):
        return
    raise LaunchError(
        f"Expected one launcher, or two that agree (got {inner}, but {outer}); unset the leftover variables"
    )


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"Expected a whole number in {name} (got {text!r})") from None


def _slurm_host(environ: Mapping[str, str]) -> str | None:
    """Return the first host of the step, where Slurm puts task 0; the loopback address if there is only one host."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        return None
    host = first_host(nodes)
    return LOOPBACK[0] if host == nodes else host


def first_host(nodes: str) -> str:
    """The first host of Slurm's short form: ``"node[01-03,07],gpu1"`` is node01, node02, node03, node07, gpu1."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]  # commas outside brackets
    host = re.sub(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]", r"\1", first)
    if not host or "[" in host or "]" in host:
        raise LaunchError(
            f"Expected a Slurm node list like 'node[01-03,07],gpu1' (got {nodes!r}); set MASTER_ADDR by hand"
        )
    return host


def _slurm_port(environ: Mapping[str, str]) -> int | None:
    """Return a port that depends on job and step only, so that steps running side by side seldom meet."""
    job = _integer(environ, "SLURM_JOB_ID") or _integer(environ, "SLURM_JOBID")
    if job is None:
        return None
    step = _integer(environ, "SLURM_STEP_ID") or _integer(environ, "SLURM_STEPID") or 0
    return _SLURM_FIRST_PORT + (101 * job + step) % _SLURM_NUM_PORTS
