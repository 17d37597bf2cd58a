"""The report as a page: whole, self-contained, escaped."""

import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import histories
import pytest
from histories import History

from elastic.report import build_report
from elastic.report_charts import draw_losses, draw_timeline, nice_ticks
from elastic.report_html import render_html, write_html
from elastic.report_schema import PHASES

VOID = {"meta", "br", "line", "rect", "circle", "path", "polyline"}
RUNS = {
    "undisturbed": histories.undisturbed,
    "replayed": histories.killed_and_replayed,
    "rejoined": histories.killed_and_rejoined,
    "corrupted": histories.corrupted,
    "only-started": lambda: History(target=None),
    "failed": lambda: (
        History().first().steps(1, 3).lose(0).end("failed", error="gone", digest="", restorable=-1)
    ),
}


class Balance(HTMLParser):
    """Checks that tags nest, and collects what could load something."""

    def __init__(self):
        super().__init__()
        self.open, self.loads, self.ids = [], [], []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.loads += [tag] if tag in {"script", "link", "img", "iframe", "object"} else []
        self.loads += [name for name in ("src", "href", "onclick", "onload") if name in values]
        self.ids += [values["id"]] if "id" in values else []
        if tag not in VOID or "/>" not in self.get_starttag_text():
            self.open += [] if tag == "meta" else [tag]

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID, tag

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag


def page_of(history):
    return render_html(build_report(history.records), history.records)


@pytest.mark.parametrize("make", RUNS.values(), ids=RUNS)
def test_page_is_well_formed_and_loads_nothing(make):
    page = page_of(make())
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert parser.loads == []
    assert len(parser.ids) == len(set(parser.ids))
    assert "url(" not in page
    assert "@import" not in page
    assert set(re.findall(r'aria-labelledby="([^"]+)"', page)) <= {
        *parser.ids,
        "timeline-title timeline-desc",
    }


def test_page_tells_figures_phases_and_promises():
    page = page_of(histories.killed_and_rejoined())
    assert "prefers-color-scheme: dark" in page
    for phase in PHASES:
        assert f'class="p-{phase}" style="width:' in page
    assert "slice 1: killed by SIGKILL" in page
    assert "No committed optimizer step was lost" in page
    assert page.count("✓ held") == 9


def test_page_escapes_whatever_the_history_says():
    evil = "<script>alert('x')</script>\"&"
    history = History().first().steps(1, 3).lose(1, cause=evil)
    history.recover("in-place", 3, slices=(0, 2)).steps(4, 9).end("failed", error=evil)
    history.records[0] = replace(history.records[0], run_id=evil, adapter=evil)
    page = page_of(history)
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_page_without_a_history_has_no_drawings(tmp_path):
    report = build_report(histories.killed_in_place().records)
    page = write_html(report, tmp_path / "report.html").read_text()
    assert "<svg" not in page
    assert "Timeline" not in page
    assert "Events" not in page


def test_timeline_ends_the_band_of_a_lost_slice_at_its_loss():
    history = histories.killed_and_rejoined()
    timeline = draw_timeline(history.records, build_report(history.records))
    first, lost = timeline.worlds[0], timeline.worlds[1]
    assert lost.x == first.x
    assert lost.width < first.width
    assert len(timeline.worlds) == 3 + 2 + 3
    assert len(timeline.recoveries) == 2
    assert len(timeline.faults) == len(timeline.losses) == 1
    for band in (*timeline.worlds, *timeline.recoveries):
        assert 64 <= band.x <= band.x + band.width <= 1000


def test_loss_chart_shows_what_was_rolled_back_and_what_ran_again():
    chart = draw_losses(histories.killed_and_replayed().records)
    assert [curve.generation for curve in chart.curves] == [1, 2]
    assert len(chart.undone) == 2
    assert len(chart.curves[1].dots) == 2


@pytest.mark.parametrize("loss", [None, math.nan, math.inf])
def test_loss_chart_leaves_out_losses_that_are_no_numbers(loss):
    history = History().first().steps(1, 5, change=lambda commit: replace(commit, loss=loss)).end()
    assert draw_losses(history.records) is None
    assert build_report(history.records).final.loss is None


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, list(range(11))),
        (0, 0.5, [n / 20 for n in range(11)]),
        (3, 3, [3]),
        (7, 95, [*range(10, 91, 10)]),
    ],
)
def test_ticks_are_round_numbers(low, high, ticks):
    assert nice_ticks(low, high) == pytest.approx(ticks)


def test_page_names_step_array_and_slice_of_silent_corruption():
    page = page_of(histories.corrupted())
    assert "Silent corruption since step 6: [&#39;w&#39;] [0:8, 0:2] is wrong on slice 1" in page
    assert "Copies of the state on different slices are the same, bit for bit" in page
    assert page.count("✗ broken") == 1
