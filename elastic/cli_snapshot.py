"""`elastic snapshot ls|verify|read|gc`: looking into host memory, checking it, reading it, cleaning it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from elastic.cli_options import as_json_option, shm_option
from reshard.errors import UsageError

_WHERE_HELP = "WHERE is the directory of a run (such as runs/demo) or a job id; by default the only live job."
where_argument = click.argument("where", required=False, default=None)


@click.group()
def snapshot() -> None:
    """Look into, check, read and clean the snapshots in host memory."""


@snapshot.command("ls", epilog="WHERE is the directory of a run or a job id; by default every job is listed.")
@where_argument
@shm_option
@as_json_option
def snapshot_ls(where: str | None, shm_dir: Path, as_json: bool) -> int:
    """List the jobs that have snapshots in host memory, and what each of their slots holds."""
    from elastic.cli_snapshot_text import print_jobs
    from snapshot.gc import list_jobs
    from snapshot.locate import FoundJob, find_job
    from snapshot.survey import list_slots

    wanted = None if where is None else find_job(where, root=shm_dir)
    root = shm_dir if wanted is None else wanted.directory.parent
    listed = [
        (job, list_slots(FoundJob(job_id=job.job_id, directory=Path(job.directory))))
        for job in list_jobs(root)
        if wanted is None or job.job_id == wanted.job_id
    ]
    if as_json:
        _print_json([msgspec.to_builtins(job) | {"slots": slots} for job, slots in listed])
    elif listed:
        print_jobs(listed)
    else:
        click.echo(f"no snapshots in {root}")
    return 0


@snapshot.command("verify", epilog=_WHERE_HELP)
@where_argument
@shm_option
@as_json_option
def snapshot_verify(where: str | None, shm_dir: Path, as_json: bool) -> int:
    """Read every shard of every host and check it: checksums, and that copies on several hosts agree.

    Exit status 1 when anything is damaged or copies disagree.
    """
    from elastic.cli_snapshot_text import print_verification
    from snapshot.locate import find_job
    from snapshot.verification import verify_job

    job = find_job(where, root=shm_dir)
    verification = verify_job(job)
    if as_json:
        head = {"job_id": job.job_id, "directory": str(job.directory), "is_sound": verification.is_sound}
        _print_json(head | msgspec.to_builtins(verification))
    else:
        print_verification(job, verification)
    return 0 if verification.is_sound else 1


@snapshot.command("read", epilog=_WHERE_HELP)
@where_argument
@click.argument("path", required=False, default=None)
@click.option(
    "--step", type=click.IntRange(min=0), default=None, help="Read this step.  [default: the newest]"
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Save the array here, in numpy's format. Types that numpy lacks come back as raw bytes: "
    "view them, as in np.load(FILE).view(ml_dtypes.bfloat16), or save with --as float32.",
)
@click.option("--as", "dtype", default=None, metavar="DTYPE", help="Convert what is saved to this type.")
@click.option("--partial", is_flag=True, help="Also when the hosts here hold only a part of the state.")
@shm_option
@as_json_option
def snapshot_read(
    where: str | None,
    path: str | None,
    step: int | None,
    out: Path | None,
    dtype: str | None,
    partial: bool,
    shm_dir: Path,
    as_json: bool,
) -> int:
    """List the arrays of a job's state, or show the one named PATH, without holding the job up.

    PATH is as in the list, for example "['params']['w']"; WHERE may be left out before one that starts with a
    bracket. What is shown is a verified copy.
    """
    from elastic.cli_snapshot_text import print_array, print_arrays
    from snapshot.array_summary import save_array, summarise
    from snapshot.view import open as open_view

    if path is None and where is not None and where.startswith("["):
        where, path = None, where
    if path is None and (out is not None or dtype is not None):
        raise UsageError(
            "--out and --as need the PATH of an array", remedy="Without PATH its names are listed."
        )
    with open_view(where, step=step, root=shm_dir, partial=partial) as view:
        if path is None:
            arrays = [view.info(name) for name in view.paths()]
            head = {"job_id": view.job.job_id, "step": view.step, "generation": view.generation}
            if as_json:
                _print_json(
                    head | {"arrays": [msgspec.to_builtins(a) | {"nbytes": a.nbytes} for a in arrays]}
                )
            else:
                print_arrays(view, arrays)
            return 0
        elements = view.copy(path)
        summary = summarise(elements)
        if out is not None:
            save_array(elements, out, dtype)
        if as_json:
            head = {"job_id": view.job.job_id, "step": view.step, "generation": view.generation}
            saved = {} if out is None else {"saved": str(out)}
            _print_json(head | msgspec.to_builtins(view.info(path)) | msgspec.to_builtins(summary) | saved)
        else:
            print_array(view, path, summary, out)
    return 0


@snapshot.command("gc")
@click.option("--dry-run", is_flag=True, help="Say what would go, and remove nothing.")
@shm_option
@as_json_option
def snapshot_gc(dry_run: bool, shm_dir: Path, as_json: bool) -> int:
    """Remove the snapshots of dead jobs, and of no others."""
    from snapshot.gc import collect, find_garbage

    removed = find_garbage(shm_dir) if dry_run else collect(shm_dir)
    if as_json:
        _print_json(msgspec.to_builtins(removed) | {"dry_run": dry_run})
        return 0
    for name in removed.directories if dry_run else ():
        click.echo(name)
    did = "would remove" if dry_run else "removed"
    click.echo(f"{did} {len(removed.directories)} directories, {removed.freed_bytes / 1e6:.1f} MB")
    return 0


def _print_json(value: Any) -> None:
    click.echo(msgspec.json.encode(value).decode())
