"""The live display: what it says, how seldom, and that it never ends the job."""

import io
from dataclasses import replace

import histories
import pytest
from histories import History

from elastic.display import LiveDisplay, is_important
from elastic.display_screens import progress_line, render_view
from elastic.display_state import JobView
from elastic.history_text import describe
from elastic.records import LossDetected, StepCommitted, WorkerEvent
from elastic.report import build_report


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    def isatty(self):
        return True


def plain_lines(history, seconds_a_record=0.05):
    stream, clock = io.StringIO(), Clock()
    with LiveDisplay(stream, clock=clock) as display:
        for record in history.records:
            display.feed(record)
            clock.now += seconds_a_record
    return stream.getvalue().splitlines()


def test_plain_display_tells_the_story_of_a_recovery():
    lines = plain_lines(histories.killed_and_replayed())
    said = [line.split("] ", 1)[1] for line in lines]
    assert said[0].startswith("run r1 started: 3 slices")
    for words in (
        "fault injected: kill on slice 1",
        "slice 1 lost: killed by SIGKILL (noticed by process-exit)",
        "FENCING",
        "generation 2 formed (in-place): slices 0 and 2, from step 8",
        "recovered in-place in 680 ms: slices 0 and 2 from step 11",
        "run completed at step 20",
    ):
        assert any(line.startswith(words) for line in said), words


def test_plain_display_prints_progress_each_two_seconds_at_most():
    history = histories.undisturbed(200)
    lines = plain_lines(history, seconds_a_record=0.01)
    progress = [line for line in lines if "steps/s" in line or "] step" in line]
    assert 2 <= len(progress) <= 1 + 0.01 * len(history.records) / 2 + 1
    assert "/200" in progress[-1]


@pytest.mark.parametrize("make", [histories.killed_in_place, histories.killed_and_rejoined])
def test_view_agrees_with_the_report(make):
    history = make()
    view = JobView()
    for record in history.records:
        view.feed(record)
    report = build_report(history.records)
    assert view.recoveries == len(report.recoveries)
    assert view.snapshots == report.snapshots.captured
    assert (view.newest_step, view.target_steps, view.phase) == (20, 20, "COMPLETED")
    assert view.steps_per_s == pytest.approx(10.0)
    assert f"in {report.recoveries[-1].mttr_s * 1000:.0f} ms" in view.last_recovery


def test_view_reckons_from_a_fault_that_is_told_after_its_detection():
    history, view = histories.killed_in_place(), JobView()
    index = next(i for i, record in enumerate(history.records) if isinstance(record, LossDetected))
    history.records[index - 1 : index + 1] = history.records[index - 1 : index + 1][::-1]
    history.records[index - 1] = replace(history.records[index - 1], last_life_unix_s=history.now)
    for record in history.records:
        view.feed(record)
    assert "in 530 ms" in view.last_recovery
    assert build_report(history.records).recoveries[0].mttr_s == pytest.approx(0.53)


def test_view_shows_each_slice_and_its_process():
    view = JobView()
    history = histories.killed_in_place()
    worker = WorkerEvent(unix_s=1000.0, generation=1, slice_index=2, state="ready", pid=4711)
    for record in [*history.records[:-1], worker]:
        view.feed(record)
    assert (view.slices[1].state, view.slices[1].step) == ("lost", 10)
    assert (view.slices[2].state, view.slices[2].pid) == ("ready", 4711)
    assert render_view(view)
    assert "step 20 (20/20 done)" in progress_line(view)


def test_view_ignores_the_steps_of_a_rehearsal():
    view = JobView()
    for record in History().formed("rehearsal", None, check=False).steps(1, 3).records:
        view.feed(record)
    assert (view.newest_step, view.snapshots) == (None, 0)


def test_terminal_display_draws_and_says_events(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    with LiveDisplay(stream) as display:
        for record in histories.killed_and_rejoined().records:
            display.feed(record)
    drawn = stream.getvalue()
    assert "slice 1 lost: killed by SIGKILL" in drawn
    assert "last recovery scale-up in 460 ms" in drawn


@pytest.mark.parametrize("terminal", [False, True])
def test_display_goes_silent_when_its_stream_breaks(monkeypatch, terminal):
    monkeypatch.setenv("TERM", "xterm-256color")

    class Broken(Terminal):
        broken = False

        def isatty(self):
            return terminal

        def write(self, text):
            if self.broken:
                raise BrokenPipeError
            return super().write(text)

    stream = Broken()
    with LiveDisplay(stream) as display:
        stream.broken = True
        for record in histories.killed_in_place().records:
            display.feed(record)


def test_display_survives_records_it_cannot_make_sense_of():
    with LiveDisplay(io.StringIO()) as display:
        display.feed(None)
        display.feed(histories.undisturbed().records[0])


def test_every_record_has_a_line_and_no_step_is_important():
    for record in histories.killed_and_rejoined().records:
        assert describe(record)
        assert "(" not in describe(record)[:13] or not describe(record).startswith(type(record).__name__)
        if isinstance(record, StepCommitted):
            assert not is_important(record)


def test_view_of_a_slice_of_several_hosts_tells_who_is_lost_and_who_a_spare() -> None:
    view = JobView()
    ready = WorkerEvent(unix_s=1000.0, generation=1, slice_index=1, state="ready", pid=4711)
    for host in (0, 1):
        view.feed(replace(ready, host_index=host))
    assert view.slices[1].state == "ready"
    loss = LossDetected(
        unix_s=1001.0,
        generation=1,
        slice_index=1,
        host_index=1,
        cause="killed",
        detector="process-exit",
        last_life_unix_s=1001.0,
    )
    view.feed(loss)
    view.feed(replace(ready, state="unwound"))
    assert view.slices[1].state == "host 0 spare, host 1 lost"
    assert describe(loss) == "slice 1 host 1 lost: killed (noticed by process-exit)"
