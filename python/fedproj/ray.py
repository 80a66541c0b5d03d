"""One run over many GPUs or hosts, on Ray: ``fedproj.ray.run("exp.toml", workers=4, device="cuda")``.

An actor per GPU, or per group of cores, trains its clients; this process fuses and keeps the run directory. The result is
that of ``fedproj run``, bit for bit. An actor that dies is restarted and repeats its clients; if this process dies,
``resume=True`` continues the run.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

import numpy as np

from fedproj import _fedproj
from fedproj._halves import describe, finish, plan_one, serve
from fedproj._progress import progress as _progress
from fedproj._run import PathLike, Run, Settings, _options

__all__ = ["run"]

# Nothing is reported to anybody unless the user asks for it.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# A client's training is a pure function, so it may be repeated. An actor that dies so often in one round lacks memory.
RETRIES = 5

# Seconds to wait for a cluster's address to answer.
PATIENCE = 10


class _Worker:
    """The clients' half in an actor."""

    def __init__(self, origin: str, options: str) -> None:
        self._trainer = _fedproj.Trainer(origin, options)

    def ready(self) -> int:
        return os.getpid()

    def train(self, download: bytes, summed: bool, clients: list[int], *states: bytes | None) -> list[Any]:
        """The results as one list, then what each client keeps. Arrays of bytes are not copied on their way."""
        given = list(zip(clients, states or [None] * len(clients)))
        if summed:
            total, kept = self._trainer.train_summed(download, given)
            results, kept = [total], dict(kept)
        else:
            trained = self._trainer.train(download, given)
            results = [result for result, _ in trained]
            kept = {client: state for client, (_, state) in zip(sorted(clients), trained)}
        arrays = [np.frombuffer(result, np.uint8) for result in results]
        return [arrays, *(kept.get(client) for client in clients)] if states else arrays


def run(
    config: PathLike | Settings | None = None,
    *,
    workers: int,
    method: str | None = None,
    settings: Settings | None = None,
    out: PathLike | None = None,
    resume: bool = False,
    progress: bool = True,
    threads: int = 1,
    device: str | None = None,
    precision: str | None = None,
    data_dir: PathLike | None = None,
    address: str | None = None,
) -> Run:
    """Makes one run with ``workers`` actors of ``threads`` threads each, or of one GPU each with ``device="cuda"``.

    The calling process fuses on a device of that kind, since a GPU and a CPU give other bytes; so it needs a GPU, too.

    ``address`` is that of a Ray cluster [default: one on this machine, which ends with the run]. All machines need this
    package and the data in the same version. Other arguments are those of :func:`fedproj.run`.

    Ctrl-C ends the run at once with :class:`fedproj.StoppedError`; ``resume=True`` continues it from its last checkpoint.
    """
    import ray

    planned, directory = plan_one(config, method, settings, out)
    # An actor sees a GPU only if it asks for one, so "auto" would differ between the processes.
    device = "cpu" if device in (None, "auto") else device
    gpus = 1 if device.startswith("cuda") else 0
    if _fedproj.is_finished(planned, directory):
        return Run(directory)
    n_rounds = json.loads(planned.config())["federation"]["rounds"]
    is_ours, actors, shown = not ray.is_initialized(), [], _progress(progress)
    try:
        if is_ours:
            _connect(ray, address, workers * threads)
        _check(ray, workers, threads, gpus)
        with serve(planned, directory, data_dir, threads, resume, device, precision) as server:
            options = _options(data_dir, device, precision, threads, 1, False)
            actors = _start(ray, server.origin, workers, threads, gpus, options)
            kept = _Kept(server)
            while (task := server.open()) is not None:
                shown.status(f"round {task[0] + 1}/{n_rounds}")
                shown.round(describe(_round(ray, server, actors, kept, *task), n_rounds))
                shown.bar(task[0] + 1, n_rounds)
            return finish(server, directory)
    except KeyboardInterrupt:
        raise _fedproj.StoppedError(f"stopped; the rounds before are in `{directory}`\nhint: resume=True") from None
    finally:
        shown.close()
        for actor in actors:
            ray.kill(actor)
        if is_ours:
            ray.shutdown()


