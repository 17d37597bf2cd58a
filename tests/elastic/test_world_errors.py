"""Which errors of a training loop may come from a lost peer."""

from __future__ import annotations

import jax
import pytest

from elastic.ports import JobOver, WorldLost
from elastic.step_errors import MAX_TEXT, describe, may_be_loss
from elastic.step_verdict import is_loss
from reshard.errors import UsageError

LOST = "UNKNOWN: Gloo all-reduce failed: [external/gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:1"


def test_error_of_the_runtime_may_be_a_loss_whatever_class_it_has() -> None:
    assert may_be_loss(jax.errors.JaxRuntimeError(LOST))
    assert may_be_loss(ValueError(LOST))  # raised by the dispatch itself, seen with JAX 0.10 on CPU
    wrapped = RuntimeError("the step failed")
    wrapped.__cause__ = ValueError(LOST)
    assert may_be_loss(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("shapes do not fit"),
        ValueError("INVALID_ARGUMENT: no such axis"),
        KeyError("UNKNOWN: x"),
        None,
    ],
)
def test_error_of_the_script_is_no_loss(error: Exception | None) -> None:
    assert not may_be_loss(error)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("oops"), "KeyError: 'oops'"),
        (AssertionError(), "AssertionError"),
        (MemoryError(), "the host is out of memory: MemoryError"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."),
            "the devices are out of memory (micro-batches, max_rows_per_device, need less): JaxRuntimeError:"
            " RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.",
        ),
    ],
)
def test_error_is_told_in_its_own_words_and_memory_as_such(error: Exception, said: str) -> None:
    assert describe(error) == said
    assert len(describe(ValueError("x" * 9000))) == MAX_TEXT


class FakeLink:
    """Answers from a list whether the world was given up; keeps what it was told."""

    def __init__(self, *fenced: bool | JobOver) -> None:
        self.told: list[tuple[object, ...]] = []
        self._fenced = list(fenced)

    def is_fenced(self, generation: int) -> bool:
        return False

    def wait_fenced(self, generation: int, timeout_s: float | None) -> bool:
        answer = self._fenced.pop(0)
        if isinstance(answer, JobOver):
            raise answer
        return answer

    def step_failed(self, generation: int, error: str, devices: str | None = None) -> None:
        self.told.append(("step", error, devices))

    def user_failed(self, error: str, exit_status: int) -> None:
        self.told.append(("user", error, exit_status))


def verdict(error: Exception, *fenced: bool | JobOver) -> tuple[bool, list[tuple[object, ...]]]:
    link = FakeLink(*fenced)
    return is_loss(error, link, 3, jax.local_devices()), link.told  # type: ignore[arg-type]


def test_error_of_the_script_is_told_at_once_with_its_exit_status() -> None:
    assert verdict(FloatingPointError("NaN")) == (False, [("user", "FloatingPointError: NaN", 1)])
    assert verdict(UsageError("no"))[1][0][2] == UsageError("no").exit_status


def test_devices_are_left_alone_where_a_loss_explains_the_error_soon() -> None:
    text = f"ValueError: {LOST}"
    assert verdict(ValueError(LOST), True) == (True, [("step", text, None)])
    assert verdict(WorldLost("given up")) == (True, [])


@pytest.mark.parametrize("decided", [True, False, JobOver("the job was stopped")])
def test_devices_are_probed_where_nothing_explains_the_error(decided: bool | JobOver) -> None:
    found, told = verdict(ValueError(LOST), False, decided)
    assert found is (decided is True)
    assert told == [("step", f"ValueError: {LOST}", None), ("step", f"ValueError: {LOST}", "")]
