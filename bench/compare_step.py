#!/usr/bin/env python3
"""One training step, ours against PyTorch's, on this machine: run alternately, printed as a Markdown table.

    python3 bench/compare_step.py [--cases resnet8:64,cnn:10] [--threads 1] [--shared] [--python PATH]
    python3 bench/compare_step.py --cases minilm-l3:32:full,minilm-l3:32:sst2 [--no-dropout]      # texts of 64 tokens, or like SST-2's
    python3 bench/compare_step.py --scaling      # ours only: one worker, two workers, two threads on one model

Speed-ups are peer/ours, time per sample (above 1: ours is faster): the median of the pairs run one after the
other, and their range. Without --shared, ours trains one client per thread, so its step stands for as many batches.
The memory ratio is ours/peer (below 1: ours needs less). Peak memory is the largest resident set of a process, as
the kernel reports it when the process ends, start-up and both of the peer's memory layouts included; it is never
below this script's own (about 15 MiB).
"""
import argparse, json, os, subprocess, sys, tempfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
CASES = "resnet8:64,resnet8-thin:64,cnn:10,resnet18:64"
TEXT = {"minilm-l3"}  # the peer's side of these is torch_encoder.py, beside this script
WAYS = [(1, False), (2, False), (2, True)]  # --scaling: threads, shared


def fail(message):
    sys.exit(f"compare_step: {message}")


def run(command, key="ms_per_step"):
    """Runs a benchmark; returns the JSON object of its last line, with the process's peak memory added."""
    shown = " ".join(map(str, command))
    with tempfile.TemporaryFile("w+") as errors:
        try:
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
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
        result[key]  # both sides give it
    except (IndexError, ValueError, KeyError, TypeError):
        fail(f"`{shown}` did not end with a JSON line that has {key}")
    return result | {"peak_mib": usage.ru_maxrss / 1024}  # the kernel (Linux) gives KiB


def ours(args, case, threads, shared):
    command = [args.binary.resolve(), "bench", "step", *options(args, case), "--threads", threads]
    command += ["--json"] + ["--shared"] * shared
    return run([str(word) for word in command])


def peer(args, case):
    script = ROOT / "bench/torch_encoder.py" if case[0] in TEXT else args.peer_dir / "torch_step.py"
    command = [args.python, "-B", script, *options(args, case), "--threads", args.threads]
    return run([str(word) for word in command])


def options(args, case):
    """What both sides take."""
    model, batch, *lengths = case
    words = ["--model", model, "--batch", batch, "--steps", args.steps] + ["--no-dropout"] * args.no_dropout
    return words + ["--lengths", *lengths] if lengths else words


def spread(ratios):
    return f"{median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def compare(args):
    print(f"Threads: {args.threads}{' (ours: shared)' * args.shared}; {args.steps} steps, {args.reps} repetitions.\n")
    print("| case | peer ms | ours ms | speed-up (peer/ours) | peer MiB | ours MiB | memory (ours/peer) |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    batches = 1 if args.shared else args.threads  # that one step of ours trains; the peer's threads share one
    for case in args.cases:
        pair = lambda: (peer(args, case), ours(args, case, args.threads, args.shared))
        pairs = [pair() for _ in range(args.reps)]
        ms = [median(side["ms_per_step"] for side in sides) for sides in zip(*pairs)]
        mib = [max(side["peak_mib"] for side in sides) for sides in zip(*pairs)]
        speedup = spread([batches * a["ms_per_step"] / b["ms_per_step"] for a, b in pairs])
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


def main():
    text = "Compares our training step with PyTorch's. Speed-up is peer/ours: above 1, ours is faster."
    parser = argparse.ArgumentParser(description=text)
    parser.add_argument("--cases", default=CASES, help="model:batch or model:batch:lengths, separated by commas (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of both; ours trains a client on each, see --shared")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--shared", action="store_true", help="ours: all threads on one model, as the peer does it")
    parser.add_argument("--no-dropout", action="store_true", help="of encoders, on both sides")
    parser.add_argument("--scaling", action="store_true", help="ours only: 1 thread, 2 threads, 2 threads shared")
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/fedproj")
    parser.add_argument("--peer-dir", type=Path, default=ROOT.parent / "shared/bench", help="where torch_step.py is")
    parser.add_argument("--python", default="python3", help="a Python that has torch, for the peer")
    args = parser.parse_args()
    args.cases = [case.split(":") for case in args.cases.split(",")]
    if any(len(case) not in (2, 3) or not case[1].isdigit() for case in args.cases):
        parser.error("--cases takes model:batch,model:batch,... or model:batch:lengths for encoders")
    if any(case[0] not in TEXT and (len(case) == 3 or args.no_dropout) for case in args.cases):
        parser.error("lengths and --no-dropout are for encoders")
    if min(args.reps, args.steps, args.threads) < 1:
        parser.error("--reps, --steps and --threads start at 1")
    if not args.binary.is_file():
        fail(f"{args.binary} is missing: run `cargo build --release`, or give --binary PATH")
    if args.scaling:
        return scaling(args)
    if any(case[0] not in TEXT for case in args.cases) and not (args.peer_dir / "torch_step.py").is_file():
        fail(f"no torch_step.py in {args.peer_dir}: give --peer-dir DIR")
    try:
        subprocess.run([args.python, "-c", "import torch"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        fail(f"`{args.python} -c 'import torch'` fails: give --python PATH of a Python with torch")
    compare(args)


if __name__ == "__main__":
    main()
