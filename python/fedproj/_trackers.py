"""Runs in MLflow and in Weights & Biases, written by those packages themselves: their file formats are their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedproj._run import Run, _flat


def to_mlflow(run: Run) -> str:
    import mlflow

    with mlflow.start_run(run_name=_name(run)) as logged:
        settings = _flat(run.config)
        for first in range(0, len(settings), 100):  # what MLflow takes in one call
            mlflow.log_params(dict(list(settings.items())[first : first + 100]))
        mlflow.set_tag("fedproj.directory", str(run.directory))
        for round_, numbers in _rounds(run):
            mlflow.log_metrics(numbers, step=round_)
        return logged.info.run_id


def to_wandb(run: Run, **init: Any) -> str:
    import wandb

    logged = wandb.init(**{"name": _name(run), "config": run.config, **init})
    try:
        for round_, numbers in _rounds(run):
            logged.log(numbers, step=round_)
        logged.summary["headline"] = run.accuracy
        return logged.dir
    finally:
        logged.finish()


def _name(run: Run) -> str:
    return f"{run.summary['method']}, seed {run.summary['seed']}"


def _rounds(run: Run) -> list[tuple[int, dict[str, float]]]:
    """What was measured in each round. Both packages show a value that is missing better than one that is no number."""
    columns = {key: values for key, values in run.metrics.items() if key != "round" and values.dtype.kind in "if"}
    rounds = run.metrics.get("round", np.zeros(0, dtype=np.int64)).tolist()
    return [
        (round_, {key: float(values[at]) for key, values in columns.items() if np.isfinite(values[at])})
        for at, round_ in enumerate(rounds)
    ]
