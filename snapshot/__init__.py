"""Host-memory snapshots: files in /dev/shm that outlive the training process, and how to read them.

Pure surface: importing it loads neither JAX nor gRPC. Capture and restore (`snapshot.capture`,
`snapshot.restore`, `snapshot.tree`) and the data plane (`snapshot.dataplane`) are imported by path.
"""

from snapshot.arena import Arena
from snapshot.checksum import checksum
from snapshot.contents import ArenaContents, RejectedCopy, VerifiedHoldings
from snapshot.digest import state_digest
from snapshot.gc import collect, list_jobs
from snapshot.job import JobLock
from snapshot.journal import JournalRecord
from snapshot.manifest import Manifest, ShardEntry, StaticManifest, is_on_lineage
from snapshot.shm import available_bytes
from snapshot.view import View, open

__all__ = [
    "Arena",
    "ArenaContents",
    "JobLock",
    "JournalRecord",
    "Manifest",
    "RejectedCopy",
    "ShardEntry",
    "StaticManifest",
    "VerifiedHoldings",
    "View",
    "available_bytes",
    "checksum",
    "collect",
    "is_on_lineage",
    "list_jobs",
    "open",
    "state_digest",
]
