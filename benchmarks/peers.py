"""Runs the scripts that measure other projects in the same run, where they are given."""

from __future__ import annotations

import json
import os
import subprocess
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from machine import fail


def add_peer_options(made: ArgumentParser, *names: str) -> None:
    """Add `--peers DIR` and a `--NAME-python` for each peer."""
    made.add_argument(
        "--peers",
        type=Path,
        metavar="DIR",
        help="folder with the peers' scripts, snapshot_NAME.py (default: none)",
    )
    for name in names:
        made.add_argument(
            f"--{name}-python",
            metavar="PATH",
            help=f"Python of an environment with {name} (default: {name} is left out)",
        )


def run_peer(given: Namespace, name: str, *, nbytes: float, leaves: int, reps: int) -> dict[str, Any] | None:
    """The JSON line of a peer's script; None, said on the output, where it is not given."""
    python = getattr(given, f"{name}_python")
    if given.peers is None or python is None:
        print(f"peer    {name}: left out (--peers DIR --{name}-python PATH)")
        return None
    command = [python, str(given.peers / f"snapshot_{name}.py"), "--bytes", str(nbytes)]
    command += ["--leaves", str(leaves), "--reps", str(reps)]
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "PYTHONPATH")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{name}: {' '.join(command)} ended with status {done.returncode}\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures
