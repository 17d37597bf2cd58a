"""Comparing copies by checksum: what disagrees, and which slice is named."""

from __future__ import annotations

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reshard_strategies import PROPERTY, layout_pairs

from reshard.copies import Copy, CopyIndex, judge_copies, pack_checksums
from reshard.errors import UsageError
from reshard.ids import HostId
from reshard.layout import ArrayLayout, Layout, MeshLayout
from reshard.redundancy import captures

BOX = ((0, 4),)
layouts = layout_pairs().map(lambda pair: pair[0])


def judge(*slices: str) -> tuple[str | None, tuple[int, ...]] | None:
    """Judge copies given as one string a slice, one letter a device; letters are checksums."""
    checksums = {
        Copy(HostId(index), device if len(own) > 1 else -1): ord(letter)
        for index, own in enumerate(slices)
        for device, letter in enumerate(own)
    }
    found = judge_copies("w", BOX, checksums)
    return None if found is None else (found.good and chr(found.good), found.suspects)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 5])
def test_judge_names_the_minority_of_slices_and_all_without_a_strict_majority(num_slices):
    for letters in itertools.product("abc", repeat=num_slices):
        counts = {letter: letters.count(letter) for letter in set(letters)}
        verdict = judge(*letters)
        if len(counts) == 1:
            assert verdict is None
            continue
        best = max(counts, key=counts.__getitem__)
        if num_slices >= 3 and 2 * counts[best] > num_slices:
            minority = tuple(index for index, letter in enumerate(letters) if letter != best)
            assert verdict == (best, minority)
        else:
            assert verdict == (None, tuple(range(num_slices)))


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        (("aa", "aa", "aa"), None),
        (("aa", "ab", "aa"), ("a", (1,))),  # a device of slice 1, by the vote of slices
        (("aa", "bb", "aa"), ("a", (1,))),
        (("aa", "ab"), ("a", (1,))),  # slice 1 is at odds with itself, and three of four say a
        (("aa", "bb"), (None, (0, 1))),  # two slices, each of one mind
        (("aaaa", "b"), (None, (0, 1))),  # copies within a slice do not out-vote another
        (("aaab",), ("a", (0,))),
        (("aabb",), (None, (0,))),
        (("ab",), (None, (0,))),
        (("aa", "bc"), (None, (0, 1))),
        (("aaa", "bc"), ("a", (1,))),
        (("aaaa", "bb", "ab"), (None, (0, 1, 2))),  # slice 0's many devices do not decide against slice 1
        (("ab", "ab", "ab"), (None, (0, 1, 2))),
    ],
)
def test_judge_weighs_devices_of_a_slice_only_where_slices_are_at_odds_with_themselves(slices, expected):
    assert judge(*slices) == expected


def test_judge_tells_which_copies_differ():
    checksums = {
        Copy(HostId(0), 0): 7,
        Copy(HostId(0), 1): 7,
        Copy(HostId(1), 2): 7,
        Copy(HostId(1), 3): 8,
    }
    found = judge_copies("w", BOX, checksums)
    assert found is not None
    assert found.slices == (0, 1)
    assert [str(copy) for copy in found.suspect_copies] == ["s1h0 device 3"]
    assert found.copies_by_checksum[0] == (7, (Copy(HostId(0), 0), Copy(HostId(0), 1), Copy(HostId(1), 2)))


@PROPERTY
@given(st.permutations(range(4)), st.lists(st.integers(0, 2), min_size=4, max_size=4))
def test_judge_does_not_depend_on_the_order_of_copies(order, values):
    copies = {Copy(HostId(index)): values[index] for index in range(4)}
    shuffled = {Copy(HostId(index)): values[index] for index in order}
    assert judge_copies("w", BOX, copies) == judge_copies("w", BOX, shuffled)


def tables_of(layout, captured, salt=0):
    return {
        host: {shard: hash((shard, salt)) & 0xFFFFFFFFFFFFFFFF for shard in shards}
        for host, shards in captured.items()
    }


