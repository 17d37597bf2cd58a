"""The command line, `elastic …`. Exit status: 0 done, 1 the run failed, 2 bad usage or input, 3 an
invariant was broken.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from elastic.cli_look import events, report, status
from elastic.cli_options import DEFAULT_RUN, job_options
from elastic.cli_plan import plan
from elastic.cli_snapshot import snapshot
from reshard.errors import ElasticError, UsageError

if TYPE_CHECKING:
    from elastic.cadence import Cadence
    from elastic.runs import HostsSpec
    from elastic.state import Config
    from snapshot.tls import TlsFiles


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="elastic-slices", prog_name="elastic")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Elastic, fault-tolerant training for JAX: slices may die and come back, the job goes on."""
    context.obj = debug


@cli.command()
@job_options
@click.option(
    "--steps", type=click.IntRange(min=1), default=200, show_default=True, help="Optimizer steps in all."
)
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    default=None,
    help="Text to train on.  [default: Python's own library]",
)
def demo(
    steps: int, data: Path | None, faults: tuple[str, ...], slices: int, out: Path | None, **options: Any
) -> int:
    """Train a small transformer on several slices, lose one in the middle, go on, get it back, and report.

    Without --fault one slice is killed; --fault none is an undisturbed run. Kinds: kill, stop,
    term, host; of a slice (its worker), agent, spare, of the coordinator or the service.
    """
    from elastic.demo.text import TextWindows

    TextWindows(data, sequence_length=1)  # a path that cannot be read is told before anything is started
    if not faults:
        faults = (f"kill:slice={min(1, slices - 1)}@step={min(60, steps // 3)}",)
    model_axis = 2 if options["devices_per_host"] % 2 == 0 else 1
    command = [
        sys.executable,
        "-m",
        "elastic.demo.train",
        "--steps",
        str(steps),
        "--model-axis",
        str(model_axis),
    ]
    if data is not None:
        command += ["--data", str(data.absolute())]
    return _run(
        tuple(command), faults=faults, slices=slices, target_steps=steps, out=out or DEFAULT_RUN, **options
    )


@cli.command(context_settings={"ignore_unknown_options": True})
@job_options
@click.option(
    "--tls-cert", type=click.Path(path_type=Path), help="PEM certificate: TLS for all connections of the job."
)
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM key of the certificate.")
@click.option(
    "--tls-ca",
    type=click.Path(path_type=Path),
    help="PEM certificates that agents trust.  [default: the certificate itself]",
)
@click.option(
    "--bind-host",
    default="127.0.0.1",
    show_default=True,
    help="Where the coordinator listens, and all else that has no address of its own.",
)
@click.option(
    "--host-prefix",
    default="",
    help="What runs an agent on its own host: 'ip netns exec host-{slice}'; {host} is the host in the slice.",
)
@click.option(
    "--agent-bind-host",
    default="",
    help="Where a slice's agent and worker listen: '10.0.0.1{slice}'.  [default: --bind-host]",
)
@click.argument("script", nargs=-1, type=click.UNPROCESSED, required=True)
def launch(
    script: tuple[str, ...],
    out: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    bind_host: str,
    host_prefix: str,
    agent_bind_host: str,
    **options: Any,
) -> int:
    """Run your own training SCRIPT (a .py file, or -m MODULE, with its arguments) under the engine on this
    machine.
    """
    from elastic.runs import HostsSpec
    from snapshot.tls import tls_files

    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UsageError(f"there is no script {script[0]}")
    tls = tls_files(tls_cert, tls_key, tls_ca)
    command = (sys.executable, *script)
    return _run(
        command,
        target_steps=None,
        out=out or Path("runs/launch"),
        tls=tls,
        hosts=HostsSpec(
            bind_host=bind_host, prefix=tuple(shlex.split(host_prefix)), agent_bind_host=agent_bind_host
        ),
        **options,
    )


def _run(
    command: tuple[str, ...],
    *,
    faults: tuple[str, ...],
    out: Path,
    target_steps: int | None,
    snapshot_every: Cadence,
    adapter: str,
    seed: int,
    shm_dir: Path,
    persist_dir: Path | None,
    persist_every: int,
    persist_keep: int,
    warm: bool,
    tls: TlsFiles | None = None,
    hosts: HostsSpec | None = None,
    lease_s: float,
    **machine: Any,
) -> int:
    from elastic.job import PersistSpec
    from elastic.runs import HostsSpec, Wanted, run_job

    persist = None
    if persist_dir is not None:
        persist = PersistSpec(directory=persist_dir.absolute(), every_steps=persist_every, keep=persist_keep)
    return run_job(
        Wanted(
            command=command,
            adapter=adapter,
            config=_config(persists=persist is not None, lease_s=lease_s, **machine),
            directory=out,
            seed=seed,
            target_steps=target_steps,
            faults=faults,
            shm_root=shm_dir,
            persist=persist,
            tls=tls,
            cadence=snapshot_every,
            warm=warm,
            hosts=hosts or HostsSpec(),
            lease_s=lease_s,
        )
    )


def _config(
    *,
    slices: int,
    spares: int,
    min_slices: int,
    hosts_per_slice: int,
    devices_per_host: int,
    replicas: int | None,
    rejoin_after_steps: int | None,
    rehearsals: int,
    precompile: bool,
    reconnect: bool,
    audit_every: int,
    on_corruption: Literal["throw-out", "warn"],
    count_writes: bool,
    quarantine_s: float,
    straggler_factor: float,
    wait_s: float,
    hang_after_s: float | None,
    lease_s: float,
    persists: bool,
) -> Config:
    from elastic.quarantine import Flapping
    from elastic.state import Config, Timing
    from elastic.stragglers import StragglerRule

    return Config(
        num_slices=slices,
        spares=spares,
        min_slices=min_slices,
        hosts_per_slice=hosts_per_slice,
        devices_per_host=devices_per_host,
        replicas=max(slices, 1) if replicas is None else replicas,
        rejoin_after_steps=rejoin_after_steps,
        rehearsals=rehearsals,
        precompile=precompile,
        keeps_runtime=not reconnect,
        persists=persists,
        audit_every=audit_every,
        on_corruption=on_corruption,
        count_writes=count_writes,
        timing=Timing(wait_s=wait_s, hang_after_s=hang_after_s, lease_s=lease_s),
        flapping=Flapping(base_s=quarantine_s),
        stragglers=StragglerRule(factor=straggler_factor),
    )


for command in (report, events, status, plan, snapshot):
    cli.add_command(command)


def main() -> None:
    """Run the command line; errors are one clear line on standard error."""
    debug = "--debug" in sys.argv[1:2]
    try:
        sys.exit(cli.main(standalone_mode=False) or 0)
    except click.exceptions.Abort:
        print("elastic: interrupted", file=sys.stderr)
        sys.exit(1)
    except click.ClickException as error:
        print(f"elastic: {error.format_message()} (see --help)", file=sys.stderr)
        sys.exit(2)
    except (ElasticError, OSError) as error:
        if debug:
            raise
        print(f"elastic: {error}", file=sys.stderr)
        sys.exit(error.exit_status if isinstance(error, ElasticError) else 1)


if __name__ == "__main__":
    main()
