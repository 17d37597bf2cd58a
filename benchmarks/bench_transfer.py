"""How fast does one agent fetch a snapshot out of another one's memory, over loopback?

The bound is `sendfile` and `recv_into` of the same bytes between two processes, with nothing checked. Ours
adds names, authentication, and a checksum of every byte. In the same rounds: ours with TLS, and a bare gRPC
stream. At the end: one source whose network is limited, against two of them.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import grpc
import numpy as np
from figures import median_interval, spread
from machine import ROOT, fail, hand_over, is_quiet, load1, parser

from snapshot.dataplane import TlsFiles, Wanted, fetch
from snapshot.dataplane_wire import tune

TARGET = 0.8
"""Of the bound's throughput."""
BLOCK_BYTES = 1 << 20
TOKEN = "bench-token"


def options() -> Namespace:
    made = parser(__doc__ or "", "transfer.json")
    made.add_argument("--rounds", type=int, default=None, help="transfers of each kind (default 15; smoke 2)")
    made.add_argument("--mib", type=int, default=None, help="size of the state (default 1024; smoke 16)")
    made.add_argument("--leaves", type=int, default=100, help="arrays in it (default: %(default)s)")
    made.add_argument(
        "--out", type=Path, default=None, help="where the TLS files go (default: a temporary folder)"
    )
    given = made.parse_args()
    given.rounds = given.rounds or (2 if given.smoke else 15)
    given.leaf_bytes = ((given.mib or (16 if given.smoke else 1024)) << 20) // given.leaves
    given.limited_bytes_per_s = (20 if given.smoke else 300) << 20
    return given


def make_certificate(folder: Path) -> TlsFiles:
    """One certificate for both sides, as a job may have it."""
    files = TlsFiles(cert=folder / "cert.pem", key=folder / "key.pem")
    kind = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command = ["openssl", "req", *kind, "-subj", "/CN=bench", "-keyout", files.key, "-out", files.cert]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        fail("openssl could not make a certificate")
    return files


def plain_transfer(address: str, memory: np.ndarray) -> Callable[[], None]:
    """The bound: into the same memory, over one connection that stays."""
    host, _, port = address.rpartition(":")
    connection = socket.socket()
    tune(connection, loopback=True)
    connection.connect((host, int(port)))
    view = memoryview(memory)

    def transfer() -> None:
        connection.send(b"x")
        at = 0
        while at < len(view):
            at += connection.recv_into(view[at : at + BLOCK_BYTES], 0, socket.MSG_WAITALL)

    return transfer


def our_transfer(
    sources: tuple[str, ...], memory: np.ndarray, given: Namespace, tls: TlsFiles | None = None
) -> Callable[[], None]:
    """All leaves with `fetch`, connection and authentication included."""
    stride = -(-given.leaf_bytes // 64) * 64
    wants = [
        Wanted(
            path=f"leaf{index}",
            box=((0, given.leaf_bytes),),
            sources=sources,
            into=memory[index * stride : index * stride + given.leaf_bytes],
        )
        for index in range(given.leaves)
    ]
    return lambda: fetch(wants, token=TOKEN, generation=1, step=1, deadline_s=120, tls=tls) and None


def grpc_transfer(address: str, memory: np.ndarray) -> Callable[[], None]:
    """The peer: messages of 1 MiB, copied to where they belong."""
    call = grpc.insecure_channel(address).unary_stream("/bench/Read")

    def transfer() -> None:
        at = 0
        for message in call(b""):
            memory[at : at + len(message)] = np.frombuffer(message, np.uint8)
            at += len(message)

    return transfer


def timed(transfer: Callable[[], None]) -> float:
    began_s = time.perf_counter()
    transfer()
    return time.perf_counter() - began_s


def measure(given: Namespace, addresses: dict[str, str], tls: TlsFiles) -> dict[str, list[float]]:
    """Seconds of each transfer; the kinds alternate, in another order each round."""
    stride = -(-given.leaf_bytes // 64) * 64
    memory = np.ones(stride * (given.leaves - 1) + given.leaf_bytes, np.uint8)
    transfers = {
        "plain": plain_transfer(addresses["plain"], memory),
        "ours": our_transfer((addresses["ours"],), memory, given),
        "tls": our_transfer((addresses["tls"],), memory, given, tls),
        "grpc": grpc_transfer(addresses["grpc"], memory),
    }
    for transfer in transfers.values():  # connections, caches
        transfer()
    seconds: dict[str, list[float]] = {name: [] for name in transfers}
    for round_index in range(given.rounds):
        names = list(transfers) if round_index % 2 else list(reversed(transfers))
        for name in names:
            seconds[name].append(timed(transfers[name]))
    limited = (addresses["limited"], addresses["limited too"])
    both = {
        "one limited": our_transfer(limited[:1], memory, given),
        "two limited": our_transfer(limited, memory, given),
    }
    for name, transfer in both.items():
        seconds[name] = [timed(transfer) for _ in range(min(3, given.rounds))]
    return seconds


def run(given: Namespace, folder: Path) -> dict[str, list[float]]:
    tls = make_certificate(folder)
    command = [sys.executable, str(ROOT / "benchmarks" / "scripts" / "transfer_server.py")]
    sizes = [str(given.leaves), str(given.leaf_bytes), str(given.limited_bytes_per_s)]
    paths = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    with subprocess.Popen(
        [*command, *sizes, TOKEN, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        line = server.stdout.readline()
        if not line:
            fail("the serving process ended")
        seconds = measure(given, json.loads(line), tls)
        server.stdin.close()
    if server.returncode:
        fail(f"the serving process ended with {server.returncode}")
    return seconds


def main() -> None:
    given = options()
    load_before = load1()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        seconds = run(given, folder)
    nbytes = given.leaf_bytes * given.leaves
    share = median_interval(
        [plain / ours for plain, ours in zip(seconds["plain"], seconds["ours"], strict=True)]
    )
    verdict = "open" if share.spans(TARGET) else ("pass" if share.median >= TARGET else "miss")
    print(f"{nbytes / 2**20:.0f} MiB in {given.leaves} arrays, loopback, median of {given.rounds}")
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, median_s in medians.items():
        print(f"{name:<12} {median_s:7.3f} s  {nbytes / median_s / 1e9:6.2f} GB/s")
    print(
        f"ours / plain throughput {share.median:.2f} [{share.low:.2f}, {share.high:.2f}],"
        f" target {TARGET}: {verdict}"
    )
    gain = medians["one limited"] / medians["two limited"]
    print(f"two limited sources are {gain:.2f} x as fast as one")
    if not is_quiet(load_before, 0):
        print(f"the machine was not quiet before the start (load {load_before}): do not quote these figures")
    figures = {
        "bytes": nbytes,
        "seconds": {name: spread(taken).as_dict() for name, taken in seconds.items()},
        "x_plain_throughput": {
            name: round(medians["plain"] / medians[name], 3) for name in ("ours", "tls", "grpc")
        },
        "two_limited_over_one": round(gain, 3),
        "target": TARGET,
        "verdict": verdict,
    }
    hand_over("transfer", figures, given.json, smoke=given.smoke, load_before=load_before)


if __name__ == "__main__":
    main()
