"""What Ray costs and gives: `python bench_ray.py` (in a network namespace, or with the settings of docs/scale.md).

Overhead: seconds per round of a 4.3 MB model with 100 clients of one step, beyond one process with as many threads. Speed: two
actors of one thread against one, for eight clients of a small ResNet.
"""

import tempfile
import time
from pathlib import Path

import fedproj
from fedproj import ray as on_ray

LARGE = {
    "method.name": "fedavg",
    "model.hidden": [1000, 1000],
    "data.partition": {"kind": "iid", "clients": 100},
    "federation.fraction": 1.0,
    "federation.checkpoint_every": 100,
    "local.epochs": 1,
}
RESNET = {
    "method.name": "fedavg",
    "model.name": "resnet8-thin",
    "data.partition": {"kind": "iid", "clients": 8},
    "federation.fraction": 1.0,
    "local.epochs": 8,
}


def seconds_per_round(make, settings: dict, rounds: int = 5) -> float:
    """The time of further rounds, without start and end of a run."""
    spent = []
    for n in (1, 1 + rounds):
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            make(settings=settings | {"federation.rounds": n}, out=Path(folder) / "run", progress=False)
            spent.append(time.monotonic() - began)
    return (spent[1] - spent[0]) / rounds


def actors(workers: int):
    return lambda **arguments: on_ray.run(workers=workers, **arguments)


def main() -> None:
    import ray

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    for sums in ("float", "fixed"):
        settings = LARGE | {"federation.sum": sums}
        alone = seconds_per_round(lambda **a: fedproj.run(threads=2, **a), settings)
        spread = seconds_per_round(actors(2), settings)
        print(f"overhead, federation.sum={sums}: {1000 * (spread - alone):.0f} ms per round ({alone:.2f} s in one process)")
    one, two = (seconds_per_round(actors(n), RESNET, 2) for n in (1, 2))
    print(f"speed: {one:.2f} s per round with one actor, {two:.2f} s with two: {one / two:.2f} times as fast")


if __name__ == "__main__":
    main()
