"""Options that several commands have, and the kinds of values they take."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from reshard.errors import UsageError

if TYPE_CHECKING:
    from elastic.cadence import Cadence

F = TypeVar("F", bound=Callable[..., Any])
DEFAULT_RUN = Path("runs/demo")

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
shm_option = click.option(
    "--shm-dir",
    type=click.Path(path_type=Path),
    default=Path("/dev/shm"),
    show_default=True,
    help="Where snapshots live; a run directory says so itself.",
)


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


class NeverOrSeconds(click.ParamType[float | None]):
    """A time in seconds, or `never`."""

    name = "seconds|never"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | None:
        """Return the seconds, None for `never`."""
        if str(value) == "never":
            return None
        try:
            return float(value)
        except ValueError:
            self.fail(f"{value!r} is neither a number of seconds nor 'never'", param, ctx)


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


_JOB_OPTIONS = (
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
    click.option(
        "--hosts-per-slice",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        help="Hosts of a slice, each with an agent and a worker; the loss of one loses the slice.",
    ),
    click.option("--devices-per-host", type=click.IntRange(min=1), default=2, show_default=True),
    click.option("--replicas", type=int, default=None, help="Slices that hold each shard.  [default: all]"),
    click.option(
        "--audit-every",
        type=click.IntRange(min=0),
        default=50,
        show_default=True,
        help="Captures between two audits of every copy on the devices; 0: only when copies disagree.",
    ),
    click.option(
        "--on-corruption",
        type=click.Choice(["throw-out", "warn"]),
        default="throw-out",
        show_default=True,
        help="What to do about a slice whose copies of the state a majority finds wrong.",
    ),
    click.option(
        "--count-writes",
        is_flag=True,
        help="Debugging: count in every restore that each element is written exactly once (slow).",
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
        "--precompile/--no-precompile",
        default=True,
        show_default=True,
        help="Compile for one slice fewer, or more, in the background while training goes on.",
    ),
    click.option(
        "--warm/--no-warm",
        default=True,
        show_default=True,
        help="Keep on each host a process ready that has run your script as far as elastic.session().",
    ),
    click.option(
        "--reconnect",
        is_flag=True,
        help="Connect JAX anew after every loss, for scripts that use jax.process_count() or multihost_utils "
        "(slower).",
    ),
    click.option(
        "--quarantine-s",
        type=click.FloatRange(min=0),
        default=5.0,
        show_default=True,
        help="A slice that is lost again soon after it joined is kept away so long, then twice as long…; "
        "0: never.",
    ),
    click.option(
        "--straggler-factor",
        type=float,
        default=1.5,
        show_default=True,
        help="Tell of a slice whose input or devices take so many times as long as the others'.",
    ),
    click.option(
        "--wait-s",
        type=click.FloatRange(min=0),
        default=60.0,
        show_default=True,
        help="How long to wait below --min-slices.",
    ),
    click.option(
        "--hang-after-s",
        type=NeverOrSeconds(),
        default=30.0,
        show_default=True,
        help="No step for so long (and longer than steps take): end the slices that hang; or 'never'.",
    ),
    click.option(
        "--lease-s",
        type=click.FloatRange(min=0),
        default=30.0,
        show_default=True,
        help="How long a worker goes on that hears from nobody who decides; then it stops itself.",
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
        metavar="KIND:TARGET@WHEN",
        help="Inject a fault: kill:slice=1@step=60, stop:agent=2@step=60,heal=3, kill:slice=2@phase=FENCING; "
        "several may be given.",
    ),
    click.option(
        "--adapter",
        default="multicontroller",
        show_default=True,
        help="How worlds are formed: multicontroller (real processes), local (one process), or another "
        "one that is installed.",
    ),
    click.option(
        "--spares",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="More slices, which wait for one to be lost and take its place at once.",
    ),
    click.option("--slices", type=int, default=3, show_default=True, help="Slices at the start."),
)


def job_options(function: F) -> F:
    """The options that `demo` and `launch` share."""
    for option in _JOB_OPTIONS:
        function = option(function)
    return function
