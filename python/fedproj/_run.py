"""Runs: made, read back, compared."""

from __future__ import annotations

import html
import json
import os
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np

from fedproj import _fedproj
from fedproj._data import Dataset
from fedproj._graph import Graph
from fedproj._method import Method
from fedproj._progress import progress as _progress

__all__ = ["Comparison", "Run", "compare", "load", "run", "sweep"]

PathLike = str | os.PathLike[str]
Settings = Mapping[str, Any]


def run(
    config: PathLike | Settings | None = None,
    *,
    data: str | Settings | Dataset | None = None,
    model: str | Graph | None = None,
    method: str | Method | None = None,
    settings: Settings | None = None,
    out: PathLike | None = None,
    progress: bool = True,
    resume: bool = False,
    data_dir: PathLike | None = None,
    device: str | None = None,
    precision: str | None = None,
    threads: int | None = None,
) -> Run:
    """Makes one run and returns it. A run that is finished already is only read.

    ``config`` is a TOML file, a dictionary of the same keys, or nothing for the defaults. ``settings`` override it; their
    keys have dots: ``{"federation.rounds": 5}``. ``out`` is the run directory [default: below ``./runs``]. ``data`` names a
    data set, describes files (``{"name": "csv", "path": "points.csv"}``), or is a :class:`fedproj.Dataset`.

    Ctrl-C ends the run after its round with :class:`fedproj.StoppedError`; ``resume=True`` continues it.

    >>> small = {"federation.rounds": 2, "local.epochs": 1, "model.hidden": [8]}
    >>> done = run(method="fedavg", settings=small, out=tmp / "fedavg", progress=False)
    >>> done.metrics["round"]
    array([0, 1])
    """
    folder = Path(out).parent if out is not None else Path("runs")
    planned = _plan(config, _saved(data, model, folder), [method], settings)
    if len(planned) != 1:
        raise _fedproj.SettingsError(f"these settings ask for {len(planned)} runs; use fedproj.sweep")
    directory = Path(out) if out is not None else planned[0].directory()
    options = _options(data_dir, device, precision, threads, 1, resume)
    return _make([(planned[0], directory)], options, progress)[0]


def sweep(
    config: PathLike | Settings | None = None,
    *,
    data: str | Settings | Dataset | None = None,
    model: str | Graph | None = None,
    methods: str | Method | Sequence[str | Method] | None = None,
    seeds: int | Sequence[int] | None = None,
    settings: Settings | None = None,
    out: PathLike,
    progress: bool = True,
    jobs: int = 1,
    data_dir: PathLike | None = None,
    device: str | None = None,
    precision: str | None = None,
    threads: int | None = None,
) -> list[Run]:
    """Makes all combinations of methods, seeds and lists (``settings={"sweep.local.epochs": [1, 5]}``) below ``out``.

    Finished runs are skipped, unfinished ones resumed.
    """
    given = settings if seeds is None else {**(settings or {}), "seeds": seeds}
    if methods is not None:
        methods = [methods] if isinstance(methods, (str, Method, type)) else list(methods)
        if not methods:
            raise ValueError("there is no method to run; leave `methods` out to run the one of the configuration")
    planned = _plan(config, _saved(data, model, Path(out)), methods or [None], given)
    runs = [(run, Path(out) / run.directory().name) for run in planned]
    return _make(runs, _options(data_dir, device, precision, threads, jobs, True), progress)


def load(directory: PathLike) -> Run:
    """A stored run, as far as it is."""
    directory = Path(directory)
    if not (directory / "config.toml").exists():
        inside = sorted(directory.glob("*/config.toml"))
        if inside:
            example = inside[0].parent
            raise _fedproj.RunError(f"`{directory}` holds {len(inside)} runs; load one of them, such as `{example}`")
        raise _fedproj.RunError(f"cannot read a run in `{directory}`: a run is a directory with config.toml")
    return Run(directory)


