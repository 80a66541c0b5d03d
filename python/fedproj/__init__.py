"""Federated learning that does not forget: a simulator for many clients, with methods written in Python at full speed.

>>> import fedproj
>>> small = {"federation.rounds": 2, "local.epochs": 1, "model.hidden": [8]}
>>> done = fedproj.run(method="fedprox", settings=small, out=tmp / "fedprox", progress=False)
>>> sorted(done.model())[:2]
['fc1.bias', 'fc1.weight']
"""

from fedproj._data import Dataset
from fedproj._fedproj import RunError, SettingsError, StoppedError
from fedproj._graph import Graph, from_torch
from fedproj._losses import (
    absolute_error,
    contrast,
    cross_entropy,
    kl,
    masked_squares,
    not_true_kl,
    offset_cross_entropy,
    relaxed_contrast,
)
from fedproj._method import Method
from fedproj._run import Comparison, Run, compare, load, run, sweep
from fedproj._server import Outputs, Server
from fedproj._step import Finish, Step

__all__ = [
    "Comparison",
    "Dataset",
    "Finish",
    "Graph",
    "Method",
    "Outputs",
    "Run",
    "RunError",
    "Server",
    "SettingsError",
    "Step",
    "StoppedError",
    "absolute_error",
    "compare",
    "contrast",
    "cross_entropy",
    "from_torch",
    "kl",
    "load",
    "masked_squares",
    "not_true_kl",
    "offset_cross_entropy",
    "relaxed_contrast",
    "run",
    "sweep",
]
