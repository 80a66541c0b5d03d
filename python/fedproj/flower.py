"""A federation on Flower: its SuperLink and SuperNodes carry the messages, or its simulation runs the nodes.

``deploy/flower`` is an app for ``flwr run`` that is made of :func:`client_app` and :func:`server_app`. Each node trains its own
clients; the server fuses, evaluates, and keeps the run directory of :func:`fedproj.run`, whose bytes the result has.

Flower may lose a message, run it twice, or deliver it late. So results are matched by round and clients, a message without an
answer is sent again, and a node keeps what its clients remember under the round that made it.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedproj import _fedproj
from fedproj._halves import describe, finish, plan_words, serve
from fedproj._run import PathLike, Run, _options

__all__ = ["client_app", "server_app"]

# Seconds between two looks for replies; Flower's own loop waits for three.
PAUSE = 0.2

# So often a round's nodes may fail or miss the deadline. More is no accident.
FAILURES = 10

# Instead of the round in which a client trained last.
NEVER = -1


class _Again(Exception):
    """What another try may mend."""


def client_app() -> ClientApp:
    """The nodes' half. The SuperNode's ``--node-config`` says which clients it has, and what its owner allows.

    ``partition-id`` and ``num-partitions`` are needed (a simulation sets them): client k is trained by the node k mod
    ``num-partitions``. ``data`` is the node's own data set in TOML, such as ``{name="csv", path="/data/own.csv"}``; then the
    node is client ``partition-id``. ``folder`` has its ``policy.toml``. ``data-dir``, ``device`` and ``threads`` are those of
    :func:`fedproj.run`.
    """
    app = ClientApp()

    @app.query()
    def meet(message: Message, context: Context) -> Message:
        return _answered(message, context, _meet)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answered(message, context, _train)

    return app


def _answered(message: Message, context: Context, work: Any) -> Message:
    """The reply. The engine's errors travel as text, so that the server can raise them."""
    try:
        content = work(message.content, context)
    except (_fedproj.SettingsError, _fedproj.RunError) as error:
        kind = "settings" if isinstance(error, _fedproj.SettingsError) else "run"
        content = RecordDict({"error": ConfigRecord({"kind": kind, "text": str(error)})})
    except _Again as error:
        content = RecordDict({"error": ConfigRecord({"kind": "again", "text": str(error)})})
    return Message(content, reply_to=message)


def _meet(content: RecordDict, context: Context) -> RecordDict:
    """Which node this is, once it has shown that it can take part."""
    place, n_places = (context.node_config.get(key) for key in ("partition-id", "num-partitions"))
    if not isinstance(place, int) or not isinstance(n_places, int) or not 0 <= place < n_places:
        raise _fedproj.SettingsError(
            f"node: partition-id is {place!r} of {n_places!r}\n"
            "hint: flower-supernode --node-config 'partition-id=0 num-partitions=3'"
        )
    has_own, task = "data" in context.node_config, content["task"]
    if not (has_own and task["has_public"]):
        _trainer(task["origin"], context, None)
    return RecordDict({"node": ConfigRecord({"place": place, "n_places": n_places, "has_own": has_own})})


def _train(content: RecordDict, context: Context) -> RecordDict:
    """The results of the node's clients."""
    task = content["task"]
    public = _bytes(content["public"]["all"]) if "public" in content else None
    trainer = _trainer(task["origin"], context, public)
    round_, clients = task["round"], list(zip(task["clients"], task["last"]))
    states = [_kept(context.state, client, last) for client, last in clients]
    download = _bytes(content["download"]["all"])
    given = list(zip(task["clients"], states))
    if task["summed"]:
        total, kept = trainer.train_summed(download, given)
        results, kept = [total], dict(kept)
    else:
        trained = trainer.train(download, given)
        results = [result for result, _ in trained]
        kept = {client: state for client, (_, state) in zip(sorted(task["clients"]), trained) if state is not None}
    for client, last in clients:
        if client in kept:
            _keep(context.state, client, last, round_, kept[client])
    reply = {str(at): _array(result) for at, result in enumerate(results)}
    about = {"place": context.node_config["partition-id"], "round": round_, "clients": list(task["clients"])}
    return RecordDict({"results": ArrayRecord(reply), "task": ConfigRecord(about)})


