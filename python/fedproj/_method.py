"""Methods written in Python.

``local_step`` is recorded, not executed: it gets handles and writes down what the engine does with them later, on the CPU or
on a GPU. So a method costs nothing per step. It is asked again only where it looked at something that has changed, such as
the round.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import linecache
import textwrap
from typing import Any, ClassVar, Iterable, Sequence

import numpy as np

__all__ = [
    "Method",
    "Objective",
    "contrast",
    "cross_entropy",
    "kl",
    "masked_squares",
    "not_true_kl",
    "relaxed_contrast",
]

_RECORDED = (
    "local_step is recorded once and executed by the engine later, so {what} has no value yet and Python cannot {do} it. "
    "Use the functions of `step`, such as step.add_scaled or step.project; branch only on step.round, step.client, "
    "step.epoch, step.step, step.has_memory, step.chance_of_step(), step.kept_model(name) and your own settings"
)


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

    def _compare(self, _: Any) -> Any:
        return self._refuse("compare")

    __lt__ = __le__ = __gt__ = __ge__ = _compare

    def _compute(self, _: Any) -> Any:
        return self._refuse("compute with")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _compute

    def __neg__(self) -> Any:
        return self._refuse("compute with")


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


class Objective:
    """A sum of losses, each with a weight and a place in the network.

    >>> cross_entropy + 0.5 * kl(3.0)
    1.0 * cross_entropy at output + 0.5 * kl at output
    >>> masked_squares.at("features")
    1.0 * masked_squares at features
    """

    def __init__(self, terms: Iterable[dict[str, Any]]) -> None:
        self._terms = list(terms)

    def at(self, node: str) -> Objective:
        """The same losses at another node: ``"output"``, ``"features"``, ``"levels"``, or a node's name."""
        return Objective({**term, "at": str(node)} for term in self._terms)

    def __add__(self, other: Objective) -> Objective:
        return Objective(self._terms + other._terms) if isinstance(other, Objective) else NotImplemented

    def __mul__(self, weight: float) -> Objective:
        return Objective({**term, "weight": term["weight"] * float(weight)} for term in self._terms)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return " + ".join(f"{term['weight']} * {term['loss']['kind']} at {term['at']}" for term in self._terms)


def _loss(kind: str, **constants: Any) -> Objective:
    return Objective([{"loss": {"kind": kind, **constants}, "at": "output", "weight": 1.0}])


cross_entropy = _loss("cross_entropy")
"""−log softmax(z)[label], on the labels of the batch."""

masked_squares = _loss("masked_squares")
"""Σ (z − t)² over the dimensions where z or t is positive; t are the targets' features."""


def kl(temperature: float, *, towards_teacher: bool = False, times_t_squared: bool = False) -> Objective:
    """The divergence KL(teacher ‖ student) at a temperature; ``towards_teacher`` swaps its arguments."""
    direction = "student_to_teacher" if towards_teacher else "teacher_to_student"
    return _loss("kl", temperature=float(temperature), direction=direction, times_t_squared=bool(times_t_squared))


def contrast(positive: Embedding, negative: Embedding, temperature: float) -> Objective:
    """MOON's contrast between two embeddings of the batch."""
    places = {"positive": positive._index, "negative": negative._index}
    return _loss("contrast", **places, temperature=float(temperature))


def not_true_kl(teacher: Embedding, temperature: float) -> Objective:
    """FedNTD's divergence over all classes but the label's; the teacher is ``step.embed(step.start, "output")``."""
    return _loss("not_true_kl", teacher=teacher._index, temperature=float(temperature))


