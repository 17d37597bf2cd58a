"""The agents that are attached to a coordinator: where their commands go, and when they last spoke. Safe for
threads.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import Any

from elastic.control_server import CLOSED

Outbox = queue.SimpleQueue[Any]


@dataclass(slots=True)
class AttachedAgent:
    """One attached agent: where its commands go, where it serves shards, and when it last spoke."""

    outbox: Outbox
    data_address: str
    heard_mono_s: float
    heard_unix_s: float


class Roster:
    """The attached agent of each host, if there is one."""

    def __init__(self) -> None:
        self._agents: dict[int, AttachedAgent] = {}
        """Never changed in place (gRPC threads come and go): replaced, under the lock."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._agents)

    def attach(self, member: int, data_address: str) -> Outbox:
        """Take in an agent, in the place of an earlier one of its host."""
        outbox: Outbox = queue.SimpleQueue()
        agent = AttachedAgent(outbox, data_address, time.monotonic(), time.time())
        with self._lock:
            previous = self._agents.get(member)
            self._agents = {**self._agents, member: agent}
        if previous is not None:
            previous.outbox.put(CLOSED)
        return outbox

    def heard(self, member: int, outbox: Outbox) -> bool:
        """Note a sign of life; False when another agent of this host has taken over."""
        agent = self._agents.get(member)
        if agent is None or agent.outbox is not outbox:
            return False
        agent.heard_mono_s, agent.heard_unix_s = time.monotonic(), time.time()
        return True

    def detach(self, member: int, outbox: Outbox) -> AttachedAgent | None:
        """Let an agent go; None when another one has its place already."""
        outbox.put(CLOSED)
        with self._lock:
            agent = self._agents.get(member)
            if agent is None or agent.outbox is not outbox:
                return None
            self._agents = {index: a for index, a in self._agents.items() if index != member}
        return agent

    def put(self, member: int, envelope: Any) -> None:
        """Send to a host's agent, if it is attached."""
        agent = self._agents.get(member)
        if agent is not None:
            agent.outbox.put(envelope)

    def addresses(self) -> dict[int, str]:
        """Where each attached agent serves its shards."""
        return {index: agent.data_address for index, agent in self._agents.items()}

    def silent_for(self, bound_s: float) -> list[tuple[int, Outbox]]:
        """The agents that have not spoken for longer."""
        now_s = time.monotonic()
        agents = self._agents.items()
        return [(index, agent.outbox) for index, agent in agents if now_s - agent.heard_mono_s > bound_s]
