"""Certificates that cannot serve a job are found before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import Authority, self_signed

from reshard.errors import UsageError
from snapshot.tls import TlsFiles, certificate_name, tls_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certificates")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority.make(folder, "authority")


@pytest.mark.parametrize(
    ("alternative", "name"),
    [
        ("", "common"),
        ("DNS:job.example,DNS:other.example", "job.example"),
        ("IP:10.0.0.1", "10.0.0.1"),
        ("IP:10.0.0.1,DNS:job.example", "job.example"),
        ("DNS:*.example", "any.example"),
    ],
)
def test_name_to_ask_for_is_one_that_is_in_the_certificate(folder: Path, alternative: str, name: str) -> None:
    assert certificate_name(self_signed(folder, "common", alternative=alternative)) == name


def test_certificate_of_an_authority_is_accepted_with_it_alone(folder: Path, authority: Authority) -> None:
    host = authority.sign("host")
    assert tls_files(host.cert, host.key, host.ca) == host
    with pytest.raises(UsageError, match=r"refuses the certificate: .*issuer.*--tls-ca"):
        tls_files(host.cert, host.key, None)
    with pytest.raises(UsageError, match=r"refuses the certificate: .*issuer"):
        tls_files(host.cert, host.key, self_signed(folder, "another").cert)


def test_certificate_that_has_expired_is_refused(authority: Authority) -> None:
    old = authority.sign("old", days=-1)
    with pytest.raises(UsageError, match="certificate has expired"):
        tls_files(old.cert, old.key, old.ca)


def test_certificate_without_a_name_is_refused(authority: Authority) -> None:
    with pytest.raises(UsageError, match="has no name"):
        certificate_name(authority.sign("nameless", subject="/O=nobody"))


def test_key_of_another_certificate_and_missing_files_are_refused(authority: Authority, folder: Path) -> None:
    one, other = authority.sign("one"), authority.sign("other")
    with pytest.raises(UsageError, match="cannot be used"):
        tls_files(one.cert, other.key, one.ca)
    with pytest.raises(UsageError, match=r"missing\.pem.*cannot be used: .*No such file"):
        tls_files(folder / "missing.pem", one.key, one.ca)
    with pytest.raises(UsageError, match="a certificate and its key"):
        tls_files(None, None, one.ca)
    assert str(TlsFiles(cert=Path("a"), key=Path("b"))) == "a, b"
