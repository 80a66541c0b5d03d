"""What Ray costs and gives: `python bench_ray.py` (in a network namespace, or with the settings of docs/scale.md).

Each part alone: `--only overhead`, `stages`, `traffic`, `speed`, `sums`, `memory`. Overhead: seconds per round of a 4.3 MB model with 100 clients of one epoch over a few samples, beyond one process with as many
threads. Speed: two actors of one thread against one, for eight clients of a small ResNet. Each figure is that of the best round
of all repeats, since other work on the machine only adds. Processor seconds, of the best repeat, count all threads.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

import fedproj
from fedproj import _fedproj
from fedproj import ray as on_ray
from fedproj._run import _options, _pairs

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


class Counted:
    """A server's half that counts the bytes which pass it."""

    def __init__(self, server):
        self._server, self.down, self.up, self.kept = server, 0, 0, 0

    def __getattr__(self, name):
        return getattr(self._server, name)

    def open(self):
        task = self._server.open()
        self.down += len(task[1]) if task else 0
        return task

    def add(self, result):
        self.up += len(result)
        self._server.add(result)

    def close(self, kept, seconds):
        self.kept += sum(len(state) for _, state in kept)
        return self._server.close(kept, seconds)


def processor_seconds():
    """Of this process and of all actors."""
    ticks = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{name}/cmdline").read_text()
            if line.startswith("ray::_Worker") or int(name) == os.getpid():
                fields = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()
                ticks += int(fields[11]) + int(fields[12])
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def best(make, settings, rounds, repeats):
    """Seconds of the best round, and processor seconds per round of the best repeat."""
    seconds, processor = [], []
    describe, marks = on_ray.describe, []

    def described(*how):
        marks.append(processor_seconds())
        return describe(*how)

    for _ in range(repeats):
        marks.clear()
        with tempfile.TemporaryDirectory() as folder:
            on_ray.describe = described
            began = processor_seconds()
            done = make(settings=settings | {"federation.rounds": rounds}, out=Path(folder) / "run")
            on_ray.describe = describe
            columns = [done.metrics[f"seconds_{part}"] for part in ("local", "fusion", "evaluation")]
            seconds += list(sum(columns)[1:])
            first, last = (marks[0], marks[-1]) if marks else (began, processor_seconds())
            processor.append((last - first) / (rounds - bool(marks)))
    return min(seconds), min(processor)


def alone(threads):
    return lambda **arguments: fedproj.run(threads=threads, progress=False, **arguments)


def actors(workers):
    return lambda **arguments: on_ray.run(workers=workers, **arguments)


def overhead(rounds, repeats):
    for sums in ("float", "fixed"):
        settings = LARGE | {"federation.sum": sums}
        (one, one_processor), (spread, processor) = (best(m, settings, rounds, repeats) for m in (alone(2), actors(2)))
        print(
            f"overhead, federation.sum={sums}: {1000 * (spread - one):.0f} ms per round, {1000 * one:.0f} ms in one process; "
            f"processor: {processor:.2f} s and {one_processor:.2f} s per round",
            flush=True,
        )


def speed(rounds, repeats):
    (one, _), (two, _) = (best(actors(n), RESNET, rounds, repeats) for n in (1, 2))
    print(f"speed: {one:.2f} s per round with one actor, {two:.2f} s with two: {one / two:.2f} times as fast", flush=True)


def traffic():
    """Bytes that pass the calling process in a round, beside what follows from the numbers of clients and workers."""
    serve = on_ray.serve
    for method, sums in (("fedavg", "float"), ("fedavg", "fixed"), ("feddyn", "float")):
        counted = []
        on_ray.serve = lambda *how: counted.append(Counted(serve(*how))) or counted[-1]
        settings = LARGE | {"method.name": method, "federation.sum": sums, "federation.rounds": 2}
        with tempfile.TemporaryDirectory() as folder:
            made = actors(2)(settings=settings, out=Path(folder) / "run")
            model = 4 * sum(tensor.size for tensor in made.model().values())
        on_ray.serve, seen, n = serve, counted[0], 100
        expected = 2 * 2 * model if sums == "fixed" else n * model
        print(
            f"traffic, {method}, federation.sum={sums}: {seen.down / 2e6:.1f} MB down per machine (computed {model / 1e6:.1f}), "
            f"{seen.up / 2e6:.1f} MB up (computed {expected / 1e6:.1f}), {seen.kept / 1e6:.1f} MB for the checkpoint",
            flush=True,
        )


def stages(rounds):
    """Processor seconds of what lies between the halves, with all clients in one process."""
    import ray

    for sums in ("float", "fixed"):
        settings = LARGE | {"federation.sum": sums, "federation.rounds": rounds}
        planned = _fedproj.plan(_pairs(settings))[0]
        with tempfile.TemporaryDirectory() as folder:
            options = _options(None, "cpu", None, 1, 1, False)
            server = _fedproj.Server(planned, Path(folder) / "run", options)
            trainer, spent = _fedproj.Trainer(server.origin, options), {}

            def timed(name, work):
                began = time.process_time()
                result = work()
                spent.setdefault(name, []).append(time.process_time() - began)
                return result

            while (task := timed("open", server.open)) is not None:
                given = [(client, None) for client in task[2]]
                train = trainer.train_summed if server.takes_sums else trainer.train
                trained = timed("train", lambda: train(task[1], given))
                results = [trained[0]] if server.takes_sums else [result for result, _ in trained]
                arrays = [np.frombuffer(result, np.uint8) for result in results]
                stored = timed("put", lambda: ray.put(arrays))
                fetched = timed("get", lambda: ray.get(stored))
                timed("add", lambda: [server.add(result) for result in fetched])
                timed("close", lambda: server.close([], 0.0))
        best_of = ", ".join(f"{name} {1000 * min(seconds):.0f} ms" for name, seconds in spent.items())
        print(f"stages, federation.sum={sums}: {best_of}", flush=True)


def sums_on_the_cpu(repeats):
    """Processor seconds per round with either kind of sum, in one process of one thread."""
    spent = {"float": [], "fixed": []}
    for _ in range(repeats):
        for sums, seconds in spent.items():
            settings = RESNET | {"local.epochs": 2, "federation.sum": sums, "federation.rounds": 3}
            with tempfile.TemporaryDirectory() as folder:
                began = time.process_time()
                alone(1)(settings=settings, out=Path(folder) / "run")
                seconds.append((time.process_time() - began) / 3)
    print(f"sums: {', '.join(f'{sums} {min(seconds):.3f} s per round' for sums, seconds in spent.items())}", flush=True)


def memory():
    """What it costs that data from memory are written beside the run."""
    x, y = np.random.default_rng(0).random((60_000, 32, 32, 3), dtype=np.float32), np.arange(60_000) % 10
    data = fedproj.Dataset(x, y, test=(x[:1000], y[:1000]))
    with tempfile.TemporaryDirectory() as folder:
        for name in ("written", "found"):
            began = time.process_time()
            data.save(folder)
            print(f"data from memory, {name}: {time.process_time() - began:.2f} s of the processor", flush=True)


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="overhead, stages, traffic, speed, sums, memory")
    arguments = parser.parse_args()
    began = time.monotonic()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    parts = {
        "overhead": lambda: overhead(arguments.rounds, arguments.repeats),
        "stages": lambda: stages(arguments.rounds),
        "traffic": traffic,
        "speed": lambda: speed(3, arguments.repeats),
        "sums": lambda: sums_on_the_cpu(arguments.repeats),
        "memory": memory,
    }
    for part in arguments.only or parts:
        parts[part]()
    print(f"{time.monotonic() - began:.0f} s in all; load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
