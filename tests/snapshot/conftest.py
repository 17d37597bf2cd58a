"""Eight virtual CPU devices, a private snapshot root for each test, and the helpers on the path."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

sys.path.insert(0, str(Path(__file__).parent))  # `snapshot_helpers`, whatever pytest's import mode

import numpy as np
import pytest
from dataplane_helpers import BIG, GENERATION, TOKEN

from reshard.ids import HostId
from snapshot.arena import Arena
from snapshot.dataplane import DataPlaneServer


@pytest.fixture
def root() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="elastic-slices-test-", dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def arena(root: Path) -> Iterator[Arena]:
    made = Arena.create("job", HostId(1), root=root)
    yield made
    made.close()


@pytest.fixture
def server(arena: Arena) -> Iterator[DataPlaneServer]:
    made = DataPlaneServer(arena, TOKEN, lambda: GENERATION)
    made.start()
    yield made
    made.close()


@pytest.fixture
def address(server: DataPlaneServer) -> str:
    return server.address


@pytest.fixture(scope="session")
def big_state() -> dict[str, np.ndarray]:
    return {"big": np.random.default_rng(0).standard_normal(BIG, np.float32)}
