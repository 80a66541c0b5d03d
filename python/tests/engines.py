"""What the tests of engines share."""

import os

import numpy as np
import pytest

# Ray and Flower ask addresses outside, so their tests run where there is only loopback: python/check --engines.
isolated = pytest.mark.skipif(
    "FEDPROJ_ISOLATED" not in os.environ, reason="needs a network namespace: python/check --engines"
)

SMALL = {"federation.rounds": 3, "local.epochs": 2, "model.hidden": [16], "data.partition.clients": 6}


def assert_same(made, expected):
    """Both runs published the same, bit for bit."""
    kept = ("model_hash", "cohort", "accuracy", "train_loss", "bytes_up", "bytes_down")
    assert [[r[k] for k in kept] for r in made.rounds] == [[r[k] for k in kept] for r in expected.rounds]
    model, other = made.model(), expected.model()
    assert model.keys() == other.keys() and all(np.array_equal(model[name], other[name]) for name in model)
