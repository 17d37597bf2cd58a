"""Growing pauses between attempts that are not calls to be retried (a stream to attach again, a process to
start): how long the next one is, by tenacity's rules.
"""

from __future__ import annotations

import tenacity
from tenacity.wait import wait_base


def pause_s(pauses: wait_base, num_failures: int) -> float:
    """Seconds to wait after so many failures in a row, from 1 on."""
    state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
    state.attempt_number = num_failures
    return pauses(state)
