"""Plan files for the tests: the shipped examples, and a small one whose numbers are easy to follow."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples" / "plans"

SMALL = """\
title = "small"

[cluster]
accelerator = "custom"
slices = 4
hosts_per_slice = 2

[cluster.figures]
chips_per_host = 2
host_network_bytes_s = 1000.0
host_copy_bytes_s = 500.0
host_memory_bytes = 1e6
device_memory_bytes = 1e5

[mesh]
axes = { data = -1, fsdp = 4 }
elastic = "data"

[model]
optimizer = "none"

[[model.arrays]]
path = "w"
shape = [16, 100]
spec = ["fsdp"]

[training]
global_batch = 96
batch_axes = ["data", "fsdp"]
step_s = 6.0
"""


def changed(*changes: tuple[str, str]) -> str:
    """Return the small file with some texts replaced; each must be there once."""
    text = SMALL
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text
