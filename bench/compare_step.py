#!/usr/bin/env python3
"""Compares one training step with PyTorch on this machine; prints a Markdown table.

    python3 bench/compare_step.py [--cases resnet8:64,cnn:10] [--threads 1] [--shared] [--python PATH]
    python3 bench/compare_step.py --cases minilm-l3:32:full,minilm-l3:32:sst2 [--no-dropout]
    python3 bench/compare_step.py --scaling      # ours only: one worker, two workers, two threads on one model

A case is model:batch, and for encoders model:batch:lengths: `full` (64 tokens) or `sst2` (as SST-2's sentences). The
two sides run in turn. bench/README.md explains the columns.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

HERE = Path(__file__).resolve().parent
CASES = "resnet8:64,resnet8-thin:64,cnn:10,resnet18:64"
ENCODERS = {"minilm-l3"}
WAYS = [(1, False), (2, False), (2, True)]  # of --scaling: threads, shared


def fail(message):
    sys.exit(f"{Path(sys.argv[0]).stem}: {message}")


def run(command, key):
    """Runs a benchmark; returns the JSON object of its last line, with the process's peak memory added."""
    command = [str(word) for word in command]
    shown = " ".join(command)
    # A log written here does not fill a pipe that nobody reads. The peers' folder must stay free of byte code.
    with tempfile.TemporaryFile("w+") as errors:
        try:
            child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
            )
        except OSError as e:
            fail(f"cannot run {shown}: {e.strerror}")
        with child.stdout:
            lines = child.stdout.read().strip().splitlines()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode != 0:
            errors.seek(0)
            fail(f"`{shown}` ended with {child.returncode}:\n{errors.read()[-2000:].strip()}")
    try:
        result = json.loads(lines[-1])
        result[key]
    except (IndexError, ValueError, KeyError, TypeError):
        fail(f"`{shown}` did not end with a JSON line that has {key}")
    return result | {"peak_mib": usage.ru_maxrss / 1024}  # Linux gives KiB


def spread(ratios):
    return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def options(args, case):
    """What both sides take."""
    model, batch, *lengths = case
    words = ["--model", model, "--batch", batch, "--steps", args.steps] + ["--no-dropout"] * args.no_dropout
    return words + ["--lengths", *lengths] if lengths else words


def ours(args, case, threads, shared):
    command = [args.binary, "bench", "step", "--json", "--threads", threads, *options(args, case)]
    return run(command + ["--shared"] * shared, "ms_per_step")


def peer(args, case):
    command = [args.python, HERE / "torch_step.py", "--threads", args.threads, *options(args, case)]
    return run(command, "ms_per_step")


def compare(args):
    print(f"Threads: {args.threads}{' (ours: shared)' * args.shared}; {args.steps} steps, {args.reps} repetitions.\n")
    print("| case | peer ms | ours ms | speed-up (peer/ours) | peer MiB | ours MiB | memory (ours/peer) |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    # Without --shared, ours trains one batch per thread; the peer's threads share one.
    batches = 1 if args.shared else args.threads
    for case in args.cases:
        pairs = [(peer(args, case), ours(args, case, args.threads, args.shared)) for _ in range(args.reps)]
        ms = [median(side["ms_per_step"] for side in sides) for sides in zip(*pairs)]
        mib = [max(side["peak_mib"] for side in sides) for sides in zip(*pairs)]
        speedup = spread([batches * p["ms_per_step"] / o["ms_per_step"] for p, o in pairs])
        memory = f"{mib[0]:.0f} | {mib[1]:.0f} | {mib[1] / mib[0]:.2f}"
        print(f"| {':'.join(case)} | {ms[0]:.2f} | {ms[1]:.2f} | {speedup} | {memory} |", flush=True)


def scaling(args):
    print(f"Ours, samples per second; {args.steps} steps, {args.reps} repetitions.\n")
    print("| case | 1 thread | 2 threads | 2 threads, shared | speed-up | speed-up, shared |")
    print("|---|---:|---:|---:|---:|---:|")
    for case in args.cases:
        runs = [[ours(args, case, *way)["samples_per_second"] for way in WAYS] for _ in range(args.reps)]
        rates = " | ".join(f"{median(column):.1f}" for column in zip(*runs))
        gains = " | ".join(spread([row[i] / row[0] for row in runs]) for i in (1, 2))
        print(f"| {':'.join(case)} | {rates} | {gains} |", flush=True)


def add_common(parser, threads, reps):
    """The arguments of both comparisons."""
    parser.add_argument("--python", default=sys.executable, help="a Python with the peers [default: this one]")
    parser.add_argument("--binary", type=Path, default=HERE.parent / "target/release/fedproj", help="ours")
    parser.add_argument("--threads", type=int, default=threads, help="of both sides")
    parser.add_argument("--reps", type=int, default=reps, help="pairs to run")


def check(args, needs_peer=True):
    """Ends with a hint where a side is missing."""
    if min(args.reps, args.threads) < 1:
        fail("--reps and --threads start at 1")
    if not args.binary.is_file():
        fail(f"{args.binary} is missing: run `cargo build --release`, or give --binary PATH")
    try:
        if needs_peer:
            subprocess.run([args.python, "-c", "import torch"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        fail(f"`{args.python} -c 'import torch'` fails: pip install -r bench/requirements.txt, or give --python PATH")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common(parser, threads=1, reps=3)
    parser.add_argument("--cases", default=CASES, help="separated by commas (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shared", action="store_true", help="ours: all threads on one model, as the peer does it")
    parser.add_argument("--no-dropout", action="store_true", help="of encoders, on both sides")
    parser.add_argument("--scaling", action="store_true", help="ours only: 1 thread, 2 threads, 2 threads shared")
    args = parser.parse_args()
    args.cases = [case.split(":") for case in args.cases.split(",")]
    if any(len(case) not in (2, 3) or not case[1].isdigit() for case in args.cases):
        parser.error("--cases takes model:batch,model:batch,... or model:batch:lengths for encoders")
    if any(case[0] not in ENCODERS and (len(case) == 3 or args.no_dropout) for case in args.cases):
        parser.error("lengths and --no-dropout are for encoders")
    if args.steps < 1:
        parser.error("--steps starts at 1")
    check(args, needs_peer=not args.scaling)
    scaling(args) if args.scaling else compare(args)


if __name__ == "__main__":
    main()
