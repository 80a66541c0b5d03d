"""Networks of one's own: layer by layer, or from PyTorch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from fedproj import _fedproj

__all__ = ["Graph", "from_torch"]


class Node(str):
    """A layer's name, with the shape of one sample after it."""

    shape: tuple[int, ...]

    def __new__(cls, name: str, shape: Sequence[int]) -> Node:
        node = super().__new__(cls, name)
        node.shape = tuple(shape)
        return node


class Graph:
    """A network, checked layer by layer: the line that does not fit raises the exception.

    ``input`` is the shape of a sample: ``(features,)``, ``(height, width)`` or ``(height, width, channels)``; for texts it is
    ``Graph(tokens=128)``. A layer takes the layer before it, or those in ``of``. The last layer is the classifier, a
    ``linear()`` without ``outputs``.

    >>> g = Graph((8, 8, 3))
    >>> x = g.conv2d(16, padding=1)
    >>> y = g.relu(g.batch_norm())
    >>> g.add([x, y]).shape
    (8, 8, 16)
    >>> g.conv2d(4, kernel=9)
    Traceback (most recent call last):
    ...
    fedproj.SettingsError: node `conv2d5`: a kernel of 9 does not fit an image of 8 with padding 0
    >>> g.average_pool(), g.linear()
    ('average_pool5', 'linear6')
    """

    def __init__(self, input: Sequence[int] | None = None, *, tokens: int | None = None) -> None:
        if (input is None) == (tokens is None):
            raise TypeError("a graph needs the shape of its input, or tokens=")
        sizes = (tokens,) if input is None else tuple(input)
        if not all(isinstance(n, (int, np.integer)) and n > 0 for n in sizes):
            raise ValueError(f"the sizes of a graph's input are whole numbers from 1 on, not {sizes}")
        sizes = tuple(int(n) for n in sizes)
        self._input: dict[str, Any] = {"tokens": sizes[0]} if input is None else {"shape": sizes}
        self.layers: list[dict[str, Any]] = []
        self.input = Node("input", sizes)
        self._weights: dict[str, np.ndarray] = {}

    def _add(self, op: str, name: str | None, of: Any, **keys: Any) -> Node:
        layer: dict[str, Any] = {"op": op, "name": name or f"{op}{len(self.layers) + 1}"}
        if of is not None:
            layer["from"] = [str(of)] if isinstance(of, str) else [str(node) for node in of]
        layer |= {key: value for key, value in keys.items() if value is not None}
        for key, value in keys.items():
            if isinstance(value, float) and not np.isfinite(value):
                raise _fedproj.SettingsError(f"node `{layer['name']}`: {key} = {value}: must be a finite number")
        layers = [*self.layers, layer]
        shape = json.loads(_fedproj.check_layers(json.dumps(self._input), json.dumps(layers)))
        self.layers = layers
        return Node(layer["name"], shape)

    def conv2d(
        self,
        outputs: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = True,
        standardized: bool = False,
        name: str | None = None,
        of: str | None = None,
    ) -> Node:
        """A convolution; ``standardized``: with standardised weights."""
        op = "standardized_conv2d" if standardized else "conv2d"
        return self._add(op, name, of, outputs=outputs, kernel=kernel, stride=stride, padding=padding, bias=bias)

    def linear(self, outputs: int | None = None, *, bias: bool = True, name: str | None = None, of: str | None = None) -> Node:
        """A fully connected layer; without ``outputs`` it is the classifier."""
        return self._add("linear", name, of, outputs=outputs, bias=None if outputs is None else bias)

    def batch_norm(self, of: str | None = None, *, name: str | None = None) -> Node:
        """Batch normalisation."""
        return self._add("batch_norm", name, of)

    def group_norm(self, groups: int, of: str | None = None, *, name: str | None = None) -> Node:
        """Group normalisation."""
        return self._add("group_norm", name, of, groups=groups)

    def layer_norm(self, of: str | None = None, *, eps: float = 1e-5, name: str | None = None) -> Node:
        """Layer normalisation over the channels of a token or pixel."""
        return self._add("layer_norm", name, of, eps=eps)

    def relu(self, of: str | None = None, *, name: str | None = None) -> Node:
        """max(x, 0)"""
        return self._add("relu", name, of)

    def gelu(self, of: str | None = None, *, name: str | None = None) -> Node:
        """x Φ(x)"""
        return self._add("gelu", name, of)

    def tanh(self, of: str | None = None, *, name: str | None = None) -> Node:
        """tanh(x)"""
        return self._add("tanh", name, of)

    def max_pool(
        self, kernel: int = 2, *, stride: int | None = None, padding: int = 0, name: str | None = None, of: str | None = None
    ) -> Node:
        """The maximum of each window."""
        return self._add("max_pool", name, of, kernel=kernel, stride=stride, padding=padding)

    def average_pool(self, of: str | None = None, *, name: str | None = None) -> Node:
        """The mean over all pixels."""
        return self._add("average_pool", name, of)

    def add(self, of: Sequence[str], *, name: str | None = None) -> Node:
        """The sum of two layers of equal shape."""
        return self._add("add", name, of)

    def flatten(self, of: str | None = None, *, name: str | None = None) -> Node:
        """An image as a vector."""
        return self._add("flatten", name, of)

    def dropout(self, rate: float = 0.5, of: str | None = None, *, name: str | None = None) -> Node:
        """Drops elements at random while training."""
        return self._add("dropout", name, of, rate=rate)

    def embedding(self, outputs: int, *, vocabulary: int | None = None, name: str | None = None) -> Node:
        """Vectors of the words, positions and types of a text."""
        return self._add("embedding", name, None, outputs=outputs, vocabulary=vocabulary)

    def attention(self, heads: int, of: str | None = None, *, rate: float = 0.0, name: str | None = None) -> Node:
        """Self-attention among the tokens of a text."""
        return self._add("attention", name, of, heads=heads, rate=rate)

    def first_token(self, of: str | None = None, *, name: str | None = None) -> Node:
        """The vector of the first token of a text."""
        return self._add("first_token", name, of)

    def mean_of_tokens(self, of: str | None = None, *, name: str | None = None) -> Node:
        """The mean of the tokens of a text."""
        return self._add("mean_of_tokens", name, of)

    def settings(self, folder: Path) -> dict[str, Any]:
        """The settings that name the network; weights from PyTorch are written below ``folder``."""
        settings: dict[str, Any] = {"model.name": "layers", "model.layers": self.layers}
        if self._weights:
            content = _safetensors(self._weights)
            path = folder / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.safetensors"
            folder.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            settings["model.weights"] = path
        return settings

    def __repr__(self) -> str:
        return f"<Graph of {len(self.layers)} layers>"


def _safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    header, data = {}, b""
    for name, tensor in tensors.items():
        values = np.ascontiguousarray(tensor, dtype="<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def from_torch(module: Any, input_shape: Sequence[int]) -> Graph:
    """A PyTorch module made of such layers as a graph, weights included. ``input_shape`` is PyTorch's: (channels, height,
    width) or (features,). The module must end with its classifier, an ``nn.Linear``.
    """
    from fedproj._torch import translate

    return translate(module, input_shape)
