"""The digest of what the devices of a new world hold, where one host has all of it: nobody has to ask for it.

The coordinator asks for it once all hosts have told that they are rebuilt. If it dies before, the world
trains on meanwhile, and the next coordinator comes too late: the snapshot has been overwritten by then.
"""

from __future__ import annotations

from elastic.choose import plan_whole
from elastic.events import ComputeDigest, SnapshotSummary, WorldSpec
from reshard.coverage import uncovered_at
from reshard.ids import HostId


class OwnDigest:
    """What the agent of a world's first host computes by itself, at most once for each world."""

    def __init__(self, member: int, host: HostId) -> None:
        self._member = member
        self._host = host
        self._is_first = False
        self._begun: tuple[int, int] | None = None

    def entered(self, world: WorldSpec) -> None:
        """This host's worker enters a world."""
        self._is_first = world.rank == 0 and not world.rehearsal

    def restored(self, snapshot: SnapshotSummary) -> ComputeDigest | None:
        """What to compute once the restored state is captured again, if it is this host's turn and it has all
        of it.
        """
        place = (snapshot.generation, snapshot.step)
        if not self._is_first or self._begun == place:
            return None
        if uncovered_at(snapshot.layout.arrays, snapshot.holdings, step=snapshot.step):
            return None
        self._begun = place
        layout, plan = plan_whole(snapshot.layout, snapshot.holdings, snapshot.step, self._host)
        return ComputeDigest(
            member=self._member,
            generation=snapshot.generation,
            step=snapshot.step,
            of_generation=snapshot.generation,
            purpose="restored",
            layout=layout,
            transfers=plan.transfers,
        )

    def is_begun(self, command: ComputeDigest) -> bool:
        """Whether what the coordinator asks for is being computed already, or was told."""
        return command.purpose == "restored" and self._begun == (command.generation, command.step)
