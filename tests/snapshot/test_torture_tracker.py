"""Python's resource tracker, which removes shared memory that others still use, is never involved."""

from __future__ import annotations

from pathlib import Path

from snapshot_helpers import start_python
from view_helpers import A, make_arena

import snapshot

# Everything that opens the files, in a process of its own that then exits: what the tracker would undo.
VISITOR = """
import sys
from multiprocessing import resource_tracker
from pathlib import Path
import snapshot
from snapshot.arena import Arena
from snapshot.locate import find_job
from snapshot.verification import verify_job
from view_helpers import A, capture_step

root = Path(sys.argv[1])
arena = Arena.attach("job", A, root=root)
arena.map_slots()
arena.reserve(1, journal_record_bytes=256, journal_records=8)
arena.verified_holdings()
arena.journal()
verify_job(find_job("job", root=root))
view = snapshot.open("job", root=root, partial=True)
view["['whole'][0]"]
print("multiprocessing.shared_memory" in sys.modules, resource_tracker._resource_tracker._fd)
"""


def test_files_stay_when_a_process_that_attached_exits(root: Path) -> None:
    arena = make_arena(root, A, 1, 2)
    before = sorted(path.name for path in arena.directory.iterdir())
    for _ in range(2):
        visitor = start_python(VISITOR, root)
        out, _ = visitor.communicate(timeout=30)
        assert (visitor.returncode, out) == (0, "False None\n")
        assert sorted(path.name for path in arena.directory.iterdir()) == sorted([*before, "journal"])
    with snapshot.open("job", root=root, partial=True) as view:
        assert view.step == 2
    arena.unlink()
    assert list(root.iterdir()) == []
