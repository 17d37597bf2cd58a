"""Tables in the terminal, the same for a recovery report and for a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH_WITHOUT_TERMINAL = 100
"""Columns where there is no terminal to ask."""


def open_console(stream: TextIO | None) -> Console:
    """Return a console that prints to `stream`, None for standard output."""
    from rich.console import Console

    console = Console(file=stream, highlight=False)
    if console.is_terminal:
        return console
    return Console(file=stream, highlight=False, width=WIDTH_WITHOUT_TERMINAL)


def titled_table(title: str, *columns: str) -> Table:
    """Return an empty table; the first column is flush left, the others right."""
    from rich.box import ROUNDED
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=ROUNDED, expand=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table
