"""Watch the weights of a running job, from another process, without copying them or holding it up.

elastic demo &                      # or any job
python examples/look_inside.py      # or: look_inside.py RUN_DIRECTORY_OR_JOB_ID NUM_LOOKS
"""

import sys
import time

import numpy as np

import snapshot
from reshard.errors import ElasticError, RetryLaterError

WHERE = sys.argv[1] if len(sys.argv) > 1 else None  # None: the only live job on this machine
NUM_LOOKS = int(sys.argv[2]) if len(sys.argv) > 2 else 10


def norms(view):
    """The root mean square of every array of floating-point numbers."""
    found = {}
    for path in view:
        array = view[path]  # read-only; straight over the job's memory where one stored box is all of it
        if array.dtype.kind in "fV" and array.size:  # V: bfloat16 and the like
            found[path] = float(np.sqrt(np.mean(np.square(array, dtype=np.float32))))
    view.check()  # read, then check: raises when the job overwrote what was read meanwhile
    return found


def look(view):
    """The norms at the newest step that stays long enough to be read."""
    for _ in range(20):
        view.refresh()
        try:
            return norms(view)
        except RetryLaterError:
            continue
    sys.exit(
        "the job's steps are too short to read all of its state; read fewer arrays, or take view.copies()"
    )


try:
    with snapshot.open(WHERE) as view:
        last_step = None
        for _ in range(NUM_LOOKS):
            found = look(view)
            while view.step == last_step:
                time.sleep(0.05)
                found = look(view)
            last_step = view.step
            largest = sorted(found, key=found.get, reverse=True)[:3]
            print(
                f"step {view.step}: " + ", ".join(f"{path} {found[path]:.4g}" for path in largest), flush=True
            )
except ElasticError as error:
    sys.exit(f"{error}")