# Workers of a simulation, and ClientApps that run several messages, read their data once.
_trainers: dict[str, Any] = {}


def _trainer(origin: str, context: Context, public: bytes | None) -> Any:
    """The clients' half of this node."""
    own, shared = context.node_config, context.run_config
    data = _table(own["data"]) if "data" in own else None
    node = json.dumps({"client": own["partition-id"], "data": data, "folder": own.get("folder")})
    # A server may ask for a device, but not name a file.
    device, threads = (own.get(key, shared.get(key)) for key in ("device", "threads"))
    options = _options(own.get("data-dir"), device or None, None, threads or 1, 1, False)
    key = f"{origin} {node if data else own.get('folder')} {options}"
    if key not in _trainers:
        _trainers.clear()
        _trainers[key] = _fedproj.Trainer(origin, options, node, public)
    return _trainers[key]


def _table(text: Any) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(f"data = {text}")["data"]
    except tomllib.TOMLDecodeError as error:
        raise _fedproj.SettingsError(
            f"node: data is {text!r}: {error}\nhint: data='{{name=\"csv\", path=\"/data/own.csv\"}}'"
        ) from None


def _kept(state: RecordDict, client: int, last: int) -> bytes | None:
    """What a client keeps since the round in which it trained last."""
    if last == NEVER:
        return None
    rounds = state.get(f"client-{client}", {})
    if str(last) not in rounds:
        # Flower saves it after it has sent the reply, so it may still be on its way.
        raise _Again(f"the node does not have what client {client} keeps since round {last + 1}")
    return _bytes(rounds[str(last)])


def _keep(state: RecordDict, client: int, last: int, round_: int, kept: bytes) -> None:
    """Keeps it beside that of the round before, in case that this round is asked for again."""
    name = f"client-{client}"
    newer = {key: value for key, value in state.get(name, {}).items() if int(key) >= last}
    state[name] = ArrayRecord({**newer, str(round_): _array(kept)})


def _array(content: bytes) -> Array:
    return Array(np.frombuffer(content, np.uint8))


def _bytes(array: Array) -> bytes:
    return array.numpy().tobytes()


