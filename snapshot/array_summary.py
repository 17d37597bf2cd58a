"""One array in a few figures, and as a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard.errors import UsageError

BLOCK_ELEMENTS = 1 << 20
NUM_FIRST_VALUES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySummary:
    """Figures of one array; NaN are left out of min, max and mean, which are None when there is nothing else.

    Of complex numbers they are those of the absolute values.
    """

    num_elements: int
    num_nan: int
    min: float | None
    max: float | None
    mean: float | None
    first_values: tuple[str, ...]


def summarise(elements: npt.NDArray[Any]) -> ArraySummary:
    """Return the figures of an array of any dtype; needs little more memory than the array has."""
    flat = elements.reshape(-1)
    first = tuple(str(value) for value in flat[:NUM_FIRST_VALUES])
    low, high, total, num_counted, num_nan = np.inf, -np.inf, 0.0, 0, 0
    is_numeric = _is_numeric(flat.dtype)
    for start in range(0, flat.size if is_numeric else 0, BLOCK_ELEMENTS):
        block = _as_floats(flat[start : start + BLOCK_ELEMENTS])
        good = block[~np.isnan(block)]
        num_nan += block.size - good.size
        if good.size:
            low, high = min(low, float(good.min())), max(high, float(good.max()))
            with np.errstate(invalid="ignore"):  # inf - inf: the mean is then NaN
                total += float(good.sum())
            num_counted += good.size
    return ArraySummary(
        num_elements=flat.size,
        num_nan=num_nan,
        min=low if num_counted else None,
        max=high if num_counted else None,
        mean=total / num_counted if num_counted else None,
        first_values=first,
    )


def save_array(elements: npt.NDArray[Any], out: Path, dtype: str | None = None) -> None:
    """Write an array in numpy's format, whole or not at all; with `dtype`, converted to it first.

    Types that numpy itself lacks (bfloat16, float8, int4) are written as raw bytes of their size, which
    `np.load(out).view(ml_dtypes.bfloat16)` reads. Raises UsageError for a dtype or file that cannot be.
    """
    try:
        converted = elements if dtype is None else elements.astype(np.dtype(dtype))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{elements.dtype} cannot be converted to {dtype!r}: {error}") from error
    if np.dtype(converted.dtype.str) != converted.dtype:
        converted = converted.view(np.dtype(f"V{converted.dtype.itemsize}"))
    part = out.with_name(out.name + ".part")
    try:
        with part.open("wb") as file:
            np.lib.format.write_array(file, converted, allow_pickle=False)
        os.replace(part, out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UsageError(f"cannot write {out}: {error}") from error


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biufc" or np.can_cast(dtype, np.float64)


def _as_floats(block: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    values = np.abs(block) if block.dtype.kind == "c" else block
    return values.astype(np.float64)
