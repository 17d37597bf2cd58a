"""The local link keeps the contract of every link."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from local_jobs import make_spec

sys.path.insert(0, str(Path(__file__).parents[2] / "elastic" / "contracts"))
from link_contract import LinkContract

from controller_adapter.local import adapter
from controller_adapter.local.link import LocalLink


@dataclass(slots=True)
class LocalJob:
    """A local job of three slices."""

    link: LocalLink

    def lose_other_slice(self) -> None:
        self.link.engine.inject("kill", (1,))

    def stop(self) -> None:
        self.link.engine.stop("enough")


class TestLocalLink(LinkContract):
    @pytest.fixture
    def job(self, tmp_path: Path, root: Path) -> Iterator[LocalJob]:
        link, _ = adapter().connect(make_spec(tmp_path, root), 0)
        assert isinstance(link, LocalLink)
        yield LocalJob(link)
        link.engine.close()
