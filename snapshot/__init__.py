"""Host-memory snapshots: files in /dev/shm that outlive the training process, and how to read them.

`snapshot.open` shows a running job's state as numpy arrays.

Pure surface: importing it loads neither JAX nor gRPC. Capture and restore (`snapshot.capture`,
`snapshot.restore`, `snapshot.tree`) and the data plane (`snapshot.dataplane`) are imported by path.
"""

from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.contents import ArenaContents, RejectedCopy
from snapshot.digest import state_digest
from snapshot.gc import collect, list_jobs
from snapshot.job import JobLock
from snapshot.journal import JournalRecord
from snapshot.manifest import Manifest, StaticManifest, is_on_lineage
from snapshot.shm import available_bytes
from snapshot.view import View, open

__all__ = [
    "Arena",
    "ArenaContents",
    "JobLock",
    "JournalRecord",
    "Manifest",
    "RejectedCopy",
    "StaticManifest",
    "View",
    "available_bytes",
    "checksum",
    "collect",
    "is_on_lineage",
    "list_jobs",
    "open",
    "state_digest",
]
