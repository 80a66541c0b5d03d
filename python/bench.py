"""What a method in Python costs: rounds of built-in methods and of their copies in Python, in turn.

    python/bench.py [--device cuda] [--repeats 5]

Prints the least seconds per round of local training and of fusion.
"""

import argparse
import math
import tempfile
import tomllib
from pathlib import Path

import fedproj


class Prox(fedproj.Method):
    mu: float = 0.01

    def local_step(self, step):
        g = step.gradient(step.private, fedproj.cross_entropy)
        step.add_scaled_diff(g, self.mu, step.weights, step.start)
        step.update(g)


class Proj(fedproj.Method):
    needs_public = True

    def memory(self):
        return {}

    def local_step(self, step):
        g = step.gradient(step.private, fedproj.cross_entropy)
        if step.has_memory and step.round >= math.ceil(0.1 * step.n_rounds):
            step.project(g, step.gradient(step.memory, fedproj.kl(3.0)))
        step.update(g)

    def fuse(self, server):
        server.weights[:] = server.average()
        ensemble = server.ensemble()
        server.distill(ensemble)
        server.set_memory(ensemble)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("settings", nargs="*", help="key=value, with a TOML value", default=[])
    args = parser.parse_args()
    settings = {"federation.rounds": 6, "local.epochs": 50, "model.hidden": [256, 256]}
    for key, value in (pair.split("=", 1) for pair in args.settings):
        settings[key] = tomllib.loads(f"value = {value}")["value"]
    print(f"{'method':<10} {'built in, s':>12} {'Python, s':>12} {'difference':>11}")
    with tempfile.TemporaryDirectory() as folder:
        for name, copy in (("fedprox", Prox()), ("fedproj", Proj())):
            least = {}
            for repeat in range(args.repeats):
                for kind, method in (("built in", name), ("Python", copy)):
                    out = Path(folder) / f"{name}-{kind}-{repeat}"
                    run = fedproj.run(method=method, settings=settings, out=out, progress=False, threads=1, device=args.device)
                    seconds = (run.metrics["seconds_local"] + run.metrics["seconds_fusion"])[2:].min()
                    least[kind] = min(seconds, least.get(kind, math.inf))
            ours, theirs = least["built in"], least["Python"]
            print(f"{name:<10} {ours:>12.4f} {theirs:>12.4f} {100 * (theirs / ours - 1):>+10.1f} %")


if __name__ == "__main__":
    main()
