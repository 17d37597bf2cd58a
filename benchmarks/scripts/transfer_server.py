"""The serving process of bench_transfer: one snapshot, offered in every way that is compared.

Prints one JSON line of addresses; ends when its input does.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np

from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.dataplane import DataPlaneServer, TlsFiles
from snapshot.dataplane_wire import tune
from snapshot.manifest import encode_static, make_static
from snapshot.slot import required_bytes

CHUNK_BYTES = 1 << 20


def write_snapshot(arena: Arena, num_leaves: int, leaf_bytes: int) -> tuple[Path, int]:
    """Capture random leaves as step 1; return the slot file and where the first shard begins."""
    mesh = MeshLayout(axis_names=("data",), axis_sizes=(1,), hosts=(HostId(0),))
    arrays = tuple(
        ArrayLayout(path=f"leaf{index}", shape=(leaf_bytes,), dtype="uint8", itemsize=1, spec=((),))
        for index in range(num_leaves)
    )
    layout = Layout(mesh=mesh, arrays=arrays, elastic_axis=None)
    static = make_static(HostId(0), layout, [(array.path, ((0, leaf_bytes),)) for array in arrays])
    arena.reserve(required_bytes(static))
    writer = arena.slot_for_write(required_bytes(static), 1)
    writer.prepare(static, encode_static(static))
    writer.begin()
    rng = np.random.default_rng(0)
    for view in writer.shard_views:
        view[:] = rng.bytes(leaf_bytes)
    sums = [checksum(view) for view in writer.shard_views]
    writer.commit(step=1, generation=1, position=0, checksums=sums)
    return writer.path, writer.shard_addresses[0] - writer._address


def serve_plain(path: Path, offset: int, nbytes: int) -> str:
    """The bound: for each byte received, send the same bytes with sendfile; no names, no checks."""
    listener = socket.socket()
    tune(listener, loopback=True)
    listener.bind(("127.0.0.1", 0))
    listener.listen()

    def work() -> None:
        fd = os.open(path, os.O_RDONLY)
        while True:
            connection, _ = listener.accept()
            while connection.recv(1):
                sent = 0
                while sent < nbytes:
                    sent += os.sendfile(connection.fileno(), fd, offset + sent, min(nbytes - sent, 16 << 20))
            connection.close()

    threading.Thread(target=work, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"


def serve_grpc(path: Path, offset: int, nbytes: int) -> tuple[grpc.Server, str]:
    """The peer: a gRPC stream of 1 MiB messages of the same bytes, without any encoding of ours."""
    fd = os.open(path, os.O_RDONLY)

    def read(request: bytes, context: grpc.ServicerContext):
        for start in range(0, nbytes, CHUNK_BYTES):
            yield os.pread(fd, min(CHUNK_BYTES, nbytes - start), offset + start)

    handler = grpc.method_handlers_generic_handler(
        "bench", {"Read": grpc.unary_stream_rpc_method_handler(read)}
    )
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


def serve_limited(arena: Arena, token: str, bytes_per_s: int) -> DataPlaneServer:
    """A source with a slow network: the kernel paces what each of its connections sends."""
    server = DataPlaneServer(arena, token, lambda: 1)
    SO_MAX_PACING_RATE = 47  # of Linux; connections inherit it from the socket that listens
    server._listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
    return server


def main() -> None:
    num_leaves, leaf_bytes, limited_bytes_per_s = (int(value) for value in sys.argv[1:4])
    token, folder = sys.argv[4], Path(sys.argv[5])
    tls = TlsFiles(cert=folder / "cert.pem", key=folder / "key.pem")
    root = Path(tempfile.mkdtemp(prefix="elastic-slices-bench-", dir="/dev/shm"))
    try:
        arena = Arena.create("bench", HostId(0), root=root)
        path, offset = write_snapshot(arena, num_leaves, leaf_bytes)
        stride = -(-leaf_bytes // 64) * 64
        span = stride * (num_leaves - 1) + leaf_bytes
        peer, grpc_address = serve_grpc(path, offset, span)
        servers = {
            "ours": DataPlaneServer(arena, token, lambda: 1),
            "tls": DataPlaneServer(arena, token, lambda: 1, tls=tls),
            "limited": serve_limited(arena, token, limited_bytes_per_s),
            "limited too": serve_limited(arena, token, limited_bytes_per_s),
        }
        for server in servers.values():
            server.start()
        addresses = {name: server.address for name, server in servers.items()}
        addresses |= {"plain": serve_plain(path, offset, span), "grpc": grpc_address}
        print(json.dumps(addresses), flush=True)
        sys.stdin.read()
        peer.stop(0).wait()
        for server in servers.values():
            server.close()
        arena.close()
    finally:
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
