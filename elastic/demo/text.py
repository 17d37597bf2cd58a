"""Reads real text as windows of bytes: the demo's data set."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import UsageError

__all__ = ["TextWindows", "read_text"]

MAX_TEXT_BYTES = 8 << 20
NOT_STDLIB_SOURCE = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


class TextWindows:
    """A map-style data set: window `i` is bytes `[i * T, i * T + T + 1)` of a text, `T = sequence_length`.

    Windows overlap by one byte, so that every byte but the first is a target once. The text is the Python
    standard library's own source files when `path` is None, else that file or folder (see `read_text`).
    Raises UsageError when the text cannot be read or fills no window.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, sequence_length: int = 16) -> None:
        if sequence_length < 1:
            raise UsageError(f"sequence_length must be at least 1, not {sequence_length}")
        self.sequence_length = sequence_length
        self._text = read_text(path)
        if len(self) < 1:
            source = "the standard library" if path is None else str(path)
            raise UsageError(
                f"too little text in {source}: "
                f"{self._text.size} bytes, one window needs {sequence_length + 1}"
            )

    def __len__(self) -> int:
        return max(0, self._text.size - 1) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, npt.NDArray[np.int32]]:
        """Return `{"tokens": int32 (T+1,)}`; IndexError past the end, so plain iteration ends."""
        return {"tokens": self.rows(np.asarray([index]))["tokens"][0]}

    def rows(self, ids: npt.NDArray[np.integer[Any]]) -> dict[str, npt.NDArray[np.int32]]:
        """Return `{"tokens": int32 (len(ids), T+1)}` for 1-D sample ids; raises IndexError."""
        ids = np.asarray(ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= len(self)):
            raise IndexError(f"sample ids must be in [0, {len(self)}), got {ids.min()} to {ids.max()}")
        offsets = ids[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        return {"tokens": self._text[offsets].astype(np.int32)}


def read_text(
    path: str | os.PathLike[str] | None = None, *, max_bytes: int = MAX_TEXT_BYTES
) -> npt.NDArray[np.uint8]:
    """Return the first `max_bytes` bytes of a text, the same on every call.

    A folder is its files one after the other, in sorted order of their relative paths, hidden ones left
    out; None is the standard library's `*.py` files without its tests. Raises UsageError naming the file
    that cannot be read.
    """
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        files = _files(root, pattern="*.py", skip=NOT_STDLIB_SOURCE)
    else:
        root = Path(path)
        files = _files(root)
    parts: list[bytes] = []
    room = max_bytes
    try:
        for file in files:
            if room <= 0:
                break
            with file.open("rb") as stream:
                parts.append(stream.read(room))
            room -= len(parts[-1])
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or root}: {error.strerror or error}") from error
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _files(root: Path, *, pattern: str = "*", skip: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the regular files of a text in order; `root` may be one of them."""
    if not root.is_dir():
        if root.exists() and not root.is_file():
            raise UsageError(f"cannot read {root}: neither a regular file nor a folder")
        yield root  # a missing one raises on opening, with the system's own words
        return
    os.scandir(root).close()  # an unreadable folder must raise: rglob passes over it in silence
    found = {file.relative_to(root): file for file in root.rglob(pattern) if file.is_file()}
    for relative in sorted(found, key=Path.as_posix):
        hidden = any(part.startswith(".") for part in relative.parts)
        if not hidden and skip.isdisjoint(relative.parts[:-1]):
            yield found[relative]
