"""The nodes' half."""

from fedproj.flower import client_app

app = client_app()
