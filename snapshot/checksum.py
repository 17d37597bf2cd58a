"""Checksums of shard bytes: XXH3 with 64 bits, seed 0 (https://xxhash.com), over the raw bytes.

One function for everything that is compared between hosts, so that equal bytes give equal numbers
whoever computed them: the capture, the agent that serves a shard, the host that receives it.
It finds corruption, not forgery: who may write at all is decided by file modes and the job's token.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt
import xxhash

ByteBuffer = bytes | bytearray | memoryview | npt.NDArray[np.uint8]

CHECKSUM_BYTES = 8


def checksum(buffer: ByteBuffer) -> int:
    """Return the 64-bit XXH3 of a C-contiguous buffer's bytes."""
    return xxhash.xxh3_64_intdigest(cast("bytes", buffer))


def checksum_parts(*parts: ByteBuffer) -> int:
    """Return the checksum of the parts' concatenation, without building it."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(cast("bytes", part))
    return digest.intdigest()
