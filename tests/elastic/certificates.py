"""Real certificates, made with the openssl command: of one's own, or signed by an authority."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from snapshot.tls import TlsFiles

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def self_signed(folder: Path, name: str, *, alternative: str = "") -> TlsFiles:
    """One certificate that a whole job shares."""
    files = TlsFiles(cert=folder / f"{name}.pem", key=folder / f"{name}.key")
    extra = ("-addext", f"subjectAltName={alternative}") if alternative else ()
    subject = ("-subj", f"/CN={name}", "-days", "2")
    _openssl("req", "-x509", *_NEW_KEY, "-keyout", files.key, "-out", files.cert, *subject, *extra)
    return files


@dataclass(frozen=True, slots=True, kw_only=True)
class Authority:
    """Signs certificates of hosts."""

    folder: Path
    files: TlsFiles

    @classmethod
    def make(cls, folder: Path, name: str) -> Authority:
        """An authority with a certificate of its own."""
        return cls(folder=folder, files=self_signed(folder, name))

    def sign(self, name: str, *, subject: str = "", days: int = 2) -> TlsFiles:
        """A certificate of a host; with `days` -1 it has expired."""
        files = TlsFiles(
            cert=self.folder / f"{name}.pem", key=self.folder / f"{name}.key", ca=self.files.cert
        )
        request = self.folder / f"{name}.csr"
        wanted = ("-subj", subject or f"/CN={name}")
        _openssl("req", "-new", *_NEW_KEY, "-keyout", files.key, "-out", request, *wanted)
        signed_by = ("-CA", self.files.cert, "-CAkey", self.files.key, "-set_serial", "7")
        _openssl("x509", "-req", "-in", request, *signed_by, "-days", str(days), "-out", files.cert)
        return files


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
