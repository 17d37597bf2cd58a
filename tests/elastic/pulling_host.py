"""A host in a process of its own: a snapshot, its data plane, and an agent's tasks; see test_parallel_pulls.

Reads commands from its input and answers each with one line; ends when its input does.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from agent_arenas import GENERATION, capture_step

from elastic.agent_tasks import ArenaTasks
from elastic.events import Stage
from reshard.execute import execute_transfers
from reshard.ids import HostId
from reshard.layout import Layout
from reshard.redundancy import captures
from reshard.transfer import Transfer
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.contents import open_source
from snapshot.dataplane import DataPlaneServer
from snapshot.manifest import make_static
from snapshot.slot import required_bytes


class Restore(msgspec.Struct):
    """Stage what the command says, then fill this host's boxes of `target` by all its transfers."""

    stage: Stage
    target: Layout
    transfers: tuple[Transfer, ...]


def restore(arena: Arena, tasks: ArenaTasks, command: Restore) -> dict[str, Any]:
    """Return the checksum of each box that this host has, and what it took."""
    tasks.stage_now(command.stage)
    generations = (command.stage.of_generation, command.stage.generation)
    source = open_source(arena.slot_files(), command.stage.step, generations)
    try:
        result = execute_transfers(
            command.transfers,
            command.target,
            arena.host,
            lambda transfer: source.read_piece(transfer.path, transfer.piece),
            count_writes=True,
        )
    finally:
        source.close()
    return {
        "boxes": [
            (path, box, checksum(np.ascontiguousarray(buffer).reshape(-1).view(np.uint8)))
            for (path, box), buffer in result.buffers.items()
        ],
        "received": result.bytes_received,
        "local": result.bytes_copied + result.bytes_reused,
    }


def main() -> None:
    """Serve one host."""
    root, slice_index, token, step = sys.argv[1:5]
    layout = msgspec.json.decode(base64.b64decode(sys.argv[5]), type=Layout)
    host = HostId(int(slice_index))
    arena = Arena.create("job", host, root=Path(root))
    if host in layout.mesh.distinct_hosts():
        arena.reserve(required_bytes(make_static(host, layout, captures(layout, 1)[host])))
        capture_step(arena, layout, int(step), 1)
    server = DataPlaneServer(arena, token, lambda: GENERATION)
    server.start()
    tasks = ArenaTasks(arena, host.slice_index, token, count_writes=True)
    print(server.address, flush=True)
    for line in sys.stdin:
        command = msgspec.json.decode(base64.b64decode(line), type=Restore)
        try:
            answer = restore(arena, tasks, command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)
    server.close()
    arena.close()


if __name__ == "__main__":
    main()
