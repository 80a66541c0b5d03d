"""PyTorch modules as graphs, by ``torch.fx``. Only :func:`fedproj.from_torch` imports this."""

from __future__ import annotations

import operator
from typing import Any, Sequence

import torch
import torch.fx
from torch import nn
from torch.nn import functional as F

from fedproj._graph import Graph, Node


def translate(module: nn.Module, input_shape: Sequence[int]) -> Graph:
    """See :func:`fedproj.from_torch`."""
    shape = tuple(input_shape)
    graph = Graph((*shape[1:], shape[0]) if len(shape) == 3 else shape)
    traced = torch.fx.symbolic_trace(module)
    modules, nodes = dict(traced.named_modules()), list(traced.graph.nodes)
    values: dict[Any, Node] = {}
    last = next((n for n in reversed(nodes) if n.op == "call_module"), None)
    for node in nodes:
        of = [values[arg] for arg in node.args if isinstance(arg, torch.fx.Node) and arg in values]
        if node.op == "placeholder":
            values[node] = graph.input
        elif node.op == "call_module":
            values[node] = _module(graph, modules[node.target], str(node.target), of[0], node is last)
        elif node.op in ("call_function", "call_method"):
            values[node] = _function(graph, node, of)
        elif node.op == "get_attr":
            raise _unknown(node, f"the attribute `{node.target}`")
    kept = {name for layer in graph.layers for name in (layer["name"],)}
    graph._weights = {
        name: tensor.detach().cpu().numpy()
        for name, tensor in module.state_dict().items()
        if name.rsplit(".", 1)[0] in kept and not name.endswith("num_batches_tracked")
    }
    return graph


def _unknown(node: Any, what: str) -> TypeError:
    known = "Conv2d, BatchNorm, GroupNorm, Linear, ReLU, GELU, Tanh, MaxPool2d, AdaptiveAvgPool2d(1), Flatten, Dropout and +"
    return TypeError(f"`{node}` is {what}, which has no layer here; there are {known}")


def _square(value: Any, name: str) -> int:
    sides = set(value) if isinstance(value, tuple) else {value}
    if len(sides) != 1 or isinstance(value, str):
        raise TypeError(f"`{name}`: windows are squares, not {value}")
    return sides.pop()


def _module(graph: Graph, layer: nn.Module, name: str, of: Node, is_last: bool) -> Node:
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1 or _square(layer.dilation, name) != 1 or layer.padding_mode != "zeros":
            raise TypeError(f"`{name}`: a convolution has one group, no dilation and zeros as padding")
        window = {key: _square(getattr(layer, key), name) for key in ("stride", "padding")}
        kernel, bias = _square(layer.kernel_size, name), layer.bias is not None
        return graph.conv2d(layer.out_channels, kernel, bias=bias, name=name, of=of, **window)
    if isinstance(layer, nn.Linear):
        return graph.linear(None if is_last else layer.out_features, bias=layer.bias is not None, name=name, of=of)
    if isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
        if (layer.eps, layer.momentum, layer.affine) != (1e-5, 0.1, True):
            raise TypeError(f"`{name}`: a batch-norm has ε = 1e-5, momentum 0.1 and parameters")
        return graph.batch_norm(of, name=name)
    if isinstance(layer, nn.GroupNorm):
        return graph.group_norm(layer.num_groups, of, name=name)
    if isinstance(layer, nn.ReLU):
        return graph.relu(of, name=name)
    if isinstance(layer, nn.GELU) and layer.approximate == "none":
        return graph.gelu(of, name=name)
    if isinstance(layer, nn.Tanh):
        return graph.tanh(of, name=name)
    if isinstance(layer, nn.MaxPool2d):
        window = {key: _square(getattr(layer, key), name) for key in ("stride", "padding")}
        return graph.max_pool(_square(layer.kernel_size, name), name=name, of=of, **window)
    if isinstance(layer, nn.AdaptiveAvgPool2d) and _square(layer.output_size, name) == 1:
        return graph.average_pool(of, name=name)
    if isinstance(layer, nn.Flatten):
        return of if len(of.shape) == 1 else graph.flatten(of, name=name)
    if isinstance(layer, nn.Dropout):
        return graph.dropout(layer.p, of, name=name)
    if isinstance(layer, nn.Identity):
        return of
    raise _unknown(name, type(layer).__name__)


def _function(graph: Graph, node: Any, of: list[Node]) -> Node:
    name = node.name
    if node.target in (operator.add, operator.iadd, torch.add, "add") and len(of) == 2:
        return graph.add(of, name=name)
    if node.target in (F.relu, torch.relu, "relu", "relu_"):
        return graph.relu(of[0], name=name)
    if node.target in (F.gelu,):
        return graph.gelu(of[0], name=name)
    if node.target in (torch.tanh, F.tanh, "tanh"):
        return graph.tanh(of[0], name=name)
    if node.target in (torch.flatten, "flatten"):
        return of[0] if len(of[0].shape) == 1 else graph.flatten(of[0], name=name)
    raise _unknown(node, f"`{getattr(node.target, '__name__', node.target)}`")
