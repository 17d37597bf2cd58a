"""One number for a whole state: equal if and only if every leaf's path, dtype, shape and bytes are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import cast

import xxhash

from reshard.errors import UsageError
from snapshot.checksum import ByteBuffer


def state_digest(arrays: Iterable[tuple[str, str, Sequence[int], ByteBuffer]]) -> str:
    """Return the digest, in hex, of (path, dtype, shape, C-order bytes of the whole array) in any order.

    The sharding does not enter it: the bytes are those of the global array. 128 bits of XXH3 for each
    leaf, SHA-256 over the sorted list of them. Raises UsageError when a path comes twice.
    """
    leaves: dict[str, bytes] = {}
    for path, dtype, shape, data in arrays:
        if path in leaves:
            raise UsageError(f"leaf {path} comes twice in a digest", path=path)
        bytes_digest = xxhash.xxh3_128_digest(cast("bytes", data) if len(data) else b"")
        fields = (
            path.encode(),
            dtype.encode(),
            ",".join(str(int(size)) for size in shape).encode(),
            bytes_digest,
        )
        leaves[path] = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    digest = hashlib.sha256(b"elastic-slices state digest 1")
    for path in sorted(leaves):
        digest.update(leaves[path])
    return digest.hexdigest()
