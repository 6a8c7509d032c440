"""Code generation of fx graphs, and the creation of their nodes by the tracer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.fx.graph import _BoxedCodeGen
from torch.fx.proxy import TracerBase

from rockmate._util import attributes_set

# The tracer's class is shared by all threads. Several observers may watch one capture.
_LOCK = threading.RLock()


def boxed_module(graph: fx.Graph) -> fx.GraphModule:
    """A module whose function takes its arguments as one list and empties it.

    With the public calling convention, the caller's argument tuple keeps every tensor alive until
    the function returns.
    """
    graph.set_codegen(_BoxedCodeGen())
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)


def module_without_code(root: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A module for a graph that is never run. The public constructor writes its code at once."""
    with _use_lazy_graph_module(True):
        return _make_graph_module(root, graph)


@contextlib.contextmanager
def on_node_created(observe: Callable[[fx.Node], None]) -> Iterator[None]:
    """Calls `observe` with each node that any tracer creates meanwhile.

    The tracer of a capture is made inside PyTorch, so it cannot be subclassed.
    """
    with _LOCK:
        create_node = TracerBase.create_node

        def create_observed(self: TracerBase, *args: Any, **kwargs: Any) -> fx.Node:
            node = create_node(self, *args, **kwargs)
            observe(node)
            return node

        with attributes_set((TracerBase, "create_node", create_observed)):
            yield