def _connect(ray: Any, address: str | None, n_cpus: int) -> None:
    how: dict[str, Any] = {"address": address} if address else {"address": "local", "num_cpus": n_cpus}
    try:
        if address:
            _reach(address)
        ray.init(**how, include_dashboard=None if address else False, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        raise _fedproj.SettingsError(
            f"no Ray cluster at `{address}`: {error}\nhint: `ray start --head` on one machine, then address='HOST:6379'"
        ) from error


def _reach(address: str) -> None:
    """Fails where nothing listens. Ray would try again for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    # Other forms, such as "auto", are Ray's to read.
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE).close()


def _check(ray: Any, workers: int, threads: int, gpus: int) -> None:
    """Rejects what the cluster does not have."""
    there = ray.cluster_resources()
    for name, needed in (("CPU", workers * threads), ("GPU", workers * gpus)):
        if there.get(name, 0) < needed:
            raise _fedproj.SettingsError(
                f"{workers} workers need {needed} {name}s, but the cluster has {there.get(name, 0):g}\n"
                "hint: fewer workers or threads, or more machines (`ray start --address=HOST:6379`)"
            )


def _start(ray: Any, origin: str, workers: int, threads: int, gpus: int, options: str) -> list[Any]:
    """The actors, once all of them have read the data."""
    resources = {"num_cpus": threads, "num_gpus": gpus, "max_restarts": -1, "max_task_retries": RETRIES}
    worker = ray.remote(**resources)(_Worker)
    actors = [worker.remote(origin, options) for _ in range(workers)]
    _get(ray, [actor.ready.remote() for actor in actors])
    return actors


class _Kept:
    """What clients keep. It stays where they are trained, in Ray's store; a checkpoint brings it here."""

    def __init__(self, server: Any) -> None:
        self._server, self._stored = server, dict[int, Any]()
        self._unsaved: set[int] = set()
        self.is_needed = server.keeps

    def of(self, client: int) -> Any:
        """Its place in the store, or the state of the checkpoint from which the run resumes."""
        return self._stored[client] if client in self._stored else self._server.state(client)

    def put(self, clients: list[int], places: list[Any]) -> None:
        self._stored.update(zip(clients, places))
        self._unsaved.update(clients)

    def take(self, ray: Any) -> list[tuple[int, bytes]]:
        """What was not in a checkpoint yet, if this round's end needs it."""
        if not (self._server.saves or self._server.measures_kept):
            return []
        clients = sorted(self._unsaved)
        self._unsaved.clear()
        states = _get(ray, [self._stored[client] for client in clients])
        return [(client, state) for client, state in zip(clients, states) if state is not None]


def _round(ray: Any, server: Any, actors: list[Any], kept: _Kept, _: int, download: bytes, cohort: list[int]) -> str:
    """Trains the clients of a round where they always train, and fuses them."""
    began, sent = time.monotonic(), ray.put(download)
    tasks = []
    for place, actor in enumerate(actors):
        clients = [client for client in cohort if client % len(actors) == place]
        if not clients:
            continue
        states = [kept.of(client) for client in clients] if kept.is_needed else []
        train = actor.train.options(num_returns=1 + len(states))
        made = train.remote(sent, server.takes_sums, clients, *states)
        if states:
            made, *places = made
            kept.put(clients, places)
        tasks.append(made)
    while tasks:
        # In the order in which workers end.
        done, tasks = ray.wait(tasks)
        for result in _get(ray, done)[0]:
            server.add(result)
    return server.close(kept.take(ray), time.monotonic() - began)


def _get(ray: Any, tasks: list[Any]) -> list[Any]:
    """The results of tasks. An error of the engine is raised as it would be here."""
    try:
        return ray.get(tasks)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, (_fedproj.SettingsError, _fedproj.RunError)):
            raise type(cause)(str(cause)) from None
        raise
    except ray.exceptions.RayActorError as error:
        text = str(error)
        for kind in (_fedproj.SettingsError, _fedproj.RunError):
            if f"{kind.__name__}: " in text:
                raise kind(text.split(f"{kind.__name__}: ", 1)[1].strip()) from None
        raise _fedproj.RunError(
            f"a worker died {RETRIES + 1} times: {text}\nhint: fewer workers per machine need less memory; resume=True continues"
        ) from error
