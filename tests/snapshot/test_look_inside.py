"""The example that looks at a running job runs as it is printed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from snapshot_helpers import REPOSITORY, start_python
from view_helpers import A, B, make_arena

EXAMPLE = REPOSITORY / "examples" / "look_inside.py"
WORKER = """
import sys
from pathlib import Path
from snapshot.arena import Arena
from view_helpers import A, B, capture_step
arenas = [Arena.attach("job", host, root=Path(sys.argv[1])) for host in (A, B)]
step = 3
while True:
    sum(range(1_000_000))  # the training step
    for arena in arenas:
        capture_step(arena, step)
    step += 1
"""


def look(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *map(str, args)]
    environment = {"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=50)


def test_example_shows_the_weights_of_a_job_that_trains(root: Path, tmp_path: Path) -> None:
    arenas = [make_arena(root, host, 1, 2) for host in (A, B)]
    (tmp_path / "job.json").write_text(json.dumps({"job_id": "job", "shm_root": str(root)}))
    worker = start_python(WORKER, root)
    ended = look(tmp_path, 3)
    worker.kill()
    worker.communicate()
    assert ended.returncode == 0, ended.stderr
    lines = [line.split() for line in ended.stdout.splitlines()]
    steps = [int(line[1].rstrip(":")) for line in lines]
    assert len(steps) == 3
    assert steps == sorted(set(steps))
    for step, line in zip(steps, lines, strict=True):
        assert line[2:4] == ["['split']", f"{step},"]
        assert line[4] == "['whole'][0]"
    for arena in arenas:
        arena.unlink()


def test_example_without_a_job_says_what_to_do(tmp_path: Path) -> None:
    ended = look(tmp_path)
    assert ended.returncode == 1
    assert "holds no job" in ended.stderr
    assert "Traceback" not in ended.stderr
