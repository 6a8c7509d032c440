"""Where each node of a trace comes from: its submodule and the user's line.

The submodule goes to `node.meta["module"]`, the line to `node.meta["stack_trace"]`.

Nodes of the forward are made while their submodule runs. Nodes of the backward are made by autograd
when no submodule runs. They bear the sequence number that autograd gave the op that they
differentiate, as the nodes of that op do.
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
from rockmate._torch.engine import backward_id
from rockmate._torch.graphs import on_node_created
from rockmate.capture import fake_device

# Key in a node's `meta`: it was made while the model's forward ran.
MADE_BY_FORWARD = "made_by_forward"


@dataclass(slots=True)
class ModuleStack:
    """The submodules that the forward is running.

    Attributes:
        paths: of those submodules, outermost first.
        takes_gradient: whether the forward has run a backward of its own.
    """

    paths: list[str] = field(default_factory=list)
    takes_gradient: bool = False

    @property
    def innermost(self) -> str:
        """Path of the submodule that is running; empty if none is."""
        return self.paths[-1] if self.paths else ""


def name_backward(graph: fx.Graph) -> None:
    """Gives each node without a submodule the module of the op that it differentiates."""
    module_of_sequence: dict[int, str] = {}
    for node in graph.nodes:
        number = node.meta.get("seq_nr")
        if "module" not in node.meta:
            node.meta["module"] = module_of_sequence.get(number, "")
        elif number is not None:  # an op without a gradient has the number of the one before it
            module_of_sequence.setdefault(number, node.meta["module"])


@contextlib.contextmanager
def record_module_stack(model: nn.Module) -> Iterator[ModuleStack]:
    """Records which submodules run, and writes the running one to each new node."""
    running = ModuleStack()

    def enter(path: str) -> Callable[..., None]:
        return lambda module, inputs: running.paths.append(path)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        running.paths.pop()

    def note_module(node: fx.Node) -> None:
        if running.paths:
            node.meta["module"] = running.innermost
            node.meta[MADE_BY_FORWARD] = True
            running.takes_gradient |= backward_id() >= 0

    handles = []
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):  # it takes no hooks
            continue
        handles.append(module.register_forward_pre_hook(enter(path), prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with on_node_created(note_module):
            yield running
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
