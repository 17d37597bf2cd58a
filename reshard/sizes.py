"""Sizes in words: the one way in which this project writes bytes for people."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """A size for people: `13.4 MB` (decimal units); for a rate, put `/s` behind it."""
    size = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 999.95:  # 999.95 MB would read "1000.0 MB"
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
