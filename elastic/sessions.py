"""The session of a training process: it yields one world after another until the training loop has come to
its end.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from types import TracebackType

from elastic.events import WorldSpec
from elastic.job import JobSpec
from elastic.ports import Link, Runtime
from elastic.solo import SoloLink
from elastic.state_keeper import StateMemory
from elastic.world import World
from reshard.errors import ElasticError


class Session:
    """See `elastic.session`."""

    def __init__(self, spec: JobSpec, link: Link, runtime: Runtime) -> None:
        self._spec = spec
        self._link = link
        self._runtime = runtime
        self._memory = StateMemory()

    def worlds(self) -> Iterator[World]:
        """Yield the world to train in, and another after each change of topology; ends when the loop has
        ended.

        Use each as `with world:`. Arrays made outside of it do not survive a change.
        Raises JobOver when the job was stopped.
        """
        while (world_spec := self._link.wait_world()) is not None:
            try:
                world = self._form(world_spec)
            except Exception as error:
                self._leave_unformed(world_spec, error)
                continue
            yield world
            if world.finish():
                return
            world.drop()
            del world

    def _form(self, world_spec: WorldSpec) -> World:
        link: Link = self._link
        if world_spec.solo:
            link = SoloLink(link)
        return World(
            world_spec,
            link,
            self._runtime,
            self._memory,
            cadence=self._spec.cadence,
            copy_threads=self._spec.copy_threads,
            seed=self._spec.seed,
            full_slices=self._spec.config.num_slices,
        )

    def _leave_unformed(self, world_spec: WorldSpec, error: Exception) -> None:
        """A world that could not be formed: somebody was lost meanwhile, or the error is our own. Raises it
        then, but not for a world that is only rehearsed alone.
        """
        generation = world_spec.generation
        text = f"the world could not be formed: {error}"[:2000]
        if world_spec.solo:
            link = SoloLink(self._link)
            link.user_failed(text, 1)
            link.unwound(generation)
            return
        if isinstance(error, ElasticError):
            self._link.user_failed(str(error), error.exit_status)
        if not isinstance(error, RuntimeError):  # JaxRuntimeError, or of a backend that cannot be made
            raise error
        self._link.step_failed(generation, text, devices="")  # there are none yet to probe
        if not self._link.wait_fenced(generation, None):
            raise error
        self._runtime.drop()
        self._link.unwound(generation)

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def leave_on_sigterm(notify: Callable[[], None]) -> None:
    """Take SIGTERM as a preemption notice: the worker leaves at a step boundary instead of dying."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: notify())
