"""Progress for long work: a bar with totals and rates on the terminal's error stream, silent elsewhere.

Knows how work is shown; nothing of the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from .distributed import rank

console = Console(stderr=True)


def _shown() -> bool:
    """Of several processes, the first speaks."""
    return console.is_terminal and rank() == 0


_open: list[Progress] = []


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} {task.fields['unit']}/s" if speed else "")


@contextmanager
def bar(description: str, total: float, unit: str = "tokens") -> Iterator[Callable[[float], None]]:
    """Show progress; yields a function that adds to the amount done. Bars opened inside another share its display."""
    if _open:
        progress = _open[-1]
        task = progress.add_task(description, total=total, unit=unit)
        yield lambda amount: progress.advance(task, amount)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _Rate(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not _shown()) as progress:
        _open.append(progress)
        try:
            task = progress.add_task(description, total=total, unit=unit)
            yield lambda amount: progress.advance(task, amount)
        finally:
            _open.pop()


def say(message: str) -> None:
    """One line for a person who watches; shown on a terminal only."""
    if _shown():
        console.print(message, highlight=False, markup=False)


_kept: list[list[str]] = []


@contextmanager
def collected() -> Iterator[list[str]]:
    """Keep warnings in a list instead of showing them, for another process to show."""
    _kept.append([])
    try:
        yield _kept[-1]
    finally:
        _kept.pop()


def warn(message: str) -> None:
    """One line that a person must see, terminal or not."""
    if _kept:
        _kept[-1].append(message)
    elif rank() == 0:
        console.print(f"warning: {message}", highlight=False, markup=False, soft_wrap=True)
