"""Batches on a mesh: what a data set must leave to the engine."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from elastic.data import BatchMaker, Rows
from reshard.errors import UsageError


class Samples:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Rows:
        return {"x": np.float32(index), "weight": np.float32(2.0)}


def test_weights_do_not_replace_an_array_of_the_samples() -> None:
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
    ids = np.arange(4)
    assert BatchMaker(mesh, "data", Samples(), 4, "mask").make(ids)["weight"].tolist() == [2.0] * 4
    with pytest.raises(UsageError, match="have an array 'weight' already"):
        BatchMaker(mesh, "data", Samples(), 4, "weight").make(ids)
