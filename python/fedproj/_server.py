"""The server's side of a round, as a method in Python sees it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np

__all__ = ["Client", "Outputs", "Server"]


@dataclasses.dataclass(frozen=True)
class Client:
    """A client that took part in the round."""

    client: int
    n_samples: int
    n_steps: int
    loss: float


@dataclasses.dataclass
class Outputs:
    """Outputs on the public set: logits (n_public, n_classes), and features or ``None``."""

    logits: np.ndarray
    features: np.ndarray | None = None


class Server:
    """The fusion of one round. ``weights`` and ``buffers`` are arrays; write into them what is sent next.

    ``weights`` begin as what the clients received, ``buffers`` as the clients' average. ``clients`` lists the
    round's clients: the number ``client``, ``n_samples``, ``n_steps`` and the mean ``loss`` of each. Other attributes are
    ``round``, ``n_rounds``, ``n_clients``, ``n_classes``, ``n_public`` and ``config``, the run's settings.
    """

    def __init__(self, questions: Any) -> None:
        self._questions = questions
        about, _ = self._ask("round")
        self.round: int = about["round"]
        self.n_rounds: int = about["n_rounds"]
        self.n_clients: int = about["n_clients"]
        self.n_classes: int = about["n_classes"]
        self.n_public: int = about["n_public"]
        self.config: dict[str, Any] = about["config"]
        self.clients: list[Client] = [Client(**client) for client in about["clients"]]
        self._vectors: dict[str, np.ndarray] = {}
        self._weights, self._buffers = self._ask("model")[1]

    def _ask(self, ask: str, *arrays: Any, **arguments: Any) -> tuple[Any, list[np.ndarray]]:
        given = [np.ascontiguousarray(array, dtype=np.float32).reshape(-1) for array in arrays]
        try:
            question = json.dumps({"ask": ask, **arguments}, allow_nan=False)
        except ValueError:
            raise ValueError(f"{', '.join(f'{name} = {value}' for name, value in arguments.items())}: must be finite") from None
        value, answers = self._questions.ask(question, given)
        return json.loads(value), [np.frombuffer(answer, dtype="<f4") for answer in answers]

    def _push(self) -> None:
        self._ask("set_model", self._weights, self._buffers)
        for name, vector in self._vectors.items():
            self._ask("set_vector", vector, name=name)

    @property
    def weights(self) -> np.ndarray:
        """The weights that are sent next; before they are changed, what the clients received."""
        return self._weights

    @weights.setter
    def weights(self, values: Any) -> None:
        self._weights[:] = values

    @property
    def buffers(self) -> np.ndarray:
        """Their buffers, such as running means of batch-norm."""
        return self._buffers

    @buffers.setter
    def buffers(self, values: Any) -> None:
        self._buffers[:] = values

    @property
    def n_results(self) -> int:
        """The number of contributions."""
        return len(self.clients)

    def sample_weights(self) -> np.ndarray:
        """n_k / Σ n, one per client."""
        return self._ask("client_weights")[1][0]

    def uniform_weights(self) -> np.ndarray:
        """1 / m, one per client."""
        return self._ask("client_weights")[1][1]

    def average(self, weights: Any = None, part: str = "weights") -> np.ndarray:
        """Σ_k w_k of a part; without weights, w_k = n_k / Σ n. A part is ``"weights"``, ``"buffers"`` or an upload's name."""
        if self.n_results == 0:  # of clients with this network, which then keeps its model
            return {"weights": self._weights, "buffers": self._buffers}.get(part, np.zeros_like(self._weights)).copy()
        weights = self.sample_weights() if weights is None else weights
        return self._ask("sum", weights, part=_part(part))[1][0]

    def stack(self, part: str = "weights") -> np.ndarray:
        """A part of all clients as an array (n_results, length), for medians and other rules over columns."""
        values = self._ask("stack", part=_part(part))[1][0]
        return values.reshape(values.size // max(self.n_results, 1), self.n_results).T

    def vector(self, name: str, initial: float = 0.0) -> np.ndarray:
        """A vector that the server keeps between rounds. Write into it."""
        if name not in self._vectors:
            self._vectors[name] = self._ask("vector", name=name, initial=float(initial))[1][0]
        return self._vectors[name]

    def send(self, name: str) -> np.ndarray:
        """A vector that is sent to the clients, see :meth:`Step.broadcast`. Write into it.

        Two names are no vectors as long as the weights. ``"logits"`` is an array (samples, classes) with a row per private
        sample, for methods with ``sends_logits``: see :meth:`samples_of`. A client whose rows are all 0 has no logits.
        ``"generator"`` are the generator's parameters: see :meth:`train_generator`.
        """
        vector = self.vector(f"send.{name}")
        return vector.reshape(-1, self.n_classes) if name == "logits" else vector

    def samples_of(self, client: int) -> np.ndarray:
        """The rows of a client's samples in the private set, as ``server.clients[0].client`` names it."""
        return np.array(self._ask("samples_of", client=int(client))[0], dtype=np.int64)

    def train_generator(
        self, steps: int = 50, *, diversity_weight: float = 1.0, decay: float = 0.98, optimizer: dict[str, Any] | None = None
    ) -> None:
        """Trains and sends the generator as FedGen does, for methods with :meth:`Method.generator`.

        The clients' classifiers shall recognise its features. The arguments are those of ``method.fedgen``; the optimiser is
        Adam with a learning rate of 3e-4.
        """
        self._push()
        how = {"diversity_weight": float(diversity_weight), "decay": float(decay)}
        self._ask("train_generator", steps=steps, optimizer=_optimizer(3e-4, optimizer), **how)
        if "send.generator" in self._vectors:
            self._vectors["send.generator"][:] = self._ask("vector", name="send.generator", initial=0.0)[1][0]

    def _needs_public(self) -> None:
        if self.n_public == 0:
            raise ValueError("this run has no public set to compute outputs on; set needs_public = True in the class")

    def ensemble(self, weights: str = "uniform", features: bool = False) -> Outputs:
        """The mean of the clients' outputs on the public set; ``weights`` is ``"uniform"`` or ``"samples"``."""
        self._needs_public()
        return self._outputs(*self._ask("ensemble", weights=weights, features=bool(features))[1])

    def client_outputs(self, features: bool = False) -> list[Outputs]:
        """Each client's outputs on the public set."""
        self._needs_public()
        arrays = self._ask("client_outputs", features=bool(features))[1]
        return [self._outputs(*pair) for pair in zip(arrays[::2], arrays[1::2])]

    def global_outputs(self, features: bool = False) -> Outputs:
        """The outputs of ``weights`` on the public set."""
        self._needs_public()
        self._push()
        return self._outputs(*self._ask("global_outputs", features=bool(features))[1])

    def distill(self, teacher: Outputs, *, absolute: bool = False, aside: bool = False, **how: Any) -> None:
        """Trains ``weights`` towards a teacher on the public set. ``how``: the keys of ``method.fedproj.distill``.

        ``absolute``: by the mean absolute error of the logits. ``aside``: trains a model that the server keeps to itself
        from round to round and publishes; ``weights`` stay as they are.
        """
        if how.get("feature_weight") and _targets(teacher)[1:] == []:
            raise ValueError("feature_weight needs the teacher's features: server.ensemble(features=True)")
        self._distill("scores" if absolute else "teacher", _targets(teacher), aside, how)

    def distill_labels(
        self, labels: Any, logits: Any = None, *, weights: Any = (1.0, 0.0), aside: bool = False, **how: Any
    ) -> None:
        """As :meth:`distill`, towards a label per public sample and, where they are not NaN, towards logits.

        ``weights``: those of the cross-entropy and of the divergence.
        """
        labels = np.asarray(labels)
        if labels.shape != (self.n_public,) or not np.isin(labels, np.arange(self.n_classes)).all():
            raise ValueError(f"labels are {self.n_public} whole numbers from 0 to {self.n_classes - 1}, one per public sample")
        shape = (self.n_public, self.n_classes)
        logits = np.full(shape, np.nan) if logits is None else np.asarray(logits)
        if logits.shape != shape:
            raise ValueError(f"logits have the shape {shape}, one row per public sample; got {logits.shape}")
        has_logits = np.isfinite(logits).all(axis=1)
        known = np.where(has_logits[:, None], logits, 0.0)
        label_weight, logit_weight = map(float, weights)
        targets = {"consensus": [label_weight, logit_weight]}
        self._distill(targets, [labels, known, has_logits], aside, how)

    def _distill(self, targets: Any, arrays: list[Any], aside: bool, how: dict[str, Any]) -> None:
        self._needs_public()
        self._push()
        how["optimizer"] = _optimizer(1e-5, how.get("optimizer"))
        self._ask("distill", *arrays, how=how, targets=targets, aside=bool(aside))
        self._weights, self._buffers = self._ask("model")[1]

    def public_labels(self) -> np.ndarray:
        """The labels of the public samples, for methods with ``needs_public_labels``."""
        return self._ask("public_labels")[1][0].astype(np.int64)

    def set_memory(self, targets: Outputs) -> None:
        """The targets of the memory in the next round."""
        self._ask("set_memory", *_targets(targets))

    def evaluate_instead(self, weights: Any) -> None:
        """Evaluates and publishes these weights instead of those that are sent."""
        self._push()
        self._ask("evaluate_instead", weights)

    def _outputs(self, logits: np.ndarray, features: np.ndarray) -> Outputs:
        shaped = features.reshape(self.n_public, -1) if features.size else None
        return Outputs(logits.reshape(self.n_public, -1), shaped)


def _part(part: str) -> Any:
    return part if part in ("weights", "buffers") else {"upload": part}


def _optimizer(lr: float, given: dict[str, Any] | None) -> dict[str, Any]:
    """Adam with a learning rate, or what differs from it, as in a configuration: no weight decay unless it is given."""
    return {"kind": "adam", "lr": lr, "weight_decay": 0.0, **(given or {})}


def _targets(outputs: Outputs) -> list[Any]:
    if not isinstance(outputs, Outputs):
        raise TypeError(f"targets are fedproj.Outputs, such as server.ensemble(), not {outputs!r}")
    return [outputs.logits] if outputs.features is None else [outputs.logits, outputs.features]