def relaxed_contrast(temperature: float, threshold: float, contrast_weight: float, penalty_weight: float) -> Objective:
    """FedRCL's relaxed contrastive loss."""
    return _loss(
        "relaxed_contrast",
        temperature=float(temperature),
        threshold=float(threshold),
        contrast_weight=float(contrast_weight),
        penalty_weight=float(penalty_weight),
    )


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
    """One local step of one client. Numbers such as ``step.round`` are known; vectors are handles without a value."""

    private = "private"
    """The client's current mini-batch."""
    memory = "memory"
    """The next batch of the memory of public samples."""

    _n_gradients = 0
    _n_embeddings = 0

    seed = property(lambda self: self._reader.look("seed"), doc="The run's seed.")
    round = property(lambda self: self._reader.look("round"), doc="Round, counted from 0.")
    n_rounds = property(lambda self: self._reader.look("n_rounds"), doc="Rounds of the run.")
    client = property(lambda self: self._reader.look("client"), doc="The client's number.")
    epoch = property(lambda self: self._reader.look("epoch"), doc="Local epoch, counted from 0.")
    step = property(lambda self: self._reader.look("step"), doc="Local step in this round, counted from 0.")
    has_memory = property(lambda self: self._reader.look("has_memory"), doc="Whether the client has a memory with targets.")

    def chance_of_round(self) -> _Chance:
        """A random number in [0, 1) per client and round, to be compared with a probability."""
        return _Chance(self._reader, "chance_of_round", self._reader.facts["chance_of_round"])

    def chance_of_step(self) -> _Chance:
        """A random number in [0, 1) per step, to be compared with a probability."""
        return _Chance(self._reader, "chance_of_step", self._reader.facts["chance_of_step"])

    def gradient(self, batch: str, objective: Objective) -> Vector:
        """The gradient of an objective on ``step.private`` or ``step.memory``."""
        return self._gradient("gradient", batch, objective)

    def gradient_uphill(self, g: Vector, radius: float, batch: str, objective: Objective) -> Vector:
        """The gradient uphill of the weights, at w + radius·g/‖g‖, as sharpness-aware methods take it."""
        return self._gradient("gradient_uphill", batch, objective, g=self._source(g), radius=self._number(radius))

    def _gradient(self, op: str, batch: str, objective: Objective, **more: Any) -> Vector:
        if batch not in ("private", "memory"):
            raise ValueError(f"a gradient is taken on step.private or step.memory, not on {batch!r}")
        if not isinstance(objective, Objective):
            raise TypeError(f"an objective is a sum of losses such as fedproj.cross_entropy, not {objective!r}")
        if batch == "memory" and not self.has_memory:
            raise ValueError("this client has no memory in this round; look at step.has_memory first")
        self._call(op, batch=batch, terms=objective._terms, **more)
        self._n_gradients += 1
        return Vector({"gradient": self._n_gradients - 1}, "a gradient", writable=True)

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

    def clip(self, g: Vector, norm_max: float) -> None:
        """Scales g to a norm of at most ``norm_max``."""
        self._call("clip", g=self._target(g), norm_max=self._number(norm_max))

    def project(self, g: Vector, r: Vector, **rule: Any) -> None:
        """g ← g − ⟨g, r⟩ / (‖r‖² + ε) · r where g points against r. For the rule, see :func:`projection_rule`."""
        self._call("project", g=self._target(g, r), r=self._source(r), rule=projection_rule(**rule))

    def update(self, g: Vector) -> None:
        """One step of the local optimiser along g."""
        self._call("update", g=self._target(g))

    def update_projected(self, g: Vector, r: Vector, **rule: Any) -> None:
        """As :meth:`update`, but then projects the optimiser's own step against r, for any optimiser."""
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
    """Whether and how far a gradient is projected.

    ``always``: also where it does not conflict. ``eps``: ε in the denominator. ``norm_guard``: ‖r‖² must be above it.
    ``coefficient_max``: largest coefficient. ``scope``: ``"global"``, or ``"layer"`` for one inner product per tensor.
    ``from_round_start``: only while the memory loss is not below that of the round's first model.
    """
    if scope not in ("global", "layer"):
        raise ValueError(f"scope is 'global' or 'layer', not {scope!r}")
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


def _source(cls: type) -> str:
    """The source of a class in a file, or in a notebook, whose classes Python itself does not find before version 3.13."""
    try:
        return textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):
        pass
    for function in vars(cls).values():
        code = getattr(function, "__code__", None)
        text = "".join(linecache.getlines(code.co_filename)) if code else ""
        for node in ast.walk(ast.parse(text)):
            is_it = isinstance(node, ast.ClassDef) and node.name == cls.__name__
            if is_it and node.lineno <= code.co_firstlineno <= node.end_lineno:
                return textwrap.dedent(ast.get_source_segment(text, node, padded=True))
    raise ValueError(
        f"the source of `{cls.__name__}` cannot be read, but a run records it; define the class in a file or in a notebook"
    )


