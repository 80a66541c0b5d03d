"""MLflow and Weights & Biases show what was measured. Both packages are large: install them to run these tests."""

import json
import struct

import fedproj
import pytest


@pytest.fixture
def done(tmp_path):
    settings = {"federation.rounds": 3, "local.epochs": 1, "model.hidden": [8]}
    return fedproj.run(method="fedproj", settings=settings, out=tmp_path / "run", progress=False)


def test_mlflow_has_settings_and_metrics(tmp_path, done):
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path / 'mlflow.db'}")
    id_ = done.to_mlflow()
    stored = mlflow.get_run(id_)
    assert stored.data.params["method.name"] == "fedproj" and stored.data.params["federation.rounds"] == "3"
    history = mlflow.MlflowClient().get_metric_history(id_, "accuracy")
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(done.metrics["accuracy"].tolist()))


def records(content):
    """The records of a file of Weights & Biases: 7 bytes, then LevelDB's log format."""
    at, parts = 7, []
    while at < len(content):
        if 32768 - at % 32768 < 7:  # no header fits into the rest of a block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        parts.append(content[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield b"".join(parts)
            parts = []


def test_wandb_has_settings_and_metrics_without_a_network(tmp_path, done):
    wandb = pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    files = done.to_wandb(project="fedproj", mode="offline", dir=str(tmp_path))
    wandb.teardown()  # a process of its own writes the file, and may still do so after the run has finished
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert str(path.parent) in files
    accuracies, settings = [], {}
    for record in map(Record.FromString, records(path.read_bytes())):
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        accuracies += [items["accuracy"]] if "accuracy" in items else []
        settings |= {update.key: json.loads(update.value_json) for update in record.run.config.update}
    assert accuracies == done.metrics["accuracy"].tolist()
    assert settings["method"]["name"] == "fedproj"
