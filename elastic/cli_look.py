"""`elastic report|events|status`: what a run has written down, and how a live one is doing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from elastic.cli_options import DEFAULT_RUN, as_json_option
from reshard.errors import UsageError

FOLLOW_EVERY_S = 0.2
"""How often `elastic events --follow` looks for what was appended."""


@click.command()
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


@click.command()
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
        time.sleep(FOLLOW_EVERY_S)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), default=DEFAULT_RUN)
@as_json_option
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
    several = any(member["host"] for member in found["members"])
    for member in found["members"]:
        host = f" host {member['host']}" if several else ""
        line = f"  slice {member['slice']}{host}: worker {member['worker']} (pid {member['pid'] or '-'})"
        if member["spare"]:
            line += ", a spare until its slice is whole"
        if member["quarantined_for_s"]:
            line += f", in quarantine for {member['quarantined_for_s']:.1f} s more"
            line += f" (lost {member['losses_in_row']} times in a row)"
        click.echo(line)
    for slow in found["stragglers"]:
        host = f" host {slow['host']}" if several else ""
        click.echo(
            f"  slice {slow['slice']}{host} is slow ({slow['where']}): × {slow['factor']:g} the others' time"
        )
    for surface, counts in found["refused"].items():
        click.echo(f"  refused at {surface}: {', '.join(f'{num} {why}' for why, num in counts.items())}")
    return 0


def _history(directory: Path) -> list[Any]:
    from elastic.job import HISTORY_FILE
    from elastic.records import read_history

    path = directory / HISTORY_FILE
    if not path.is_file():
        raise UsageError(f"{directory} holds no run: there is no {path.name} in it")
    return list(read_history(path))
