"""Settings every test shares: eight virtual CPU devices, how hard Hypothesis searches, and what is drawn."""

import os
import random

# Before anything imports JAX, in this process or in one that a test starts.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import pytest
from hypothesis import HealthCheck, settings

# A deadline per example measures the machine's load, not the code.
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# `make test` has few minutes, `make test-all` searches deep; some tests take a multiple of these numbers.
settings.register_profile("ci", derandomize=True, max_examples=25, print_blob=True, database=None, **QUIET)
settings.register_profile("dev", max_examples=25, **QUIET)
settings.register_profile("deep", max_examples=1000, print_blob=True, **QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

SEED_VARIABLE = "ELASTIC_FAULT_SEED"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--draw`."""
    parser.addoption(
        "--draw",
        action="store_true",
        help=f"run one test of each family (mark `family`), drawn by the seed in {SEED_VARIABLE} (1)",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    """The seed, so that a draw can be repeated."""
    return f"draw: {SEED_VARIABLE}={_seed()}" if config.getoption("--draw") else None


@pytest.hookimpl(trylast=True)  # after `-m` and `-k`: what they leave out is not drawn
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--draw`, leave out all but one test of each family."""
    if not config.getoption("--draw"):
        return
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if mark := item.get_closest_marker("family"):
            families.setdefault(mark.args[0], []).append(item)
    drawn = {random.Random(f"{_seed()} {name}").choice(members) for name, members in families.items()}
    left_out = [item for members in families.values() for item in members if item not in drawn]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _seed() -> str:
    return os.environ.get(SEED_VARIABLE, "1")
