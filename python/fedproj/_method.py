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
from typing import Any, ClassVar, Sequence

import numpy as np

from fedproj._losses import cross_entropy
from fedproj._server import Server
from fedproj._step import Finish, Step


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

    Attributes of the class say what it needs, with their defaults in brackets:

    - ``needs_public`` [False]: Whether the method needs a public set.
    - ``needs_public_labels`` [False]: Whether it also needs the labels of the public samples.
    - ``needs_features`` [False]: Whether its ensemble on the public set has features as well as logits.
    - ``uploads`` [()]: Names of the vectors that a client sends with its weights.
    - ``personal_model`` [None]: The kept vector that is a client's own model; ``federation.evaluate_clients`` then
      measures that one.
    - ``taps`` [()]: Nodes besides the output at which a loss stands: ``"features"``, ``"levels"``, or names.
    - ``first_memory`` ["none"]: The memory's targets in the first round: ``"none"``, ``"global_model"`` or
      ``"labels"``.
    - ``projection_head`` [None]: Outputs of a projection head that the method adds to the network (node
      ``"head.2"``).
    - ``exit_level`` [None]: The level behind which the method adds a small classifier to the network (node
      ``"exit"``).
    - ``stays_with_client`` [()]: Layers whose parameters stay with their client, together with all buffers. Clients
      send them for the global model.
    - ``sends_logits`` [False]: Whether the server sends logits for the clients' own samples, see ``server.send``.
    - ``exchanges_logits`` [False]: Whether clients with different networks may take part; ``fuse`` then runs once per
      network.
    """

    needs_public: ClassVar[bool] = False
    needs_public_labels: ClassVar[bool] = False
    needs_features: ClassVar[bool] = False
    uploads: ClassVar[Sequence[str]] = ()
    personal_model: ClassVar[str | None] = None
    taps: ClassVar[Sequence[str]] = ()
    first_memory: ClassVar[str] = "none"
    projection_head: ClassVar[int | None] = None
    exit_level: ClassVar[int | None] = None
    stays_with_client: ClassVar[Sequence[str]] = ()
    sends_logits: ClassVar[bool] = False
    exchanges_logits: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        dataclasses.dataclass(kw_only=True)(cls)

    def memory(self) -> dict[str, Any] | None:
        """The clients' memory of public samples as keys of ``method.fedproj.memory``; ``None``: no memory."""
        return None

    def generator(self) -> dict[str, Any] | None:
        """The generator of features that the server sends, as keys of ``method.fedgen.generator``; ``None``: no generator."""
        return None

    def class_offsets(self, counts: np.ndarray) -> Sequence[float]:
        """What :data:`offset_cross_entropy` adds to a client's logits, from its number of samples per class.

        Minus infinity leaves a class out.
        """
        return np.zeros(len(counts))

    def check(self, config: dict[str, Any]) -> None:
        """Raises an exception where the method does not work with the rest of the configuration."""

    def local_step(self, step: Step) -> None:
        """What a client does with one mini-batch. Recorded: it must depend on ``step`` and the settings alone."""
        step.update(step.gradient(step.private, cross_entropy))

    def finish(self, client: Finish) -> None:
        """What a client does after its last mini-batch. Recorded, as :meth:`local_step`."""

    def fuse(self, server: Server) -> None:
        """How the server fuses the clients' results, once per round, in NumPy."""
        server.weights[:] = server.average()

    # What the engine asks for, in JSON.

    def _settings(self) -> dict[str, Any]:
        settings = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in settings.items() if value is not None}

    def _is_own(self, function: str) -> bool:
        return getattr(type(self), function) is not getattr(Method, function)

    def _about(self) -> str:
        for name in ("uploads", "taps", "stays_with_client"):
            if isinstance(names := getattr(self, name), str):
                raise TypeError(f"{name} is a tuple of names: ({names!r},), not {names!r}")
        return json.dumps(
            {
                "name": type(self).__name__,
                "needs_public": bool(self.needs_public),
                "needs_public_labels": bool(self.needs_public_labels),
                "needs_features": bool(self.needs_features),
                "uploads": [str(name) for name in self.uploads],
                "personal_model": self.personal_model,
                "taps": [str(name) for name in self.taps],
                "memory": self.memory(),
                "generator": self.generator(),
                "sends_logits": bool(self.sends_logits),
                "exchanges_logits": bool(self.exchanges_logits),
                "stays_with_client": [str(layer) for layer in self.stays_with_client],
                "exit_level": self.exit_level,
                "first_memory": self.first_memory,
                "projection_head": self.projection_head,
                "checks": self._is_own("check"),
                "offsets": self._is_own("class_offsets"),
                "finishes": self._is_own("finish") or bool(self.uploads),
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

    def _class_offsets(self, counts: list[int]) -> list[float]:
        offsets = np.asarray(self.class_offsets(np.array(counts)), dtype=np.float32)
        if offsets.shape != (len(counts),) or not np.all(offsets < np.inf):
            raise ValueError(f"class_offsets returns {len(counts)} numbers, one per class, below infinity; got {offsets}")
        return offsets.tolist()

    def _record_step(self, facts: str) -> str:
        step = Step(json.loads(facts))
        self.local_step(step)
        if not any(call["op"] in ("update", "update_projected", "descend") for call in step._calls):
            raise ValueError("local_step has no step.update, so the client's weights never move")
        return step._answer()

    def _record_finish(self, facts: str) -> str:
        client = Finish(json.loads(facts))
        self.finish(client)
        sent = {call["v"]["upload"] for call in client._calls if "upload" in call.get("v", {})}
        for name in sent.symmetric_difference(self.uploads):
            where = "finish sends it" if name in sent else "uploads names it"
            raise ValueError(f"`{name}` must be both in uploads and in client.upload({name!r}); only {where}")
        return client._answer()

    def _fuse(self, questions: Any) -> None:
        server = Server(questions)
        self.fuse(server)
        server._push()
