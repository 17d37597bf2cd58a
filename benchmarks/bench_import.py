"""How long does `import elastic` take in a fresh process, JAX not imported?

Alternates with processes that import nothing: an interpreter's own start is the floor. The bound is on the
import itself, timed inside the process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace

from figures import median_interval, spread
from machine import ROOT, fail, hand_over, is_quiet, load1, parser

BOUND_S = 0.3
MEASURE = """
import sys, time
began_s, cpu_began_s = time.perf_counter(), time.process_time()
import elastic
print(time.perf_counter() - began_s, time.process_time() - cpu_began_s)
assert "jax" not in sys.modules, "importing elastic imported JAX"
"""


def options() -> Namespace:
    made = parser(__doc__ or "", "import.json")
    made.add_argument(
        "--runs", type=int, default=None, help="fresh processes of each kind (default 40; smoke 3)"
    )
    made.add_argument(
        "--top", type=int, default=8, help="how many of the slowest modules to show (default: %(default)s)"
    )
    given = made.parse_args()
    given.runs = given.runs or (3 if given.smoke else 40)
    return given


def run_python(code: str, *flags: str) -> tuple[float, subprocess.CompletedProcess[str]]:
    """Wall seconds of a fresh interpreter that runs `code`, and what it printed."""
    began_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        capture_output=True,
        text=True,
        check=False,
    )
    wall_s = time.perf_counter() - began_s
    if done.returncode:
        fail(done.stderr.strip().splitlines()[-1])
    return wall_s, done


def slowest_modules(import_time: str, num: int) -> list[tuple[str, float]]:
    """From what `-X importtime` prints: the modules with the longest time of their own, in seconds."""
    found: list[tuple[str, float]] = []
    for line in import_time.splitlines():
        fields = line.removeprefix("import time:").split("|")
        if len(fields) == 3 and fields[0].strip().isdecimal():
            found.append((fields[2].strip(), int(fields[0]) / 1e6))
    return sorted(found, key=lambda item: item[1], reverse=True)[:num]


def main() -> None:
    given = options()
    load_before = load1()
    run_python(MEASURE)  # writes the byte code and warms the page cache; what is asked is a normal start
    floors, walls, imports, cpus = [], [], [], []
    for _ in range(given.runs):
        floors.append(run_python("")[0])
        wall_s, done = run_python(MEASURE)
        walls.append(wall_s)
        import_s, cpu_s = map(float, done.stdout.split())
        imports.append(import_s)
        cpus.append(cpu_s)
    taken, floor_s = median_interval(imports), statistics.median(floors)
    verdict = "pass" if taken.median < BOUND_S else "miss"
    print(f"floor   {floor_s:.3f} s  an interpreter that imports nothing, start to end")
    print(f"bound  <{BOUND_S:.3f} s  for `import elastic`, JAX not imported")
    print(
        f"import  {taken.median:.3f} s  [{taken.low:.3f}, {taken.high:.3f}],"
        f" median of {given.runs}: {verdict}"
    )
    print(f"CPU     {statistics.median(cpus):.3f} s  of the import, all its threads (NumPy starts some)")
    print(f"whole   {statistics.median(walls):.3f} s  {statistics.median(walls) / floor_s:.1f} x floor")
    slowest = slowest_modules(run_python("import elastic", "-X", "importtime")[1].stderr, given.top)
    print(
        "slowest by their own time: " + ", ".join(f"{name} {own_s * 1e3:.1f} ms" for name, own_s in slowest)
    )
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {
        "import_s": spread(imports).as_dict(),
        "import_cpu_s": spread(cpus).as_dict(),
        "interpreter_s": spread(floors).as_dict(),
        "x_floor": round(statistics.median(walls) / floor_s, 3),
        "bound_s": BOUND_S,
        "verdict": verdict,
        "slowest_ms": {name: round(own_s * 1e3, 2) for name, own_s in slowest},
    }
    hand_over("import", figures, given.json, smoke=given.smoke, load_before=load_before)


if __name__ == "__main__":
    main()
