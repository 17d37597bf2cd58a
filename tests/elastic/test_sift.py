"""Holdings of one snapshot whose copies differ: which are kept, and what is said of the others."""

from __future__ import annotations

import itertools

import pytest

from elastic.copy_check import Named
from elastic.sift import sift
from reshard.holdings import Holding
from reshard.ids import HostId

BOX = ((0, 4),)
NOBODY: Named = frozenset()


def held(**arrays: dict[int, str]) -> list[Holding]:
    """Copies as `array={slice: letter}`; letters are checksums."""
    return [
        Holding(host=HostId(index), step=5, path=path, box=BOX, checksum=ord(letter), tier="shm")
        for path, copies in arrays.items()
        for index, letter in copies.items()
    ]


def kept(holdings: list[Holding], named: Named = NOBODY) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for holding in sift(holdings, 1, named).kept:
        found[holding.path] = (*found.get(holding.path, ()), holding.host.slice_index)
    return found


def test_sift_keeps_all_that_agree():
    holdings = held(w={0: "a", 1: "a"}, v={0: "b", 2: "b"})
    sifted = sift(holdings, 1, NOBODY)
    assert (list(sifted.kept), sifted.left_out, sifted.refused, sifted.doubts) == (holdings, (), (), ())


@pytest.mark.parametrize("num_slices", [2, 3, 4, 5])
def test_sift_always_keeps_one_checksum_and_doubts_exactly_what_no_majority_decides(num_slices: int):
    for letters in itertools.product("abc", repeat=num_slices):
        sifted = sift(held(w=dict(enumerate(letters))), 1, NOBODY)
        (checksum,) = {holding.checksum for holding in sifted.kept}
        assert len(sifted.kept) + len(sifted.left_out) == num_slices
        best = max(set(letters), key=letters.count)
        has_majority = num_slices >= 3 and 2 * letters.count(best) > num_slices
        is_one = len(set(letters)) == 1
        assert bool(sifted.doubts) == (not is_one and not has_majority)
        assert bool(sifted.refused) == (not is_one and has_majority)
        if has_majority:
            assert chr(checksum) == best


def test_sift_refuses_the_minority_of_three_copies_and_says_whose():
    sifted = sift(held(w={0: "a", 1: "b", 2: "a"}, v={0: "c", 1: "c"}), 1, NOBODY)
    assert [(h.path, h.host.slice_index) for h in sifted.left_out] == [("w", 1)]
    assert sifted.refused == ("w of slice 1 refused: minority of 3 copies",)
    assert sifted.doubts == ()


def test_sift_of_two_copies_takes_that_of_the_slice_which_no_audit_has_named():
    holdings = held(w={0: "a", 1: "b"})
    named = frozenset({(1, "w", 0)})
    sifted = sift(holdings, 1, named)
    assert kept(holdings, named) == {"w": (1,)}
    assert sifted.refused == ("w of slice 0 refused: an audit found it wrong",)
    assert sifted.doubts == ()
    assert sift(holdings, 2, named).doubts  # named in another generation
    assert sift(held(v={0: "a", 1: "b"}), 1, named).doubts  # another array


def test_sift_doubts_the_only_copy_where_an_audit_has_found_it_wrong_but_keeps_it():
    holdings = held(w={1: "a"}, v={1: "b"})
    sifted = sift(holdings, 1, frozenset({(1, "w", 1)}))
    assert list(sifted.kept) == holdings
    assert sifted.doubts == ("w is only on slice 1, where an audit found it wrong",)


def test_sift_believes_a_named_slice_again_where_another_agrees():
    holdings = held(w={0: "a", 1: "a"})
    assert list(sift(holdings, 1, frozenset({(1, "w", 1)})).kept) == holdings


def test_sift_keeps_in_doubt_the_copies_of_slices_that_differ_least():
    """Slice 1 is in every disagreement: the others' copies are more likely the good ones."""
    holdings = held(u={0: "a", 1: "b"}, v={1: "c", 2: "d"}, w={0: "e", 2: "e"})
    assert kept(holdings) == {"u": (0,), "v": (2,), "w": (0, 2)}
    assert len(sift(holdings, 1, NOBODY).doubts) == 2


def test_sift_of_two_copies_in_doubt_keeps_the_lowest_slice_for_all():
    assert kept(held(u={0: "a", 1: "b"}, v={1: "c", 0: "d"})) == {"u": (0,), "v": (0,)}
