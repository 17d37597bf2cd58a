"""Hosts on one machine, each in a network namespace of its own, and cutting the network between them.

Namespaces `NAME-hub` (coordinator, runtime service, launcher) and `NAME-0`, `NAME-1`, … (one a slice) hang on
one bridge. A cut loses packets without a word, as a broken switch does: nobody gets an error or a reset. It
needs root and iproute2, touches nothing but these namespaces, and `close` removes them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterable
from types import TracebackType

from reshard.errors import UsageError

HUB = "hub"
Party = int | str
"""A slice's index, or `HUB`."""
_NETWORK = "10.77.0"
_NOWHERE = "02:00:00:00:00:01"
"""A link address that nobody has: what is sent there is lost."""
MAX_HOSTS = 10


def what_is_missing() -> str:
    """Why namespaces cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    for tool in ("ip", "nsenter"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian: apt-get install iproute2 util-linux)"
    return ""


class NamespaceNet:
    """The network of `num_hosts` hosts and a hub; every pair can be cut and healed, in one direction or both.

    Raises UsageError where namespaces cannot be made.
    """

    def __init__(self, name: str, num_hosts: int) -> None:
        if missing := what_is_missing():
            raise UsageError(missing)
        if not 1 <= num_hosts <= MAX_HOSTS:
            raise UsageError(f"{num_hosts} hosts: there is room for 1 to {MAX_HOSTS}")
        self._name = name
        self.hosts: tuple[int, ...] = tuple(range(num_hosts))
        self._cuts: set[tuple[Party, Party]] = set()
        self._made: list[str] = []
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> NamespaceNet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- who is where ----

    def address(self, party: Party) -> str:
        """The address of a host, or of the hub."""
        return f"{_NETWORK}.1" if party == HUB else f"{_NETWORK}.1{party}"

    @property
    def agent_bind_host(self) -> str:
        """For `--agent-bind-host`."""
        return f"{_NETWORK}.1{{slice}}"

    @property
    def host_prefix(self) -> str:
        """For `--host-prefix`."""
        return f"nsenter --net=/run/netns/{self._name}-{{slice}}"

    @property
    def hub_prefix(self) -> tuple[str, ...]:
        """What goes before the command of the launcher."""
        return ("nsenter", f"--net=/run/netns/{self._name}-{HUB}")

    # ---- cuts ----

    def cut(self, one: Party, other: Party, *, one_way: bool = False) -> None:
        """Lose all packets from `one` to `other`, and, unless `one_way`, back."""
        for sender, receiver in ((one, other),) if one_way else ((one, other), (other, one)):
            _ip(
                *("-n", self._space(sender), "neigh", "replace", self.address(receiver), "lladdr", _NOWHERE),
                *("dev", self._device(sender), "nud", "permanent"),
            )
            self._cuts.add((sender, receiver))

    def cut_off(self, parties: Iterable[Party]) -> None:
        """Cut these parties off from all others; among themselves they are connected."""
        inside: set[Party] = set(parties)
        everybody: tuple[Party, ...] = (HUB, *self.hosts)
        for one in inside:
            for other in everybody:
                if other not in inside:
                    self.cut(one, other)

    def heal(self) -> None:
        """Let all packets through again."""
        for sender, receiver in sorted(self._cuts, key=str):
            _ip(
                "-n", self._space(sender), "neigh", "del", self.address(receiver), "dev", self._device(sender)
            )
        self._cuts.clear()

    def close(self) -> None:
        """Remove the namespaces, with all that is connected through them."""
        for space in self._made:
            with contextlib.suppress(UsageError):
                _ip("netns", "del", space)
        self._made.clear()

    # ---- making ----

    def _make(self) -> None:
        hub = self._space(HUB)
        self._add(hub)
        _ip("-n", hub, "link", "add", "br0", "type", "bridge")
        _ip("-n", hub, "addr", "add", f"{self.address(HUB)}/24", "dev", "br0")
        _ip("-n", hub, "link", "set", "br0", "up")
        for host in self.hosts:
            space = self._space(host)
            self._add(space)
            _ip("-n", hub, "link", "add", f"v{host}", "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("-n", hub, "link", "set", f"v{host}", "master", "br0", "up")
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")

    def _add(self, space: str) -> None:
        _ip("netns", "add", space)
        self._made.append(space)
        _ip("-n", space, "link", "set", "lo", "up")

    def _space(self, party: Party) -> str:
        return f"{self._name}-{party}"

    def _device(self, party: Party) -> str:
        return "br0" if party == HUB else "eth0"


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UsageError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
