"""Where a coordinator listens, as its agents find it."""

from __future__ import annotations

import contextlib

from elastic.control_channel import read_place, write_place
from elastic.job import JobSpec
from elastic.mandate import Mandate
from reshard.errors import ElasticError


class KeptPlace:
    """Where this coordinator listens, for the agents; written again should a stale one have replaced it."""

    def __init__(self, spec: JobSpec, address: str, mandate: Mandate) -> None:
        self._spec = spec
        self._address = address
        self._mandate = mandate

    def write(self) -> None:
        """Write it. Raises FencedError."""
        self._mandate.check()
        write_place(self._spec.directory, self._address, self._spec.tls, self._mandate.epoch)

    def keep(self) -> None:
        """Write it again if it is not there."""
        with contextlib.suppress(OSError, ElasticError):
            if read_place(self._spec.directory).epoch < self._mandate.epoch:
                self.write()
