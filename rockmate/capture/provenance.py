"""The submodule that ran each op, written to `node.meta["module"]` while a model is traced.

Nodes of the forward are made while their submodule runs. Nodes of the backward are made by autograd, when none does: they bear the
sequence number that autograd gave the op that they differentiate, and numbers count up while the forward passes through submodules.
Numbers alone would not do for the forward, since an op that needs no gradient (in a frozen submodule) is given none.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from rockmate._torch import graphs
from rockmate._torch.aot import sequence_number
from rockmate._torch.graphs import on_node_created
from rockmate.capture import fake_device


@dataclass(frozen=True, slots=True)
class ModuleStack:
    """Where the forward has been.

    Attributes:
        spans: autograd sequence numbers of each submodule's forward: (first, past the last, module path).
        entered: for each submodule whose forward has begun and not ended, the outer ones first: (first sequence number, module path).
    """

    spans: list[tuple[int, int, str]] = field(default_factory=list)
    entered: list[tuple[int, str]] = field(default_factory=list)

    @property
    def innermost(self) -> str:
        """Path of the submodule that is running; empty if none is."""
        return self.entered[-1][1] if self.entered else ""

    def name_backward(self, graph: fx.Graph) -> None:
        """Gives each node that no submodule made the module of the op that it differentiates."""
        module_of_sequence = self._module_of_sequence()
        for node in graph.nodes:
            if "module" not in node.meta:
                node.meta["module"] = module_of_sequence.get(node.meta.get("seq_nr", -1), "")

    def _module_of_sequence(self) -> dict[int, str]:
        """The innermost module of each sequence number. Spans end in order of leaving, so an inner one comes before its parent."""
        last_trace_start = max((first for first, _, path in self.spans if not path), default=0)
        result: dict[int, str] = {}
        for first, past_last, path in self.spans:
            if (
                first < last_trace_start
            ):  # an earlier trace of the same module: the tracer runs it more than once
                continue
            for number in range(first, past_last):
                result.setdefault(number, path)
        return result


@contextlib.contextmanager
def record_module_stack(model: nn.Module) -> Iterator[ModuleStack]:
    """Records the trail of the model's forward, and names the nodes that are made on it."""
    trail = ModuleStack()

    def enter(path: str) -> Callable[..., None]:
        return lambda module, inputs: trail.entered.append((sequence_number(), path))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        first, path = trail.entered.pop()
        trail.spans.append((first, sequence_number(), path))

    def note_module(node: fx.Node) -> None:
        if trail.entered:
            node.meta["module"] = trail.innermost

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path), prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with on_node_created(note_module):
            yield trail
    finally:
        for handle in handles:
            handle.remove()


_TORCH = str(Path(torch.__file__).parent) + os.sep
_THIS_PACKAGE = str(Path(__file__).parents[1]) + os.sep
_PASSED_OVER = (_TORCH, __file__, fake_device.__file__, graphs.__file__, "<")
"""Code that does not count: what stands in for PyTorch's own functions is called from the user's line."""


def source_lines() -> AbstractContextManager[None]:
    """Gives each node that is traced meanwhile the user's line that made it."""
    return on_node_created(_note_line)


def _note_line(node: fx.Node) -> None:
    line = _user_line() if node.op == "call_function" else ""
    if line and not node.meta.get("stack_trace"):
        node.meta["stack_trace"] = line


def _user_line() -> str:
    """The innermost frame outside PyTorch, in the form of a traceback; empty if this package stands nearer than the user's code.

    Code without a file (text that `exec` ran) has no line to show, and counts as its caller's.
    """
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PASSED_OVER):
            continue
        if name.startswith(_THIS_PACKAGE):
            return ""
        code = linecache.getline(name, frame.f_lineno).strip()
        return f'  File "{name}", line {frame.f_lineno}, in {frame.f_code.co_name}\n    {code}'
    return ""
