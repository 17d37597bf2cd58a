"""The command line, `elastic …`. Exit status: 0 done, 1 the run failed, 2 bad usage or input, 3 an
invariant was broken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from elastic.cli_snapshot import snapshot
from reshard.errors import ElasticError, UsageError

if TYPE_CHECKING:
    from elastic.cadence import Cadence
    from snapshot.dataplane_auth import TlsFiles

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_RUN = Path("runs/demo")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="elastic-slices", prog_name="elastic")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Elastic, fault-tolerant training for JAX: slices may die and come back, the job goes on."""
    context.obj = debug


class NeverOrSteps(click.ParamType[int | None]):
    """A number of steps, or `never`."""

    name = "steps|never"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        """Return the number, None for `never`."""
        if isinstance(value, int):
            return value
        if str(value) == "never":
            return None
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither a number of steps nor 'never'", param, ctx)
        return int(value)


class CadenceParam(click.ParamType["Cadence"]):
    """How often to take snapshots: see `elastic.cadence.parse_cadence`."""

    name = "steps|seconds|budget"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Cadence:
        """Return the cadence."""
        from elastic.cadence import parse_cadence

        if not isinstance(value, str):
            return cast("Cadence", value)
        try:
            return parse_cadence(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


def job_options(function: F) -> F:
    """The options that `demo` and `launch` share."""
    for option in (
        click.option(
            "--out",
            type=click.Path(path_type=Path, file_okay=False),
            default=None,
            help="Directory of the run.",
        ),
        click.option(
            "--seed", type=int, default=0, show_default=True, help="Fixes sample order and fault moments."
        ),
        click.option(
            "--min-slices", type=int, default=1, show_default=True, help="Wait below this number of slices."
        ),
        click.option(
            "--rejoin-after-steps",
            type=NeverOrSteps(),
            default=40,
            show_default=True,
            help="Start a lost slice again after so many steps, or 'never'.",
        ),
        click.option("--devices-per-host", type=click.IntRange(min=1), default=2, show_default=True),
        click.option(
            "--replicas", type=int, default=None, help="Slices that hold each shard.  [default: all]"
        ),
        click.option(
            "--audit-every",
            type=click.IntRange(min=0),
            default=50,
            show_default=True,
            help="Captures between two audits of every copy on the devices; 0: only when copies disagree.",
        ),
        click.option(
            "--snapshot-every",
            type=CadenceParam(),
            default="1",
            show_default=True,
            metavar="K|Ts|auto:P%",
            help="Steps, seconds, or as often as P % of stall allow: 5, 2s, auto:3%.",
        ),
        click.option(
            "--rehearsals",
            type=click.IntRange(min=0),
            default=1,
            show_default=True,
            help="Smaller worlds whose programs are compiled before the start.",
        ),
        click.option(
            "--wait-s",
            type=click.FloatRange(min=0),
            default=60.0,
            show_default=True,
            help="How long to wait below --min-slices.",
        ),
        click.option(
            "--shm-dir",
            type=click.Path(path_type=Path),
            default=Path("/dev/shm"),
            show_default=True,
            help="Where snapshots live (a tmpfs).",
        ),
        click.option(
            "--persist-dir",
            type=click.Path(path_type=Path, file_okay=False),
            default=None,
            help="Also write snapshots here, as Orbax checkpoints; a run goes on from the newest one there.",
        ),
        click.option(
            "--persist-every",
            type=click.IntRange(min=1),
            default=100,
            show_default=True,
            help="Write a snapshot to --persist-dir every so many steps (and the last one).",
        ),
        click.option(
            "--persist-keep",
            type=click.IntRange(min=1),
            default=3,
            show_default=True,
            help="Keep so many of the newest snapshots in --persist-dir.",
        ),
        click.option(
            "--fault",
            "faults",
            multiple=True,
            metavar="KIND:slice=N@step=S",
            help="Inject a fault; several may be given.",
        ),
        click.option(
            "--adapter",
            default="multicontroller",
            show_default=True,
            help="How worlds are formed: multicontroller (real processes), local (one process), or another "
            "one that is installed.",
        ),
        click.option("--slices", type=int, default=3, show_default=True, help="Slices at the start."),
    ):
        function = option(function)
    return function


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

    Without --fault one slice is killed; --fault none is an undisturbed run. Kinds: kill, stop, term, agent,
    host.
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
    "--tls-cert", type=click.Path(path_type=Path), help="PEM certificate: TLS between agents, for snapshots."
)
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM key of the certificate.")
@click.option(
    "--tls-ca",
    type=click.Path(path_type=Path),
    help="PEM certificates that agents trust.  [default: the certificate itself]",
)
@click.argument("script", nargs=-1, type=click.UNPROCESSED, required=True)
def launch(
    script: tuple[str, ...],
    out: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_ca: Path | None,
    **options: Any,
) -> int:
    """Run your own training SCRIPT (a .py file, or -m MODULE, with its arguments) under the engine on this
    machine.
    """
    from snapshot.dataplane_auth import tls_files

    if script[0] != "-m" and not Path(script[0]).is_file():
        raise UsageError(f"there is no script {script[0]}")
    tls = tls_files(tls_cert, tls_key, tls_ca)
    command = (sys.executable, *script)
    return _run(command, target_steps=None, out=out or Path("runs/launch"), tls=tls, **options)


