"""All refusals are counted, and what is written of them does not grow with their number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.records import MessageRefused
from elastic.refusals import WRITTEN_SINGLY, RefusalLedger, RefusalsTold, RefusalTally
from reshard.errors import UsageError


def refused(num: int = 1, *, surface: str = "control", cause: str = "wrong-token") -> MessageRefused:
    return MessageRefused(
        unix_s=0.0, generation=1, sender="x" * 1000, reason="no", surface=surface, cause=cause, num=num
    )


@given(st.lists(st.integers(1, 1000), max_size=200))
def test_records_add_up_to_all_refusals_and_few_are_written(numbers: list[int]) -> None:
    ledger = RefusalLedger()
    written = [record for num in numbers if (record := ledger.take(refused(num))) is not None]
    bound = WRITTEN_SINGLY + sum(numbers).bit_length()
    assert len(written) <= bound
    written += ledger.rest()
    assert sum(record.num for record in written) == sum(numbers)
    assert ledger.counts() == ({"control": {"wrong-token": sum(numbers)}} if numbers else {})
    assert all(len(record.sender) == 120 for record in written)
    assert list(ledger.rest()) == []


def test_million_refusals_leave_few_records() -> None:
    ledger = RefusalLedger()
    written = [ledger.take(refused()) for _ in range(1_000_000)]
    numbers = [record.num for record in written if record is not None]
    assert numbers[: WRITTEN_SINGLY + 3] == [1] * WRITTEN_SINGLY + [8, 16, 32]
    assert len(numbers) < 30


def test_kinds_are_counted_apart() -> None:
    ledger = RefusalLedger()
    for surface, cause in (("control", "wrong-token"), ("data-plane", "wrong-token"), ("control", "other")):
        assert ledger.take(refused(surface=surface, cause=cause)) is not None
    assert ledger.counts() == {"control": {"other": 1, "wrong-token": 1}, "data-plane": {"wrong-token": 1}}


def test_tally_tells_once_what_an_agent_has_refused() -> None:
    tally = RefusalTally()
    for sender in ("a", "b"):
        tally.count("data-plane", "wrong-token", sender)
    assert tally.take() == (RefusalsTold(surface="data-plane", reason="wrong-token", sender="b", num=2),)
    assert tally.take() == ()
    with pytest.raises(UsageError, match="at least one"):
        RefusalsTold(surface="control", reason="x", sender="y", num=0)
