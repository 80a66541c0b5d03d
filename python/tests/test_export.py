"""TensorBoard reads what the command writes."""

import subprocess
import sys

import fedproj
import pytest

accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def test_tensorboard_reads_every_number_of_a_run(tmp_path):
    settings = {"federation.rounds": 3, "local.epochs": 1, "model.hidden": [8]}
    run = fedproj.run(method="fedproj", settings=settings, out=tmp_path / "run", progress=False)
    command = [sys.executable, "-m", "fedproj", "export", "tensorboard", str(run.directory), "--out", str(tmp_path / "tb")]
    for _ in range(2):
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert len(list((tmp_path / "tb/run").iterdir())) == 1, "a second export replaces the first"
    events = accumulators.EventAccumulator(path).Reload()
    tags = events.Tags()["scalars"]
    assert {"accuracy", "loss", "train_loss", "seconds/local", "bytes_up"} <= set(tags) and "round" not in tags
    accuracy = events.Scalars("accuracy")
    assert [event.step for event in accuracy] == [0, 1, 2]
    assert [event.value for event in accuracy] == pytest.approx(run.metrics["accuracy"].tolist(), rel=1e-6)
    times = [event.wall_time for event in accuracy]
    assert times == sorted(times)
