"""A private snapshot root for each test, empty again at its end, and the helpers on the path."""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `local_jobs`, whatever pytest's import mode

import pytest

from controller_adapter.local import connect


@pytest.fixture
def root() -> Iterator[Path]:
    """Host memory of the test's jobs; the test fails when something of them is left in it."""
    path = Path(tempfile.mkdtemp(prefix="elastic-slices-test-", dir="/dev/shm"))
    yield path
    if connect._live is not None:
        connect._live.close()
    path.rmdir()
