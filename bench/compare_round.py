#!/usr/bin/env python3
"""One federated round, ours against the peers', on this machine: run alternately, printed as a Markdown table.

    python3 bench/compare_round.py --python TORCH_VENV/bin/python [--pfl-python PFL_VENV/bin/python] [--reps 2] [--device cuda]

Cases: FedAvg and FedProj (distillation included) against plain PyTorch (torch_round.py), with the same network, clients,
samples, epochs and threads; and the pfl-research CIFAR-10 benchmark (1000 users, cohort 50, cnn, batch 10, SGD) against pfl
(pfl_round.py), where its environment is given. Speed-ups are peer/ours, above 1: ours is faster.
"""
import argparse
from pathlib import Path
from statistics import median

from compare_step import ROOT, run

# Two CPU cores take a small round; a GPU the paper's: 10 clients × 500 samples × 20 epochs, 60 000 public images.
SIZES = {
    "cpu": ["--model", "resnet8", "--clients", "4", "--samples", "256", "--epochs", "2", "--public", "2000"],
    "cuda": ["--model", "resnet8", "--clients", "10", "--samples", "500", "--epochs", "20", "--public", "60000"],
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="python3", help="a Python with torch")
    parser.add_argument("--pfl-python", help="a Python with pfl[pytorch]; without it that case is left out")
    parser.add_argument("--peer-dir", type=Path, default=ROOT.parent / "shared" / "bench")
    parser.add_argument("--binary", type=Path, default=ROOT / "target" / "release" / "fedproj")
    parser.add_argument("--threads", default="2")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--precision", default="tf32", help="ours on a GPU; PyTorch keeps its default, tf32 in convolutions")
    parser.add_argument("--reps", type=int, default=2)
    args = parser.parse_args()

    sizes = SIZES[args.device]
    ours = [str(args.binary), "bench", "round", "--threads", args.threads, "--json", "--device", args.device]
    if args.device == "cuda":
        ours += ["--precision", args.precision, "--rounds", "3"]
    cases = []
    for method in ("fedavg", "fedproj"):
        peer = [args.python, "-B", str(args.peer_dir / "torch_round.py"), "--threads", args.threads, "--device", args.device]
        cases.append((f"{method}, {' '.join(sizes)}", peer + ["--method", method] + sizes, ours + ["--method", method] + sizes))
    if args.pfl_python:
        peer = [args.pfl_python, "-B", str(args.peer_dir / "pfl_round.py"), args.device, "9" if args.device == "cpu" else "24", args.threads]
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
