#!/usr/bin/env python3
"""One federated round, ours against the peers', on this machine: run alternately, printed as a Markdown table.

    python3 bench/compare_round.py --python TORCH_VENV/bin/python [--pfl-python PFL_VENV/bin/python] [--reps 2]

Cases: FedAvg and FedProj (distillation included) against plain PyTorch (torch_round.py), with the same network, clients,
samples, epochs and threads; and the pfl-research CIFAR-10 benchmark (1000 users, cohort 50, cnn, batch 10, SGD) against pfl
(pfl_round.py), where its environment is given. Speed-ups are peer/ours, above 1: ours is faster.
"""
import argparse
from pathlib import Path
from statistics import median

from compare_step import ROOT, run

SIZES = ["--model", "resnet8", "--clients", "4", "--samples", "256", "--epochs", "2", "--public", "2000"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3", help="a Python with torch")
    parser.add_argument("--pfl-python", help="a Python with pfl[pytorch]; without it that case is left out")
    parser.add_argument("--peer-dir", type=Path, default=ROOT.parent / "shared" / "bench")
    parser.add_argument("--binary", type=Path, default=ROOT / "target" / "release" / "fedproj")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--reps", type=int, default=2)
    args = parser.parse_args()

    ours = [str(args.binary), "bench", "round", "--threads", args.threads, "--json"]
    cases = []
    for method in ("fedavg", "fedproj"):
        peer = [args.python, "-B", str(args.peer_dir / "torch_round.py"), "--threads", args.threads]
        cases.append((f"{method}, {' '.join(SIZES)}", peer + ["--method", method] + SIZES, ours + ["--method", method] + SIZES))
    if args.pfl_python:
        peer = [args.pfl_python, "-B", str(args.peer_dir / "pfl_round.py"), "cpu", "9", args.threads]
        sizes = ["--method", "fedavg", "--model", "cnn", "--clients", "50", "--samples", "50", "--epochs", "1"]
        cases.append(("pfl benchmark", peer, ours + sizes + ["--batch", "10", "--optimizer", "sgd", "--rounds", "9"]))

    print("| case | peer s a round | ours s a round | speed-up (peer/ours) | peer MiB | ours MiB |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, peer, mine in cases:
        pairs = [(run(peer, "round_s"), run(mine, "round_s")) for _ in range(args.reps)]
        ratios = [p["round_s"] / o["round_s"] for p, o in pairs]
        middle = [median(side["round_s"] for side in column) for column in zip(*pairs)]
        memory = [max(side["peak_mib"] for side in column) for column in zip(*pairs)]
        print(f"| {name} | {middle[0]:.2f} | {middle[1]:.2f} | {median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
              f" | {memory[0]:.0f} | {memory[1]:.0f} |", flush=True)


if __name__ == "__main__":
    main()
