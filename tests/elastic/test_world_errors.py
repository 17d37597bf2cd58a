"""Which errors of a training loop may come from a lost peer."""

from __future__ import annotations

import jax
import pytest

from elastic.step_errors import may_be_loss

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
