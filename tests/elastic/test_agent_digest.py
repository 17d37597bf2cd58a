"""The digest of a state that several hosts hold parts of, put together in rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agent_arenas import GENERATION, elements, layout_of_hosts, made_arenas
from hypothesis import given
from hypothesis import strategies as st

from elastic.agent_digest import digest_from_memory, rounds
from elastic.agent_fetch import PieceFetcher, read_pieces
from elastic.agent_tasks import ArenaTasks
from elastic.choose import plan_whole
from elastic.events import ComputeDigest
from reshard.boxes import full_box
from reshard.ids import HostId
from reshard.layout import ArrayLayout
from snapshot.digest import state_digest

STEP = 4
LAYOUT = layout_of_hosts(3)


@pytest.mark.parametrize(("round_bytes", "num_rounds"), [(1, 2), (5, 2), (1 << 30, 1)])
def test_digest_is_that_of_the_state_in_however_many_rounds(round_bytes: int, num_rounds: int) -> None:
    fetched: list[set[str]] = []
    with made_arenas(LAYOUT, 1, STEP) as arenas:
        held = [h for arena in arenas.values() for m in arena.manifests().complete for h in m.holdings()]
        layout, plan = plan_whole(LAYOUT, held, STEP, HostId(0))

        def fetch(command, source, wants):
            fetched[-1] |= {path for path, _ in wants}
            return read_pieces(arenas[source], STEP, GENERATION, wants)

        class Fetcher(PieceFetcher):
            def fill(self, *args):
                fetched.append(set())
                return super().fill(*args)

        command = ComputeDigest(
            member=0,
            generation=GENERATION,
            step=STEP,
            of_generation=GENERATION,
            purpose="final",
            layout=layout,
            transfers=plan.transfers,
        )
        fetcher = Fetcher(arenas[HostId(0)], HostId(0), "", fetch=fetch, tls=None)
        digest = digest_from_memory(command, HostId(0), fetcher, count_writes=True, round_bytes=round_bytes)
    assert digest == state_digest(
        (array.path, array.dtype, array.shape, elements(array.path, STEP).tobytes())
        for array in LAYOUT.arrays
    )
    assert len(fetched) == num_rounds


def test_digest_of_what_is_whole_here_is_read_without_putting_anything_together() -> None:
    layout = layout_of_hosts(1)
    with made_arenas(layout, 1, STEP) as arenas:
        held = [h for arena in arenas.values() for m in arena.manifests().complete for h in m.holdings()]
        whole, plan = plan_whole(layout, held, STEP, HostId(0))

        class Fetcher(PieceFetcher):
            def fill(self, *args):
                raise AssertionError(args)

        command = ComputeDigest(
            member=0, generation=GENERATION, step=STEP, of_generation=GENERATION, purpose="final",
            layout=whole, transfers=plan.transfers,
        )  # fmt: skip
        fetcher = Fetcher(arenas[HostId(0)], HostId(0), "", fetch=None, tls=None)
        digest = digest_from_memory(command, HostId(0), fetcher)
    assert digest == state_digest(
        (array.path, array.dtype, array.shape, elements(array.path, STEP).tobytes())
        for array in layout.arrays
    )


@given(st.lists(st.integers(0, 9), max_size=12), st.integers(1, 20))
def test_rounds_keep_to_their_bound_and_have_each_array_once(sizes: list[int], max_bytes: int) -> None:
    one = ArrayLayout(path="", shape=(1,), dtype="uint8", itemsize=1)
    arrays = [replace(one, path=str(index), shape=(size,)) for index, size in enumerate(sizes)]
    found = list(rounds(arrays, max_bytes))
    assert [array for round_ in found for array in round_] == arrays
    for round_ in found:
        assert round_
        assert len(round_) == 1 or sum(array.nbytes for array in round_) <= max_bytes


def test_digest_is_of_what_was_captured_and_never_of_what_was_fetched_for_the_restore() -> None:
    """Fetched shards carry the step and generation that the devices' state is captured under."""
    layout = layout_of_hosts(1)
    with made_arenas(layout, 1, STEP + 1) as arenas:
        arena = arenas[HostId(0)]
        shards = [(array.path, full_box(array.shape), elements(array.path, STEP)) for array in layout.arrays]
        arena.write_stage(layout, shards, step=STEP, generation=GENERATION, position=0)
        assert [manifest.step for manifest in arena.manifests().complete] == [STEP + 1, STEP]
        assert ArenaTasks(arena, 0).summary_of(STEP, GENERATION) is None
        held = [h for m in arena.manifests().complete if m.step == STEP for h in m.holdings()]
        whole, plan = plan_whole(layout, held, STEP, HostId(0))
        command = ComputeDigest(
            member=0, generation=GENERATION, step=STEP, of_generation=GENERATION, purpose="restored",
            layout=whole, transfers=plan.transfers,
        )  # fmt: skip
        assert ArenaTasks(arena, 0).digest_now(command).digest == ""
