import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("dropped_backends.py")
BOUND_S = 120


def free_addresses(num: int) -> list[str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    return addresses


@pytest.mark.timeout(2 * BOUND_S)
def test_dropped_backends_are_gone_though_a_program_was_compiled_for_all():
    """One that stays keeps its client, which aborts the process once the service of that world ends."""
    command = [sys.executable, str(SCRIPT)]
    addresses = free_addresses(3)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [*command, str(rank), *addresses],
            env=environment,
            stdin=subprocess.PIPE,  # a process stays until it is closed: the services are in the first one
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        told = [process.communicate(timeout=BOUND_S)[0].splitlines() for process in reversed(processes)]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [[line for line in lines if line.startswith("alive")] for lines in told] == [["alive 0"] * 3] * 2
    # Both programs are traced in the first world only.
    assert [[line for line in lines if line.startswith("traced")] for lines in told] == [["traced 2"] * 3] * 2
