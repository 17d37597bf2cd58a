"""A job's description, as its processes find it: `DIR/job.json`, `DIR/token` (0600), and the
environment of the workers.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from elastic.bounds import check_order
from elastic.cadence import EVERY_STEP, Cadence
from elastic.state import Config
from reshard.errors import UsageError
from snapshot.job import job_directory
from snapshot.tls import TlsFiles

JOB_FILE = "job.json"
TOKEN_FILE = "token"
TOKEN_MODE = 0o600
LOCK_FILE = ".lock"
HISTORY_FILE = "events.jsonl"
COORDINATOR_FILE = "coordinator.json"
ARBITER_DIRECTORY = "arbiter"
LOG_DIRECTORY = "coordinator-log"
"""What a coordinator keeps for the one after it."""

WORKER_HEARTBEAT_S = 1.0
"""How often a worker's link tells its agent that the process lives."""

WORKER_SILENT_S = 20.0

ENV_DIRECTORY = "ELASTIC_DIR"
ENV_SLICE = "ELASTIC_SLICE"
ENV_HOST = "ELASTIC_HOST"
"""The index of a worker's slice, and of its host in it."""
ENV_LEASH_FD = "ELASTIC_LEASH_FD"
ENV_STANDBY = "ELASTIC_STANDBY"
"""Set for a process that waits at its session until it gets its turn; its value is the role it then takes."""
ROLE_WARM = "warm"
ROLE_SHADOW = "shadow"


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistSpec:
    """The persistent tier of a job: the first captured step of each `every_steps` and the last one of the run
    are written below `directory`, and the newest `keep` are kept.
    """

    directory: Path
    every_steps: int = 100
    keep: int = 3
    epoch: int = 1
    """The place of this job among those that wrote there: its snapshots are newer than any earlier job's."""

    def __post_init__(self) -> None:
        if self.every_steps < 1 or self.keep < 1:
            raise UsageError(
                f"persisting every {self.every_steps} steps and keeping {self.keep}: both must be at least 1"
            )

    def is_due(self, step: int, previous_step: int) -> bool:
        """Whether the captured `step` is the first of its period; `previous_step` was captured before it."""
        return (step + 1) // self.every_steps > (previous_step + 1) // self.every_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a job is: its processes read it at their start, nothing changes it afterwards."""

    job_id: str
    directory: Path
    adapter: str
    in_place: str
    simulated_faults: bool
    command: tuple[str, ...]
    """The worker's command line."""
    service_command: tuple[str, ...]
    """The adapter's runtime service (on the coordinator's host); empty if it needs none."""
    worker_environment: dict[str, str] = field(default_factory=dict)
    config: Config
    seed: int = 0
    target_steps: int | None = None
    shm_root: Path = Path("/dev/shm")
    bind_host: str = "127.0.0.1"
    """Where the coordinator and the runtime service listen."""
    host_prefix: tuple[str, ...] = ()
    """What goes before an agent's command, to run it on its own host; `{slice}` is the slice's index,
    `{host}` the host's in it.
    """
    agent_bind_host: str = ""
    """Where a slice's agent and worker listen; `{slice}` and `{host}` as above. Empty: as `bind_host`."""
    tls: TlsFiles | None = None
    """Certificates for all connections of the job, at the same paths on every host; None: no TLS."""
    persist: PersistSpec | None = None
    cadence: Cadence = EVERY_STEP
    """How often the state is captured."""
    copy_threads: int | None = None
    """Threads that a worker copies snapshots with; None: as many as the machine's processors allow."""
    warm: bool = True
    """Whether each agent keeps a process ready for its worker's place."""
    heartbeat_s: float = 0.2
    agent_dead_s: float = 0.8
    """Silence after which an agent counts as away. With one heartbeat more it is within 1 s; the longest gap
    that a load of 13 on two cores made between two was 0.10 s more than their distance."""
    agent_stuck_s: float = 20.0
    """How long an agent's deciding thread may be busy with one thing before its heartbeat stops."""
    worker_stopped_s: float = 0.3
    """How long a worker may be stopped (SIGSTOP) before it is ended."""
    worker_silent_s: float = WORKER_SILENT_S
    """How long a worker that is not stopped may send no heartbeat before it is ended."""
    lease_s: float = 30.0
    """How long a worker goes on without an agent, and an agent's worker without a coordinator."""
    coordinator_lease_s: float = 3.0
    """How long a coordinator may command without having renewed its right to (`elastic.mandate`), and so how
    long another waits before it takes over from one that hangs."""
    arbiter: Path | None = None
    """The directory of the arbiter's records; None: in the run's own. All machines on which a coordinator of
    the job may run must see it."""

    def __post_init__(self) -> None:
        timing = self.config.timing
        check_order(
            heartbeat_s=self.heartbeat_s,
            agent_dead_s=self.agent_dead_s,
            suspect_s=timing.suspect_s,
            join_s=timing.join_s,
        )
        check_order(worker_stopped_s=self.worker_stopped_s, suspect_s=timing.suspect_s)
        check_order(
            worker_heartbeat_s=WORKER_HEARTBEAT_S,
            worker_silent_s=self.worker_silent_s,
            lease_s=self.lease_s,
        )
        check_order(agent_dead_s=self.agent_dead_s, agent_stuck_s=self.agent_stuck_s)
        check_order(
            heartbeat_s=self.heartbeat_s, coordinator_lease_s=self.coordinator_lease_s, lease_s=self.lease_s
        )
        if self.lease_s > timing.lease_s:
            raise UsageError(
                f"two worlds could train: workers go on alone for lease_s ({self.lease_s:g} s), the machine"
                f" waits for {timing.lease_s:g} s",
                remedy="Give Timing.lease_s at least the job's.",
            )

    @property
    def arbiter_directory(self) -> Path:
        """Where the arbiter's records are."""
        return self.arbiter or self.directory / ARBITER_DIRECTORY

    @property
    def persist_root(self) -> Path | None:
        """The directory of the persistent tier, None without one."""
        return None if self.persist is None else self.persist.directory

    def host_directory(self, member: int) -> Path:
        """The snapshot memory of a host."""
        return job_directory(self.shm_root, self.job_id) / str(self.config.host(member))

    def on_host(self, member: int) -> tuple[str, ...]:
        """What goes before the command of this host's agent."""
        return tuple(self._of_host(word, member) for word in self.host_prefix)

    def bind_host_of(self, member: int) -> str:
        """The address on which this host's agent and worker listen."""
        return self._of_host(self.agent_bind_host or self.bind_host, member)

    def _of_host(self, text: str, member: int) -> str:
        host = self.config.host(member)
        return text.replace("{slice}", str(host.slice_index)).replace("{host}", str(host.host_index))

    def socket_path(self, member: int) -> Path:
        """The unix socket between a host's agent and its worker, in the host's directory of the arena."""
        return self.host_directory(member) / "agent.sock"

    def worker_file(self, member: int, suffix: str) -> Path:
        """What a worker writes: `logs/worker-1.log`; `logs/worker-1-0.log` where a slice has several."""
        return self.directory / "logs" / f"worker-{self.config.label(member)}.{suffix}"


