"""An error has come out of a training loop: a lost slice, or the script's own?"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from elastic.device_probe import own_devices, probe_devices
from elastic.ports import JobOver, Link, WorldLost
from elastic.step_errors import describe, may_be_loss
from reshard.errors import ElasticError

PROBE_AFTER_S = 1.0
"""A lost slice is nearly always known by then. Devices are not touched before: a world that is given up is
left at once."""
CONFIRM_S = 60.0
"""How long an error waits for the word whether it was a loss; the coordinator decides much sooner."""


def is_loss(error: Exception, link: Link, generation: int, devices: Sequence[jax.Device]) -> bool:
    """Whether the coordinator gives the world up because of this error.

    It is told at once of an error that is the script's own. Of any other too, and, if no loss explains it,
    whether this slice's devices are well.
    """
    if isinstance(error, WorldLost) or link.is_fenced(generation):
        return True
    text = describe(error)
    if not may_be_loss(error):
        link.user_failed(text, error.exit_status if isinstance(error, ElasticError) else 1)
        return False
    link.step_failed(generation, text)
    try:
        if link.wait_fenced(generation, PROBE_AFTER_S):
            return True
        link.step_failed(generation, text, probe_devices(own_devices(devices)))
        return link.wait_fenced(generation, CONFIRM_S)
    except JobOver:
        return False
