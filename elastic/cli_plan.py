"""`elastic plan`: what a change of topology would move, choose and cost, without running it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from elastic.cli_options import as_json_option
from reshard.errors import UsageError


class SlicesParam(click.ParamType[tuple[int, ...]]):
    """Slices lost at once: `3,7`."""

    name = "slices"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the indices, sorted."""
        if isinstance(value, tuple):
            return value
        names = str(value).split(",")
        if not all(name.strip().isdecimal() for name in names):
            self.fail(f"{value!r} does not name slices: give indices such as 3 or 3,7", param, ctx)
        return tuple(sorted({int(name) for name in names}))


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@click.option(
    "--lose",
    "losses",
    type=SlicesParam(),
    multiple=True,
    metavar="SLICES",
    help="Slices lost at once, such as 3,7; may be given several times.  [default: each slice on its own]",
)
@click.option("--every-slice", is_flag=True, help="Plan the loss of every slice, however many there are.")
@click.option("--template", is_flag=True, help="Print a commented file to begin with.")
@as_json_option
def plan(
    file: Path | None, losses: tuple[tuple[int, ...], ...], every_slice: bool, template: bool, as_json: bool
) -> int:
    """Show what losing slices of the cluster in FILE would move, choose and cost, without running it.

    FILE is TOML and describes a cluster and a model. Exit status 1 when a loss would take state with it or
    leave no layout, or memory does not do.
    """
    if template:
        click.echo((Path(__file__).parent / "plan_template.toml").read_text(), nl=False)
        return 0
    if file is None:
        raise UsageError(
            "elastic plan needs a FILE",
            remedy="`elastic plan --template > plan.toml` makes one to begin with.",
        )
    import time

    import msgspec

    from elastic.plan_assess import assess
    from elastic.plan_file import read_plan_file
    from elastic.plan_setting import Setting
    from elastic.plan_text import print_assessment

    plan_file = read_plan_file(file)
    try:
        setting = Setting.of(plan_file)
    except UsageError as error:
        raise UsageError(f"{file}: {error.message}", remedy=error.remedy, **error.fields) from error
    found = assess(setting, losses, time.perf_counter, every_slice=every_slice)
    if as_json:
        click.echo(msgspec.json.encode(found).decode())
    else:
        print_assessment(found)
    return 0 if found.is_sound else 1
