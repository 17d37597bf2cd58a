"""Running a job to its end from the command line: checks first, a display while it runs, the report
afterwards.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from elastic.adapters import find_adapter, find_injector
from elastic.cadence import EVERY_STEP, Cadence
from elastic.display import LiveDisplay
from elastic.history import HistoryWriter
from elastic.job import HISTORY_FILE, WORKER_SILENT_S, JobSpec, PersistSpec, hold_directory, new_job_id
from elastic.launcher import Launcher, Listener
from elastic.ports import JobLauncher, OneProcessAdapter
from elastic.records import Record, RunEnded, read_history
from elastic.report import Report, build_report, write_report
from elastic.report_html import write_html
from elastic.report_terminal import print_report
from elastic.state import Config
from reshard.errors import ElasticError, JobFailedError, PersistentTierError, UsageError
from snapshot.copying import default_num_threads
from snapshot.gc import collect
from snapshot.persist import clear_staging, lock_root, next_epoch
from snapshot.shm import check_root
from snapshot.tls import TlsFiles

EXIT_INVARIANT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsSpec:
    """Where things run and listen; see `JobSpec`."""

    bind_host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()
    agent_bind_host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line asks for."""

    command: tuple[str, ...]
    adapter: str
    config: Config
    directory: Path
    seed: int
    target_steps: int | None
    faults: tuple[str, ...]
    shm_root: Path = Path("/dev/shm")
    persist: PersistSpec | None = None
    tls: TlsFiles | None = None
    cadence: Cadence = EVERY_STEP
    warm: bool = True
    hosts: HostsSpec = HostsSpec()
    lease_s: float = 30.0


def run_job(wanted: Wanted) -> int:
    """Run one job; returns the exit status. Raises UsageError for what cannot be run as asked, before
    anything is started.
    """
    spec, faults = prepare(wanted)
    with hold_directory(spec.directory):
        return _run_held(spec, faults)


def _run_held(spec: JobSpec, faults: Sequence[Any]) -> int:
    removed = collect(spec.shm_root)
    if removed.directories:
        print(
            f"removed {len(removed.directories)} dead jobs' snapshots from {spec.shm_root}", file=sys.stderr
        )
    ended: RunEnded | None = None
    error: ElasticError | None = None
    with hold_persistent_tier(spec) as spec, LiveDisplay() as display:
        launcher = make_launcher(spec, faults)
        listeners: list[Listener] = [display]
        armed = find_injector().arm(faults, launcher, spec.seed) if faults else None
        if armed is not None:
            listeners.append(armed)
        try:
            ended = launcher.run(listeners)
        except JobFailedError as failed:
            error = failed
        if armed is not None:
            append_history(spec, armed.close())
    return conclude(spec, ended, error)


@contextlib.contextmanager
def hold_persistent_tier(spec: JobSpec) -> Iterator[JobSpec]:
    """Keep the job's persistent tier to itself; yields the job with its place among those that wrote there.

    Raises UsageError when another job writes there, PersistentTierError when the directory cannot be used.
    """
    if spec.persist is None:
        yield spec
        return
    directory = spec.persist.directory
    if not directory.parent.is_dir():
        raise UsageError(
            f"{directory} cannot be made: there is no directory {directory.parent}",
            remedy="Make it, or name another --persist-dir.",
        )
    try:
        lock = lock_root(directory, spec.job_id)
    except PersistentTierError as failed:
        raise UsageError(failed.message, remedy="Name another --persist-dir.") from failed
    try:
        clear_staging(directory)
        yield replace(spec, persist=replace(spec.persist, epoch=next_epoch(spec.persist.directory)))
    finally:
        lock.release()


def make_launcher(spec: JobSpec, faults: Sequence[Any]) -> JobLauncher:
    """What runs the job: the adapter's own launcher for a job of one process. Raises UsageError."""
    adapter = find_adapter(spec.adapter)
    if adapter.one_process:
        return cast(OneProcessAdapter, adapter).launcher(spec, faults)
    return Launcher(spec)


