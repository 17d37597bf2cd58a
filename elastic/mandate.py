"""A coordinator's right to command: waited for, renewed by a thread, checked before every word.

The lease counts from before the last successful renewal began, so whatever the store took, no claimant can
have seen it run out earlier. A right that was lost does not come back: the process ends, and another starts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import tenacity

from elastic.arbiter import ArbiterStore, FencedError, Tenure, Watch, take_office
from reshard.errors import ElasticError

LOOK_EVERY_S = 0.05
RENEWALS_A_LEASE = 6
Clock = Callable[[], float]


class Mandate:
    """The right to command in one epoch; `check` raises FencedError once it is lost."""

    def __init__(
        self, store: ArbiterStore, tenure: Tenure, began_s: float, clock: Clock = time.monotonic
    ) -> None:
        self._store = store
        self._tenure = tenure
        self._clock = clock
        self._until_s = began_s + tenure.lease_s
        self._lost = ""
        self._closed = threading.Event()

    @property
    def epoch(self) -> int:
        """The epoch that every message carries."""
        return self._tenure.epoch

    @property
    def is_valid(self) -> bool:
        """Whether this process may command now."""
        return not self._lost and self._clock() < self._until_s

    def check(self) -> None:
        """Raise FencedError unless this process may command now."""
        if not self.is_valid:
            raise FencedError(self._lost or self._why_late())

    def lose(self, why: str) -> None:
        """Command no more, for good."""
        self._lost = self._lost or why

    def renew(self) -> None:
        """Renew once; a store that cannot be reached leaves the lease as it is. Raises FencedError."""
        began_s = self._clock()
        self.check()
        try:
            renewed = self._store.renew(self._tenure)
        except (OSError, ElasticError):
            self.check()
            return
        if renewed is None:
            self.lose(f"epoch {self.epoch} is over: another coordinator has taken over")
        self.check()
        assert renewed is not None
        self._tenure, self._until_s = renewed, began_s + renewed.lease_s

    def keep(self, on_lost: Callable[[FencedError], None], also: Callable[[], None] = lambda: None) -> None:
        """Renew from a thread, and do `also` after each renewal; `on_lost` is called once, from there."""

        def run() -> None:
            try:
                while not self._closed.wait(self._tenure.lease_s / RENEWALS_A_LEASE):
                    self.renew()
                    also()
            except FencedError as lost:
                on_lost(lost)

        threading.Thread(target=run, name="elastic-mandate", daemon=True).start()

    def close(self) -> None:
        """Renew no more; the record stays, the process's end tells the next one."""
        self._closed.set()

    def _why_late(self) -> str:
        return f"the lease of epoch {self.epoch} could not be renewed within {self._tenure.lease_s:g} s"


def wait_mandate(store: ArbiterStore, lease_s: float, clock: Clock = time.monotonic) -> Mandate:
    """Block until the job's last coordinator is dead or out of its lease, and the next epoch is ours."""
    watch = Watch()

    def try_once() -> Mandate | None:
        began_s = clock()
        seen = store.read()
        claimed = take_office(store, watch, clock(), lease_s, seen)
        return None if claimed is None else Mandate(store, claimed, began_s, clock)

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_result(lambda mandate: mandate is None)
        | tenacity.retry_if_exception_type(OSError),
        wait=tenacity.wait_fixed(LOOK_EVERY_S) + tenacity.wait_random(0, LOOK_EVERY_S),
    )
    mandate = retrying(try_once)
    assert mandate is not None
    return mandate


class FreeMandate(Mandate):
    """Where nobody else can command: a coordinator in a test, or in its only process."""

    def __init__(self) -> None:
        self._lost = ""

    @property
    def epoch(self) -> int:
        """Always the first."""
        return 1

    @property
    def is_valid(self) -> bool:
        """Until it is lost by a word from outside."""
        return not self._lost

    def _why_late(self) -> str:
        return "fenced"

    def close(self) -> None:
        """Nothing is held."""
