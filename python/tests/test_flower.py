"""Runs on Flower are those of ``fedproj run``, bit for bit. Without Flower, or without a network namespace, they are skipped."""

import datetime
import ipaddress
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import fedproj
from engines import SMALL, assert_same, isolated

pytest.importorskip("flwr", reason="skipped: Flower is not installed (python/check --engines installs it)")
pytestmark = isolated

PYTHON = Path(__file__).parents[1]
APP = PYTHON.parent / "deploy" / "flower"
N_NODES = 3

# FedProj with memory and distillation; and a method whose clients keep a vector, long enough that a node dies while it trains.
FEDPROJ = {"method.name": "fedproj", "method.fedproj.projection.warmup": 0}
FEDDYN = {"method.name": "feddyn", "local.epochs": 400}


class Engine:
    """Flower's processes, in a folder of their own. All of them, and theirs, end with it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.app = shutil.copytree(APP, home / "app")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = os.environ | {
            "PATH": path,
            "PYTHONPATH": str(PYTHON),
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def start(self, name: str, *command: str) -> None:
        with open(self.home / f"{name}.log", "w") as log:
            subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True)

    def superlink(self, port: int, *how: str) -> None:
        no_installs = "--disable-runtime-dependency-installation"
        self.start("superlink", "flower-superlink", "--host", "127.0.0.1", "--port", str(port), no_installs, *how)
        tls = f'root-certificates = "{self.home}/ca.pem"' if "--ssl-keyfile" in how else "insecure = true"
        connection = f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{port}"\n{tls}\n'
        (self.home / "config.toml").write_text(connection)
        self.wait_until(lambda: self.flwr("list").returncode == 0)

    def wait_until(self, is_so) -> None:
        until = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < until, self.logs()
            time.sleep(0.2)

    def flwr(self, *command: str, **how) -> subprocess.CompletedProcess:
        run = ["flwr", *command]
        return subprocess.run(run, env=self.environment, capture_output=True, text=True, cwd=self.home, timeout=200, **how)

    def run(self, out: Path, settings: dict, *how: str, **others) -> str:
        words = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        given = {"settings": words, "out": str(out), "nodes": N_NODES, "deadline": 30, **others}
        toml = self.home / "run.toml"
        toml.write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in given.items()))
        done = self.flwr("run", str(self.app), "here", "--stream", "-c", str(toml), *how)
        return done.stdout + done.stderr

    def processes(self, *words: str) -> list[int]:
        """Processes of this engine whose command line has these words."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                ours = f"FLWR_HOME={self.home}\0".encode() in Path(f"/proc/{name}/environ").read_bytes()
                line = Path(f"/proc/{name}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if ours and all(word in line for word in words):
                found.append(int(name))
        return found

    def logs(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-4000:]}" for log in sorted(self.home.glob("*.log")))

    def end(self) -> None:
        # Those that end may start others until they do.
        while left := self.processes():
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.1)


def certificates(folder: Path) -> None:
    """An authority of its own and a server's certificate for loopback."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def certificate(name, key, issuer, issuer_key, is_ca):
        now = datetime.datetime.now(datetime.timezone.utc)
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])
        builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1)).add_extension(names, critical=False)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        return builder.sign(issuer_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    def named(text):
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])

    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    (folder / "ca.pem").write_bytes(certificate(named("authority"), authority, named("authority"), authority, True))
    (folder / "server.pem").write_bytes(certificate(named("localhost"), server, named("authority"), authority, False))
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (folder / "server.key").write_bytes(server.private_bytes(pem, pkcs8, plain))


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    folder = tmp_path_factory.mktemp("expected")

    def make(own):
        settings, out = SMALL | own, folder / own["method.name"]
        return fedproj.run(APP / "experiment.toml", settings=settings, out=out, progress=False)

    return {own["method.name"]: make(own) for own in (FEDPROJ, FEDDYN)}


@pytest.fixture(scope="module")
def simulation(tmp_path_factory):
    engine = Engine(tmp_path_factory.mktemp("simulation"))
    try:
        engine.superlink(39201, "--insecure", "--simulation")
        yield engine
    finally:
        engine.end()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    engine = Engine(tmp_path_factory.mktemp("deployment"))
    certificates(engine.home)
    files = [f"--ssl-{kind}file={engine.home}/{name}" for kind, name in (("ca-cert", "ca.pem"), ("cert", "server.pem"))]
    try:
        engine.superlink(39202, *files, "--ssl-keyfile", f"{engine.home}/server.key")
        for place in range(N_NODES):
            config = f"partition-id={place} num-partitions={N_NODES}"
            how = ["--root-certificates", f"{engine.home}/ca.pem", "--superlink", "127.0.0.1:39202"]
            engine.start(f"node-{place}", "flower-supernode", *how, "--port", str(39210 + place), "--node-config", config)
        yield engine
    finally:
        engine.end()


SIMULATED = ("--federation-config", f"num-supernodes={N_NODES} client-resources-num-cpus=1 init-args-num-cpus=2")


def test_a_simulation_gives_the_same_bytes(simulation, expected, tmp_path):
    told = simulation.run(tmp_path / "run", SMALL | FEDPROJ, *SIMULATED)
    assert (tmp_path / "run" / "summary.json").exists(), told + simulation.logs()
    made = fedproj.load(tmp_path / "run")
    assert_same(made, expected["fedproj"])
    made.verify()
    assert "round 3/3" in told and "node" in told


def test_a_deployment_gives_the_same_bytes(deployment, expected, tmp_path):
    told = deployment.run(tmp_path / "run", SMALL | FEDPROJ)
    assert (tmp_path / "run" / "summary.json").exists(), told + deployment.logs()
    assert_same(fedproj.load(tmp_path / "run"), expected["fedproj"])


@contextmanager
def kill_after_a_round(engine: Engine, out: Path, *words: str) -> Iterator[list[int]]:
    """Kills a process after the first round, while the block runs; whom."""
    killed, metrics, ended = [], out / "metrics.jsonl", threading.Event()

    def kill():
        while not ended.wait(0.02) and not (metrics.exists() and metrics.stat().st_size):
            pass
        while not ended.wait(0.02) and not killed:
            for process in engine.processes(*words)[:1]:
                os.kill(process, signal.SIGKILL)
                killed.append(process)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("words,where", [(("ray::ClientAppActor.run",), "simulation"), (("flwr-clientapp",), "deployment")])
def test_a_node_that_is_killed_is_asked_again(words, where, request, expected, tmp_path):
    engine, how = request.getfixturevalue(where), SIMULATED if where == "simulation" else ()
    with kill_after_a_round(engine, tmp_path / "run", *words) as killed:
        told = engine.run(tmp_path / "run", SMALL | FEDDYN, *how)
    assert killed and (tmp_path / "run" / "summary.json").exists(), told + engine.logs()
    assert_same(fedproj.load(tmp_path / "run"), expected["feddyn"])