class Method:
    """A federated method: what a client does with a mini-batch, and how the server fuses the clients' models.

    The defaults are FedAvg. Annotated attributes are settings; they become keyword arguments:

    >>> class MyProx(Method):
    ...     mu: float = 0.01
    ...     def local_step(self, step):
    ...         g = step.gradient(step.private, cross_entropy)
    ...         step.add_scaled_diff(g, self.mu, step.weights, step.start)
    ...         step.update(g)
    >>> MyProx(mu=0.1)
    MyProx(mu=0.1)
    """

    needs_public: ClassVar[bool] = False
    """Whether the method needs a public set."""
    needs_public_labels: ClassVar[bool] = False
    """Whether it also needs the labels of the public samples."""
    needs_features: ClassVar[bool] = False
    """Whether its ensemble on the public set has features as well as logits."""
    uploads: ClassVar[Sequence[str]] = ()
    """Names of the vectors that a client sends with its weights."""
    taps: ClassVar[Sequence[str]] = ()
    """Nodes besides the output at which a loss stands: ``"features"``, ``"levels"``, or names."""
    first_memory: ClassVar[str] = "none"
    """The memory's targets in the first round: ``"none"``, ``"global_model"`` or ``"labels"``."""
    projection_head: ClassVar[int | None] = None
    """Outputs of a projection head that the method adds to the network (node ``"head.2"``)."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(kw_only=True)(cls)

    def memory(self) -> dict[str, Any] | None:
        """The clients' memory of public samples as keys of ``method.fedproj.memory``; ``None``: no memory."""
        return None

    def check(self, config: dict[str, Any]) -> None:
        """Raises an exception where the method does not work with the rest of the configuration."""

    def local_step(self, step: Step) -> None:
        """What a client does with one mini-batch. Recorded: it must depend on ``step`` and the settings alone."""
        step.update(step.gradient(step.private, cross_entropy))

    def finish(self, client: Finish) -> None:
        """What a client does after its last mini-batch. Recorded, as :meth:`local_step`."""

    def fuse(self, server: Any) -> None:
        """How the server fuses the clients' results, once per round, in NumPy."""
        server.weights[:] = server.average()

    # What the engine asks for, in JSON.

    def _settings(self) -> dict[str, Any]:
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in settings.items() if value is not None}

    def _is_own(self, function: str) -> bool:
        return getattr(type(self), function) is not getattr(Method, function)

    def _about(self) -> str:
        return json.dumps(
            {
                "name": type(self).__name__,
                "needs_public": bool(self.needs_public),
                "needs_public_labels": bool(self.needs_public_labels),
                "needs_features": bool(self.needs_features),
                "uploads": [str(name) for name in self.uploads],
                "taps": [str(name) for name in self.taps],
                "memory": self.memory(),
                "first_memory": self.first_memory,
                "projection_head": self.projection_head,
                "checks": self._is_own("check"),
                "finishes": self._is_own("finish"),
                "fuses": self._is_own("fuse"),
            }
        )

    def _identity(self) -> tuple[str, str]:
        """The source of the class and of its bases, and the settings."""
        classes = [base for base in type(self).__mro__ if issubclass(base, Method) and base is not Method]
        sources = [_source(base) for base in reversed(classes)]
        try:
            return "\n".join(sources), json.dumps(self._settings(), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"settings are numbers, texts, lists and tables: {error}") from error

    @classmethod
    def _from_settings(cls, settings: str) -> Method:
        return cls(**json.loads(settings))

    def _check(self, config: str) -> None:
        self.check(json.loads(config))

    def _record_step(self, facts: str) -> str:
        step = Step(json.loads(facts))
        self.local_step(step)
        if not any(call["op"] in ("update", "update_projected") for call in step._calls):
            raise ValueError("local_step has no step.update, so the client's weights never move")
        return step._answer()

    def _record_finish(self, facts: str) -> str:
        client = Finish(json.loads(facts))
        self.finish(client)
        return client._answer()

    def _fuse(self, questions: Any) -> None:
        from fedproj._server import Server

        server = Server(questions)
        self.fuse(server)
        server._push()
