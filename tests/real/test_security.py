"""A real job with certificates under attack, what its processes show of the token, and a slice that flaps."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from certificates import Authority
from real_runs import Run, assert_nothing_lost, finish, left_behind, processes_naming, start

from elastic import control_pb2 as pb
from elastic.control_channel import bearer, open_channel, read_place
from elastic.control_pb2_grpc import ControlStub
from elastic.events import Phase
from elastic.job import ENV_SLICE, JobSpec, load_job, load_token
from elastic.protocol import WORKER_CODEC, Heartbeat
from elastic.records import LossDetected, SliceQuarantined, WorldFormed, of_kind, read_history
from elastic.status import ask_status
from elastic.wire import FramedSocket
from reshard.errors import ElasticError, UsageError
from snapshot.dataplane import Wanted, fetch

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]

BOUND_S = 180.0
STEPS = 200
TRAIN = ("--", "-m", "elastic.demo.train", "--model-axis", "1", "--steps", str(STEPS))


def wait_for(process: subprocess.Popen[str], what: str, condition: Callable[[], bool]) -> None:
    """Look until the condition holds; the job must go on meanwhile."""
    until_s = time.monotonic() + BOUND_S
    while not condition():
        assert process.poll() is None, f"ended before {what}:\n{process.communicate()[0]}"
        assert time.monotonic() < until_s, f"not in {BOUND_S} s: {what}"
        time.sleep(0.05)


def status_of(directory: Path) -> dict[str, Any]:
    """What the coordinator says; nothing while it does not answer."""
    with contextlib.suppress(ElasticError):
        return ask_status(directory)
    return {}


def is_training(directory: Path) -> bool:
    status = status_of(directory)
    return status.get("phase") == Phase.RUNNING.value and status["newest_committed"] >= 3


@contextlib.contextmanager
def running(directory: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A job; ended when the test fails."""
    process = start(directory, "launch", "--devices-per-host", "1", "--out", str(directory), *arguments)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def agents_of(directory: Path) -> list[int]:
    """The processes of the job's agents."""
    found = []
    for pid in processes_naming(str(directory)):
        with contextlib.suppress(OSError):
            if b"elastic.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def listening_ports(pid: int) -> list[int]:
    """The TCP ports on which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(entry).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes]


def attack(spec: JobSpec) -> None:
    """Garbage and wrong tokens at every surface; some connections are left open, saying nothing."""
    place = read_place(spec.directory)
    control = ("127.0.0.1", int(place.address.rpartition(":")[2]))
    agents = [("127.0.0.1", port) for pid in agents_of(spec.directory) for port in listening_ports(pid)]
    assert len(agents) == 3
    with contextlib.ExitStack() as held:
        for target in (control, *agents):
            for said in (b"", os.urandom(4000), b"\xff" * 40):
                stranger = held.enter_context(socket.create_connection(target))
                with contextlib.suppress(OSError):
                    stranger.sendall(said)
        with open_channel(place, spec.tls) as channel, pytest.raises(grpc.RpcError):
            ControlStub(channel).Stop(pb.StopRequest(reason="mine"), metadata=bearer("guess"), timeout=30)
        for host, port in agents:
            wanted = Wanted(path="w", box=((0, 1),), sources=(f"{host}:{port}",), into=bytearray(4))
            with pytest.raises(UsageError, match="wrong or missing job token"):
                fetch([wanted], token="guess", generation=1, step=1, deadline_s=30, tls=spec.tls)
        for index in range(3):
            stranger = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            stranger.connect(str(spec.socket_path(index)))
            FramedSocket(stranger, WORKER_CODEC).send(Heartbeat(unix_s=1.0))


def assert_token_is_not_shown(spec: JobSpec) -> None:
    """Neither command lines nor environments, nor files that others may read, have the token."""
    token = load_token(spec.directory).encode()
    pids = processes_naming(str(spec.directory))
    workers = 0
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            workers += f"{ENV_SLICE}=".encode() in environment
            assert token not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert token not in environment
    assert workers >= 3
    for path in spec.directory.rglob("*"):
        if path.is_file() and token in path.read_bytes():
            assert (path.name, path.stat().st_mode & 0o7777) == ("token", 0o600)


def assert_memory_is_its_owners_alone(spec: JobSpec) -> None:
    memory = spec.shm_root / f"elastic-{spec.job_id}"
    modes: dict[str, set[int]] = {
        "directory": {memory.stat().st_mode & 0o7777},
        "file": set(),
        "socket": set(),
    }
    for path in memory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat().st_mode & 0o7777
            kind = "directory" if path.is_dir() else "socket" if path.is_socket() else "file"
            modes[kind].add(found)
    assert modes == {"directory": {0o700}, "file": {0o600}, "socket": {0o600}}


def test_job_with_certificates_goes_on_under_attack_and_counts_it(tmp_path: Path) -> None:
    tls = Authority.make(tmp_path, "authority").sign("job")
    run = tmp_path / "run"
    files = ("--tls-cert", str(tls.cert), "--tls-key", str(tls.key), "--tls-ca", str(tls.ca))
    fault = ("--rejoin-after-steps", "3", "--fault", "kill:slice=1@step=60")
    with running(run, "--slices", "3", *files, *fault, *TRAIN) as process:
        wait_for(process, "the job trains", lambda: is_training(run))
        spec = load_job(run)
        assert spec.tls == tls
        assert_token_is_not_shown(spec)
        assert_memory_is_its_owners_alone(spec)
        attack(spec)
        surfaces = {"control", "data-plane", "worker-socket"}
        wait_for(process, "all surfaces tell", lambda: set(status_of(run).get("refused", ())) == surfaces)
        ended = finish(process, run)
    assert_nothing_lost(ended, STEPS)
    assert ended.report.recoveries[0].lost_slices == (1,)
    refused = ended.report.refused
    assert refused["control"]["wrong-token"] == 1
    assert refused["data-plane"]["wrong-token"] == 3
    assert refused["data-plane"]["tls"] >= 3
    assert refused["worker-socket"] == {"unknown-sender": 3}
    assert "Refused: " in ended.output
    assert left_behind(ended.report.run.id) == []


def test_certificates_that_cannot_be_used_end_the_command_before_anything_starts(tmp_path: Path) -> None:
    old = Authority.make(tmp_path, "authority").sign("old", days=-1)
    files = ("--tls-cert", str(old.cert), "--tls-key", str(old.key), "--tls-ca", str(old.ca))
    run = tmp_path / "run"
    ended: Run = finish(start(run, "launch", "--out", str(run), *files, *TRAIN), run)
    assert ended.status == 2
    assert "certificate has expired" in ended.output
    assert not run.exists()


def test_slice_killed_again_and_again_is_kept_away_longer_each_time(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ("--slices", "3", "--rejoin-after-steps", "0", "--quarantine-s", "2")
    endless = (*TRAIN[:-1], "100000")
    killed: list[int] = []

    def is_back() -> bool:
        status = status_of(run)
        member = status["members"][1] if status else {}
        in_world = is_training(run) and 1 in status.get("world", ()) and member["worker"] == "in-world"
        return in_world and member["pid"] not in (0, *killed)

    with running(run, *options, *endless) as process:
        for _ in range(3):
            wait_for(process, "slice 1 trains", is_back)
            killed.append(status_of(run)["members"][1]["pid"])
            os.kill(killed[-1], signal.SIGKILL)
        wait_for(process, "slice 1 is back after its quarantine", is_back)
        assert status_of(run)["members"][1]["losses_in_row"] == 3
    records = list(read_history(run / "events.jsonl"))
    losses = [record for record in of_kind(records, LossDetected) if record.slice_index == 1]
    quarantines = of_kind(records, SliceQuarantined)
    assert len(losses) == 3
    assert [(one.slice_index, one.losses_in_row, one.delay_s) for one in quarantines] == [
        (1, 2, 2),
        (1, 3, 4),
    ]
    for quarantine in quarantines:
        joins = [
            world.unix_s
            for world in of_kind(records, WorldFormed)
            if 1 in world.slices and world.unix_s > quarantine.unix_s
        ]
        assert joins[0] - quarantine.unix_s >= quarantine.delay_s
        assert any(
            quarantine.unix_s < world.unix_s < joins[0] and world.slices == (0, 2)
            for world in of_kind(records, WorldFormed)
        )
