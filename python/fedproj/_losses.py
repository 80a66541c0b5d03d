"""The losses of which a method's objective is a sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable

import numpy as np

if TYPE_CHECKING:
    from fedproj._step import Embedding


class Objective:
    """A sum of losses, each with a weight and a place in the network.

    - ``cross_entropy``: −log softmax(z)[label], on the labels of the batch.
    - ``offset_cross_entropy``: −log softmax(z + o)[label]; o are the client's ``Method.class_offsets``.
    - ``masked_squares``: Σ (z − t)² over the dimensions where z or t is positive; t are the targets' features.
    - ``absolute_error``: the mean over the classes of |z − t|; t are the targets' logits.
    - :func:`kl`, :func:`contrast`, :func:`not_true_kl` and :func:`relaxed_contrast` make the others.

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
        return Objective({**term, "weight": _finite("weight", term["weight"] * float(weight))} for term in self._terms)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        return " + ".join(f"{term['weight']} * {term['loss']['kind']} at {term['at']}" for term in self._terms)


def _finite(name: str, value: float, *, positive: bool = False) -> float:
    with np.errstate(over="ignore"):
        number = np.float32(value)
    if not np.isfinite(number) or (positive and not number > 0):
        raise ValueError(f"{name} = {value}: must be a {'positive' if positive else 'finite'} number of single precision")
    return float(value)


def _loss(kind: str, **constants: Any) -> Objective:
    for name, value in constants.items():
        if isinstance(value, float):
            _finite(name, value, positive=name == "temperature")
    return Objective([{"loss": {"kind": kind, **constants}, "at": "output", "weight": 1.0}])


cross_entropy = _loss("cross_entropy")
offset_cross_entropy = _loss("offset_cross_entropy")
masked_squares = _loss("masked_squares")
absolute_error = _loss("absolute_error")


def kl(temperature: float, *, towards_teacher: bool = False, times_t_squared: bool = False) -> Objective:
    """The divergence KL(teacher ‖ student) at a temperature; ``towards_teacher`` swaps its arguments."""
    direction = "student_to_teacher" if towards_teacher else "teacher_to_student"
    return _loss("kl", temperature=float(temperature), direction=direction, times_t_squared=bool(times_t_squared))


def _place(embedding: Embedding) -> int:
    index = vars(embedding).get("_index") if hasattr(embedding, "__dict__") else None
    if index is None:
        raise TypeError(f'expected an embedding, such as step.embed(step.start, "output"), not {embedding!r}')
    return index


def contrast(positive: Embedding, negative: Embedding, temperature: float) -> Objective:
    """MOON's contrast between two embeddings of the batch."""
    places = {"positive": _place(positive), "negative": _place(negative)}
    return _loss("contrast", **places, temperature=float(temperature))


def not_true_kl(teacher: Embedding, temperature: float) -> Objective:
    """FedNTD's divergence over all classes but the label's; the teacher is ``step.embed(step.start, "output")``."""
    return _loss("not_true_kl", teacher=_place(teacher), temperature=float(temperature))


def relaxed_contrast(temperature: float, threshold: float, contrast_weight: float, penalty_weight: float) -> Objective:
    """FedRCL's relaxed contrastive loss."""
    return _loss(
        "relaxed_contrast",
        temperature=float(temperature),
        threshold=float(threshold),
        contrast_weight=float(contrast_weight),
        penalty_weight=float(penalty_weight),
    )
