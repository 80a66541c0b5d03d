"""Ctrl-C ends a run after its round; progress is shown meanwhile."""

import signal
import subprocess
import sys
import time

import fedproj

# A shell that starts its jobs in the background has them ignore Ctrl-C, and a child inherits that.
LONG = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
import fedproj
try:
    fedproj.run(method="fedavg", settings={"federation.rounds": 100000, "local.epochs": 1, "model.hidden": [8]}, out=OUT)
except fedproj.StoppedError as stopped:
    print("stopped:", stopped)
"""


def test_ctrl_c_ends_after_the_round_and_the_run_resumes(tmp_path):
    out = tmp_path / "a"
    code = LONG.replace("OUT", repr(str(out)))
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    # Ctrl-C may cut off the line that is being printed, so let some rounds pass.
    while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_text().count("\n") < 8:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 0 and "stopped: stopped after round" in stdout, stderr
    assert "round 1/100000, accuracy" in stderr and "stopping after this round" in stderr
    stopped = fedproj.load(out)
    n_done = len(stopped.rounds)
    assert not stopped.is_finished and n_done > 0
    again = subprocess.Popen(
        [sys.executable, "-c", code.replace("out=", "resume=True, out=")], stderr=subprocess.PIPE, text=True
    )
    line = again.stderr.readline()
    again.kill()
    again.communicate()
    assert line.startswith(f"round {n_done + 1}/100000"), line
