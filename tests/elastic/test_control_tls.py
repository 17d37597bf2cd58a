"""The control channel with certificates: both sides are checked, and callers need certificate and token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from certificates import Authority, self_signed

from elastic import control_pb2 as pb
from elastic.control_channel import bearer, open_channel, read_place, server_credentials, write_place
from elastic.control_pb2_grpc import ControlStub
from elastic.control_server import make_server
from elastic.coordinator import Coordinator
from elastic.job import JobSpec, load_token, save_job
from elastic.state import Config
from elastic.status import ask_status
from reshard.errors import RetryLaterError, UsageError
from snapshot.tls import TlsFiles

CALL_S = 20.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(params=["authority", "shared"])
def tls(request: pytest.FixtureRequest, authority: Authority, tmp_path: Path) -> TlsFiles:
    return authority.sign("coordinator") if request.param == "authority" else self_signed(tmp_path, "shared")


@pytest.fixture
def job(tls: TlsFiles, tmp_path: Path) -> Iterator[JobSpec]:
    """A job whose coordinator answers."""
    spec = JobSpec(
        job_id="test", directory=tmp_path / "run", adapter="multicontroller", in_place="proven",
        simulated_faults=False, command=("true",), service_command=(), config=Config(num_slices=2), tls=tls,
    )  # fmt: skip
    token = save_job(spec)
    coordinator = Coordinator(spec, token)
    server, address = make_server(coordinator, token, 2, bind_host=spec.bind_host, tls=tls)
    server.start()
    write_place(spec.directory, address, tls)
    yield spec
    server.stop(grace=None).wait()
    coordinator.close()


def call(job: JobSpec, tls: TlsFiles | None, token: str | None = None) -> grpc.StatusCode:
    """How a call of Status with these credentials ends."""
    place = read_place(job.directory)
    with open_channel(place, tls) as channel:
        try:
            ControlStub(channel).Status(
                pb.StatusRequest(), metadata=bearer(token or load_token(job.directory)), timeout=CALL_S
            )
        except grpc.RpcError as error:
            return error.code()  # type: ignore[no-any-return]
    return grpc.StatusCode.OK


def test_status_of_a_job_with_certificates_is_told(job: JobSpec) -> None:
    assert ask_status(job.directory)["phase"] == "WAITING"


def test_certificate_alone_is_not_enough(job: JobSpec) -> None:
    assert call(job, job.tls) is grpc.StatusCode.OK
    assert call(job, job.tls, "wrong") is grpc.StatusCode.UNAUTHENTICATED


def test_caller_without_a_certificate_of_the_job_never_gets_to_a_call(job: JobSpec, tmp_path: Path) -> None:
    assert job.tls is not None
    stranger = self_signed(tmp_path, "stranger")
    trusting = replace(stranger, ca=job.tls.ca or job.tls.cert)
    for unknown in (stranger, trusting, None):
        assert call(job, unknown) is grpc.StatusCode.UNAVAILABLE
    assert ask_status(job.directory)["refused"] == {}, "gRPC ends these connections before it tells us"


def test_coordinator_with_a_certificate_of_somebody_else_is_not_believed(
    job: JobSpec, tmp_path: Path
) -> None:
    """An impostor at the coordinator's address does not get the token."""
    impostor = self_signed(tmp_path, "impostor")
    coordinator = Coordinator(replace(job, directory=tmp_path), "any")
    server, address = make_server(coordinator, "any", 2, bind_host=job.bind_host, tls=impostor)
    server.start()
    write_place(job.directory, address, impostor)
    with pytest.raises(RetryLaterError, match="does not answer"):
        ask_status(job.directory)
    server.stop(grace=None).wait()
    coordinator.close()


def test_certificate_that_has_expired_is_none_for_a_server(authority: Authority) -> None:
    old = authority.sign("old", days=-1)
    with pytest.raises(UsageError, match="expired"):
        server_credentials(old)
