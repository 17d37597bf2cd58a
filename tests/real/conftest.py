"""The undisturbed run that disturbed ones are compared with: made once."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_runs import Run, assert_nothing_lost, demo


@pytest.fixture(scope="session")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A demo run without a fault."""
    directory: Path = tmp_path_factory.mktemp("baseline")
    run = demo(directory)
    assert_nothing_lost(run)
    return run
