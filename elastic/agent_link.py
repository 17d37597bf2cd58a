"""The worker's end of the unix socket to its agent: the `Link` of a session in a process of its own.

A reader thread takes commands in while the main thread may be stuck in a collective; a fence makes it
call `unblock` until the main thread is out. When the agent dies the link tries to reach the next one;
without any for `lease_s` the worker ends itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from elastic.events import (
    AuditAfter,
    Captured,
    Fence,
    LaidOut,
    LeftWorld,
    PreemptionNotice,
    StacksTaken,
    StepFailed,
    StopAfter,
    TakeStacks,
    WorkerFailed,
    WorldSpec,
)
from elastic.job import ENV_STANDBY, ROLE_SHADOW, WORKER_HEARTBEAT_S, JobSpec
from elastic.parent_death import outlive_parent
from elastic.ports import JobOver, Room
from elastic.protocol import (
    WORKER_CODEC,
    EnterWorld,
    Heartbeat,
    Hello,
    JobEnded,
    LoopEnded,
    Rehearse,
    Rehearsed,
    Replicated,
    Reserve,
    Reserved,
    StateDescribed,
    TakeTurn,
    Unwound,
    WorkerCommitted,
    WorldRebuilt,
)
from elastic.wire import FramedSocket, WireError
from elastic.worker_process import LEASE_EXIT_STATUS, REHEARSAL_EXIT_STATUS
from elastic.worker_stacks import report_stacks
from reshard.errors import ElasticError, InsufficientMemoryError, RetryLaterError, UsageError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.arena import Arena
from snapshot.persist_tree import TreeDescription

UNBLOCK_EVERY_S = 0.01
RECONNECT_EVERY_S = 0.05
COMMITS_TOLD_AGAIN = 8
MAX_UNHEARD = 4096
SOLO_S = 300.0
"""How long a process that stands by may play one world alone …"""
SOLO_AFTER_TURN_S = 60.0
"""… and how long it may take to get out of it once it is wanted: a long trace is not broken off."""


class AgentLink:
    """See `elastic.ports.Link`. `unblock` gets a main thread out of a broken collective; it is called
    from a thread.
    """

    def __init__(self, spec: JobSpec, member: int, unblock: Callable[[], None]) -> None:
        self._spec = spec
        self._member = member
        self._unblock = unblock
        self._changed = threading.Condition()
        self._connection: FramedSocket | None = None
        self._next_world: WorldSpec | None = None
        self._fenced_below = 0
        self._inside = 0
        """The generation of the world the main thread is in (0: none)."""
        self._stop: StopAfter | None = None
        self._audit: AuditAfter | None = None
        self._reserved: Reserved | None = None
        self._awaits_copies = False
        self._held: Captured | None = None
        """A capture that is told with the commit of its step."""
        self._replicated: Replicated | None = None
        self._release_due = False
        """Whether a runtime that was kept for a next world is to be let go."""
        self._keeps_runtime = False
        self.release: Callable[[], None] | None = None
        """Lets go of a runtime that was kept; called from the thread that waits for a world."""
        self._end: JobEnded | None = None
        self._rescue: threading.Thread | None = None
        self._heard_s = time.monotonic()
        self._commits: deque[WorkerCommitted] = deque(maxlen=COMMITS_TOLD_AGAIN)
        self._unheard: deque[WorkerCommitted] = deque(maxlen=MAX_UNHEARD)
        """Commits made while no agent was there."""
        self._told = threading.RLock()  # also taken in the SIGTERM handler, on a thread that may hold it
        self._said: dict[type[object], object] = {}
        """What was told in this world, for an agent that takes over and may not have heard it."""
        self._arenas: dict[HostId, Arena] = {}
        role = os.environ.get(ENV_STANDBY, "")
        self._is_shadow = role == ROLE_SHADOW
        self._has_turn = not role
        """True of a worker; a process that stands by goes on from its session when it is."""
        self._solo: deque[WorldSpec] = deque()
        """Worlds to play alone until it is its turn."""
        self._solo_since_s: float | None = None
        """Since when the main thread plays a world alone."""
        self._turn_s = 0.0
        """When the turn of a process that stood by came."""
        self._owes_unwound = False
        """Whether the agent waits for the word that a world that is played alone is left."""
        self._is_leashed = bool(role) and not self._is_shadow
        """Whether the agent's end is this process's: until it is a worker, which another agent may adopt."""
        self._connect()
        threading.Thread(target=self._read, name="agent-link", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self._has_turn or self._solo)
        threading.Thread(target=self._beat, name="agent-heartbeat", daemon=True).start()

    # ---- Link: waiting and looking ----

    def wait_world(self) -> WorldSpec | None:
        """Block until the next world is assigned; None when the job has ended."""
        while True:
            while self._is_to_release():
                if self.release is not None:
                    self.release()
            with self._changed:
                if self._end is not None and not self._end.completed:
                    raise JobOver("the job was stopped")
                world = self._take_world()
                if world is not None or self._end is not None:
                    return world
                # What was there has been taken back meanwhile: by a fence, or as the turn has come.

    def _take_world(self) -> WorldSpec | None:
        """The world to enter next, if there is one; holds the lock."""
        if not self._has_turn and self._solo:
            world: WorldSpec | None = self._solo.popleft()
        else:
            world, self._next_world = self._next_world, None
        if world is not None:
            self._inside = world.generation
            self._solo_since_s = time.monotonic() if world.solo else None
            self._owes_unwound = self._has_turn
            self._stop = self._audit = None
            with self._told:
                self._commits.clear()
                self._unheard.clear()
                self._said.clear()
        return world

    def _is_to_release(self) -> bool:
        """Wait for a world, or the end; True when, before that, what was kept is not needed any more."""
        with self._changed:
            if self._is_leashed:
                self._changed.wait_for(lambda: self._has_turn or self._solo)
                if self._has_turn:
                    self._is_leashed = False
                    outlive_parent()  # takes effect for the thread that was there first: this one
            self._changed.wait_for(lambda: self._release_due or self._is_told())
            is_due, self._release_due = self._release_due and not self._is_told(), False
            return is_due

    def _is_told(self) -> bool:
        is_to_rehearse = not self._has_turn and bool(self._solo)
        return is_to_rehearse or self._next_world is not None or self._end is not None

    def keeps_runtime(self) -> bool:
        """Whether the next world may go on in the runtime of the one that is left."""
        return self._keeps_runtime

    def is_fenced(self, generation: int) -> bool:
        """Whether the world of `generation` has been given up."""
        return generation < self._fenced_below or (self._end is not None and not self._end.completed)

    def stop_step(self, generation: int) -> int | None:
        """The step after whose boundary to stop, None to go on."""
        stop = self._stop
        return stop.step if stop is not None and stop.generation == generation else None

    def audit_step(self, generation: int) -> int | None:
        """The step whose capture, or the first one after it, is to be an audit; None without an order."""
        audit = self._audit
        return audit.step if audit is not None and audit.generation == generation else None

    def wait_fenced(self, generation: int, timeout_s: float | None) -> bool:
        """Block until the world of `generation` is given up (True), or the time is over or the job
        complete (False).
        """
        with self._changed:
            self._changed.wait_for(
                lambda: generation < self._fenced_below or self._end is not None, timeout_s
            )
            if self._end is not None and not self._end.completed:
                raise JobOver("the job was stopped")
            return generation < self._fenced_below

    def arenas(self) -> Mapping[HostId, Arena]:
        """This host's arena; none for a shadow, which keeps nothing."""
        if not self._arenas and not self._is_shadow:
            host = self._spec.config.host(self._member)
            self._arenas[host] = Arena.attach(self._spec.job_id, host, root=self._spec.shm_root)
        return self._arenas

    # ---- Link: telling ----

    def reserve(self, host: HostId, room: Room) -> None:
        """Make room in the arena. Raises InsufficientMemoryError."""
        self._clear_answer()
        self._awaits_copies = room.buddy_bytes is not None
        self._tell(
            Reserve(
                slot_bytes=room.slot_bytes,
                journal_record_bytes=room.journal_record_bytes,
                journal_records=room.journal_records,
                buddy_bytes=room.buddy_bytes,
            )
        )
        with self._changed:
            self._changed.wait_for(lambda: self._reserved is not None or self._end is not None)
            answer = self._reserved
        if answer is None:
            raise JobOver("the job was stopped")
        if answer.error and not answer.needed_bytes:
            raise UsageError(answer.error)
        if answer.error:
            raise InsufficientMemoryError(
                answer.needed_bytes, answer.available_bytes, str(self._spec.shm_root)
            )

    def replicated_step(self, generation: int) -> int | None:
        """The newest step of which this host has what it keeps for other slices; see `Link`."""
        if not self._awaits_copies:
            return None
        replicated = self._replicated
        return replicated.step if replicated is not None and replicated.generation == generation else -1

    def rebuilt(
        self, generation: int, restored_step: int | None, form_s: float, restore_s: float, shm_bytes: int
    ) -> None:
        """Tell that the state is on the devices."""
        self._tell_held()
        self._tell(
            WorldRebuilt(
                generation=generation,
                restored_step=restored_step,
                form_s=form_s,
                restore_s=restore_s,
                bytes_from={"shm": shm_bytes},
            )
        )

    def laid_out(self, generation: int, layout: Layout, lacking: str = "") -> None:
        """Tell where each box of the world's state is, or is to be; see `Link`."""
        told = LaidOut(member=self._member, generation=generation, layout=layout, lacking=lacking)
        self._tell(told)

    def described(self, tree: TreeDescription) -> None:
        """Tell how the tree of the world's state looks."""
        self._tell(StateDescribed(tree=tree))

    def captured(self, host: HostId, generation: int, step: int, checksums: bytes, *, is_audit: bool) -> None:
        """Tell the checksums of a capture (with the commit of its step, if one follows), or of an audit."""
        captured = Captured(
            member=self._member,
            generation=generation,
            step=step,
            checksums=checksums,
            is_audit=is_audit,
        )
        if is_audit:
            self._tell(captured)
        else:
            self._tell_held()
            self._held = captured

    def committed(self, message: WorkerCommitted) -> None:
        """Tell that a step's outputs are ready and captured."""
        held = self._held
        if held is not None and (held.generation, held.step) == (message.generation, message.step):
            self._held = None
            message = replace(message, checksums=held.checksums)
        self._tell_held()
        self._tell(message)

    def _tell_held(self) -> None:
        """Tell of a capture that no commit followed."""
        held, self._held = self._held, None
        if held is not None:
            self._tell(held)

    def left(self, generation: int) -> None:
        """Tell that the loop has stopped at a boundary as told, or has rehearsed."""
        self._tell_held()
        self._tell(LeftWorld(member=self._member, generation=generation))

    def ended(self, generation: int, step: int) -> None:
        """Tell that the training loop has come to its end."""
        self._tell_held()
        self._tell(LoopEnded(generation=generation, step=step))

    def step_failed(self, generation: int, error: str, devices: str | None = None) -> None:
        """Tell that a step failed in a way that a lost peer may explain; see `Link`."""
        self._tell(StepFailed(member=self._member, generation=generation, error=error, devices=devices))

    def user_failed(self, error: str, exit_status: int) -> None:
        """Tell that the user's code raised."""
        self._tell(WorkerFailed(member=self._member, error=error, exit_status=exit_status))

    def preempted(self) -> None:
        """Tell that this worker was told to leave (SIGTERM)."""
        self._tell(PreemptionNotice(member=self._member))

    def rehearsed(self, generation: int, error: str) -> None:
        """Tell that a world that was played alone is left: of those before its turn, once all are."""
        newest, owes_unwound = self._leave()
        if owes_unwound:
            self._tell(Unwound(generation=newest))
        with self._changed:
            if error:
                self._solo.clear()
            is_last = not self._has_turn and not self._solo
        if is_last:
            self._tell(Rehearsed(error=error))

    def unwound(self, generation: int) -> None:
        """Tell that the devices of every world before the newest generation are dropped."""
        newest, _ = self._leave()
        self._tell(Unwound(generation=newest))

    def _leave(self) -> tuple[int, bool]:
        """The main thread is in no world; returns the newest generation that was fenced, and whether the
        agent waits for the word that the world is left.
        """
        with self._changed:
            self._inside = 0
            self._solo_since_s = None
            newest, owes_unwound = self._fenced_below, self._owes_unwound
            rescue, self._rescue = self._rescue, None
        if rescue is not None:
            rescue.join()  # it must not touch what the next world opens
        return newest, owes_unwound

    # ---- threads ----

    def _clear_answer(self) -> None:
        self._reserved = None

    def _tell(self, message: object) -> None:
        if self._is_shadow and not isinstance(message, LeftWorld | StepFailed | WorkerFailed):
            return  # a shadow of a world has nothing else to tell
        with self._told:
            if isinstance(message, WorkerCommitted):
                self._commits.append(message)
            elif not isinstance(message, Heartbeat | Captured | StacksTaken):
                self._said[type(message)] = message
            connection = self._connection
        try:
            if connection is not None:
                connection.send(message)
                return
        except OSError:
            pass  # the agent is gone: the next one is told
        if isinstance(message, WorkerCommitted):
            with self._told:
                self._unheard.append(message)

    def _connect(self) -> None:
        path = str(self._spec.socket_path(self._member))
        deadline_s = time.monotonic() + self._spec.lease_s
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(path)
            except OSError as error:
                connection.close()
                if time.monotonic() >= deadline_s:
                    raise RetryLaterError(f"no agent at {path} for {self._spec.lease_s} s") from error
                time.sleep(RECONNECT_EVERY_S)
                continue
            framed = FramedSocket(connection, WORKER_CODEC)
            with self._told, contextlib.suppress(OSError):  # a break is noticed by the reader
                framed.send(Hello(pid=os.getpid(), generation=self._inside))
                commits = dict.fromkeys((*self._unheard, *self._commits))
                for message in (*commits, *self._said.values()):
                    framed.send(message)
                self._unheard.clear()
            if self._connection is not None:
                self._connection.close()
            self._connection = framed
            return

    def _read(self) -> None:
        while True:
            try:
                message = self._connection.receive() if self._connection is not None else None
            except (OSError, WireError):
                message = None
            if message is not None:
                self._take(message)
                continue
            if self._end is not None:
                return
            if not self._has_turn or self._is_shadow:
                os._exit(0)  # it stands by for this agent only
            try:
                self._connect()
            except ElasticError:
                os._exit(LEASE_EXIT_STATUS)  # nobody to answer to: stop before somebody else goes on

    def _take(self, message: object) -> None:
        self._heard_s = time.monotonic()
        if isinstance(message, TakeStacks):
            path = self._spec.worker_file(self._member, "stacks")
            self._tell(report_stacks(path, self._member, message.generation))
            return
        with self._changed:
            if isinstance(message, TakeTurn):
                self._take_turn()
            elif isinstance(message, Rehearse):
                self._solo.extend(message.worlds)
            elif isinstance(message, EnterWorld):
                self._next_world = message.world
            elif isinstance(message, Fence):
                self._fenced_below = max(self._fenced_below, message.generation)
                self._next_world = None
                self._owes_unwound = True
                self._keeps_runtime = message.keep_runtime
                self._release_due = not message.keep_runtime
            elif isinstance(message, StopAfter):
                self._stop = message
            elif isinstance(message, AuditAfter):
                self._audit = message
            elif isinstance(message, Replicated):
                self._replicated = message
            elif isinstance(message, Reserved):
                self._reserved = message
                with self._told:
                    self._said.pop(Reserve, None)
            elif isinstance(message, JobEnded):
                self._end = message
            self._changed.notify_all()
            is_stop = isinstance(message, JobEnded) and not message.completed
            must_leave = isinstance(message, Fence) or is_stop
            is_out = self._inside == 0
            if must_leave and not is_out and self._rescue is None:
                self._rescue = threading.Thread(target=self._get_out, name="unblock", daemon=True)
                self._rescue.start()
        if must_leave and is_out:
            self._tell(Unwound(generation=self._fenced_below))

    def _take_turn(self) -> None:
        """From now on this is the worker; a world it plays alone is left as soon as may be."""
        if not self._has_turn:
            self._has_turn = True
            self._turn_s = time.monotonic()
            self._solo.clear()
            if self._inside:
                self._fenced_below = max(self._fenced_below, self._inside + 1)

    def _hangs_alone(self, now_s: float) -> bool:
        """Whether a rehearsal goes on for too long: the script waits for something that never comes in it."""
        since_s = self._solo_since_s
        if since_s is None or (self._has_turn and self._turn_s < since_s):
            return False  # the coordinator has a bound for what it has assigned
        bound_s = SOLO_AFTER_TURN_S if self._has_turn else SOLO_S
        return now_s - max(since_s, self._turn_s) > bound_s

    def _get_out(self) -> None:
        """Unblock the main thread, again and again: it may only now be entering the collective."""
        while self._inside:
            self._unblock()
            time.sleep(UNBLOCK_EVERY_S)

    def _beat(self) -> None:
        while self._end is None:
            self._tell(Heartbeat(unix_s=time.time()))
            if self._hangs_alone(time.monotonic()):
                os._exit(REHEARSAL_EXIT_STATUS)
            if (
                self._has_turn
                and not self._is_shadow
                and time.monotonic() - self._heard_s > self._spec.lease_s
            ):
                os._exit(
                    LEASE_EXIT_STATUS
                )  # the agent hangs: somebody else may go on without this slice by now
            time.sleep(WORKER_HEARTBEAT_S)
