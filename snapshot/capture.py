"""Capturing a state: copying this host's share of it into the older slot, at every step.

The hot path of the whole project. Everything that stays the same while the world lives (offsets, which
device has which box, the static manifest) is worked out once; a step then costs, for each shard, one
memory copy, one hash, and a few microseconds, on several threads where there is much to copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from reshard.boxes import Box
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import Layout
from snapshot.arena import Arena
from snapshot.capture_plan import CapturePlan, plan_capture
from snapshot.capture_sources import (
    Source,
    device_sources,
    host_sources,
    host_values,
    selected_shards,
    source_of,
)
from snapshot.copying import copy_and_hash, shared_team
from snapshot.device_buffers import start_copies_to_host
from snapshot.manifest import encode_static, make_static
from snapshot.slot import SlotWriter, required_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStats:
    """One capture: what was written, and how long the training loop was held.

    `wait_s` went by until the state was computed, `copy_s` is the rest of what the loop waited for.
    `overlapped_s` went by after that, beside the loop, until the snapshot was complete: 0 unless the
    capture was started by `start` where memory is copied beside the loop. `checksums` are in the order of
    `Capturer.static.shards`.
    """

    step: int
    slot: str
    num_shards: int
    captured_bytes: int
    wait_s: float
    copy_s: float
    checksums: tuple[int, ...]
    overlapped_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Labels:
    """What a snapshot says of itself."""

    step: int
    generation: int
    position: int


class Capturer:
    """Captures one host's selection of shards; made once per world.

    `selection` is the (path, box) set that the redundancy policy gives this host (`reshard.captures`);
    `layout` that of the state (`snapshot.tree.layout_of`), `device_ids` are those of the host's devices
    (default: all of this process). `num_threads` copy at once (default: one for
    each processor this process may use, four at most). `overlap` says whether `start` copies beside the
    loop (default: where device memory is not host memory). For one thread at a time.
    """

    def __init__(
        self,
        arena: Arena,
        layout: Layout,
        host: HostId,
        selection: Iterable[tuple[str, Box]],
        *,
        device_ids: Collection[int] | None = None,
        num_threads: int | None = None,
        overlap: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.static = make_static(host, layout, sorted(selection))
        self.slot_bytes = required_bytes(self.static)
        self._encoded = encode_static(self.static)
        self._nbytes = tuple(entry.nbytes for entry in self.static.shards)
        self._captured_bytes = sum(self._nbytes)
        self._device_ids = device_ids
        self._team = shared_team(num_threads)
        self._arena = arena
        self._overlap = overlap
        self._clock = clock
        self._plan: CapturePlan | None = None
        self._background: ThreadPoolExecutor | None = None
        self._in_flight: Future[CaptureStats] | None = None

    @property
    def overlaps(self) -> bool:
        """Whether `start` copies beside the loop; else it returns when the snapshot is complete."""
        return jax.default_backend() != "cpu" if self._overlap is None else self._overlap

    def warm_up(self, state: Any) -> None:
        """Do now what the first captures would do: check the state, map the slots and fault them in.

        Raises what `capture` raises. What the slots hold stays.
        """
        self._plan = plan_capture(state, self.static, self._device_ids)
        self._arena.map_slots()

    def capture(self, state: Any, *, step: int, generation: int, position: int) -> CaptureStats:
        """Copy the selection out of `state` into the oldest slot and commit it.

        When this returns the snapshot is complete and nothing refers to the state's buffers any more: it
        may be donated. Raises UsageError, naming the leaf, when the state does not fit the layout, or when
        another capture is still in flight; on any error the slot is left empty and the newer snapshot as it
        was.
        """
        began_s = self._clock()
        leaves, plan, slot, ready_s = self._begin(state, step)
        checksums = [0] * len(self._nbytes)
        self._copy(slot, device_sources(plan, leaves) + host_sources(plan, leaves), checksums)
        slot.commit(step=step, generation=generation, position=position, checksums=checksums)
        copy_s = self._clock() - ready_s
        return self._stats(step, slot, checksums, ready_s - began_s, copy_s)

    def start(self, state: Any, *, step: int, generation: int, position: int) -> None:
        """Begin a capture of `state`; `finish` gives its stats or raises what went wrong.

        Where `overlaps`, this returns as soon as the transfers of all selected shards to the host were
        started; copying, hashing and the commit go on in a thread, and until the commit the slot holds
        nothing. `state` may be donated at once: the runtime starts a transfer before, and keeps its source
        until it is done. Else this is `capture`. Raises what `capture` raises, UsageError also while the
        capture before is in flight. Tried on CPU devices only, whose pinned memory is host memory too.
        """
        if not self.overlaps:
            stats = self.capture(state, step=step, generation=generation, position=position)
            self._in_flight = Future()
            self._in_flight.set_result(stats)
            return
        began_s = self._clock()
        leaves, plan, slot, ready_s = self._begin(state, step)
        copies = start_copies_to_host(selected_shards(plan, leaves))
        # Values that live on the host may be changed by the next step: taken now.
        kept = [(target, np.array(value)) for target, value in host_values(plan, leaves)]
        if self._background is None:
            self._background = ThreadPoolExecutor(1, thread_name_prefix="snapshot-capture")
        labels = _Labels(step, generation, position)
        wait_s, copy_s = ready_s - began_s, self._clock() - ready_s
        self._in_flight = self._background.submit(
            self._complete, slot, slot.hold(), copies + kept, labels, wait_s, copy_s
        )

    @property
    def in_flight(self) -> bool:
        """Whether a capture that was started is not complete yet; `finish` would wait."""
        return self._in_flight is not None and not self._in_flight.done()

    def finish(self) -> CaptureStats | None:
        """Wait for the capture that was started and return its stats; None when there is none.

        Raises what went wrong in it; its slot is empty then, and the snapshot before it as it was.
        """
        in_flight, self._in_flight = self._in_flight, None
        return None if in_flight is None else in_flight.result()

    def _begin(self, state: Any, step: int) -> tuple[list[Any], CapturePlan, SlotWriter, float]:
        """Wait for the state, and make the slot ready to be filled; also return when the state was there."""
        if self._in_flight is not None:
            raise UsageError(
                f"capture of step {step} while another is in flight", remedy="Call finish first.", step=step
            )
        leaves, treedef = jax.tree_util.tree_flatten(state)
        jax.block_until_ready(leaves)
        ready_s = self._clock()
        if self._plan is None or not self._plan.fits(leaves, treedef):
            self._plan = None
            self._plan = plan_capture(state, self.static, self._device_ids)
        slot = self._arena.slot_for_write(self.slot_bytes, step)
        slot.prepare(self.static, self._encoded)
        slot.begin()
        return leaves, self._plan, slot, ready_s

    def _copy(self, slot: SlotWriter, sources: list[Source], checksums: list[int]) -> None:
        """Copy and hash all shards that lie in host memory as a snapshot stores them."""
        addresses, nbytes = slot.shard_addresses, self._nbytes

        def copy(source: Source) -> None:
            target, address, _ = source
            checksums[target] = copy_and_hash(addresses[target], address, nbytes[target])

        if self._team.num_threads > 1:
            sources.sort(key=lambda source: nbytes[source[0]], reverse=True)
        self._team.for_each(copy, sources, self._captured_bytes)

    def _complete(
        self,
        slot: SlotWriter,
        held: memoryview,
        shards: list[tuple[int, Any]],
        labels: _Labels,
        wait_s: float,
        copy_s: float,
    ) -> CaptureStats:
        """Copy transferred shards into the slot and commit it, beside the loop."""
        began_s = self._clock()
        checksums = [0] * len(self._nbytes)
        sources = [source_of(target, np.asarray(shard)) for target, shard in shards]
        with held:  # an arena that is closed meanwhile must not unmap what is written to
            self._copy(slot, sources, checksums)
        slot.commit(
            step=labels.step, generation=labels.generation, position=labels.position, checksums=checksums
        )
        overlapped_s = self._clock() - began_s
        return self._stats(labels.step, slot, checksums, wait_s, copy_s, overlapped_s)

    def _stats(
        self,
        step: int,
        slot: SlotWriter,
        checksums: list[int],
        wait_s: float,
        copy_s: float,
        overlapped_s: float = 0.0,
    ) -> CaptureStats:
        return CaptureStats(
            step=step,
            slot=slot.path.name,
            num_shards=len(checksums),
            captured_bytes=self._captured_bytes,
            wait_s=wait_s,
            copy_s=copy_s,
            checksums=tuple(checksums),
            overlapped_s=overlapped_s,
        )
