"""The user's line of each node, written to `node.meta["stack_trace"]` while a model is traced.

The tracer makes each node of the forward while the model's own code stands on Python's stack: the innermost frame outside PyTorch is
the line that called the op. Walking the frames costs about 20 us a node; formatting whole stacks, as the tracer can do itself, costs
many times that. Nodes of the backward are made by autograd, with no code of the user's on the stack, and get nothing.
"""

from __future__ import annotations

import linecache
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import fx

from rockmate import stand_ins, traced_nodes
from rockmate.traced_nodes import each_node

_TORCH, _THIS_PACKAGE = (str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))
_PASSED_OVER = (_TORCH, __file__, traced_nodes.__file__, stand_ins.__file__, "<")
"""Code that does not count: what stands in for PyTorch's own functions is called from the user's line."""


def source_lines() -> AbstractContextManager[None]:
    """Gives each node that is traced meanwhile the user's line that made it."""
    return each_node(_note_line)


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
