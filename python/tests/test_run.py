"""One run: its results, its directory, and what it does with wrong requests."""

import json
import subprocess
import sys

import fedproj
import numpy as np
import pytest
from fedproj import _trackers

SMALL = {"federation.rounds": 3, "local.epochs": 1, "model.hidden": [8]}


def small(out, method="fedavg", **more):
    return fedproj.run(method=method, settings=SMALL, out=out, progress=False, **more)


def test_a_run_gives_its_metrics_as_arrays(tmp_path):
    run = small(tmp_path / "a")
    assert run.is_finished and run.config["federation"]["rounds"] == 3
    metrics = run.metrics
    assert metrics["round"].tolist() == [0, 1, 2] and metrics["accuracy"].dtype == np.float64
    assert metrics["accuracy"][-1] == run.summary["last"]
    assert np.isnan(metrics["distill_loss"]).all(), "FedAvg distils nothing"
    assert {len(column) for column in metrics.values()} == {3}
    assert (metrics["seconds_local"] > 0).all() and metrics["model_hash"][-1] == run.summary["model_hash"]


@pytest.mark.parametrize(("noise", "mark"), [("seeded", " (nominal)"), ("system", "")])
def test_a_run_under_privacy_shows_its_epsilon_and_whether_it_is_nominal(tmp_path, noise, mark):
    private = {**SMALL, "privacy.noise_multiplier": 2.0, "privacy.noise": noise}
    run = fedproj.run(method="fedavg", settings=private, out=tmp_path / "a", progress=False)
    metrics = run.metrics
    assert (np.diff(metrics["privacy_epsilon"]) > 0).all()
    assert metrics["privacy_epsilon"][-1] == run.summary["privacy"]["epsilon"]
    assert metrics["privacy_nominal"].tolist() == [1 if mark else 0] * 3
    numbers = dict(_trackers._rounds(run))[2]
    assert numbers["privacy_nominal"] == float(bool(mark)) and numbers["privacy_epsilon"] > 0
    shown = f"{run.summary['privacy']['epsilon']:.2f}{mark}"
    assert f"ε = {shown}, " in repr(run) and f"<td>{shown}</td>" in run._repr_html_()
    assert "ε" not in repr(small(tmp_path / "b")) and "privacy_epsilon" not in small(tmp_path / "b").metrics


def test_the_model_has_pytorch_names_and_shapes(tmp_path):
    model = small(tmp_path / "a").model()
    shapes = {name: tensor.shape for name, tensor in model.items()}
    assert shapes["fc1.weight"] == (8, 64) and shapes["fc2.weight"] == (10, 8) and shapes["fc2.bias"] == (10,)
    assert all(tensor.dtype == np.float32 and tensor.flags.writeable for tensor in model.values())


