"""What nodes and server of a Flower federation say to each other, over a grid in this process that loses and repeats messages."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

import fedproj
from engines import SMALL, assert_same

pytest.importorskip("flwr", reason="skipped: Flower is not installed (python/check --engines installs it)")
from flwr.app import Context, RecordDict  # noqa: E402
from flwr.serverapp import Grid  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from fedproj import flower  # noqa: E402
from fedproj._run import _pairs  # noqa: E402


class Nodes(Grid):
    """Nodes in this process. `fate` decides how often a message runs, and after how many looks its reply arrives."""

    run = set_run = create_message = send_and_receive = None

    def __init__(self, *configs, fate=lambda kind, n: (1, 0)):
        places = [{"partition-id": place, "num-partitions": len(configs)} | config for place, config in enumerate(configs)]
        self.contexts = {17 + place: Context(1, 17 + place, config, RecordDict(), {}) for place, config in enumerate(places)}
        self.app, self.fate, self.replies, self.n_sent = flower.client_app(), fate, {}, 0
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def get_node_ids(self):
        return list(self.contexts)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            self.n_sent += 1
            message.metadata.__dict__["_message_id"] = name = str(self.n_sent)
            times, delay = self.fate(message.metadata.message_type, self.n_sent)
            for _ in range(times):
                reply = self.app(message, self.contexts[message.metadata.dst_node_id])
                self.replies[name] = [delay, reply]
            ids.append(name)
        return ids

    def pull_messages(self, message_ids):
        for name in message_ids:
            if name in self.replies:
                self.replies[name][0] -= 1
        return [self.replies.pop(name)[1] for name in message_ids if name in self.replies and self.replies[name][0] < 0]


def run(grid, out, settings, **how):
    words = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
    return flower.run(grid, settings=words, out=out, **{"deadline": 1, **how})


@pytest.mark.parametrize("sums", ["float", "fixed"])
def test_messages_that_are_lost_repeated_or_late_change_nothing(sums, tmp_path):
    settings = SMALL | {"method.name": "feddyn", "federation.sum": sums, "federation.fraction": 0.5}
    train = []

    def fate(kind, n):
        if kind != "train":
            return 1, 0
        train.append(n)
        # The third never runs, the fifth runs twice, the sixth answers after it was sent again.
        return {3: (0, 0), 5: (2, 0), 6: (1, 7)}.get(len(train), (1, 0))

    grid = Nodes({}, {}, {}, fate=fate)
    made = run(grid, tmp_path / "run", settings)
    assert_same(made, fedproj.run(settings=settings, out=tmp_path / "alone", progress=False))
    needed = sum(len({client % 3 for client in record["cohort"]}) for record in made.rounds)
    assert len(train) == needed + 2, "two messages were sent again"


def test_a_node_keeps_two_rounds_of_each_client(tmp_path):
    grid = Nodes({}, {})
    run(grid, tmp_path / "run", SMALL | {"method.name": "feddyn", "federation.fraction": 1.0})
    kept = {name: sorted(rounds) for context in grid.contexts.values() for name, rounds in context.state.items()}
    assert kept == {f"client-{client}": ["1", "2"] for client in range(6)}


def test_a_node_without_what_its_client_keeps_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(flower, "FAILURES", 2)

    def fate(kind, n):
        if kind == "train" and n > 3:
            grid.contexts[17].state.clear()
        return 1, 0

    grid = Nodes({}, {}, fate=fate)
    with pytest.raises(fedproj.RunError, match="does not have what client 0 keeps"):
        run(grid, tmp_path / "run", SMALL | {"method.name": "feddyn", "federation.fraction": 1.0})


def test_a_run_resumes_where_clients_keep_nothing(tmp_path):
    settings, half = SMALL | {"method.name": "fedproj"}, SMALL | {"method.name": "fedproj", "federation.rounds": 1}
    run(Nodes({}, {}), tmp_path / "run", half)
    made = run(Nodes({}), tmp_path / "run", settings, resume=True)
    assert_same(made, fedproj.run(settings=settings, out=tmp_path / "alone", progress=False))
    run(Nodes({}), tmp_path / "kept", SMALL | {"method.name": "feddyn", "federation.rounds": 1})
    with pytest.raises(fedproj.SettingsError, match="cannot be resumed"):
        run(Nodes({}), tmp_path / "kept", SMALL | {"method.name": "feddyn"}, resume=True)


def own_data(folder):
    """A run on three clients' samples, and nodes that have one client's each."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 6)).astype(np.float32), np.arange(90) % 3
    lists = [list(range(first, last)) for first, last in ((0, 20), (20, 50), (50, 90))]
    data = fedproj.Dataset(x, y, test=(x[:30], y[:30]), public=x[::2] + 1, partition=lists)
    nodes = []
    for place, samples in enumerate(lists):
        path = folder / f"node-{place}"
        path.mkdir(parents=True)
        np.save(path / "x.npy", x[samples])
        np.save(path / "y.npy", y[samples])
        nodes.append({"data": f"{{name = 'numpy', path = '{path}'}}"})
    settings = {"method.name": "fedproj", "federation.rounds": 3, "model.hidden": [8], "federation.fraction": 1.0}
    return data.save(folder / "data"), settings, nodes


