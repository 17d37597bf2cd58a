"""Only the job's agents are served, only the job's agents believed, and nobody holds up the others."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from dataplane_helpers import BIG_BOX, GENERATION, TOKEN, W_BOX, Peer, Proxy, get
from snapshot_helpers import reserve, write_into
from waiting import wait_until

from reshard.errors import RetryLaterError, UsageError
from snapshot import dataplane_server
from snapshot.arena import Arena
from snapshot.dataplane import (
    DataPlaneServer,
    TlsFiles,
)
from snapshot.dataplane_auth import MAGIC, authenticate
from snapshot.tls import tls_files


@pytest.mark.parametrize("token", ["", "job-toke", "job-token2", "wrong"])
def test_wrong_token_is_refused_and_counted(arena: Arena, server: DataPlaneServer, token: str) -> None:
    reserve(arena)
    write_into(arena, 5)
    with pytest.raises(UsageError, match="wrong or missing job token"):
        get([("w", W_BOX, server.address)], token=token)
    assert server.refused == 1


def test_stale_generation_is_refused_and_counted_and_a_newer_one_served(
    arena: Arena, server: DataPlaneServer
) -> None:
    reserve(arena)
    write_into(arena, 5)
    with pytest.raises(UsageError, match="stale generation 2, the job is at 3"):
        get([("w", W_BOX, server.address)], generation=GENERATION - 1)
    assert server.refused == 1
    get([("w", W_BOX, server.address)], generation=GENERATION + 1)


def test_empty_token_is_refused_at_the_server(arena: Arena) -> None:
    with pytest.raises(UsageError, match="must not be empty"):
        DataPlaneServer(arena, "", lambda: 1)


def test_token_never_travels_and_a_recorded_proof_is_of_no_use(arena: Arena, server: DataPlaneServer) -> None:
    reserve(arena)
    write_into(arena, 5)
    said = bytearray()

    def listen() -> None:
        near, _ = listener.accept()
        with near, socket.create_connection(("127.0.0.1", int(server.address.split(":")[1]))) as far:
            near.sendall(far.recv(40, socket.MSG_WAITALL))
            said.extend(near.recv(72, socket.MSG_WAITALL))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        heard = pool.submit(listen)
        with pytest.raises(RetryLaterError):
            get([("w", W_BOX, f"127.0.0.1:{listener.getsockname()[1]}")], deadline_s=0.5)
        heard.result()
    assert TOKEN.encode() not in said
    with socket.create_connection(("127.0.0.1", int(server.address.split(":")[1]))) as replay:
        replay.recv(40, socket.MSG_WAITALL)
        replay.sendall(said)
        assert replay.recv(33, socket.MSG_WAITALL)[:1] == b"\1"
    assert server.refused == 1


def test_server_that_does_not_know_the_token_is_not_believed() -> None:
    def pretend() -> None:
        near, _ = listener.accept()
        with near:
            near.sendall(MAGIC + bytes(32))
            near.recv(72, socket.MSG_WAITALL)
            near.sendall(b"\0" + bytes(32))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(pretend)
        with pytest.raises(UsageError, match="does not know the job's token"):
            get([("w", W_BOX, f"127.0.0.1:{listener.getsockname()[1]}")])


def test_strangers_that_say_nothing_or_garbage_hold_up_nobody(
    arena: Arena, server: DataPlaneServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane_server, "MAX_STRANGERS", 4)
    monkeypatch.setattr(dataplane_server, "HANDSHAKE_S", 50.0)
    reserve(arena)
    data = write_into(arena, 5)
    target = ("127.0.0.1", int(server.address.split(":")[1]))
    silent = [socket.create_connection(target) for _ in range(12)]
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(200), MAGIC, MAGIC + bytes(64), b"\0" * 10_000):
        with socket.create_connection(target) as stranger:
            stranger.sendall(garbage)
    got, _ = get([("w", W_BOX, server.address)])
    assert got == [data[2]]
    for dropped in silent[:8]:  # though they had time left
        dropped.settimeout(10)
        assert dropped.recv(100, socket.MSG_WAITALL)[40:] == b""
    for each in silent:
        each.close()


def test_garbage_from_an_admitted_caller_ends_its_connection_alone(
    arena: Arena, server: DataPlaneServer
) -> None:
    reserve(arena)
    data = write_into(arena, 5)
    target = ("127.0.0.1", int(server.address.split(":")[1]))
    for garbage in (b"\xff\xff\xff\xff", b"\0\0\0\0", b"\5\0\0\0hello", b"\1\0\0\0\x90"):
        with socket.create_connection(target) as caller:
            authenticate(caller, TOKEN.encode(), server.address)
            caller.sendall(garbage)
            caller.settimeout(10)
            assert caller.recv(1) == b""
    assert get([("w", W_BOX, server.address)])[0] == [data[2]]


def test_each_refusal_is_told_with_its_reason_and_sender(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane_server, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(dataplane_server, "MAX_STRANGERS", 2)
    told: list[tuple[str, str]] = []
    server = DataPlaneServer(
        arena, TOKEN, lambda: GENERATION, on_refused=lambda *refused: told.append(refused)
    )
    server.start()
    target = ("127.0.0.1", int(server.address.split(":")[1]))
    with socket.create_connection(target) as stranger:
        stranger.sendall(os.urandom(200))
        wait_until(lambda: told == [("bad-message", "127.0.0.1")])
    with socket.create_connection(target) as stranger:
        stranger.sendall(MAGIC + bytes(10))  # and no more
        wait_until(lambda: told[1:] == [("too-slow", "127.0.0.1")])
    monkeypatch.setattr(dataplane_server, "HANDSHAKE_S", 50.0)
    with socket.create_connection(target) as gone:
        gone.recv(1)
    with pytest.raises(UsageError):
        get([("w", W_BOX, server.address)], token="wrong")
    wait_until(lambda: len(told) == 3)
    silent = [socket.create_connection(target) for _ in range(3)]
    wait_until(lambda: len(told) == 4)
    assert [reason for reason, _ in told[2:]] == ["wrong-token", "too-many"]
    assert server.refused == 4
    for each in silent:
        each.close()
    server.close()


def test_stranger_with_tls_that_is_none_is_told(
    arena: Arena, certificates: dict[str, TlsFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons: list[str] = []
    server = DataPlaneServer(
        arena,
        TOKEN,
        lambda: GENERATION,
        tls=certificates["shared"],
        on_refused=lambda reason, sender: reasons.append(reason),
    )
    server.start()
    with socket.create_connection(("127.0.0.1", int(server.address.split(":")[1]))) as stranger:
        stranger.sendall(os.urandom(200))
        wait_until(lambda: reasons == ["tls"])
    server.close()


def test_callers_beyond_the_bound_are_served_later(
    root: Path, big_state: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataplane_server, "MAX_CALLERS", 1)
    gate = threading.Event()

    def hold(number: int, passed: int, data: bytes) -> bytes:
        if passed > 1 << 20:
            gate.wait(20)
        return data

    with Peer(root, 1, big_state) as peer, Proxy(peer.address, hold) as proxy, ThreadPoolExecutor(2) as pool:
        first = pool.submit(get, [("big", BIG_BOX, proxy.address)])
        wait_until(lambda: proxy.passed_bytes > 1 << 20)
        second = pool.submit(get, [("big", BIG_BOX, peer.address)])
        gate.set()
        assert first.result()[0] == second.result()[0] == [big_state["big"].tobytes()]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TlsFiles]:
    """`shared` is one certificate for all; `stranger` is of nobody we know."""
    made = {}
    for name in ("shared", "stranger"):
        folder = tmp_path_factory.mktemp(name)
        files = TlsFiles(cert=folder / "cert.pem", key=folder / "key.pem")
        subject = ["-subj", f"/CN={name}", "-days", "2"]
        kind = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command = ["openssl", *kind, "-keyout", str(files.key), "-out", str(files.cert), *subject]
        subprocess.run(command, check=True, capture_output=True)
        made[name] = files
    return made


def test_tls_carries_whole_boxes_and_pieces(
    root: Path, big_state: dict[str, np.ndarray], certificates: dict[str, TlsFiles]
) -> None:
    tls = certificates["shared"]
    with Peer(root, 1, big_state, tls=tls) as peer:
        got, _ = get([("big", BIG_BOX, peer.address), ("big", ((3, 1000),), peer.address)], tls=tls)
    assert got == [big_state["big"].tobytes(), big_state["big"][3:1000].tobytes()]


def test_tls_with_another_certificate_is_refused_by_both_sides(
    root: Path, big_state: dict[str, np.ndarray], certificates: dict[str, TlsFiles]
) -> None:
    ours, theirs = certificates["shared"], certificates["stranger"]
    with Peer(root, 1, big_state, tls=ours) as peer:
        with pytest.raises(UsageError, match="TLS: CERTIFICATE_VERIFY_FAILED"):
            get([("big", BIG_BOX, peer.address)], tls=theirs)
        trusting = TlsFiles(cert=theirs.cert, key=theirs.key, ca=ours.cert)
        with pytest.raises(UsageError, match=r"TLS: .*ALERT"):
            get([("big", BIG_BOX, peer.address)], tls=trusting)


def test_tls_caller_of_a_plain_server_is_told_so(
    root: Path, big_state: dict[str, np.ndarray], certificates: dict[str, TlsFiles]
) -> None:
    with Peer(root, 1, big_state) as peer, pytest.raises(UsageError, match="TLS: "):
        get([("big", BIG_BOX, peer.address)], tls=certificates["shared"])


def test_tls_files_that_are_none_are_named(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no certificate")
    files = TlsFiles(cert=tmp_path / "cert.pem", key=tmp_path / "key.pem")
    with pytest.raises(UsageError, match=r"cert\.pem"):
        files.server_context()


def test_tls_files_of_a_command_line_are_all_there_and_read_or_none(
    tmp_path: Path, certificates: dict[str, TlsFiles]
) -> None:
    shared = certificates["shared"]
    assert tls_files(None, None, None) is None
    assert tls_files(shared.cert, shared.key, None) == shared
    with pytest.raises(UsageError, match="a certificate and its key"):
        tls_files(shared.cert, None, None)
    with pytest.raises(UsageError, match="cannot be used"):
        tls_files(shared.cert, certificates["stranger"].key, None)