def judged_one_by_one(tables):
    """What an index must find, the slow way: every box of the tables judged by itself."""
    by_shard = defaultdict(dict)
    for host, table in tables.items():
        for shard, checksum in table.items():
            by_shard[shard][Copy(host)] = checksum
    judged = (judge_copies(path, box, copies) for (path, box), copies in sorted(by_shard.items()))
    return tuple(found for found in judged if found is not None)


@PROPERTY
@given(layouts, st.integers(1, 4))
def test_copies_that_agree_give_no_disagreement(layout, replicas):
    captured = captures(layout, replicas)
    tables = tables_of(layout, captured)
    index = CopyIndex.of_captures(layout, replicas)
    assert index.compare({host: pack_checksums(list(table.values())) for host, table in tables.items()}) == ()


@PROPERTY
@given(layouts, st.integers(1, 4), st.data())
def test_index_of_captures_finds_what_the_tables_tell(layout, replicas, data):
    captured = captures(layout, replicas)
    tables = tables_of(layout, captured)
    for host in data.draw(st.lists(st.sampled_from(sorted(tables)), max_size=3)):
        if tables[host]:
            tables[host][data.draw(st.sampled_from(sorted(tables[host])))] ^= 1
    index = CopyIndex.of_captures(layout, replicas)
    packed = {host: pack_checksums(list(table.values())) for host, table in tables.items()}
    assert index.compare(packed) == judged_one_by_one(tables)
    holders = {
        shard: [h for h in tables if shard in tables[h]] for table in tables.values() for shard in table
    }
    assert index.num_compared(tables) == sum(len(hosts) > 1 for hosts in holders.values())


@PROPERTY
@given(layouts, st.data())
def test_index_of_devices_names_the_device_of_any_copy_that_is_changed(layout, data):
    index = CopyIndex.of_devices(layout)
    hosts = layout.mesh.distinct_hosts()
    values = {host: [0] * len(index.ids[host]) for host in hosts}
    for array_index, array in enumerate(layout.arrays):
        boxes = layout.boxes(array)
        for host in hosts:
            own = [p for p, other in enumerate(layout.mesh.hosts) if other == host]
            for place, position in enumerate(own):
                values[host][array_index * len(own) + place] = (
                    1000 + array_index * 50 + boxes.index(boxes[position])
                )
    packed = {host: pack_checksums(own) for host, own in values.items()}
    assert index.compare(packed) == ()
    host = data.draw(st.sampled_from(hosts))
    own = [p for p, other in enumerate(layout.mesh.hosts) if other == host]
    place = data.draw(st.integers(0, len(values[host]) - 1))
    values[host][place] ^= 1 << 40
    array, position = layout.arrays[place // len(own)], own[place % len(own)]
    box = layout.boxes(array)[position]
    copies = [p for p, other in enumerate(layout.boxes(array)) if other == box]
    found = index.compare({host: pack_checksums(own) for host, own in values.items()})
    if len(copies) == 1:
        assert found == ()
        return
    (one,) = found
    assert (one.path, one.box) == (array.path, box)
    assert {copy.position for _, at in one.copies_by_checksum for copy in at} == set(copies)
    assert Copy(host, position) in one.suspect_copies
    if len({layout.mesh.hosts[p].slice_index for p in copies}) >= 3:
        assert one.suspects == (host.slice_index,)


def test_index_refuses_a_table_of_another_size_or_host():
    layout = Layout(
        mesh=MeshLayout(axis_names=("d",), axis_sizes=(2,), hosts=(HostId(0), HostId(1))),
        arrays=(ArrayLayout(path="w", shape=(4,), dtype="float32", itemsize=4),),
    )
    index = CopyIndex.of_devices(layout)
    with pytest.raises(UsageError, match="16 bytes of checksums from s1h0, expected 1 of 8 bytes"):
        index.compare({HostId(0): pack_checksums([1]), HostId(1): pack_checksums([1, 2])})
    with pytest.raises(UsageError, match="checksums from s2h0, expected 0"):
        index.compare({HostId(2): pack_checksums([1])})
    assert index.compare({}) == ()


def test_checksums_are_packed_in_eight_bytes_each_whatever_their_size():
    packed = pack_checksums([0, 1, 2**64 - 1])
    assert np.frombuffer(packed, "<u8").tolist() == [0, 1, 2**64 - 1]
    assert pack_checksums([]) == b""