class Run:
    """A run and its results, read from its directory."""

    def __init__(self, directory: PathLike) -> None:
        self.directory = Path(directory)
        stored = json.loads(_fedproj.load(self.directory))
        self.config: dict[str, Any] = stored["config"]
        self.summary: dict[str, Any] = stored["summary"]
        self.manifest: dict[str, Any] | None = stored["manifest"]
        self.is_finished: bool = stored["finished"]
        self._rounds: list[dict[str, Any]] = stored["rounds"]

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """One array per quantity, one value per round; NaN where it was not measured. pandas and polars take it as it is.

        Under privacy ``privacy_epsilon`` is the ε of all rounds so far, and ``privacy_nominal`` is 1 where it is nominal.
        """
        nested = ("seconds", "privacy")
        rounds = [{**{f"{n}_{k}": v for n in nested for k, v in r.get(n, {}).items()}, **r} for r in self._rounds]
        columns = {key: [r.get(key) for r in rounds] for key in (rounds[0] if rounds else ())}
        return {key: _column(values) for key, values in columns.items() if not _is_nested(values)}

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Everything that was recorded, round by round: also the clients, accuracies per class, hashes."""
        return self._rounds

    @property
    def accuracy(self) -> float:
        """Mean test accuracy of the last rounds, in [0, 1]."""
        return self.summary["headline"]

    def model(self) -> dict[str, np.ndarray]:
        """The final model under PyTorch's names: ``{k: torch.from_numpy(v) for k, v in run.model().items()}``."""
        path = self.directory / "model.safetensors"
        if not path.exists():
            raise _fedproj.RunError(f"`{path}` is missing: a run writes its model when it has finished")
        try:
            return read_safetensors(path)
        except (KeyError, ValueError) as error:
            raise _fedproj.RunError(f"`{path}` is damaged; Run.verify makes the run again and compares") from error

    def report(self, out: PathLike | None = None, title: str | None = None) -> Path:
        """Writes a page with figures and tables, and returns its path."""
        out = Path(out) if out is not None else self.directory / "report"
        return Path(json.loads(_fedproj.report([self.directory], out, title))["report"])

    def verify(
        self,
        method: Method | None = None,
        *,
        rounds: int | None = None,
        data_dir: PathLike | None = None,
        device: str | None = None,
        precision: str | None = None,
        threads: int | None = None,
    ) -> dict[str, Any]:
        """Repeats the run and compares it bit for bit. A method written in Python must be at hand: ``method=MyProx()``."""
        if method is not None:
            _fedproj.register(_object(method))
        if rounds is not None and not (isinstance(rounds, int) and rounds >= 1):
            raise _fedproj.SettingsError(f"rounds = {rounds}: must be a whole number from 1 on")
        options = _options(data_dir, device, precision, threads, 1, False)
        return json.loads(_fedproj.verify(self.directory, rounds, options))

    def to_mlflow(self) -> str:
        """Logs settings and metrics to MLflow, as it is set up in this process, and returns the id of MLflow's run.

        Needs the package ``mlflow``. A second call makes a second run.
        """
        from fedproj._trackers import to_mlflow

        return to_mlflow(self)

    def to_wandb(self, **init: Any) -> str:
        """Logs settings and metrics to Weights & Biases, and returns the path of its run's files.

        Needs the package ``wandb``. ``init`` goes to ``wandb.init``: ``project="fedproj", mode="offline"``.
        """
        from fedproj._trackers import to_wandb

        return to_wandb(self, **init)

    def curves(self) -> str:
        """The accuracies of all rounds as an SVG picture."""
        return _fedproj.curves([self.directory])

    @property
    def _epsilon(self) -> str:
        """What the run has revealed, as tables show it; empty without privacy."""
        spent = self.summary.get("privacy")
        return f"{spent['epsilon']:.2f}{' (nominal)' if spent['nominal'] else ''}" if spent else ""

    def __repr__(self) -> str:
        state = f"accuracy {100 * self.accuracy:.2f} %" if self.is_finished else f"{len(self._rounds)} rounds so far"
        state += f", ε = {self._epsilon}" if self._epsilon else ""
        return f"<Run {self.summary['method']}, seed {self.summary['seed']}, {state}, {str(self.directory)!r}>"

    def _repr_html_(self) -> str:
        rows = {
            "method": self.summary["method"],
            "data": self.config["data"]["private"]["name"],
            "seed": self.summary["seed"],
            "rounds": f"{len(self._rounds)} of {self.config['federation']['rounds']}",
            "accuracy": f"{100 * self.accuracy:.2f} % (mean of the last rounds)",
            "best": f"{100 * self.summary['best']:.2f} %",
            "time": f"{self.summary['seconds']:.1f} s",
            "directory": str(self.directory),
        }
        rows |= {"ε": self._epsilon} if self._epsilon else {}
        cells = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(str(v))}</td></tr>" for k, v in rows.items())
        return f"{self.curves() if self._rounds else ''}<table>{cells}</table>"


