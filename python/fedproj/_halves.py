"""What the engines share: a run, its directory, and the settings of its two halves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedproj import _fedproj
from fedproj._run import Run, Settings, _options, _plan


def plan_one(config: Any, method: str | None, settings: Settings | None, out: Any) -> tuple[Any, Path]:
    """The one run that the arguments ask for, and its directory."""
    if method is not None and not isinstance(method, str):
        raise _fedproj.SettingsError(
            "an engine's workers know methods by name; a class in Python runs with fedproj.run on one machine"
        )
    return _only(_plan(config, {}, [method], settings), out)


def plan_words(words: list[str], out: Any) -> tuple[Any, Path]:
    """The same for the words of a command line."""
    return _only(_fedproj.plan(words), out)


def _only(planned: list[Any], out: Any) -> tuple[Any, Path]:
    if len(planned) != 1:
        raise _fedproj.SettingsError(f"these settings ask for {len(planned)} runs; use fedproj.sweep, or one after another")
    return planned[0], Path(out) if out is not None else planned[0].directory()


@contextmanager
def serve(
    planned: Any, directory: Path, data_dir: Any, threads: int | None, resume: bool, device: str = "cpu", precision: Any = None
) -> Iterator[Any]:
    """The server's half. It leaves the directory at the end, also after an error, so that the run can be resumed."""
    server = _fedproj.Server(planned, directory, _options(data_dir, device, precision, threads, 1, resume))
    try:
        yield server
    finally:
        server.leave()


def finish(server: Any, directory: Path) -> Run:
    """Writes a run's results and reads them back."""
    server.finish()
    return Run(directory)


def describe(record: str, n_rounds: int) -> str:
    """A line about a round."""
    done = json.loads(record)
    accuracy = f", accuracy {100 * done['accuracy']:.2f} %" if done["accuracy"] is not None else ""
    return f"round {done['round'] + 1}/{n_rounds}{accuracy}, {done['seconds']['local']:.1f} s"
