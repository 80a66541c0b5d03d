"""Runs on Ray are those of ``fedproj run``, bit for bit. Without Ray, or without a network namespace, they are skipped."""

import json
import os
import signal
import socket
import threading
import time

import pytest

import fedproj
from engines import SMALL, assert_same, isolated

ray = pytest.importorskip("ray", reason="skipped: Ray is not installed (python/check --engines installs it)")
from fedproj import ray as on_ray  # noqa: E402

pytestmark = isolated

# One method whose clients keep a vector, and FedProj with memory and distillation.
METHODS = {"feddyn": {}, "fedproj": {"method.fedproj.projection.warmup": 0}}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")
    fixed = {"federation.sum": "fixed"}
    return {
        (method, sums): fedproj.run(
            method=method, settings=SMALL | own | (fixed if sums else {}), out=folder / f"{method}-{sums}", progress=False
        )
        for method, own in METHODS.items()
        for sums in (False, True)
    }


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers,sums", [(1, False), (2, False), (4, False), (2, True)])
def test_any_number_of_workers_gives_the_same_bytes(method, workers, sums, expected, tmp_path):
    settings = SMALL | METHODS[method] | ({"federation.sum": "fixed"} if sums else {})
    made = on_ray.run(method=method, settings=settings, workers=workers, out=tmp_path / "run", progress=False)
    assert_same(made, expected[method, sums])
    made.verify()


def workers_alive():
    """Processes of actors."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/cmdline") as line:
                if line.read().startswith("ray::_Worker"):
                    found.append(int(name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_that_is_killed_repeats_its_clients(method, expected, tmp_path):
    killed, metrics = [], tmp_path / "run" / "metrics.jsonl"

    def kill():
        # The second round has begun, and lasts long enough to die in it.
        while not metrics.exists() or not metrics.stat().st_size:
            time.sleep(0.01)
        killed.append(workers_alive()[0])
        os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    settings = SMALL | METHODS[method] | {"local.epochs": 100}
    made = on_ray.run(method=method, settings=settings, workers=2, out=tmp_path / "run", progress=False)
    thread.join()
    assert killed and killed[0] not in workers_alive()
    assert_same(made, fedproj.run(method=method, settings=settings, out=tmp_path / "alone", progress=False))


def test_a_worker_that_always_dies_ends_the_run_with_the_reason(expected, tmp_path, monkeypatch):
    class Starved(on_ray._Worker):
        # As the kernel ends a process when memory is short.
        def train(self, *_):
            os.kill(os.getpid(), signal.SIGKILL)

    out, settings = tmp_path / "run", SMALL | METHODS["feddyn"]
    half = settings | {"federation.rounds": 1}
    on_ray.run(method="feddyn", settings=half, workers=1, out=out, progress=False)
    with monkeypatch.context() as patched:
        patched.setattr(on_ray, "_Worker", Starved)
        patched.setattr(on_ray, "RETRIES", 1)
        with pytest.raises(fedproj.RunError, match="a worker died 2 times(.|\n)*fewer workers per machine need less memory"):
            on_ray.run(method="feddyn", settings=settings, workers=1, out=out, resume=True, progress=False)
    # Nothing is lost.
    made = on_ray.run(method="feddyn", settings=settings, workers=1, out=out, resume=True, progress=False)
    assert_same(made, expected["feddyn", False])


def test_a_run_resumes_and_a_finished_one_is_read(expected, tmp_path):
    out, settings = tmp_path / "run", SMALL | METHODS["feddyn"]
    half = settings | {"federation.rounds": 1}
    on_ray.run(method="feddyn", settings=half, workers=1, out=out, progress=False)
    made = on_ray.run(method="feddyn", settings=settings, workers=2, out=out, resume=True, progress=False)
    assert_same(made, expected["feddyn", False])
    assert_same(on_ray.run(method="feddyn", settings=settings, workers=2, out=out, progress=False), made)


def test_ctrl_c_leaves_the_rounds_before(expected, tmp_path):
    out, metrics = tmp_path / "run", tmp_path / "run" / "metrics.jsonl"

    def interrupt():
        while not metrics.exists() or not metrics.stat().st_size:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    settings = SMALL | METHODS["feddyn"] | {"local.epochs": 100}
    thread = threading.Thread(target=interrupt)
    # A shell lets its background jobs ignore Ctrl-C.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    with pytest.raises(fedproj.StoppedError, match="resume=True"):
        on_ray.run(method="feddyn", settings=settings, workers=2, out=out, progress=False)
    thread.join()
    signal.signal(signal.SIGINT, handler)
    made = on_ray.run(method="feddyn", settings=settings, workers=2, out=out, resume=True, progress=False)
    assert_same(made, fedproj.run(method="feddyn", settings=settings, out=tmp_path / "alone", progress=False))


def test_what_clients_keep_is_fetched_for_checkpoints_and_measurements(tmp_path):
    saved = {"federation.checkpoint_every": 2, "federation.rounds": 5, "federation.fraction": 0.5}
    for method, more in (("feddyn", {}), ("ditto", {"federation.evaluate_clients": True})):
        settings, out = SMALL | saved | more, tmp_path / method
        half = settings | {"federation.rounds": 3}
        on_ray.run(method=method, settings=half, workers=2, out=out, progress=False)
        made = on_ray.run(method=method, settings=settings, workers=1, out=out, resume=True, progress=False)
        alone = fedproj.run(method=method, settings=settings, out=tmp_path / f"{method}-alone", progress=False)
        assert_same(made, alone)
        assert [r.get("personal_by_client") for r in made.rounds] == [r.get("personal_by_client") for r in alone.rounds]
        assert method == "feddyn" or made.rounds[0]["personal_by_client"]


def test_what_cannot_work_is_rejected_before_a_round(tmp_path):
    def error(out, more=None, **arguments):
        with pytest.raises(fedproj.SettingsError) as raised:
            on_ray.run(settings=SMALL | (more or {}), out=tmp_path / out, progress=False, **arguments)
        return str(raised.value)

    assert "100 CPUs" in error("a", workers=100)
    assert "GPUs" in error("b", workers=1, device="cuda")
    assert "by name" in error("c", workers=1, method=fedproj.Method())
    assert "of memory, but this machine has" in error("d", {"model.hidden": [1000000, 1000000]}, workers=1)
    assert not list(tmp_path.iterdir()), "nothing was begun"


@pytest.mark.parametrize("form", ["{}", "ray://{}"])
def test_a_cluster_that_cannot_be_reached_is_named_within_seconds(form):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = form.format(f"127.0.0.1:{closed.getsockname()[1]}")
        began = time.monotonic()
        with pytest.raises(fedproj.SettingsError, match=f"no Ray cluster at `{address}`.*refused\nhint: `ray start"):
            on_ray._connect(ray, address, 1)
        assert time.monotonic() - began < on_ray.PATIENCE


def test_a_worker_with_other_data_or_another_version_is_rejected(tmp_path):
    planned = fedproj._fedproj.plan([f"{k}={json.dumps(v)}" for k, v in SMALL.items()])[0]
    options = json.dumps(dict(data_dir=None, device="cpu", precision=None, threads=1, jobs=1, resume=False))
    server = fedproj._fedproj.Server(planned, tmp_path / "run", options)
    origin = json.loads(server.origin)
    for change, told in [
        ({"version": "9.9"}, "version"),
        ({"hashes": origin["hashes"] | {"private": "0"}}, "another `private`"),
        ({"isa": "abacus"}, "instruction set"),
    ]:
        with pytest.raises(fedproj.SettingsError, match=told):
            fedproj._fedproj.Trainer(json.dumps(origin | change), options)