class Comparison:
    """Finished runs side by side: mean ± standard deviation over seeds, and paired differences."""

    def __init__(self, compared: dict[str, Any], directories: Sequence[Path]) -> None:
        self.settings: list[dict[str, Any]] = compared["settings"]
        self.notes: list[str] = compared["notes"]
        self._tables: list[str] = compared["tables"]
        self._directories = list(directories)

    def __str__(self) -> str:
        return "\n".join([*(table.rstrip() for table in self._tables), *(f"note: {note}" for note in self.notes)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{_fedproj.curves(self._directories)}<pre>{html.escape(str(self))}</pre>"


def compare(runs: Iterable[Run | PathLike], baseline: str | None = None) -> Comparison:
    """Compares finished runs, or directories of them. ``baseline`` names the row that the others are compared with."""
    runs = [runs] if isinstance(runs, (str, os.PathLike, Run)) else runs
    directories = [run.directory if isinstance(run, Run) else Path(run) for run in runs]
    if not directories:
        raise ValueError("there is no run to compare; give runs, or directories of runs")
    return Comparison(json.loads(_fedproj.compare(directories, baseline)), directories)


def read_safetensors(path: PathLike) -> dict[str, np.ndarray]:
    """The tensors of a file of single precision."""
    content = Path(path).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    tensors = {}
    for name, about in json.loads(content[8:start]).items():
        if name != "__metadata__":
            first, end = about["data_offsets"]
            dtype = {"F32": "<f4", "I64": "<i8"}[about["dtype"]]
            values = np.frombuffer(content[start + first : start + end], dtype=dtype)
            tensors[name] = values.reshape(about["shape"]).copy()
    return tensors


def _plan(config: Any, saved: Settings, methods: Sequence[Any], settings: Settings | None) -> list[Any]:
    """The runs that the arguments ask for."""
    if not isinstance(settings, Mapping | None):
        raise TypeError(f"settings are a dictionary such as {{'federation.rounds': 5}}, not {type(settings).__name__}")
    given: list[str] = []
    if isinstance(config, Mapping):
        given += _pairs(_flat(config))
    elif config is not None:
        given.append(os.fspath(config))
    given += _pairs(saved)
    given += _pairs(settings or {})
    planned = []
    for method in methods:
        named = _pairs({"method.name": method}) if isinstance(method, str) else []
        runs = _fedproj.plan(given + named)
        if method is not None and not isinstance(method, str):
            runs = [run.with_method(_object(method)) for run in runs]
        planned += runs
    return planned


def _object(method: Any) -> Method:
    """A method that is written in Python."""
    if isinstance(method, type) and issubclass(method, Method):
        raise TypeError(f"a method is an object, not its class: {method.__name__}()")
    if not isinstance(method, Method) or type(method) is Method:
        raise TypeError(f"a method is a name or an object of a subclass of fedproj.Method, not {method!r}")
    return method


def _saved(data: str | Settings | Dataset | None, model: str | Graph | None, folder: Path) -> Settings:
    """The settings that name data and model; what is in memory is written below ``folder``."""
    settings: dict[str, Any] = {}
    if isinstance(data, Dataset):
        settings |= data.save(folder / "data")
    elif isinstance(data, str):
        settings["data.private"] = data
    elif isinstance(data, Mapping):
        settings["data.private"] = dict(data)
    elif data is not None:
        kinds = "the name of a data set, a dictionary such as {'name': 'csv', 'path': …}, or a fedproj.Dataset"
        raise TypeError(f"data is {kinds}, not {type(data).__name__}")
    if isinstance(model, Graph):
        settings |= model.settings(folder / "data")
    elif isinstance(model, str):
        settings["model.name"] = model
    elif model is not None:
        raise TypeError(f"model is the name of a network or a fedproj.Graph, not {type(model).__name__}")
    return settings


def _flat(table: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Nested tables under keys with dots."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        inner = _flat(value, f"{path}{key}.") if isinstance(value, Mapping) else {f"{path}{key}": value}
        flat.update(inner)
    return flat


def _pairs(settings: Settings) -> list[str]:
    """As the command line takes them: ``key=value``, values in TOML."""
    return [f"{key}={_toml(value)}" for key, value in settings.items()]


def _toml(value: Any) -> str:
    """
    >>> _toml({"kind": "sgd", "lr": 0.1, "on": True, "widths": (8, 4)})
    '{kind = "sgd", lr = 0.1, on = true, widths = [8, 4]}'
    """
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
    if isinstance(value, (int, float, np.integer, np.floating)):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, (str, os.PathLike)):
        return json.dumps(os.fspath(value), ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, (Sequence, np.ndarray)):
        return "[" + ", ".join(_toml(inner) for inner in value) + "]"
    raise TypeError(f"a setting is a number, a text, a list or a table, not {value!r}")


def _options(data_dir: Any, device: Any, precision: Any, threads: Any, jobs: int, resume: bool) -> str:
    for name, value, largest in (("threads", threads, 65535), ("jobs", jobs, 64)):
        if value is not None and not (isinstance(value, int) and 1 <= value <= largest):
            raise _fedproj.SettingsError(f"{name} = {value!r}: must be from 1 to {largest}")
    for name, text in (("device", device), ("precision", precision)):
        if not isinstance(text, str | None):
            raise TypeError(f"{name} is a text such as {'cuda' if name == 'device' else 'fp32'!r}, not {text!r}")
    return json.dumps(
        {
            "data_dir": None if data_dir is None else os.fspath(data_dir),
            "device": device,
            "precision": precision,
            "threads": threads,
            "jobs": jobs,
            "resume": bool(resume),
        }
    )


def _make(runs: list[tuple[Any, Path]], options: str, show: bool) -> list[Run]:
    shown = _progress(show)
    try:
        _fedproj.make(runs, options, shown)
    finally:
        shown.close()
    return [Run(directory) for _, directory in runs]


def _is_nested(values: list[Any]) -> bool:
    return any(isinstance(value, (list, dict)) for value in values)


def _column(values: list[Any]) -> np.ndarray:
    if any(isinstance(value, str) for value in values):
        return np.array(values)
    if all(isinstance(value, int) for value in values):
        return np.array(values, dtype=np.int64)
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