def test_the_same_settings_give_the_command_lines_bytes(tmp_path):
    run = small(tmp_path / "a", method="fedproj")
    settings = [f"{key}={json.dumps(value)}" for key, value in SMALL.items()]
    command = [sys.executable, "-m", "fedproj", "run", *settings, "method.name=fedproj", "--out", str(tmp_path / "b")]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["model_hash"] == run.summary["model_hash"]
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_a_configuration_is_a_file_a_dictionary_or_nothing(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[federation]\nrounds = 1\n[local]\nepochs = 1\n[model]\nhidden = [8]\n[method]\nname = 'fedavg'\n")
    table = {"federation": {"rounds": 1}, "local": {"epochs": 1}, "model": {"hidden": [8]}, "method": "fedavg"}
    hashes = {
        fedproj.run(config, out=tmp_path / str(i), progress=False).summary["model_hash"]
        for i, config in enumerate([path, table])
    }
    assert len(hashes) == 1


def test_a_finished_run_is_read_and_another_configuration_is_refused(tmp_path):
    first = small(tmp_path / "a")
    before = (tmp_path / "a/metrics.jsonl").stat().st_mtime_ns
    assert small(tmp_path / "a").summary == first.summary
    assert (tmp_path / "a/metrics.jsonl").stat().st_mtime_ns == before
    with pytest.raises(fedproj.SettingsError, match="holds a run of another configuration"):
        small(tmp_path / "a", method="fedprox")


def test_a_run_verifies_and_reports_itself(tmp_path):
    run = small(tmp_path / "a")
    verified = run.verify()
    assert verified["n_rounds"] == 3 and "model.safetensors" in verified["compared"]
    assert run.report().read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(fedproj.SettingsError, match="rounds = -1: must be a whole number from 1 on"):
        run.verify(rounds=-1)
    with pytest.raises(TypeError, match="an object of a subclass of fedproj.Method, not 'fedavg'"):
        run.verify("fedavg")
    model = tmp_path / "a/model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"\x00")
    with pytest.raises(fedproj.RunError, match="is not what its rerun gives"):
        run.verify()
    model.write_bytes(b"rubbish" * 9)
    with pytest.raises(fedproj.RunError, match="model.safetensors` is damaged"):
        run.model()


def test_a_notebook_shows_curves_and_a_table(tmp_path):
    page = small(tmp_path / "a")._repr_html_()
    assert page.startswith("<svg") and "<th>accuracy</th>" in page and "FedAvg" in page


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"federation.rounds": 0}, "federation.rounds = 0: must be at least 1"),
        ({"federation.round": 1}, "did you mean `federation.rounds`?"),
        ({"local.optimizer": {"kind": "sgdd"}}, "must be one of sgd, adam, adamw"),
        ({"federation.rounds": "many"}, 'federation.rounds = "many": must be a whole number from 0 on'),
        ({"seeds": [0, 1]}, "these settings ask for 2 runs; use fedproj.sweep"),
    ],
)
def test_wrong_settings_are_answered_in_the_command_lines_words(tmp_path, settings, text):
    with pytest.raises(fedproj.SettingsError) as raised:
        fedproj.run(settings=settings, out=tmp_path, progress=False)
    assert text in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_wrong_arguments_are_python_exceptions(tmp_path):
    with pytest.raises(fedproj.SettingsError, match="unknown device `tpu`"):
        small(tmp_path / "a", device="tpu")
    with pytest.raises(fedproj.SettingsError, match="cannot read the configuration `nowhere.toml`"):
        fedproj.run("nowhere.toml", out=tmp_path, progress=False)
    with pytest.raises(TypeError, match="a method is a name or an object"):
        fedproj.run(method=3, out=tmp_path, progress=False)
    with pytest.raises(TypeError, match=r"an object, not its class: Method\(\)"):
        fedproj.run(method=fedproj.Method, out=tmp_path, progress=False)
    for count in ({"threads": 0}, {"threads": -1}, {"threads": 100_000}):
        with pytest.raises(fedproj.SettingsError, match="threads = .*: must be from 1 to 65535"):
            fedproj.run(out=tmp_path, progress=False, **count)
    with pytest.raises(fedproj.SettingsError, match="threads = '2': must be from 1"):
        small(tmp_path / "a", threads="2")
    with pytest.raises(TypeError, match="device is a text such as 'cuda', not 0"):
        small(tmp_path / "a", device=0)
    with pytest.raises(TypeError, match="settings are a dictionary such as .*, not str"):
        fedproj.run(settings="federation.rounds=5", out=tmp_path, progress=False)
    with pytest.raises(TypeError, match=r"an object, not its class: Method\(\)"):
        fedproj.sweep(methods=fedproj.Method, out=tmp_path, progress=False)
    with pytest.raises(TypeError, match="an object of a subclass of fedproj.Method, not <fedproj"):
        fedproj.run(method=fedproj.Method(), out=tmp_path, progress=False)
    with pytest.raises(ValueError, match="there is no method to run"):
        fedproj.sweep(methods=[], out=tmp_path, progress=False)
    with pytest.raises(TypeError, match="'name': 'csv'.*, not tuple"):
        fedproj.run(data=([[1.0]], [0]), out=tmp_path, progress=False)
    with pytest.raises(ValueError, match="no run to compare"):
        fedproj.compare([])
    with pytest.raises(TypeError, match="a setting is a number"):
        fedproj.run(settings={"seed": object()}, out=tmp_path, progress=False)
    with pytest.raises(fedproj.RunError, match="cannot read"):
        fedproj.load(tmp_path / "none")


def test_a_loss_that_leaves_the_finite_numbers_is_a_run_error(tmp_path):
    settings = {**SMALL, "local.optimizer": {"kind": "sgd", "lr": 1e30}}
    with pytest.raises(fedproj.RunError, match="round 0, client .* the loss is"):
        fedproj.run(method="fedavg", settings=settings, out=tmp_path / "a", progress=False)


def test_runs_are_swept_and_compared(tmp_path):
    runs = fedproj.sweep(methods=["fedavg", "fedprox"], seeds=2, settings=SMALL, out=tmp_path, progress=False)
    assert [(run.summary["method"], run.summary["seed"]) for run in runs] == [
        ("fedavg", 0),
        ("fedavg", 1),
        ("fedprox", 0),
        ("fedprox", 1),
    ]
    assert len({run.directory for run in runs}) == 4
    comparison = fedproj.compare(runs)
    names = [row["name"] for row in comparison.settings[0]["rows"]]
    assert names == ["FedAvg", "FedProx"] and "FedProx" in str(comparison)
    assert comparison._repr_html_().startswith("<svg")


def test_one_method_needs_no_list_and_data_may_be_a_dictionary(tmp_path):
    rows = "".join(f"{i % 3 + i / 1000},{i % 5},{i % 3}\n" for i in range(300))
    (tmp_path / "points.csv").write_text(rows)
    data = {"name": "csv", "path": str(tmp_path / "points.csv")}
    settings = {**SMALL, "data.partition.clients": 4}
    (run,) = fedproj.sweep(data=data, methods="fedavg", settings=settings, out=tmp_path / "runs", progress=False)
    assert run.config["data"]["private"]["name"] == "csv" and run.summary["method"] == "fedavg"
    assert "FedAvg" in str(fedproj.compare(tmp_path / "runs"))
    (other,) = fedproj.sweep(data=data, methods="fedprox", settings=settings, out=tmp_path / "runs", progress=False)
    assert other.directory != run.directory
    with pytest.raises(fedproj.RunError, match="holds 2 runs; load one of them, such as"):
        fedproj.load(tmp_path / "runs")


def test_the_command_is_the_programs_own():
    def command(*args):
        return subprocess.run([sys.executable, "-m", "fedproj", *args], capture_output=True, text=True)

    assert command("--version").stdout.startswith("fedproj ")
    assert "fedproj" in command("methods").stdout
    wrong = command("run", "federation.rounds=0")
    assert wrong.returncode == 2 and wrong.stderr == "error: federation.rounds = 0: must be at least 1\n"
    assert command("runn").returncode == 2
