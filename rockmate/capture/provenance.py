"""Where each node of a trace comes from: its submodule and the user's line.

The submodule goes to `node.meta["module"]`, the line to `node.meta["stack_trace"]`.

Nodes of the forward are made while their submodule runs. Nodes of the backward are made by autograd
when no submodule runs. They bear the sequence number that autograd gave the op that they
differentiate, and these numbers count up while the forward passes through submodules. The forward
needs more than numbers: an op without a gradient, as in a frozen submodule, has none.
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
from rockmate._torch.engine import backward_id
from rockmate._torch.graphs import on_node_created
from rockmate.capture import fake_device

# Key in a node's `meta`: it was made while the model's forward ran.
MADE_BY_FORWARD = "made_by_forward"


@dataclass(slots=True)
class ModuleStack:
    """The submodules that the forward has run and is running.

    Attributes:
        spans: of each submodule's finished forward, its autograd sequence numbers and its path:
            (first, past the last, path).
        entered: the submodules that are running, outermost first: (first sequence number, path).
        takes_gradient: whether the forward has run a backward of its own.
    """

    spans: list[tuple[int, int, str]] = field(default_factory=list)
    entered: list[tuple[int, str]] = field(default_factory=list)
    takes_gradient: bool = False

    @property
    def innermost(self) -> str:
        """Path of the submodule that is running; empty if none is."""
        return self.entered[-1][1] if self.entered else ""

    def name_backward(self, graph: fx.Graph) -> None:
        """Gives each node without a submodule the module of the op that it differentiates."""
        module_of_sequence = self._module_of_sequence()
        for node in graph.nodes:
            if "module" not in node.meta:
                node.meta["module"] = module_of_sequence.get(node.meta.get("seq_nr", -1), "")

    def _module_of_sequence(self) -> dict[int, str]:
        """The innermost module of each sequence number.

        Spans are in order of leaving, so an inner one comes before its parent.
        """
        last_trace_start = max((first for first, _, path in self.spans if not path), default=0)
        result: dict[int, str] = {}
        for first, past_last, path in self.spans:
            if first < last_trace_start:
                continue  # of an earlier trace: the tracer runs the module more than once
            for number in range(first, past_last):
                result.setdefault(number, path)
        return result


@contextlib.contextmanager
def record_module_stack(model: nn.Module) -> Iterator[ModuleStack]:
    """Records which submodules run, and writes the running one to each new node."""
    trail = ModuleStack()

    def enter(path: str) -> Callable[..., None]:
        return lambda module, inputs: trail.entered.append((sequence_number(), path))

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        first, path = trail.entered.pop()
        trail.spans.append((first, sequence_number(), path))

    def note_module(node: fx.Node) -> None:
        if trail.entered:
            node.meta["module"] = trail.innermost
            node.meta[MADE_BY_FORWARD] = True
            trail.takes_gradient |= backward_id() >= 0

    handles = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
            continue
        handles.append(module.register_forward_pre_hook(enter(path), prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with on_node_created(note_module):
            yield trail
    finally:
        for handle in handles:
            handle.remove()


TORCH = str(Path(torch.__file__).parent) + os.sep
THIS_PACKAGE = str(Path(__file__).parents[1]) + os.sep
# Frames that do not count: they stand in for PyTorch's own functions, called from the user's line.
_PASSED_OVER = (TORCH, __file__, fake_device.__file__, graphs.__file__, "<")


def source_lines() -> AbstractContextManager[None]:
    """Writes the user's line to each node that is traced meanwhile."""
    return on_node_created(_note_line)


def _note_line(node: fx.Node) -> None:
    line = _user_line() if node.op == "call_function" else ""
    if line and not node.meta.get("stack_trace"):
        node.meta["stack_trace"] = line


def _user_line() -> str:
    """The innermost frame outside PyTorch, in the form of a traceback.

    Empty if a frame of this package is further in than the user's code. Code without a file, which
    `exec` ran, counts as its caller's.
    """
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:
        name = frame.f_code.co_filename
        if name.startswith(_PASSED_OVER):
            continue
        if name.startswith(THIS_PACKAGE):
            return ""
        code = linecache.getline(name, frame.f_lineno).strip()
        return f'  File "{name}", line {frame.f_lineno}, in {frame.f_code.co_name}\n    {code}'
    return ""
