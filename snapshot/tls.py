"""The certificates of a job: the files, and whether they can be used, found out before anything starts.

The same files serve the data plane and the control channel. Each side shows its certificate and checks the
other's; so one that its own authority did not sign, or that has run out, is of no use on either side.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.errors import UsageError

_WILDCARD = "*."


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files for TLS, the same kind on every host; each side shows its certificate and checks the other's.

    It is checked against `ca`, or without one must be `cert` itself, shared by the whole job. The names in
    certificates are not looked at: hosts are known by certificate and token, their addresses change.
    """

    cert: Path
    key: Path
    ca: Path | None = None

    def server_context(self) -> ssl.SSLContext:
        """Return the context of the side that listens. Raises UsageError for files that cannot be used."""
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """Return the context of the side that calls. Raises UsageError for files that cannot be used."""
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def __str__(self) -> str:
        return ", ".join(str(path) for path in (self.cert, self.key, self.ca) if path is not None)

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(self.cert, self.key)
            context.load_verify_locations(self.ca or self.cert)
        except OSError as error:
            raise UsageError(f"TLS files {self} cannot be used: {error}") from error
        return context


def tls_files(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """Return the files as given on a command line, tried once against themselves; None for none.

    Raises UsageError when they are not complete or cannot be used.
    """
    if cert is None or key is None:
        if cert is None and key is None and ca is None:
            return None
        raise UsageError(
            "TLS needs a certificate and its key", remedy="Give --tls-cert and --tls-key, or none."
        )
    files = TlsFiles(cert=cert.absolute(), key=key.absolute(), ca=None if ca is None else ca.absolute())
    certificate_name(files)
    return files


def certificate_name(files: TlsFiles) -> str:
    """Return a name in the certificate, by which a caller that insists on one can ask for it.

    Its files are used on both sides of one handshake in memory. Raises UsageError when they cannot be read,
    do not belong together, the certificate has expired, or is not of the authority; or when it has no name.
    """
    shown = _shown_to_itself(files)
    names = dict(reversed([(kind, name) for kind, name in shown.get("subjectAltName", ())]))
    common = (value for part in shown.get("subject", ()) for key, value in part if key == "commonName")
    name = names.get("DNS") or names.get("IP Address") or next(common, "")
    if not name:
        raise UsageError(
            f"the certificate {files.cert} has no name",
            remedy="Make one with a subject alternative name (DNS:…) or a common name.",
        )
    return f"any.{name.removeprefix(_WILDCARD)}" if name.startswith(_WILDCARD) else str(name)


def _shown_to_itself(files: TlsFiles) -> dict[str, Any]:
    """The certificate as a caller sees it. Raises UsageError when one of the sides refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = files.server_context().wrap_bio(to_server, to_client, server_side=True)
    client = files.client_context().wrap_bio(to_client, to_server)
    try:
        for side in (client, server, client, server):  # hello; answer; certificate; done
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason
        raise UsageError(
            f"TLS files {files} cannot be used: who is given the same refuses the certificate: {why}",
            remedy="Give a certificate that is in force, and with --tls-ca the authority that signed it.",
        ) from error
    return client.getpeercert() or {}
