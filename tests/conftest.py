"""Settings every test shares: eight virtual CPU devices, and how hard Hypothesis searches."""

import os

# Before anything imports JAX, in this process or in one that a test starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from hypothesis import HealthCheck, settings

# A deadline per example measures the machine's load, not the code.
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# `make test` has few minutes, `make test-all` searches deep; some tests take a multiple of these numbers.
settings.register_profile("ci", derandomize=True, max_examples=25, print_blob=True, database=None, **QUIET)
settings.register_profile("dev", max_examples=25, **QUIET)
settings.register_profile("deep", max_examples=1000, print_blob=True, **QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
