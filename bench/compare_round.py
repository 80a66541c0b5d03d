#!/usr/bin/env python3
"""Compares one federated round with PyTorch and pfl on this machine; prints a Markdown table.

    python3 bench/compare_round.py [--model resnet8] [--reps 2] [--python PATH]
    python3 bench/compare_round.py --device cuda --graphs [--precision bf16]

Both sides have the same network, clients, samples, epochs and threads. They run in turn. Cases: FedAvg and FedProj
(distillation included) against plain PyTorch, and the pfl-research CIFAR-10 benchmark against pfl. With --graphs,
PyTorch runs once more with its steps captured as CUDA graphs.
"""
import argparse
from statistics import median

from compare_step import HERE, add_common, check, run, spread

# A small round for CPU cores. On a GPU the paper's epochs and public set.
SMALL = ["--clients", "4", "--samples", "256", "--epochs", "2", "--public", "2000"]
CLIENTS = {"resnet8": ["--clients", "10", "--samples", "500"], "resnet18": ["--clients", "5", "--samples", "900"]}
MODELS = {"cpu": ["resnet8"], "cuda": list(CLIENTS)}
PFL = ["--method", "fedavg", "--model", "cnn", "--clients", "50", "--samples", "50", "--epochs", "1", "--batch", "10",
       "--optimizer", "sgd"]
PFL_ROUNDS = {"cpu": ("9", "9"), "cuda": ("24", "30")}  # peer's, ours


def cases(args):
    """The name of each case, the peer's commands (eager, with graphs) and ours."""
    both = ["--threads", args.threads, "--device", args.device]
    ours = [args.binary, "bench", "round", "--json", *both]
    if args.device == "cuda":
        ours += ["--precision", args.precision]
    for model in args.model:
        paper = [*CLIENTS.get(model, CLIENTS["resnet8"]), "--epochs", "20", "--public", "60000"]
        for method in ("fedavg", "fedproj"):
            sizes = ["--method", method, "--model", model, *(SMALL if args.device == "cpu" else paper)]
            rounds = ["--rounds", "3"] if args.device == "cuda" else []
            peer = [args.python, HERE / "torch_round.py", *both, *sizes]
            yield " ".join(sizes), [peer] + [[*peer, "--graphs"]] * args.graphs, [*ours, *sizes, *rounds]
    theirs, mine = PFL_ROUNDS[args.device]
    peer = [args.python, HERE / "pfl_round.py", *both, "--rounds", theirs]
    yield "pfl benchmark", [peer], [*ours, *PFL, "--rounds", mine]


def compare(name, peers, mine, reps, graphs):
    """One row of the table: the sides run in turn."""
    runs = [[run(command, "round_s") for command in (*peers, mine)] for _ in range(reps)]
    middle = lambda side, key: median(row[side][key] for row in runs)
    seconds = [f"{middle(side, 'round_s'):.3g}" for side in range(len(peers))]
    gains = [spread([row[side]["round_s"] / row[-1]["round_s"] for row in runs]) for side in range(len(peers))]
    if graphs and len(peers) == 1:
        seconds, gains = [*seconds, ""], [*gains, ""]
    parts = f"{middle(-1, 'local_s'):.3g} + {middle(-1, 'server_s'):.3g}"
    memory = [max(row[side]["peak_mib"] for row in runs) for side in (0, -1)]
    cells = [name, *seconds, f"{middle(-1, 'round_s'):.3g}", parts, *gains, *(f"{mib:.0f}" for mib in memory)]
    print(f"| {' | '.join(cells)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, threads=2, reps=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--model", help="networks, separated by commas [default: resnet8; on a GPU resnet18 too]")
    parser.add_argument("--graphs", action="store_true", help="PyTorch also with captured CUDA graphs; needs --device cuda")
    parser.add_argument("--precision", default="tf32", help="ours on a GPU; PyTorch keeps its default, tf32 in convolutions")
    args = parser.parse_args()
    args.model = args.model.split(",") if args.model else MODELS[args.device]
    if args.graphs and args.device == "cpu":
        parser.error("--graphs needs --device cuda")
    check(args)

    peers = ["eager", "graphs"][: 1 + args.graphs] if args.device == "cuda" else ["peer"]
    gains = [f"speed-up ({peer}/ours)" for peer in peers]
    heads = ["case", *(f"{peer} s/round" for peer in peers), "ours s/round", "clients + server", *gains, "peer MiB", "ours MiB"]
    print(f"| {' | '.join(heads)} |\n|---|{'---:|' * (len(heads) - 1)}")
    for name, peers, mine in cases(args):
        compare(name, peers, mine, args.reps, args.graphs)


if __name__ == "__main__":
    main()
