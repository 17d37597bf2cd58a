"""Eight virtual CPU devices for the comparisons with JAX, and the shared strategies on the path."""

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

sys.path.insert(0, str(Path(__file__).parent))  # `reshard_strategies`, whatever pytest's import mode