def server_app(config: PathLike | None = None) -> ServerApp:
    """The server's half, for the run of a configuration file.

    Flower's run configuration adds ``settings`` (``"method.name=fedproj federation.rounds=3"``), ``out`` (the run directory),
    ``resume``, ``nodes`` (how many to wait for), ``deadline`` (seconds until a message without an answer is sent again),
    ``data-dir``, ``threads``, and the ``device`` of nodes that do not choose one.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run(grid, config, **_arguments(context))

    return app


def _arguments(context: Context) -> dict[str, Any]:
    given = context.run_config
    return {
        "settings": str(given.get("settings", "")),
        "out": given.get("out") or None,
        "resume": bool(given.get("resume", False)),
        "nodes": int(given.get("nodes", 0)),
        "deadline": float(given.get("deadline", 600)),
        "data_dir": given.get("data-dir") or None,
        "threads": int(given.get("threads", 1)),
    }


def run(
    grid: Grid,
    config: PathLike | None = None,
    *,
    settings: str = "",
    out: PathLike | None = None,
    resume: bool = False,
    nodes: int = 0,
    deadline: float = 600,
    data_dir: PathLike | None = None,
    threads: int = 1,
) -> Run:
    """Makes one run over the nodes of a grid, in a ServerApp of your own. See :func:`server_app`."""
    words = [] if config is None else [os.fspath(config)]
    planned, directory = plan_words(words + shlex.split(settings), out)
    if _fedproj.is_finished(planned, directory):
        return Run(directory)
    n_rounds = json.loads(planned.config())["federation"]["rounds"]
    with serve(planned, directory, data_dir, threads, resume) as server:
        _check(server, directory)
        federation = _Federation(grid, server, deadline)
        federation.wait_for(nodes)
        _say(f"{len(federation.nodes)} nodes; results go to `{directory.resolve()}`")
        while (task := server.open()) is not None:
            began = time.monotonic()
            federation.round(*task)
            _say(describe(server.close([], time.monotonic() - began), n_rounds))
        return finish(server, directory)


def _check(server: Any, directory: Path) -> None:
    """Rejects what needs the states of clients, which stay on their nodes."""
    if server.measures_kept:
        raise _fedproj.SettingsError(
            "federation.evaluate_clients measures what this method's clients keep, which stays on their nodes\n"
            "hint: federation.evaluate_clients=false, or fedproj.ray"
        )
    if server.keeps and Run(directory).rounds:
        raise _fedproj.SettingsError(
            "this run cannot be resumed: Flower's nodes keep what clients remember for one `flwr run` only\n"
            "hint: begin again with another `out`"
        )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _Federation:
    """The nodes of a run, and what was asked of them."""

    def __init__(self, grid: Grid, server: Any, deadline: float) -> None:
        self._grid, self._server, self._deadline = grid, server, deadline
        self._public = server.public()
        self._summed, self._keeps = server.takes_sums, server.keeps
        self._n_places = 0
        # The node of each place, and the places that hold data of their own.
        self.nodes: dict[int, int] = {}
        self._owners: set[int] = set()
        # The round in which each client trained last.
        self._last: dict[int, int] = {}

    def wait_for(self, n_nodes: int) -> None:
        """Meets the nodes, once so many are connected and each place has one."""
        until, met = time.monotonic() + self._deadline, 0
        while True:
            there = list(self._grid.get_node_ids())
            if len(there) >= max(n_nodes, 1) and len(there) > met:
                self._meet()
                met = len(there)
            if self.nodes and len(self.nodes) == self._n_places:
                return
            if time.monotonic() > until:
                raise _fedproj.SettingsError(
                    f"{len(there)} nodes are connected and {len(self.nodes)} of {self._n_places or n_nodes or 1} have answered "
                    f"within {self._deadline:g} s\nhint: start the others, or raise `deadline`: flower-supernode --superlink "
                    "HOST:8000 --node-config 'partition-id=0 num-partitions=3'"
                )
            time.sleep(PAUSE)

    def _meet(self) -> None:
        """Asks all connected nodes for their places. A node that comes back has another number."""
        there = list(self._grid.get_node_ids())
        hello = ConfigRecord({"origin": self._server.origin, "has_public": self._public is not None})
        asked = self._push({node: RecordDict({"task": hello}) for node in there}, MessageType.QUERY)
        until, found = time.monotonic() + self._deadline, dict[int, int]()
        while asked and time.monotonic() < until:
            for node, content in self._pull(asked):
                if content is None:
                    continue
                place, n_places, has_own = (content["node"][key] for key in ("place", "n_places", "has_own"))
                if place in found or self._n_places not in (0, n_places):
                    raise _fedproj.SettingsError(
                        f"two nodes are node {place}, or nodes disagree on their number ({n_places})\n"
                        "hint: --node-config 'partition-id=0 num-partitions=3', with a partition-id of its own for each node"
                    )
                found[place], self._n_places = node, n_places
                if has_own:
                    self._owners.add(place)
            time.sleep(PAUSE)
        # Who did not answer may be at work.
        self.nodes = {place: node for place, node in self.nodes.items() if node in there} | found

    def _push(self, contents: dict[int, RecordDict], kind: str) -> dict[str, int]:
        """Sends contents to nodes; the nodes by the messages' ids."""
        ttl = FAILURES * self._deadline
        messages = [Message(content, node, kind, ttl=ttl) for node, content in contents.items()]
        ids = self._grid.push_messages(messages) if messages else []
        return {id_: node for id_, node in zip(ids, contents) if id_}

    def _pull(self, asked: dict[str, int]) -> list[tuple[int, RecordDict | None]]:
        """The replies that are there; ``None`` where Flower has lost one, or the node asks for another try."""
        replies = []
        for message in list(self._grid.pull_messages(list(asked))):
            node = asked.pop(message.metadata.reply_to_message_id, None)
            if node is None:
                continue
            content = None if message.has_error() else message.content
            if content is not None and "error" in content:
                kind, text = content["error"]["kind"], content["error"]["text"]
                if kind != "again":
                    raise (_fedproj.SettingsError if kind == "settings" else _fedproj.RunError)(f"{self._name(node)}: {text}")
                self._why = text
                content = None
            elif content is None:
                self._why = str(message.error.reason)
            replies.append((node, content))
        return replies

    def _name(self, node: int) -> str:
        places = [place for place, known in self.nodes.items() if known == node]
        return f"node {places[0]}" if places else f"Flower's node {node}"

    _why = "no answer"

    def round(self, round_: int, download: bytes, cohort: list[int]) -> None:
        """Adds the results of a round's clients. A node that fails or stays silent is asked again."""
        waiting: dict[int, list[int]] = {}
        for client in cohort:
            waiting.setdefault(client % self._n_places, []).append(client)
        self._check_owners(waiting)
        array = ArrayRecord({"all": _array(download)})
        asked, failures = self._send(round_, array, waiting), 0
        until = time.monotonic() + self._deadline
        while waiting:
            time.sleep(PAUSE)
            failed = time.monotonic() > until
            for node, content in self._pull(asked):
                failed |= content is None
                if content is not None:
                    self._take(round_, content, waiting)
            if waiting and failed:
                failures += 1
                if failures > FAILURES:
                    raise _fedproj.RunError(
                        f"round {round_ + 1}: nodes {sorted(waiting)} have failed {failures} times, last: {self._why}\n"
                        "hint: the nodes' logs say more; a ClientApp without enough memory is killed"
                    )
                # In a simulation this also moves messages away from an actor that has died.
                self._meet()
                busy = set(asked.values()) if time.monotonic() <= until else set()
                again = {place: clients for place, clients in waiting.items() if self.nodes.get(place) not in busy}
                asked |= self._send(round_, array, again)
                until = time.monotonic() + self._deadline

    def _check_owners(self, waiting: dict[int, list[int]]) -> None:
        """A node with data of its own is one client."""
        for place in self._owners & waiting.keys():
            if waiting[place] != [place]:
                raise _fedproj.SettingsError(
                    f"node {place} has data of its own, so it is client {place}, but the run has clients {waiting[place]} for it\n"
                    f"hint: data.partition.clients={self._n_places}"
                )

    def _send(self, round_: int, download: ArrayRecord, tasks: dict[int, list[int]]) -> dict[str, int]:
        """Asks nodes for the results of their clients."""
        contents = {}
        for place, clients in tasks.items():
            last = [self._last.get(client, NEVER) if self._keeps else NEVER for client in clients]
            task = {"origin": self._server.origin, "round": round_, "clients": clients, "last": last, "summed": self._summed}
            content = RecordDict({"task": ConfigRecord(task), "download": download})
            if place in self._owners and self._public is not None:
                content["public"] = ArrayRecord({"all": _array(self._public)})
            if place in self.nodes:
                contents[self.nodes[place]] = content
        return self._push(contents, MessageType.TRAIN)

    def _take(self, round_: int, content: RecordDict, waiting: dict[int, list[int]]) -> None:
        """Takes a node's results once, whichever of its messages they answer."""
        place, clients = content["task"]["place"], list(content["task"]["clients"])
        if content["task"]["round"] == round_ and waiting.get(place) == clients:
            for result in content["results"].values():
                self._server.add(result.numpy())
            self._last |= {client: round_ for client in waiting.pop(place)}
