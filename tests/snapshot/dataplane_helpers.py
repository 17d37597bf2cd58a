"""A peer with an arena and a data plane, and a TCP proxy that treats its bytes badly."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from reshard.boxes import Box
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.dataplane import DataPlaneServer, Fetched, Wanted, fetch
from snapshot.manifest import encode_static, make_static
from snapshot.slot import SlotWriter, required_bytes

TOKEN = "job-token"
GENERATION = 3
W_BOX = ((2, 4), (0, 3))
BIG = 3 << 20
"""Elements of the big array: 12 MiB, so that it takes many blocks."""
BIG_BOX = ((0, BIG),)


def layout_of(arrays: dict[str, tuple[int, ...]]) -> Layout:
    """Arrays of float32, all on two hosts."""
    return Layout(
        mesh=MeshLayout(axis_names=("data",), axis_sizes=(2,), hosts=(HostId(0), HostId(1))),
        arrays=tuple(
            ArrayLayout(path=path, shape=shape, dtype="float32", itemsize=4, spec=((),) * len(shape))
            for path, shape in arrays.items()
        ),
    )


def capture(
    arena: Arena, state: dict[str, np.ndarray], step: int, *, boxes: dict[str, Box] | None = None
) -> SlotWriter:
    """Capture a state of float32 arrays (or one box of each) as a worker would."""
    layout = layout_of({path: value.shape for path, value in state.items()})
    wanted = boxes or {path: tuple((0, size) for size in value.shape) for path, value in state.items()}
    static = make_static(arena.host, layout, list(wanted.items()))
    if len(list(arena.directory.glob("slot*"))) < 2:
        arena.reserve(required_bytes(static))
    writer = arena.slot_for_write(required_bytes(static), step)
    writer.prepare(static, encode_static(static))
    writer.begin()
    for view, (path, box) in zip(writer.shard_views, wanted.items(), strict=True):
        view[:] = state[path][tuple(slice(*part) for part in box)].tobytes()
    sums = [checksum(view) for view in writer.shard_views]
    writer.commit(step=step, generation=1, position=0, checksums=sums)
    return writer


class Peer:
    """A host that has captured a state and serves it."""

    def __init__(self, root: Path, slice_index: int, state: dict[str, np.ndarray], **options: Any) -> None:
        self.arena = Arena.create("job", HostId(slice_index), root=root)
        self.writer = capture(self.arena, state, 5)
        self.server = DataPlaneServer(self.arena, TOKEN, lambda: GENERATION, **options)
        self.server.start()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.arena.close()

    @property
    def address(self) -> str:
        return self.server.address


def get(
    wants: Sequence[tuple[str, Box, str | tuple[str, ...]]],
    *,
    step: int = 5,
    itemsize: int = 4,
    token: str = TOKEN,
    generation: int = GENERATION,
    deadline_s: float = 20.0,
    **options: Any,
) -> tuple[list[bytes], Fetched]:
    """Fetch (path, box, sources) into fresh memory filled with ones."""
    buffers = [
        np.full(int(np.prod([stop - start for start, stop in box])) * itemsize, 255, np.uint8)
        for _, box, _ in wants
    ]
    fetched = fetch(
        [
            Wanted(path=path, box=box, sources=(at,) if isinstance(at, str) else at, into=buffer)
            for (path, box, at), buffer in zip(wants, buffers, strict=True)
        ],
        token=token,
        generation=generation,
        step=step,
        deadline_s=deadline_s,
        **options,
    )
    return [buffer.tobytes() for buffer in buffers], fetched


Treat = Callable[[int, int, bytes], "bytes | None"]
"""(connection number, bytes it has passed on, the next ones) → what to pass on; None cuts the connection."""


class Proxy:
    """Passes connections on to `target`; what the server sends goes through `treat`, which may block."""

    def __init__(self, target: str, treat: Treat) -> None:
        self._treat = treat
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self.passed_bytes = 0
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        for each in [self._listener, *self._open]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for each in [self._listener, *self._open]:
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(self._target)
            self._open += [near, far]
            number, self.num_connections = self.num_connections, self.num_connections + 1
            for work in ((far, near, number), (near, far, -1)):
                self._threads.append(threading.Thread(target=self._pass_on, args=work))
                self._threads[-1].start()

    def _pass_on(self, source: socket.socket, target: socket.socket, number: int) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                treated = data if number < 0 else self._treat(number, passed, data)
                if treated is None:
                    break
                target.sendall(treated)
                passed += len(treated)
                self.passed_bytes += len(treated) if number >= 0 else 0
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
