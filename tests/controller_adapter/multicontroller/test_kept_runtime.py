import jax
import pytest
from jax._src import distributed
from jax.experimental import multihost_utils

from controller_adapter.multicontroller import jax_private
from reshard.errors import UsageError


class Client:
    """A client of a coordination service."""

    def key_value_set(self, key: str, value: str) -> str:
        return f"{key}={value}"

    def wait_at_barrier(self, name: str) -> None:
        raise AssertionError("nobody must wait for the lost")


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in jax_private._MEETINGS:
        monkeypatch.setattr(multihost_utils, name, getattr(multihost_utils, name))
    monkeypatch.setattr(distributed.global_state, "client", Client())


def test_what_would_wait_for_a_lost_process_is_refused_in_words():
    jax_private.guard_kept("slice 1")
    for name in jax_private._MEETINGS:
        with pytest.raises(UsageError, match=f"multihost_utils.{name} would wait for ever: slice 1 is lost"):
            getattr(multihost_utils, name)("x")
    with pytest.raises(UsageError, match="barrier"):
        distributed.global_state.client.wait_at_barrier("x")


def test_rest_of_the_client_stays_as_it_is_also_after_a_second_loss():
    for lost in ("slice 1", "slices 1 and 2"):
        jax_private.guard_kept(lost)
    assert distributed.global_state.client.key_value_set("a", "b") == "a=b"


def test_kept_traces_are_caches_that_this_jax_has():
    jax.jit(lambda x: x + 1).trace(1.0)
    names = {jax_private._name_of(function) for function in jax_private.util._caches.values()}
    assert {"_infer_params_cached", "trace_to_jaxpr", "_cached_abstract_eval"} <= names
