"""Data from memory.

A run must be repeatable, so its data need a place: they are written once, under the hash of their content, beside the run.
The configuration names that place. So ``fedproj verify`` and a resumed run find the same samples, and other samples make
another run.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Iterable, Sequence

import numpy as np

__all__ = ["Dataset"]


class Dataset:
    """Samples and labels in memory: arrays, anything that NumPy or DLPack can read on the CPU, or lists of texts.

    ``x`` is (n, features), (n, height, width), (n, height, width, channels) or (n, channels, height, width). Images of bytes
    are scaled by 1/255; other numbers are taken as they are, or standardised if ``standardise`` is set. ``y`` are class
    numbers from 0. ``test`` is a pair (x, y); without it, a part of the samples is held out. ``public`` is x without labels
    or a pair; without it, a part of the private set is public. ``partition`` is one list of sample numbers per client; with
    it, no part of the samples is held out, so it needs ``test``, and for methods with a public set ``public``. Texts need
    ``tokenizer``, a file with one word piece per line, as BERT's ``vocab.txt``.

    >>> x, y = np.random.default_rng(0).normal(size=(60, 4)), np.arange(60) % 3
    >>> Dataset(x, y, test=(x, y), partition=[range(0, 30), range(30, 60)])
    <Dataset of 60 samples of shape (4,), 3 classes, 2 clients>
    """

    def __init__(
        self,
        x: Any,
        y: Any,
        *,
        test: tuple[Any, Any] | None = None,
        public: Any = None,
        partition: Sequence[Sequence[int]] | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        layout: str | None = None,
        standardise: bool = False,
    ) -> None:
        self._is_text = _is_texts(x)
        if self._is_text and tokenizer is None:
            raise ValueError("texts need a tokenizer: the path of a file with one word piece per line, as BERT's vocab.txt")
        self._tokenizer = None if tokenizer is None else Path(tokenizer)
        self._layout, self._standardise = layout, bool(standardise)
        self._parts = {"train": self._part("x", x, y)}
        if test is not None:
            self._parts["test"] = self._part("test", *_pair(test, "test"))
        if public is not None:
            pair = public if isinstance(public, tuple) else (public, None)
            self._parts["public"] = self._part("public", *_pair(pair, "public"))
        self._shape = None if self._is_text else self._parts["train"][0].shape[1:]
        for name, (samples, labels) in self._parts.items():
            if not self._is_text and samples.shape[1:] != self._shape:
                raise ValueError(f"{name}: samples of shape {samples.shape[1:]}, but x has samples of shape {self._shape}")
            if name == "test" and labels.max() >= self.n_classes:
                raise ValueError(f"test: label {labels.max()}, but y has only classes 0 to {self.n_classes - 1}")
        if partition is not None and test is None:
            raise ValueError("partition: give test=(x, y), too; a part of x that is held out would renumber its samples")
        self._partition = None if partition is None else _lists(partition, len(self))

    def _part(self, name: str, x: Any, y: Any) -> tuple[Any, np.ndarray | None]:
        samples = _texts(name, x) if self._is_text else _samples(name, x)
        if len(samples) == 0:
            raise ValueError(f"{name}: there is no sample")
        return samples, None if y is None else _labels(name, y, len(samples))

    def __len__(self) -> int:
        return len(self._parts["train"][0])

    @property
    def n_classes(self) -> int:
        """The largest label and one."""
        return int(self._parts["train"][1].max()) + 1

    def __repr__(self) -> str:
        what = "texts" if self._is_text else f"samples of shape {self._shape}"
        clients = "" if self._partition is None else f", {len(self._partition)} clients"
        return f"<Dataset of {len(self)} {what}, {self.n_classes} classes{clients}>"

    def save(self, folder: str | os.PathLike[str]) -> dict[str, Any]:
        """Writes the samples below ``folder``, unless they are there, and returns the settings that name them."""
        place = Path(folder) / self._hash()
        if not place.exists():
            new = place.with_name(f"{place.name}.{os.getpid()}.new")
            new.mkdir(parents=True, exist_ok=True)
            self._write(new)
            # The folder appears whole or not at all.
            new.rename(place)
        return self._settings(place)

    def _hash(self) -> str:
        content = hashlib.blake2b(digest_size=16)
        for name, (samples, labels) in sorted(self._parts.items()):
            arrays = [] if self._is_text else [samples]
            content.update(name.encode())
            if self._is_text:
                content.update(json.dumps(samples).encode())
            for array in arrays + ([] if labels is None else [labels]):
                content.update(f"{array.dtype.str}{array.shape}".encode())
                content.update(np.ascontiguousarray(array))
        content.update(json.dumps(self._partition).encode())
        return content.hexdigest()

    def _write(self, folder: Path) -> None:
        for name, (samples, labels) in self._parts.items():
            if self._is_text:
                rows = zip(samples, [""] * len(samples) if labels is None else (f"{label:06}" for label in labels))
                lines = (json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows)
                (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
                continue
            at, suffix = (folder / "public", "") if name == "public" else (folder / "private", f"_{name}")
            at.mkdir(exist_ok=True)
            np.save(at / f"x{suffix}.npy", np.ascontiguousarray(samples))
            if labels is not None:
                np.save(at / f"y{suffix}.npy", labels)
        if self._partition is not None:
            (folder / "partition.json").write_text(json.dumps(self._partition))

    def _settings(self, place: Path) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        if self._is_text:
            private: dict[str, Any] = {"name": "text", "path": place / "train.jsonl"}
            if "test" in self._parts:
                private["test"] = place / "test.jsonl"
            public: dict[str, Any] = {"name": "text", "path": place / "public.jsonl"}
            if "public" in self._parts and self._parts["public"][1] is None:
                public["label"], public["text"] = "none", "text"
            settings["data.text.vocabulary"] = self._tokenizer.absolute() if self._tokenizer else ""
        else:
            private, public = {"name": "numpy", "path": place / "private"}, {"name": "numpy", "path": place / "public"}
            for source in (private, public):
                source.update({} if self._layout is None else {"layout": self._layout})
                source.update({"standardise": True} if self._standardise else {})
        settings["data.private"] = private
        if "public" in self._parts:
            settings["data.public"] = public
        if self._partition is not None:
            settings["data.partition"] = {"kind": "file", "path": place / "partition.json"}
            if "public" not in self._parts:
                settings["data.public"] = "none"
        return settings


def _pair(pair: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{name} is a pair (x, y), not {type(pair).__name__}")
    if name == "test" and pair[1] is None:
        raise ValueError("test: a test set needs labels")
    return pair


def _array(name: str, values: Any) -> np.ndarray:
    if not hasattr(values, "__array__") and hasattr(values, "__dlpack__"):
        return np.from_dlpack(values)
    array = np.asarray(values)
    if array.dtype.kind not in "buif":
        raise TypeError(f"{name}: expected numbers, not {array.dtype}")
    return array


def _samples(name: str, values: Any) -> np.ndarray:
    array = _array(name, values)
    if array.ndim not in (2, 3, 4):
        raise ValueError(f"{name}: an array of shape {array.shape} holds no samples; expected 2 to 4 dimensions")
    if array.dtype == np.uint8:
        return array
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    if not np.isfinite(array).all():
        raise ValueError(f"{name}: sample {int(np.argwhere(~np.isfinite(array))[0][0])} is not finite in single precision")
    return array


def _labels(name: str, values: Any, n: int) -> np.ndarray:
    if np.asarray(values).dtype.kind in "US":
        raise TypeError(f"{name}'s labels: expected class numbers, not texts; numpy.unique(y, return_inverse=True)[1] makes them")
    array = _array(f"{name}'s labels", values)
    if array.shape != (n,):
        raise ValueError(f"{name}: labels of shape {array.shape} for {n} samples")
    whole = np.nan_to_num(array, nan=-1.0).astype(np.int64)
    wrong = np.flatnonzero((whole != array) | (whole < 0) | (whole >= 2**31))
    if wrong.size:
        raise ValueError(f"{name}: label {array[wrong[0]]} of sample {wrong[0]} is no class number from 0 on")
    return whole


def _is_texts(x: Any) -> bool:
    return isinstance(x, (list, tuple)) and len(x) > 0 and all(isinstance(text, str) for text in x)


def _texts(name: str, values: Any) -> list[str]:
    if not _is_texts(values):
        raise TypeError(f"{name}: expected a list of texts, as x is")
    return list(values)


def _lists(partition: Sequence[Sequence[int]], n: int) -> list[list[int]]:
    lists = [np.asarray(list(samples) if isinstance(samples, Iterable) else samples) for samples in partition]
    for client, samples in enumerate(lists):
        if samples.ndim == 1 and samples.size == 0:
            raise ValueError(f"partition: client {client} holds no sample")
        if samples.ndim != 1 or samples.dtype.kind not in "iu":
            raise TypeError(f"partition: client {client} needs a list of sample numbers")
        if not (0 <= samples.min() and samples.max() < n):
            raise ValueError(f"partition: client {client} holds a sample that is not among the {n}")
    return [samples.tolist() for samples in lists]
