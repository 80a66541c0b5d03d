"""The server's half."""

from pathlib import Path

from fedproj.flower import server_app

app = server_app(Path(__file__).parent.parent / "experiment.toml")