@contextlib.contextmanager
def hold_directory(directory: Path) -> Iterator[None]:
    """Keep a run's directory to oneself. Raises UsageError when another run is using it."""
    descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UsageError(f"another run is using {directory}", remedy="Give this one its own --out.") from None
    try:
        yield
    finally:
        os.close(descriptor)


def new_job_id() -> str:
    """A short random name for a job."""
    return secrets.token_hex(4)


def save_job(spec: JobSpec) -> str:
    """Write `job.json` and a new token; returns the token."""
    token = secrets.token_urlsafe(24)
    spec.directory.mkdir(parents=True, exist_ok=True)
    body = msgspec.json.format(msgspec.json.encode(spec, enc_hook=_encode_path), indent=2)
    (spec.directory / JOB_FILE).write_bytes(body)
    path, unfinished = spec.directory / TOKEN_FILE, spec.directory / f"{TOKEN_FILE}.part"
    # A new file: who may have an earlier one open, of whatever mode, does not see what is written here.
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, TOKEN_MODE)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, TOKEN_MODE)
        file.write(token)
    unfinished.replace(path)
    return token


def load_job(directory: Path) -> JobSpec:
    """Read `job.json`. Raises UsageError when there is none or it cannot be read."""
    path = directory / JOB_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=JobSpec, dec_hook=_decode_path)
    except OSError as error:
        raise UsageError(f"{directory} is not the directory of a job: {error}") from error
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def load_token(directory: Path) -> str:
    """Read the job's token. Raises UsageError when there is none, or others than its owner can read it."""
    path = directory / TOKEN_FILE
    try:
        with path.open() as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            token = file.read().strip()
    except OSError as error:
        raise UsageError(f"no token in {directory}: {error}") from error
    if mode & 0o077:
        raise UsageError(
            f"{path} has mode {mode:04o}: others can read or change the job's token",
            remedy="Start the job anew (the token may be known by now), in a directory that keeps modes.",
        )
    return token


def _encode_path(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _decode_path(kind: type, value: object) -> object:
    if issubclass(kind, Path):
        return Path(str(value))
    raise NotImplementedError(kind)
