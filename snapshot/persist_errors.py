"""Errors of the operating system and of TensorStore as ours, by what can be done about them."""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Iterator
from pathlib import Path

from reshard.boxes import Box
from reshard.errors import CorruptCopyError, ElasticError, MissingShardError, PersistentTierError

_REASONS = {
    "no-space": (errno.ENOSPC, errno.EDQUOT, errno.EFBIG),
    "permission": (errno.EACCES, errno.EPERM, errno.EROFS),
    "missing": (errno.ENOENT, errno.ENOTDIR),
}
_REMEDIES = {
    "no-space": "Make room there, or keep fewer; training goes on, and the next snapshot is written anew.",
    "permission": "Mount it writable, or change its mode; training goes on meanwhile.",
    "missing": "Make the directory or mount the file system; training goes on meanwhile.",
}
_OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # the one place where TensorStore tells the errno


def write_error(error: Exception, where: Path | str) -> ElasticError:
    """Return our error for one that happened while `where` was written; ours stay as they are."""
    if isinstance(error, ElasticError):
        return error
    found = _OS_ERROR.search(str(error))
    code = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
    reason = next((name for name, codes in _REASONS.items() if code in codes), "io")
    return PersistentTierError(reason, f"{where} cannot be written: {error}", remedy=_REMEDIES.get(reason))


@contextlib.contextmanager
def writing(where: Path | str) -> Iterator[None]:
    """Turn errors of the system within into PersistentTierError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise write_error(error, where) from error


def read_error(error: Exception, path: str, box: Box, step: int) -> ElasticError:
    """Return our error for one that TensorStore raised while a box was read."""
    text = str(error)
    if text.startswith("NOT_FOUND"):
        return MissingShardError(path, box, step)
    return CorruptCopyError(
        f"persisted step {step}: {path!r} cannot be read: {text}", path=path, box=box, step=step
    )
