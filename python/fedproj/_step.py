"""A client's step and the end of its round, recorded: handles of vectors, and what is done with them."""

from __future__ import annotations

import json
from typing import Any, Sequence

import numpy as np

from fedproj._losses import Objective

_RECORDED = (
    "local_step is recorded once and executed by the engine later, so {what} has no value yet and Python cannot {do} it. "
    "Use the functions of `step`, such as step.add_scaled or step.project; branch only on step.round, step.client, "
    "step.epoch, step.step, step.has_memory, step.n_memory_batches, step.has_generator, step.has_logits, "
    "step.chance_of_step(), step.kept_model(name) and your own settings"
)


_STEPS_MAX = 100_000  # every step is recorded

_BATCHES = ("private", "memory", "taught", "generated")


def _needs_more_than_labels(term: dict[str, Any]) -> bool:
    return term["at"] != "output" or term["loss"]["kind"] not in ("cross_entropy", "offset_cross_entropy")


class _Unknown:
    """Something without a value while a step is recorded. Whoever computes with it learns why that cannot work."""

    _what = "it"

    def _refuse(self, do: str) -> Any:
        raise TypeError(_RECORDED.format(what=self._what, do=do))

    def __bool__(self) -> bool:
        return self._refuse("branch on")

    def __float__(self) -> float:
        return self._refuse("convert")

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self._refuse("convert")

    def __iter__(self) -> Any:
        return self._refuse("iterate over")

    def __getitem__(self, _: Any) -> Any:
        return self._refuse("index")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"`{name}`: {_RECORDED.format(what=self._what, do='compute with')}")

    def _compare(self, _: Any) -> Any:
        return self._refuse("compare")

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compare
    __hash__ = object.__hash__

    def _compute(self, *_: Any) -> Any:
        return self._refuse("compute with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _compute

    __neg__ = __abs__ = __pow__ = __rpow__ = __len__ = __int__ = _compute


class Vector(_Unknown):
    """A vector as long as the network's parameters, by its name."""

    def __init__(self, name: Any, what: str, writable: bool) -> None:
        self._name, self._what, self._writable = name, what, writable

    def __repr__(self) -> str:
        return f"<{self._what}>"


class Embedding(_Unknown):
    """Values of a node for the private batch under other weights, for :func:`contrast`."""

    _what = "an embedding"

    def __init__(self, index: int) -> None:
        self._index = index


class _Chance(_Unknown):
    """A random number in [0, 1). It can be compared with a number, and nothing else."""

    _what = "a random number of a step"

    def __init__(self, reader: _Reader, fact: str, value: float) -> None:
        self._reader, self._fact, self._value = reader, fact, value

    def _against(self, how: str, limit: float, holds: bool) -> bool:
        self._reader.note({self._fact: [how, float(limit)]})
        return holds

    def __lt__(self, limit: float) -> bool:
        return self._against("below", limit, self._value < limit)

    def __le__(self, limit: float) -> bool:
        return self._against("at_most", limit, self._value <= limit)

    def __gt__(self, limit: float) -> bool:
        return self._against("above", limit, self._value > limit)

    def __ge__(self, limit: float) -> bool:
        return self._against("at_least", limit, self._value >= limit)


class _Reader:
    """Facts, and which of them were looked at."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts, self.read = facts, []

    def note(self, fact: Any) -> None:
        if fact not in self.read:
            self.read.append(fact)

    def look(self, name: str) -> Any:
        self.note(name)
        return self.facts[name]


class _Recording:
    """What a step and the end of a client's round share."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._reader = _Reader(facts)
        self._calls: list[dict[str, Any]] = []
        self.weights = Vector("weights", "the client's weights", writable=False)
        self.start = Vector("start", "the weights that the client received", writable=False)

    def _answer(self) -> str:
        return json.dumps({"facts": self._reader.read, "calls": self._calls}, allow_nan=False)

    def _call(self, op: str, **arguments: Any) -> None:
        self._calls.append({"op": op, **arguments})

    def _declare(self, kind: str, name: str, what: str, writable: bool) -> Vector:
        vector = Vector({kind: str(name)}, f"{what} `{name}`", writable)
        self._call("declare", v=vector._name)
        return vector

    def state(self, name: str) -> Vector:
        """A vector that the client keeps between rounds; starts as zeros."""
        return self._declare("state", name, "the kept vector", writable=True)

    def broadcast(self, name: str) -> Vector:
        """A vector that the server sent, see :meth:`Server.send`; zeros if it sent none."""
        return self._declare("broadcast", name, "the received vector", writable=False)

    def add_scaled(self, y: Vector, a: float, x: Vector) -> None:
        """y ← y + a·x"""
        y, x = self._target(y, x), self._source(x)
        self._call("add_scaled", y=y, a=self._number(a), x=x)

    def add_scaled_diff(self, g: Vector, a: float, x: Vector, y: Vector) -> None:
        """g ← g + a·(x − y)"""
        g, x, y = self._target(g, x, y), self._source(x), self._source(y)
        self._call("add_scaled_diff", g=g, a=self._number(a), x=x, y=y)

    @staticmethod
    def _number(value: float) -> float:
        number = float(value)
        if not np.isfinite(np.float32(number)):
            raise ValueError(f"{value} is no finite number of single precision")
        return number

    @staticmethod
    def _source(vector: Vector) -> Any:
        if not isinstance(vector, Vector):
            raise TypeError(f"expected a vector of the step, such as step.weights or a gradient, not {vector!r}")
        return vector._name

    def _target(self, vector: Vector, *sources: Vector) -> Any:
        name = self._source(vector)
        if not vector._writable:
            raise TypeError(f"{vector._what} cannot be changed; weights move by step.update alone")
        if any(isinstance(source, Vector) and source._name == name for source in sources):
            raise TypeError(f"{vector._what} is changed and read by the same operation")
        return name


class Step(_Recording):
    """One local step of one client. Numbers such as ``step.round`` are known; vectors are handles without a value.

    ``step.weights`` and ``step.start`` are the client's weights and those that it received. A gradient is taken on a batch:

    - ``step.private``: the client's current mini-batch.
    - ``step.memory``: the next batch of the memory of public samples, where ``step.has_memory``.
    - ``step.taught``: the current mini-batch with logits for :func:`fedproj.kl`. They are those that the server sent for its
      samples (``step.has_logits``), or those that the client's own classifier gives the generator's features of the same
      labels (``step.has_generator``).
    - ``step.generated``: features that the generator makes for random labels, and these labels. They enter the client's
      classifier.
    """

    private, memory, taught, generated = "private", "memory", "taught", "generated"

    _n_gradients = 0
    _n_embeddings = 0

    seed = property(lambda self: self._reader.look("seed"), doc="The run's seed.")
    round = property(lambda self: self._reader.look("round"), doc="Round, counted from 0.")
    n_rounds = property(lambda self: self._reader.look("n_rounds"), doc="Rounds of the run.")
    client = property(lambda self: self._reader.look("client"), doc="The client's number.")
    epoch = property(lambda self: self._reader.look("epoch"), doc="Local epoch, counted from 0.")
    step = property(lambda self: self._reader.look("step"), doc="Local step in this round, counted from 0.")
    has_memory = property(lambda self: self._reader.look("has_memory"), doc="Whether the client has a memory with targets.")
    n_memory_batches = property(
        lambda self: self._reader.look("n_memory_batches"), doc="Batches in a pass over the memory; 0 without one."
    )
    has_generator = property(lambda self: self._reader.look("has_generator"), doc="Whether the server has sent a generator.")
    has_logits = property(
        lambda self: self._reader.look("has_logits"), doc="Whether the server has sent logits for the client's own samples."
    )

    def chance_of_round(self) -> _Chance:
        """A random number in [0, 1) per client and round, to be compared with a probability."""
        return _Chance(self._reader, "chance_of_round", self._reader.facts["chance_of_round"])

    def chance_of_step(self) -> _Chance:
        """A random number in [0, 1) per step, to be compared with a probability."""
        return _Chance(self._reader, "chance_of_step", self._reader.facts["chance_of_step"])

    def gradient(self, batch: str, objective: Objective) -> Vector:
        """The gradient of an objective on ``step.private``, ``step.memory``, ``step.taught`` or ``step.generated``."""
        return self._gradient("gradient", batch, objective)

    def gradient_at(self, at: Vector, batch: str, objective: Objective) -> Vector:
        """The gradient at a vector that the client keeps. Running averages of batch-norm stay unchanged."""
        return self._gradient("gradient_at", batch, objective, at=self._source(at))

    def gradient_uphill(self, g: Vector, radius: float, batch: str, objective: Objective) -> Vector:
        """The gradient uphill of the weights, at w + radius·g/‖g‖, as sharpness-aware methods take it."""
        return self._gradient("gradient_uphill", batch, objective, g=self._source(g), radius=self._number(radius))

    def descend(self, n: int, batch: str, objective: Objective) -> None:
        """``n`` steps of the local optimiser, each along the gradient on its own batch."""
        if not isinstance(n, (int, np.integer)) or not 0 <= n <= _STEPS_MAX:
            raise ValueError(f"a number of steps is a whole number from 0 to {_STEPS_MAX}, not {n!r}")
        self._call("descend", n=int(n), **self._taken_on(batch, objective))

    def _gradient(self, op: str, batch: str, objective: Objective, **more: Any) -> Vector:
        self._call(op, **self._taken_on(batch, objective), **more)
        self._n_gradients += 1
        return Vector({"gradient": self._n_gradients - 1}, "a gradient", writable=True)

    def _taken_on(self, batch: str, objective: Objective) -> dict[str, Any]:
        if batch not in _BATCHES:
            raise ValueError(f"a gradient is taken on one of {', '.join(f'step.{name}' for name in _BATCHES)}, not on {batch!r}")
        if not isinstance(objective, Objective):
            raise TypeError(f"an objective is a sum of losses such as fedproj.cross_entropy, not {objective!r}")
        if batch == "memory" and not self.has_memory:
            raise ValueError("this client has no memory in this round; look at step.has_memory first")
        if batch == "generated" and not self.has_generator:
            raise ValueError("the server has sent no generator in this round; look at step.has_generator first")
        if batch == "taught" and not (self.has_generator or self.has_logits):
            raise ValueError("the server has sent no teacher; look at step.has_generator or step.has_logits first")
        if batch == "generated" and any(_needs_more_than_labels(term) for term in objective._terms):
            raise ValueError("generated features have labels alone: take fedproj.cross_entropy at the output")
        kinds = {term["loss"]["kind"] for term in objective._terms}
        if batch == "private" and kinds & {"kl", "absolute_error"}:
            raise ValueError("step.private has no teacher's logits; kl and absolute_error need step.memory or step.taught")
        if batch != "memory" and "masked_squares" in kinds:
            raise ValueError(f"step.{batch} has no features of a teacher; masked_squares needs step.memory")
        return {"batch": batch, "terms": objective._terms}

    def kept_model(self, name: str) -> Vector | None:
        """The model that ``client.keep_model(name)`` kept in an earlier round; ``None`` if there is none."""
        self._reader.note({"kept": str(name)})
        if name not in self._reader.facts["kept"]:
            return None
        return Vector({"kept": str(name)}, f"the kept model `{name}`", writable=False)

    def embed(self, weights: Vector, node: str = "output") -> Embedding:
        """Values of a node for the private batch under ``step.start`` or a kept model, in evaluation mode."""
        self._call("embed", weights=self._source(weights), at=str(node))
        self._n_embeddings += 1
        return Embedding(self._n_embeddings - 1)

    def assign(self, y: Vector, x: Vector) -> None:
        """y ← x"""
        self._call("assign", y=self._target(y, x), x=self._source(x))

    def clip(self, g: Vector, norm_max: float) -> None:
        """Scales g to a norm of at most ``norm_max``."""
        if not self._number(norm_max) > 0:
            raise ValueError(f"norm_max = {norm_max}: must be positive")
        self._call("clip", g=self._target(g), norm_max=float(norm_max))

    def project(self, g: Vector, r: Vector, **rule: Any) -> None:
        """g ← g − ⟨g, r⟩ / (‖r‖² + ε) · r where g points against r.

        The rule's keywords: ``always=True`` projects also where they do not conflict. ``eps`` is ε, ``norm_guard`` what
        ‖r‖² must be above, ``coefficient_max`` the largest coefficient. ``scope="layer"`` takes one inner product per tensor
        instead of one for all (``"global"``). ``from_round_start=True`` projects only while the memory loss is not below that
        of the round's first model.
        """
        self._call("project", g=self._target(g, r), r=self._source(r), rule=projection_rule(**rule))

    def project_to_cone(self, g: Vector, references: Sequence[Vector]) -> None:
        """Replaces g by the nearest vector that conflicts with none of up to 16 gradients.

        Take the gradients one after another.
        """
        self._call("project_to_cone", g=self._target(g, *references), references=[self._source(r) for r in references])

    def project_inputs(self, g: Vector, sent: Sequence[Vector], scales: bool = False) -> None:
        """Takes from g what acts on inputs of the layers: G ← G − Σ_j (G r_j) r_jᵀ per layer.

        The r_j stand in the rows of vectors that the server sends, named one after another. ``scales``: layers whose G
        lies mostly along them are scaled there (TRGP). A GPU takes 16 vectors and 125 directions per layer at most.
        """
        vectors = [self._source(v) for v in sent]
        self._call("project_inputs", g=self._target(g), sent=vectors, scales=bool(scales))

    def update(self, g: Vector) -> None:
        """One step of the local optimiser along g."""
        self._call("update", g=self._target(g))

    def update_projected(self, g: Vector, r: Vector, **rule: Any) -> None:
        """As :meth:`update`, but then projects the optimiser's own step against r, for any optimiser.

        The rule is that of :meth:`project`.
        """
        self._call("update_projected", g=self._target(g, r), r=self._source(r), rule=projection_rule(**rule))


def projection_rule(
    *,
    always: bool = False,
    eps: float = 1e-8,
    norm_guard: float = 0.0,
    coefficient_max: float | None = None,
    scope: str = "global",
    from_round_start: bool = False,
) -> dict[str, Any]:
    """The rule of :meth:`Step.project` as the engine reads it."""
    if scope not in ("global", "layer"):
        raise ValueError(f"scope is 'global' or 'layer', not {scope!r}")
    for name, value in (("eps", eps), ("norm_guard", norm_guard), ("coefficient_max", coefficient_max)):
        if value is not None and not 0 <= value < np.inf:
            raise ValueError(f"{name} = {value}: must be 0 or positive")
    return {
        "always": bool(always),
        "eps": float(eps),
        "norm_guard": float(norm_guard),
        "coefficient_max": None if coefficient_max is None else float(coefficient_max),
        "scope": scope,
        "from_round_start": bool(from_round_start),
    }


class Finish(_Recording):
    """The end of a client's local training."""

    lr_total = property(lambda self: self._reader.look("lr_total"), doc="The sum of the learning rates of all local steps.")

    def upload(self, name: str) -> Vector:
        """A vector of zeros that is sent to the server with the weights. Its name must be in ``uploads``."""
        return self._declare("upload", name, "the sent vector", writable=True)

    def keep_model(self, name: str) -> None:
        """Keeps the weights and their buffers for later rounds, see :meth:`Step.kept_model`."""
        self._call("keep_model", name=str(name))