def test_a_node_with_data_of_its_own_is_one_client(tmp_path):
    data, settings, nodes = own_data(tmp_path)
    config = tmp_path / "config.toml"
    config.write_text("\n".join(pair.replace("=", " = ", 1) for pair in _pairs(data | settings)))
    made = flower.run(Nodes(*nodes), config, out=tmp_path / "run", deadline=1)
    assert_same(made, fedproj.run(config, out=tmp_path / "alone", progress=False))
    # Without data of its own, a node does not read files that the network names.
    with pytest.raises(fedproj.SettingsError, match="node.*names files"):
        flower.run(Nodes({}, {}, {}), config, out=tmp_path / "files", deadline=1)
    with pytest.raises(fedproj.SettingsError, match="data.partition.clients=2"):
        flower.run(Nodes(*nodes[:2]), config, out=tmp_path / "fewer", deadline=1)


@pytest.mark.parametrize(
    "config,told",
    [
        ({"folder": "FOLDER"}, "methods|allows fedavg"),
        ({"device": "cuda"}, "GPU|CUDA|cuda"),
        ({"data": "digits"}, "hint: data="),
        ({"data": '{name = "numpy", path = "OTHER"}'}, "node.*(initial_model|shape|features)"),
        ({"partition-id": 5}, "partition-id"),
        ({"partition-id": 1}, "two nodes"),
    ],
)
def test_a_node_that_cannot_take_part_says_why(config, told, tmp_path):
    (tmp_path / "policy.toml").write_text('methods = ["fedavg"]\n')
    np.save(tmp_path / "x.npy", np.zeros((4, 5), np.float32))
    np.save(tmp_path / "y.npy", np.arange(4) % 2)
    config = {key: str(value).replace("FOLDER", str(tmp_path)).replace("OTHER", str(tmp_path)) for key, value in config.items()}
    if "partition-id" in config:
        config["partition-id"] = int(config["partition-id"])
    with pytest.raises((fedproj.SettingsError, fedproj.RunError), match=told):
        run(Nodes(config, {}), tmp_path / "run", SMALL | {"method.name": "fedprox"})
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text()


def test_a_node_of_another_version_is_named(tmp_path, monkeypatch):
    serve = flower.serve

    class Other:
        def __init__(self, server):
            self._server, self.origin = server, json.dumps(json.loads(server.origin) | {"version": "9.9"})

        def __getattr__(self, name):
            return getattr(self._server, name)

    @contextmanager
    def other(*how):
        with serve(*how) as server:
            yield Other(server)

    monkeypatch.setattr(flower, "serve", other)
    with pytest.raises(fedproj.SettingsError, match="version .* instead of 9.9"):
        run(Nodes({}), tmp_path / "run", SMALL)


def test_a_server_does_not_wait_for_ever(tmp_path):
    with pytest.raises(fedproj.SettingsError, match="flower-supernode"):
        run(Nodes(), tmp_path / "none", SMALL, deadline=0.3)
    with pytest.raises(fedproj.SettingsError, match="2 nodes are connected"):
        run(Nodes({}, {}), tmp_path / "few", SMALL, nodes=3, deadline=0.3)
    with pytest.raises(fedproj.SettingsError, match="evaluate_clients"):
        run(Nodes({}), tmp_path / "kept", SMALL | {"method.name": "ditto", "federation.evaluate_clients": True})
