"""What every benchmark says about the machine it ran on, and how it hands its figures over."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "bench"


def parser(description: str, default_json: str) -> argparse.ArgumentParser:
    """An argument parser with the options that all benchmarks share."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--smoke", action="store_true", help="small sizes: shows that it runs, the figures mean nothing"
    )
    made.add_argument(
        "--json",
        type=Path,
        default=RUNS / default_json,
        metavar="PATH",
        help="where the JSON goes (default: %(default)s)",
    )
    return made


def compile_cache_environment() -> dict[str, str]:
    """The environment for jobs that share one compile cache: the caller's, or one below runs/bench."""
    return dict(os.environ) | {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(RUNS / "jax-cache"))
    }


def run_child(script: str, name: str, *arguments: str) -> dict[str, Any]:
    """What `script`, in a process of its own, prints as its last line of JSON; `name` is for the failure."""
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        fail(f"{name} ended with status {done.returncode}\n{done.stderr[-2000:]}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def load1() -> float:
    """The machine's load average over the last minute."""
    return round(os.getloadavg()[0], 2)


def is_quiet(load: float, own_load: float) -> bool:
    """Whether a load average can be explained by what the benchmark itself runs."""
    return load <= own_load + 0.5


def hand_over(bench: str, figures: dict[str, Any], path: Path, *, smoke: bool, load_before: float) -> None:
    """Print the figures as one JSON line, the last of the output, and write them to `path`."""
    line = json.dumps(
        {
            "bench": bench,
            **figures,
            "smoke": smoke,
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "load1": {"before": load_before, "after": load1()},
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(line + "\n")
    print(line)


def fail(message: str) -> None:
    """End with status 1 and one clear line."""
    print(f"benchmark failed: {message}", file=sys.stderr)
    sys.exit(1)
