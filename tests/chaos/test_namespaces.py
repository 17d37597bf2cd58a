"""Network namespaces as hosts: what is cut is lost without a word, and comes through again once healed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from chaos.namespaces import HUB, NamespaceNet, Party, what_is_missing

pytestmark = pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())

ASK = (
    "import socket, sys; s = socket.create_connection((sys.argv[1], 7007), timeout=0.5);"
    " print(s.recv(2).decode())"
)
ANSWER = (
    "import socket, sys; s = socket.create_server((sys.argv[1], 7007)); print('up', flush=True)\n"
    "while True:\n    c, _ = s.accept(); c.sendall(b'ok'); c.close()"
)


@pytest.fixture
def net() -> Iterator[NamespaceNet]:
    with NamespaceNet(f"eft{os.getpid() % 100000}", 3) as made:
        servers = [_serve(made, party) for party in (HUB, *made.hosts)]
        yield made
        for server in servers:
            server.kill()
            server.communicate()


def prefix(net: NamespaceNet, party: Party) -> list[str]:
    return list(net.hub_prefix) if party == HUB else net.host_prefix.format(slice=party).split()


def _serve(net: NamespaceNet, party: Party) -> subprocess.Popen[str]:
    command = [*prefix(net, party), sys.executable, "-c", ANSWER, net.address(party)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    return server


def reaches(net: NamespaceNet, one: Party, other: Party) -> bool:
    command = [*prefix(net, one), sys.executable, "-c", ASK, net.address(other)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout == "ok\n" or "timed out" in done.stderr, done.stderr  # lost, not refused
    return done.stdout == "ok\n"


def test_host_cut_off_reaches_nobody_and_nobody_it_until_healed(net: NamespaceNet) -> None:
    assert reaches(net, 0, 1)
    assert reaches(net, 1, HUB)
    net.cut_off([1])
    assert not reaches(net, 1, HUB)
    assert not reaches(net, 0, 1)
    assert reaches(net, 0, 2)
    assert reaches(net, 0, HUB)
    net.heal()
    assert reaches(net, 0, 1)
    assert reaches(net, HUB, 1)


def test_cut_between_two_hosts_leaves_both_their_way_to_the_hub(net: NamespaceNet) -> None:
    net.cut(1, 2)
    assert not reaches(net, 1, 2)
    assert reaches(net, 1, HUB)
    assert reaches(net, 2, HUB)
    assert reaches(net, 2, 0)


def test_namespaces_are_gone_after_closing() -> None:
    name = f"efx{os.getpid() % 100000}"
    NamespaceNet(name, 1).close()
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert name not in listed
