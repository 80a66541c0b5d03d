"""What Python adds on a GPU. Without one, skipped."""

import json
import multiprocessing

import fedproj
import pytest
from engines import SMALL, assert_same
from fedproj import _fedproj

CUDA = {"data_dir": None, "device": "cuda", "precision": None, "threads": 1, "jobs": 1, "resume": False}


def why_no_gpu(folder):
    try:
        fedproj.run(settings=SMALL | {"federation.rounds": 1}, out=folder / "try", device="cuda", progress=False)
    except fedproj.RunError as error:
        return str(error)
    return None


@pytest.fixture(scope="module", autouse=True)
def gpu(tmp_path_factory):
    if reason := why_no_gpu(tmp_path_factory.mktemp("gpu")):
        pytest.skip(f"skipped: no usable GPU: {reason}")


def train(origin, connection):
    """A process with the clients' half on the GPU."""
    trainer = _fedproj.Trainer(origin, json.dumps(CUDA))
    while (task := connection.recv()) is not None:
        connection.send(trainer.train(*task))


# One method whose clients keep a vector, and FedProj with memory and distillation.
@pytest.mark.parametrize("method", ["feddyn", "fedproj"])
def test_two_processes_on_one_gpu_give_the_bytes_of_one(method, tmp_path):
    settings = SMALL | {"method.name": method, "method.fedproj.projection.warmup": 0}
    alone = fedproj.run(settings=settings, out=tmp_path / "alone", device="cuda", progress=False)
    planned = _fedproj.plan([f"{key}={json.dumps(value)}" for key, value in settings.items()])[0]
    server = _fedproj.Server(planned, tmp_path / "run", json.dumps(CUDA))
    processes, ends = [], []
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        end, other = context.Pipe()
        processes.append(context.Process(target=train, args=(server.origin, other)))
        ends.append(end)
        processes[-1].start()
    kept = {}
    while (task := server.open()) is not None:
        _, download, cohort = task
        shares = [[client for client in cohort if client % 2 == place] for place in range(2)]
        for end, share in zip(ends, shares):
            end.send((download, [(client, kept.get(client)) for client in share]))
        for end, share in zip(ends, shares):
            for client, (result, state) in zip(share, end.recv()):
                server.add(result)
                if state is not None:
                    kept[client] = state
        server.close(list(kept.items()), 0.0)
    server.finish()
    for process, end in zip(processes, ends):
        end.send(None)
        process.join()
        assert process.exitcode == 0
    assert_same(fedproj.load(tmp_path / "run"), alone)