def _run(
    command: tuple[str, ...],
    *,
    faults: tuple[str, ...],
    slices: int,
    out: Path,
    target_steps: int | None,
    replicas: int | None,
    snapshot_every: Cadence,
    adapter: str,
    seed: int,
    min_slices: int,
    rejoin_after_steps: int | None,
    devices_per_host: int,
    audit_every: int,
    rehearsals: int,
    wait_s: float,
    shm_dir: Path,
    persist_dir: Path | None,
    persist_every: int,
    persist_keep: int,
    tls: TlsFiles | None = None,
) -> int:
    from elastic.job import PersistSpec
    from elastic.runs import Wanted, run_job
    from elastic.state import Config, Timing

    persist = None
    if persist_dir is not None:
        persist = PersistSpec(directory=persist_dir.absolute(), every_steps=persist_every, keep=persist_keep)
    config = Config(
        num_slices=slices,
        min_slices=min_slices,
        devices_per_host=devices_per_host,
        replicas=max(slices, 1) if replicas is None else replicas,
        rejoin_after_steps=rejoin_after_steps,
        rehearsals=rehearsals,
        persists=persist is not None,
        audit_every=audit_every,
        timing=Timing(wait_s=wait_s),
    )
    return run_job(
        Wanted(
            command=command,
            adapter=adapter,
            config=config,
            directory=out,
            seed=seed,
            target_steps=target_steps,
            faults=faults,
            shm_root=shm_dir,
            persist=persist,
            tls=tls,
            cadence=snapshot_every,
        )
    )


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path), default=DEFAULT_RUN)
@click.option(
    "--html", type=click.Path(path_type=Path, dir_okay=False), default=None, help="Write the page here too."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def report(directory: Path, html: Path | None, as_json: bool) -> int:
    """Show the recovery report of the run in DIRECTORY, from its history."""
    import msgspec

    from elastic.report import build_report
    from elastic.report_html import write_html
    from elastic.report_terminal import print_report

    records = _history(directory)
    built = build_report(records)
    if html is not None:
        write_html(built, html, records)
    if as_json:
        click.echo(msgspec.json.encode(built).decode())
    else:
        print_report(built)
    return 0


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path), default=DEFAULT_RUN)
@click.option("--follow", is_flag=True, help="Go on with what is appended, until the run ends.")
@click.option("--json", "as_json", is_flag=True, help="Print the records as JSON, one a line.")
def events(directory: Path, follow: bool, as_json: bool) -> int:
    """Show what happened in the run in DIRECTORY, in order."""
    import time

    from elastic.history_text import describe
    from elastic.job import HISTORY_FILE
    from elastic.launcher import HistoryTail
    from elastic.records import RunEnded, encode_record

    _history(directory)
    tail = HistoryTail(directory / HISTORY_FILE)
    while True:
        for record in tail.read():
            click.echo(encode_record(record).decode().rstrip() if as_json else describe(record))
            follow = follow and not isinstance(record, RunEnded)
        if not follow:
            return 0
        time.sleep(0.2)


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path), default=DEFAULT_RUN)
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def status(directory: Path, as_json: bool) -> int:
    """Show how the live job in DIRECTORY is doing."""
    from elastic.status import ask_status

    found = ask_status(directory)
    if as_json:
        click.echo(json.dumps(found))
        return 0
    click.echo(
        f"job {found['job_id']}: {found['phase']}, generation {found['generation']}, "
        f"newest step {found['newest_committed']}, world {found['world']}"
    )
    for member in found["members"]:
        click.echo(f"  slice {member['slice']}: worker {member['worker']} (pid {member['pid'] or '-'})")
    return 0


def _history(directory: Path) -> list[Any]:
    from elastic.job import HISTORY_FILE
    from elastic.records import read_history

    path = directory / HISTORY_FILE
    if not path.is_file():
        raise UsageError(f"{directory} holds no run: there is no {path.name} in it")
    return list(read_history(path))


cli.add_command(snapshot)


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
