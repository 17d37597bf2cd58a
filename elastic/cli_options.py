"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

as_json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
shm_option = click.option(
    "--shm-dir",
    type=click.Path(path_type=Path),
    default=Path("/dev/shm"),
    show_default=True,
    help="Where snapshots live; a run directory says so itself.",
)
