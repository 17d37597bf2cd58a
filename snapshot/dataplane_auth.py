"""Who may talk on the data plane: both sides prove that they know the job's token, and TLS where asked for.

    ← magic, server nonce
    → magic, client nonce, HMAC-SHA256(token, "client", server nonce, client nonce)
    ← verdict, HMAC-SHA256(token, "server", server nonce, client nonce)

The token never travels; a proof is of no use on another connection, as each side chose a nonce of it. Without
TLS the bytes that follow are neither secret nor safe from who can change packets: for trusted networks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time

from reshard.errors import RetryLaterError, UsageError
from snapshot.dataplane_wire import ProtocolError, receive, send

MAGIC = b"ELADPL\x00\x01"
NONCE_BYTES = PROOF_BYTES = 32
HANDSHAKE_S = 2.0
"""How long a caller has to prove itself, and how long a server has to answer."""

_ADMITTED, _REFUSED, _BUSY = b"\0", b"\1", b"\2"


def _proof(token: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(token, side + server_nonce + client_nonce, hashlib.sha256)


def challenge(connection: socket.socket, token: bytes, until_s: float) -> bytes | None:
    """Server: have the caller prove itself. Return our own proof for `admit`, None for one to `refuse`.

    Raises OSError when the caller speaks another language or takes longer than `until_s` (monotonic).
    """
    nonce = os.urandom(NONCE_BYTES)
    send(connection, MAGIC + nonce)
    if receive(connection, len(MAGIC), until_s) != MAGIC:
        raise ProtocolError("not a caller of the data plane")
    answer = bytes(receive(connection, NONCE_BYTES + PROOF_BYTES, until_s))
    client_nonce, proof = answer[:NONCE_BYTES], answer[NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(token, b"client", nonce, client_nonce)):
        return None
    return _proof(token, b"server", nonce, client_nonce)


def admit(connection: socket.socket, proof: bytes) -> None:
    """Server: let a caller in that has proved itself."""
    send(connection, _ADMITTED + proof)


def refuse(connection: socket.socket) -> None:
    """Server: tell a caller that it has not proved itself."""
    send(connection, _REFUSED + bytes(PROOF_BYTES))


def turn_away(connection: socket.socket) -> None:
    """Server: tell a caller that has proved itself to come again later."""
    send(connection, _BUSY + bytes(PROOF_BYTES))


def authenticate(connection: socket.socket, token: bytes, address: str) -> None:
    """Client: prove that we know the token, and have the server prove it.

    Raises UsageError when one of them does not, RetryLaterError when the server is full, OSError.
    """
    until_s = time.monotonic() + HANDSHAKE_S
    if receive(connection, len(MAGIC), until_s) != MAGIC:
        raise ProtocolError(f"{address} does not speak the data plane's protocol, or another version of it")
    server_nonce, client_nonce = bytes(receive(connection, NONCE_BYTES, until_s)), os.urandom(NONCE_BYTES)
    send(connection, MAGIC + client_nonce + _proof(token, b"client", server_nonce, client_nonce))
    answer = bytes(receive(connection, 1 + PROOF_BYTES, until_s))
    verdict, proof = answer[:1], answer[1:]
    same_job = "Give both agents the token of the same job."
    if verdict == _REFUSED:
        raise UsageError(f"agent at {address}: wrong or missing job token", remedy=same_job, address=address)
    if verdict == _BUSY:
        raise RetryLaterError(f"agent at {address} has as many callers as it can serve", address=address)
    if not hmac.compare_digest(proof, _proof(token, b"server", server_nonce, client_nonce)):
        raise UsageError(
            f"who answers at {address} does not know the job's token", remedy=same_job, address=address
        )
