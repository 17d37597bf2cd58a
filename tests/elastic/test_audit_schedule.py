"""Which captures are audits follows from their count and from orders alone."""

import pytest

from elastic.audit_schedule import AuditSchedule


def audits(schedule, steps, ordered=None):
    return [step for step in steps if schedule.take_due(step, ordered)]


@pytest.mark.parametrize(
    ("every", "steps", "expected"),
    [
        (5, range(20), [4, 9, 14, 19]),
        (0, range(20), []),
        (1, range(3), [0, 1, 2]),
        (2, [0, 3, 7, 11, 15], [3, 11]),
        (3, range(7, 16), [9, 12, 15]),
    ],
)
def test_audits_are_every_so_many_captures(every, steps, expected):
    assert audits(AuditSchedule(every), steps) == expected


def test_ordered_step_is_an_audit_once_or_the_first_capture_after_it():
    assert audits(AuditSchedule(0), range(10), ordered=4) == [4]
    assert audits(AuditSchedule(0), [0, 3, 7, 11], ordered=4) == [7]


def test_order_that_comes_after_its_step_is_nothing():
    schedule = AuditSchedule(0)
    assert audits(schedule, range(6)) == []
    assert audits(schedule, range(6, 12), ordered=5) == []
