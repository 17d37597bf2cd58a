"""The coordinator's service: who may call it, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import msgspec
import pytest

from elastic import control_pb2 as pb
from elastic.control_pb2_grpc import ControlStub
from elastic.control_server import make_server
from elastic.coordinator import Coordinator
from elastic.events import AgentAttached, WorkerState
from elastic.job import HISTORY_FILE, TOKEN_FILE, JobSpec, load_job, load_token, save_job
from elastic.protocol import CONTROL_CODEC
from elastic.records import MessageRefused, of_kind, read_history
from elastic.state import Config

ATTACHED = AgentAttached(
    member=0, worker=WorkerState.NONE, worker_pid=0, generation=0, data_address="127.0.0.1:1"
)


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return JobSpec(
        job_id="test",
        directory=tmp_path,
        adapter="multicontroller",
        in_place="proven",
        simulated_faults=False,
        command=("true",),
        service_command=(),
        config=Config(num_slices=2),
    )


@pytest.fixture
def served(spec: JobSpec) -> Iterator[tuple[Coordinator, ControlStub]]:
    coordinator = Coordinator(spec, "right")
    server, address = make_server(coordinator, "right", 2, bind_host="127.0.0.1", tls=None)
    server.start()
    with grpc.insecure_channel(address) as channel:
        yield coordinator, ControlStub(channel)
    server.stop(grace=None).wait()
    coordinator.close()


def test_call_with_the_token_is_answered(served: tuple[Coordinator, ControlStub]) -> None:
    reply = served[1].Status(pb.StatusRequest(), metadata=(("authorization", "Bearer right"),))
    assert msgspec.json.decode(reply.status)["phase"] == "WAITING"


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)])
@pytest.mark.parametrize("call", ["Status", "Stop", "Note", "Attach"])
def test_call_without_the_token_is_refused_and_written_down(
    served: tuple[Coordinator, ControlStub], spec: JobSpec, metadata: tuple[tuple[str, str], ...], call: str
) -> None:
    calls = {
        "Status": lambda stub: stub.Status(pb.StatusRequest(), metadata=metadata),
        "Stop": lambda stub: stub.Stop(pb.StopRequest(reason="mine"), metadata=metadata),
        "Note": lambda stub: stub.Note(pb.Envelope(), metadata=metadata),
        "Attach": lambda stub: list(stub.Attach(iter([pb.Envelope()]), metadata=metadata)),
    }
    with pytest.raises(grpc.RpcError) as refused:
        calls[call](served[1])
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    records = of_kind(list(read_history(spec.directory / HISTORY_FILE)), MessageRefused)
    assert [(record.reason, record.cause) for record in records] == [
        ("wrong or missing job token", "wrong-token")
    ]
    assert records[0].surface == "control"
    status = msgspec.json.decode(served[0].status())
    assert status["refused"] == {"control": {"wrong-token": 1}}


@pytest.mark.parametrize(
    ("member", "event"),
    [(0, replace(ATTACHED, member=1)), (7, replace(ATTACHED, member=7))],
    ids=["another's slice", "no such slice"],
)
def test_agent_of_a_slice_that_is_not_its_own_is_refused(
    served: tuple[Coordinator, ControlStub], member: int, event: AgentAttached
) -> None:
    name, body = CONTROL_CODEC.encode(event)
    envelope = pb.Envelope(member=member, kind=name, body=body)
    with pytest.raises(grpc.RpcError) as refused:
        list(served[1].Attach(iter([envelope]), metadata=(("authorization", "Bearer right"),)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert msgspec.json.decode(served[0].status())["refused"] == {"control": {"unknown-sender": 1}}


def test_job_file_comes_back_as_it_was_and_the_token_is_its_owners_alone(spec: JobSpec) -> None:
    token = save_job(spec)
    assert load_job(spec.directory) == spec
    assert load_token(spec.directory) == token
    assert (spec.directory / TOKEN_FILE).stat().st_mode & 0o7777 == 0o600
    assert token not in (spec.directory / "job.json").read_text()
