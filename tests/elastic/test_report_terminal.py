"""The report in the terminal: complete and readable at 100 columns."""

import io

import histories
import pytest
from histories import History

from elastic.report import build_report
from elastic.report_terminal import print_report


def printed(history):
    stream = io.StringIO()
    print_report(build_report(history.records), stream=stream)
    return stream.getvalue()


def flapping(times):
    history = History(target=None).first().steps(1, 5)
    for number in range(times):
        newest = history.newest
        slices = (0, 2) if number % 2 == 0 else (0, 1, 2)
        mode = "in-place" if number % 2 == 0 else "scale-up"
        if number % 2 == 0:
            history.lose(1)
        history.recover(mode, newest, slices=slices).steps(newest + 1, newest + 3)
    return history.end()


@pytest.mark.parametrize("make", [histories.undisturbed, histories.killed_and_rejoined, lambda: flapping(15)])
def test_terminal_report_fits_100_columns_and_has_no_escape_codes_in_a_file(make):
    text = printed(make())
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_terminal_report_shows_each_recovery_with_its_phases_and_bytes():
    text = printed(histories.killed_and_rejoined())
    for words in ("in-place", "scale-up", "detect", "MTTR", "lower bound", "1.0 MB", "#2 Slice 1 joined"):
        assert words in text


def test_terminal_report_shows_all_of_many_recoveries():
    text = printed(flapping(15))
    assert all(f"#{number}" in text for number in range(1, 16))


def test_terminal_report_takes_brackets_for_text_not_for_markup():
    history = History().first().steps(1, 3).end("failed", error="[red]axis [/nothing] is gone")
    assert "[red]axis [/nothing] is gone" in printed(history)


def test_terminal_report_says_when_faults_were_simulated():
    history = History(target=5)
    object.__setattr__(history.records[0], "simulated_faults", True)
    assert "simulated inside one process" in printed(history.first().steps(1, 5).end())


def test_terminal_report_counts_comparisons_and_says_nothing_more_when_copies_agree():
    text = printed(histories.undisturbed())
    assert "Copies: 1 captures and 0 audits compared across slices" in text
    assert "SILENT" not in text


def test_terminal_report_names_step_array_and_slice_of_silent_corruption():
    text = printed(histories.corrupted())
    assert "SILENT CORRUPTION found in 2" in text
    assert "since step 6: ['w'] [0:8, 0:2] is wrong on slice 1 (mesh device 2)" in text
    assert max(map(len, text.splitlines())) <= 100
