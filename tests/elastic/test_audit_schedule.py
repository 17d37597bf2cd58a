"""Which captures are audits follows from step numbers alone."""

import pytest

from elastic.audit_schedule import AuditSchedule


def audits(schedule, steps, ordered=None):
    return [step for step in steps if schedule.take_due(step, ordered)]


@pytest.mark.parametrize(
    ("every", "newest", "steps", "expected"),
    [
        (5, -1, range(20), [4, 9, 14, 19]),
        (0, -1, range(20), []),
        (1, -1, range(3), [0, 1, 2]),
        (20, -1, [0, 3, 7, 11, 15, 19, 23], [19]),
        (10, -1, [0, 7, 12, 18, 29, 31], [12, 29]),  # irregular captures: the first one past each multiple
        (5, 6, range(7, 20), [9, 14, 19]),
        (5, 9, range(10, 20), [14, 19]),
    ],
)
def test_audits_are_the_first_captures_past_each_multiple(every, newest, steps, expected):
    assert audits(AuditSchedule(every, newest), steps) == expected


def test_ordered_step_is_an_audit_once_or_the_first_capture_after_it():
    assert audits(AuditSchedule(0, -1), range(10), ordered=4) == [4]
    assert audits(AuditSchedule(0, -1), [0, 3, 7, 11], ordered=4) == [7]


def test_order_that_comes_after_its_step_is_nothing():
    schedule = AuditSchedule(0, -1)
    assert audits(schedule, range(6)) == []
    assert audits(schedule, range(6, 12), ordered=5) == []
