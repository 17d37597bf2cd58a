"""The compile cache may be wherever `etils.epath` gets to: the place is handed on unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from controller_adapter.multicontroller import adapter
from elastic.job import JobSpec
from elastic.state import Config

STORE = """
import sys
from etils import epath
from etils.epath import register
def open_path(path):
    return epath.Path(sys.argv[1] + path.removeprefix("store:/"))
register._URI_PREFIXES_TO_CLS["store://"] = open_path
from controller_adapter.multicontroller import jax_private
jax_private.share_compile_cache()
import jax
jax.jit(lambda x: 2 * x + 1)(1.0)
"""


def test_place_of_the_compile_cache_reaches_the_workers_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = JobSpec(
        job_id="j", directory=tmp_path, adapter="multicontroller", in_place="proven", simulated_faults=False,
        command=(), service_command=(), config=Config(num_slices=1),
    )  # fmt: skip
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "gs://bucket/cache")
    assert adapter().worker_environment(spec)["JAX_COMPILATION_CACHE_DIR"] == "gs://bucket/cache"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    assert adapter().worker_environment(spec)["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "compile-cache")


def test_compile_cache_of_another_kind_of_path_is_written(tmp_path: Path) -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": "store://cache"}
    subprocess.run([sys.executable, "-c", STORE, str(tmp_path)], env=environment, check=True)
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.name.endswith("-cache")]
