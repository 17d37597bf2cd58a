"""Where a live display draws: a table redrawn in place on a terminal, lines of text anywhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from elastic.display_state import JobView
from elastic.history_text import format_slices
from elastic.records import Record, StepCommitted

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

REFRESHES_PER_S = 3
PROGRESS_EVERY_S = 2.0


class Screen(Protocol):
    """Where a display shows what it knows."""

    def say(self, line: str) -> None:
        """Show a line about an event."""

    def update(self, record: Record) -> None:
        """Show what the view knows after this record."""

    def close(self) -> None:
        """Show the last view and give the terminal back."""


class ForgivingStream:
    """A text stream that does not raise: after an error it is `broken` and swallows what is written.

    Rich ends the process when the reader of a pipe goes away; so it must not see that.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write, with question marks for what the stream's encoding lacks."""
        try:
            if not self.broken:
                encoding = getattr(self._stream, "encoding", None) or "utf-8"
                self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):
            self.broken = True
        return len(text)

    def flush(self) -> None:
        """Flush, if there is still anybody to read it."""
        try:
            if not self.broken:
                self._stream.flush()
        except (OSError, ValueError):
            self.broken = True


class PlainScreen:
    """Lines of text: the important events, and the progress every two seconds."""

    def __init__(self, view: JobView, stream: ForgivingStream, clock: Callable[[], float]) -> None:
        self._view = view
        self._stream = stream
        self._clock = clock
        self._next_progress = clock()

    def say(self, line: str) -> None:
        """Print a line with the time since the run began."""
        self._stream.write(f"[{self._view.elapsed_s:7.2f} s] {line}\n")
        self._stream.flush()

    def update(self, record: Record) -> None:
        """Print the progress if it is due: after a commit only, so that a line always tells something new."""
        if isinstance(record, StepCommitted) and self._clock() >= self._next_progress:
            self._next_progress = self._clock() + PROGRESS_EVERY_S
            self.say(progress_line(self._view))

    def close(self) -> None:
        """Leave nothing unwritten."""
        self._stream.flush()


class RichScreen:
    """A table that is redrawn in place; the important events scroll by above it."""

    def __init__(self, view: JobView, console: Console, lock: threading.Lock) -> None:
        from rich.live import Live

        self._view = view
        self._lock = lock
        self._console = console
        self._live: Live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=REFRESHES_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()

    def say(self, line: str) -> None:
        """Print a line above the table."""
        from rich.text import Text

        self._console.print(Text(f"[{self._view.elapsed_s:7.2f} s] {line}"))

    def update(self, record: Record) -> None:
        """Nothing to do: the refresh thread redraws."""

    def close(self) -> None:
        """Draw the last view and stop redrawing."""
        self._live.stop()

    def _render(self) -> RenderableType:
        from rich.text import Text

        try:
            with self._lock:
                return render_view(self._view)
        except Exception as error:  # drawing must not end the job
            return Text(f"(the display failed: {error})")


def progress_line(view: JobView) -> str:
    """Where the job is, in one line."""
    step = "–" if view.newest_step is None else str(view.newest_step)
    done = "" if view.target_steps is None else f" ({view.committed}/{view.target_steps} done)"
    parts = [f"step {step}{done}"]
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.steps_per_s is not None:
        parts.append(f"{view.steps_per_s:.1f} steps/s")
    parts += [f"generation {view.generation}", format_slices(view.world), view.phase]
    return "  ".join(parts)


_COLOURS = {"training": "green", "lost": "red", "ended": "red", "waiting": "dim"}


def render_view(view: JobView) -> RenderableType:
    """The view as a table: a line a slice, then where the job is."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title, justify in (("slice", "right"), ("state", "left"), ("pid", "right"), ("step", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for index, one in sorted(view.slices.items()):
        state = Text(one.state, style=_COLOURS.get(one.state, "yellow"))
        table.add_row(str(index), state, str(one.pid or "–"), "–" if one.step is None else str(one.step))
    checked = f"{view.snapshots} taken, {view.verified} verified, {view.rejected} refused"
    facts = [
        Text(progress_line(view), style="bold"),
        Text(f"snapshots {checked}   recoveries {view.recoveries}   {view.elapsed_s:.1f} s"),
    ]
    if view.persisted_step is not None or view.persist_failed:
        newest = "–" if view.persisted_step is None else str(view.persisted_step)
        style = "red" if view.persist_failed else ""
        facts.append(Text(f"persistent tier: newest {newest}, {view.persist_failed} failed", style=style))
    if view.corruption:
        facts.append(Text(view.corruption, style="bold red"))
    if view.last_recovery:
        facts.append(Text(f"last recovery {view.last_recovery}", style="cyan"))
    return Group(table, *facts)
