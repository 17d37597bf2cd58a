"""The data plane: agents read shards of snapshots out of each other's arenas, over TCP.

The server sends slot files as they are (`snapshot.dataplane_server`), the caller receives into its own memory
(`snapshot.dataplane_client`); the checksum written at the capture is checked where the bytes arrive. Both
sides prove that they know the job's token (`snapshot.dataplane_auth`). Why:
`docs/decisions/008-data-plane.md`.
"""

from snapshot.dataplane_client import Fetched, Wanted, fetch
from snapshot.dataplane_errors import NotCapturedYetError, OverwrittenError
from snapshot.dataplane_server import DataPlaneServer
from snapshot.tls import TlsFiles

__all__ = [
    "DataPlaneServer",
    "Fetched",
    "NotCapturedYetError",
    "OverwrittenError",
    "TlsFiles",
    "Wanted",
    "fetch",
]