def prepare(wanted: Wanted) -> tuple[JobSpec, Sequence[Any]]:
    """The job's description and its faults. Raises UsageError."""
    adapter = find_adapter(wanted.adapter)
    if adapter.one_process and wanted.config.spares:
        raise UsageError(
            f"the {adapter.name} adapter has no spare slices",
            remedy="Leave out --spares, or start processes.",
        )
    faults: Sequence[Any] = ()
    if wanted.faults:
        num_slices, num_hosts = wanted.config.num_all_slices, wanted.config.hosts_per_slice
        faults = find_injector().parse(wanted.faults, num_slices, num_hosts)
    check_root(wanted.shm_root)
    keeps_runtime = wanted.config.keeps_runtime and getattr(adapter, "keeps_runtime", False)
    precompile = wanted.config.precompile and not adapter.one_process
    plays_alone = precompile and getattr(adapter, "plays_alone", False)
    config = replace(
        wanted.config, keeps_runtime=keeps_runtime, precompile=precompile, plays_alone=plays_alone
    )
    directory = wanted.directory.absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as failed:
        raise UsageError(f"cannot write to {directory}: {failed}") from failed
    spec = JobSpec(
        job_id=new_job_id(),
        directory=directory,
        adapter=adapter.name,
        in_place=adapter.in_place,
        simulated_faults=adapter.simulated_faults,
        command=wanted.command,
        service_command=adapter.service_command(),
        config=config,
        seed=wanted.seed,
        target_steps=wanted.target_steps,
        shm_root=wanted.shm_root,
        persist=wanted.persist,
        copy_threads=None if adapter.one_process else copy_threads(wanted.config.num_members),
        tls=wanted.tls,
        cadence=wanted.cadence,
        warm=wanted.warm,
        bind_host=wanted.hosts.bind_host,
        host_prefix=wanted.hosts.prefix,
        agent_bind_host=wanted.hosts.agent_bind_host,
        lease_s=wanted.lease_s,
        worker_silent_s=min(WORKER_SILENT_S, wanted.lease_s * 2 / 3),
    )
    environment = adapter.worker_environment(spec)
    fields = {name: getattr(spec, name) for name in spec.__dataclass_fields__}
    return JobSpec(**(fields | {"worker_environment": environment})), faults


def copy_threads(workers_on_machine: int) -> int:
    """How many threads each of several workers on this machine may copy with."""
    return max(1, default_num_threads() // workers_on_machine)


def append_history(spec: JobSpec, records: Sequence[Record]) -> None:
    """Write what the coordinator has not heard into the history of a run that is over."""
    if records and (spec.directory / HISTORY_FILE).exists():
        history = HistoryWriter(spec.directory / HISTORY_FILE)
        for record in records:
            history.write(record)
        history.close()


def conclude(spec: JobSpec, ended: RunEnded | None, error: ElasticError | None) -> int:
    """Write and print the report of a run; returns the exit status of the command."""
    records = (
        list(read_history(spec.directory / HISTORY_FILE)) if (spec.directory / HISTORY_FILE).exists() else []
    )
    if not records:
        raise error or JobFailedError("the run left no history", remedy=f"See {spec.directory / 'logs'}.")
    report = build_report(records)
    path = write_report(report, spec.directory)
    write_html(report, spec.directory / "report.html", records)
    print_report(report)
    for missed in report.faults_missed:
        print(f"elastic: fault {missed.detail} was not injected: {missed.why}", file=sys.stderr)
    print(f"report: {path} and {spec.directory / 'report.html'}; logs: {spec.directory / 'logs'}")
    return exit_status(report, ended, error)


def exit_status(report: Report, ended: RunEnded | None, error: ElasticError | None) -> int:
    """0 done; 1 (or what the failure says) failed; 3 an invariant was broken."""
    failed = error is not None or ended is None or ended.outcome != "completed"
    if "broken" in report.invariants.values() and not failed:
        broken = [name for name, verdict in report.invariants.items() if verdict == "broken"]
        print(f"elastic: broken invariants: {', '.join(broken)}", file=sys.stderr)
        return EXIT_INVARIANT
    if error is not None:
        print(f"elastic: {error}", file=sys.stderr)
        return error.exit_status
    if ended is not None and ended.outcome != "completed":
        print(f"elastic: the run failed: {ended.error}", file=sys.stderr)
        return ended.exit_status or 1
    return 0
