"""Progress of runs: a line on a terminal, an output that changes in a notebook, a line per round in a log."""

from __future__ import annotations

import html
import sys
from typing import Any

_WIDTH = 24


def _without_left(status: str) -> str:
    """The status without the word that the command line puts behind its own estimate of the time.

    >>> _without_left("left; round 2/3"), _without_left("left, 5 min for all runs; round 2/3")
    ('round 2/3', '5 min for all runs; round 2/3')
    """
    return status.removeprefix("left").lstrip(",; ")


class Silent:
    """Shows nothing."""

    def note(self, line: str) -> None:
        """Something that a user must know."""

    def begin(self, title: str) -> None:
        """A run begins or resumes."""

    def status(self, text: str) -> None:
        """A round begins."""

    def round(self, line: str) -> None:
        """A round has ended."""

    def bar(self, n_done: int, n_all: int) -> None:
        """So many of all local trainings are done."""

    def close(self) -> None:
        """All runs have ended, in whatever way."""


class Log(Silent):
    """A line per round."""

    def note(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    round = note


class _Drawn(Silent):
    """A title, a status and a bar, drawn again when one of them has changed."""

    def __init__(self) -> None:
        self._title, self._status, self._done, self._all = "", "", 0, 0

    def begin(self, title: str) -> None:
        self._title = title

    def status(self, text: str) -> None:
        self._status = _without_left(text)
        self._draw()

    def bar(self, n_done: int, n_all: int) -> None:
        if (n_done, n_all) != (self._done, self._all):
            self._done, self._all = n_done, n_all
            self._draw()

    def _draw(self) -> None:
        raise NotImplementedError


class Terminal(_Drawn):
    """One line that is written again and again."""

    def note(self, line: str) -> None:
        print(f"\r\x1b[K{line}", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        n = _WIDTH * self._done // max(self._all, 1)
        print(f"\r\x1b[K{self._title}[{'#' * n}{'.' * (_WIDTH - n)}] {self._status}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class Notebook(_Drawn):
    """A bar and a line below the cell, which go when the runs have ended."""

    def __init__(self, display: Any) -> None:
        super().__init__()
        self._shown = display({"text/plain": ""}, raw=True, display_id=True)

    note = Log.note

    def _draw(self) -> None:
        text = html.escape(f"{self._title}{self._status}")
        page = f'<progress value="{self._done}" max="{max(self._all, 1)}"></progress> {text}'
        self._update({"text/html": page, "text/plain": text})

    def _update(self, data: dict[str, str]) -> None:
        if self._shown is not None:
            self._shown.update(data, raw=True)

    def close(self) -> None:
        self._update({"text/plain": ""})


def progress(show: bool) -> Silent:
    """What shows progress here."""
    if not show:
        return Silent()
    shell = sys.modules.get("IPython") and sys.modules["IPython"].get_ipython()
    if shell is not None and type(shell).__name__ == "ZMQInteractiveShell":
        from IPython.display import display

        return Notebook(display)
    return Terminal() if sys.stderr.isatty() else Log()
