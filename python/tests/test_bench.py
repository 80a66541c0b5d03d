"""The comparison of rounds (bench/compare_round.py), with a stand-in for both sides."""
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "compare_round.py"
# Eager PyTorch takes 3 s, with graphs 2 s, and ours 0.5 s. Every call is logged.
STAND_IN = """#!/bin/sh
echo "$*" >> {log}
case "$*" in
    *"bench round"*) echo '{ours}' ;;
    *--graphs*) echo '{graphs}' ;;
    *) echo '{eager}' ;;
esac
"""


@pytest.fixture
def compare(tmp_path):
    """Runs the script; gives its exit status, its table without the head, and the commands of both sides."""
    log, program = tmp_path / "log", tmp_path / "program"
    answers = {"ours": {"round_s": 0.5, "local_s": 0.4, "server_s": 0.1}, "eager": {"round_s": 3}, "graphs": {"round_s": 2}}
    program.write_text(STAND_IN.format(log=log, **{name: json.dumps(answer) for name, answer in answers.items()}))
    program.chmod(0o755)

    def run(*options):
        command = [sys.executable, SCRIPT, "--python", program, "--binary", program, "--reps", "1", *options]
        done = subprocess.run(command, capture_output=True, text=True)
        calls = log.read_text().splitlines() if log.exists() else []
        rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()]
        return done, rows[2:], [call for call in calls if "import torch" not in call]

    return run


def test_a_cpu_compares_small_rounds(compare):
    done, rows, calls = compare("--model", "resnet8-thin")
    assert done.returncode == 0, done.stderr
    assert [row[1:5] for row in rows] == [["3", "0.5", "0.4 + 0.1", "6.00 (6.00–6.00)"]] * 3
    assert [row[0].split()[1] for row in rows] == ["fedavg", "fedproj", "benchmark"]
    assert all("--model resnet8-thin" in call and "--epochs 2" in call for call in calls[:4])
    assert not any("--graphs" in call or "--precision" in call for call in calls)


def test_a_gpu_compares_the_papers_rounds_eager_and_with_graphs(compare):
    done, rows, calls = compare("--device", "cuda", "--graphs", "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    gains = ["6.00 (6.00–6.00)", "4.00 (4.00–4.00)"]
    assert [row[1:7] for row in rows[:4]] == [["3", "2", "0.5", "0.4 + 0.1", *gains]] * 4
    # pfl has no graphs.
    assert rows[4][1:7] == ["3", "", "0.5", "0.4 + 0.1", gains[0], ""]
    sizes = [call for call in calls if "--model resnet18" in call]
    assert len(sizes) == 6 and all("--clients 5 --samples 900 --epochs 20" in call for call in sizes)
    ours = [call for call in calls if "bench round" in call]
    assert len(ours) == 5 and all("--precision bf16" in call for call in ours)
    assert sum("--graphs" in call for call in calls) == 4


def test_graphs_need_a_gpu(compare):
    done, _, calls = compare("--graphs")
    assert done.returncode == 2 and "--graphs needs --device cuda" in done.stderr and not calls
