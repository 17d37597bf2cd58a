"""Whether a slice's own devices still work."""

from __future__ import annotations

import threading

import jax

from elastic.device_probe import own_devices, probe_devices


def test_devices_that_work_have_nothing_wrong() -> None:
    devices = own_devices(jax.devices())
    assert set(devices) == set(jax.local_devices())
    assert probe_devices(devices) == ""


def test_device_that_fails_is_named_with_its_error() -> None:
    device = jax.local_devices()[0]

    def fail(_: jax.Device) -> None:
        raise RuntimeError("INTERNAL: uncorrectable error")

    assert probe_devices([device], run=fail) == (
        f"device {device} failed: RuntimeError: INTERNAL: uncorrectable error"
    )


def test_device_that_does_not_answer_is_named_within_the_bound() -> None:
    device, go_on = jax.local_devices()[0], threading.Event()

    def hang(_: jax.Device) -> None:
        go_on.wait()

    try:
        found = probe_devices([device], 0.05, run=hang)
    finally:
        go_on.set()
    assert found == f"device {device} did not answer within 0.05 s"
