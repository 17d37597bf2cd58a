"""Where a worker's threads are: for the step watchdog, taken by a thread beside the one that may hang."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from elastic.detector_events import StacksTaken

RUNTIME = frozenset({"jax", "jaxlib", "elastic", "snapshot", "reshard", "controller_adapter"})
"""Packages in which a thread waits for others: the compiled step runs below them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A frame of a stack."""

    module: str
    function: str
    file: str
    line: int

    @property
    def is_runtime(self) -> bool:
        """Whether it is the engine's or JAX's own code; the demo is a script like any other."""
        is_demo = self.module == "elastic.demo" or self.module.startswith("elastic.demo.")
        return self.module.partition(".")[0] in RUNTIME and not is_demo

    @property
    def is_library(self) -> bool:
        """Whether it is Python's own: waiting for a lock there says nothing about whose lock it is."""
        return self.module.partition(".")[0] in sys.stdlib_module_names

    def __str__(self) -> str:
        return f"{self.function} ({Path(self.file).name}:{self.line})"


def locate(stack: Iterator[Place] | list[Place]) -> tuple[bool, str]:
    """Whether a thread is in the script's own code, and where, from its stack (innermost frame first).

    The innermost frame that is not of Python's own library decides.
    """
    for place in stack:
        if not place.is_library:
            return not place.is_runtime, str(place)
    return False, "Python"


def locate_thread(thread_id: int) -> tuple[bool, str]:
    """Locate a thread of this process, as `locate` does."""
    return locate(_stack_of(thread_id))


def take_stacks(path: Path, thread_id: int) -> tuple[bool, str]:
    """Write the stacks of all threads to `path` (at most 100 threads of 100 frames, in place of what was
    there) and locate the thread `thread_id`.
    """
    found = locate_thread(thread_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        file.write(f"The main thread is {'in the script' if found[0] else 'waiting'}: {found[1]}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    return found


def report_stacks(path: Path, member: int, generation: int) -> StacksTaken:
    """Take this process's stacks into a file; tells where its main thread is."""
    main_id = threading.main_thread().ident or 0
    try:
        in_script, where = take_stacks(path, main_id)
    except OSError as error:  # no room for the file: where we are is told all the same
        in_script, where = locate_thread(main_id)
        where = f"{where}; its stacks could not be written: {error}"
    return StacksTaken(member=member, generation=generation, in_script=in_script, where=where)


def _stack_of(thread_id: int) -> Iterator[Place]:
    frame: FrameType | None = sys._current_frames().get(thread_id)
    while frame is not None:
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        yield Place(module=module, function=code.co_qualname, file=code.co_filename, line=frame.f_lineno or 0)
        frame = frame.f_back
