"""A panic never passes the border: it becomes a `fedproj.RunError`, which `except Exception` catches.

PyO3 raises a panic to Python as its own `PanicException`, and panics again where Rust meets one. So a method that raises it
makes a true panic in the engine, wherever it is called. This needs a process of its own: other packages have such a class too.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import fedproj

class Panics(fedproj.Method):
    where: str = ""

    def at(self, place):
        if place == self.where:
            (panic,) = [c for c in BaseException.__subclasses__() if c.__name__ == "PanicException"]
            raise panic("a fault of the engine")

    def check(self, config):
        self.at("check")

    def class_offsets(self, counts):
        self.at("class_offsets")
        return super().class_offsets(counts)

    def local_step(self, step):
        self.at("local_step")
        super().local_step(step)

    def finish(self, client):
        self.at("finish")

    def fuse(self, server):
        kept.append(server)
        self.at("fuse")
        super().fuse(server)

kept = []
settings = {"federation.rounds": 1, "local.epochs": 1, "model.hidden": [8]}

def run(method, name):
    return fedproj.run(method=method, settings=settings, out=FOLDER + "/" + name, progress=False)

class Fails(fedproj.Method):
    def check(self, config):
        raise KeyError("makes PyO3 know its class")

try:
    run(Fails(), "fails")
except KeyError:
    pass
try:
    run(Panics(where=WHERE), WHERE)
except Exception as raised:
    assert type(raised) is fedproj.RunError, repr(raised)
    assert str(raised).startswith("internal error: "), raised
    print("caught:", raised)
# The engine works on.
assert run(Panics(), "after").is_finished
"""


@pytest.mark.parametrize("where", ["check", "class_offsets", "local_step", "finish", "fuse"])
def test_a_panic_is_a_run_error_and_the_next_run_works(tmp_path, where):
    path = tmp_path / "script.py"
    path.write_text(f"FOLDER, WHERE = {str(tmp_path)!r}, {where!r}\n{SCRIPT}")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "caught: internal error: " in done.stdout
