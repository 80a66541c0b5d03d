#!/usr/bin/env python3
"""Compares one federated round with PyTorch and pfl on this machine; prints a Markdown table.

    python3 bench/compare_round.py [--device cuda] [--reps 2] [--python PATH]

Both sides have the same network, clients, samples, epochs and threads. They run in turn. Cases: FedAvg and FedProj
(distillation included) against plain PyTorch, and the pfl-research CIFAR-10 benchmark against pfl.
"""
import argparse
from statistics import median

from compare_step import HERE, add_common, check, run, spread

# A small round for CPU cores. On a GPU the paper's: 10 clients × 500 samples × 20 epochs, 60 000 public images.
SIZES = {
    "cpu": ["--model", "resnet8", "--clients", "4", "--samples", "256", "--epochs", "2", "--public", "2000"],
    "cuda": ["--model", "resnet8", "--clients", "10", "--samples", "500", "--epochs", "20", "--public", "60000"],
}
PFL = ["--method", "fedavg", "--model", "cnn", "--clients", "50", "--samples", "50", "--epochs", "1", "--batch", "10",
       "--optimizer", "sgd"]
PFL_ROUNDS = {"cpu": ("9", "9"), "cuda": ("24", "30")}  # peer's, ours


def cases(args):
    """The name of each case, the peer's command and ours."""
    both = ["--threads", args.threads, "--device", args.device]
    ours = [args.binary, "bench", "round", "--json", *both]
    if args.device == "cuda":
        ours += ["--precision", args.precision]
    for method in ("fedavg", "fedproj"):
        sizes = ["--method", method, *SIZES[args.device]]
        rounds = ["--rounds", "3"] if args.device == "cuda" else []
        yield " ".join(sizes), [args.python, HERE / "torch_round.py", *both, *sizes], [*ours, *sizes, *rounds]
    theirs, mine = PFL_ROUNDS[args.device]
    peer = [args.python, HERE / "pfl_round.py", *both, "--rounds", theirs]
    yield "pfl benchmark", peer, [*ours, *PFL, "--rounds", mine]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, threads=2, reps=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", default="tf32", help="ours on a GPU; PyTorch keeps its default, tf32 in convolutions")
    args = parser.parse_args()
    check(args)

    print("| case | peer s/round | ours s/round | speed-up (peer/ours) | peer MiB | ours MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, peer, mine in cases(args):
        pairs = [(run(peer, "round_s"), run(mine, "round_s")) for _ in range(args.reps)]
        seconds = [median(side["round_s"] for side in sides) for sides in zip(*pairs)]
        memory = [max(side["peak_mib"] for side in sides) for sides in zip(*pairs)]
        speedup = spread([p["round_s"] / o["round_s"] for p, o in pairs])
        print(f"| {name} | {seconds[0]:.3g} | {seconds[1]:.3g} | {speedup} | {memory[0]:.0f} | {memory[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
