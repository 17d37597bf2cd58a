"""JAX's coordination service in a process of its own; `elastic.runtime_service` says how to speak to it."""

from __future__ import annotations

import os
import socket
import sys
import threading

from elastic.leash import leash_fd, watch_leash

ATTEMPTS = 20


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> None:
    """Serve until the launcher is gone; without one, or before it serves, until standard input ends."""
    watch_leash(lambda: os._exit(1))
    from controller_adapter.multicontroller.jax_private import start_service  # long: after the leash

    print("READY", flush=True)
    words = sys.stdin.readline().split()
    if len(words) != 3 or words[0] != "START":
        return
    num_processes, host = int(words[1]), words[2]
    for attempt in range(ATTEMPTS):
        address = f"{host}:{_free_port(host)}"
        try:
            service = start_service(address, num_processes)
        except RuntimeError:
            if attempt == ATTEMPTS - 1:
                raise
            continue  # somebody took the port between our look and our bind
        print(f"UP {address}", flush=True)
        if leash_fd() is not None:
            threading.Event().wait()  # a coordinator's end is not ours: another one takes over
        sys.stdin.read()
        del service
        os._exit(0)


if __name__ == "__main__":
    main()
