"""The user's line of each node, written to `node.meta["stack_trace"]` while a model is traced.

The tracer makes each node of the forward while the model's own code stands on Python's stack: the innermost frame outside PyTorch is
the line that called the op. Walking the frames costs about 20 us a node; formatting whole stacks, as the tracer can do itself, costs
many times that. Nodes of the backward are made by autograd, with no code of the user's on the stack, and get nothing.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.fx.proxy import TracerBase

from rockmate import stand_ins

_TORCH, _THIS_PACKAGE = (str(Path(file).parent) + os.sep for file in (torch.__file__, __file__))
_PASSED_OVER = (_TORCH, stand_ins.__file__, "<")  # functions that stand in for PyTorch's own are called from the user's line
_LOCK = threading.Lock()  # the tracer's class is shared by all threads


@contextlib.contextmanager
def source_lines() -> Iterator[None]:
    """Gives each node that is traced meanwhile the user's line that made it."""
    with _LOCK:
        create_node = TracerBase.create_node

        def create_with_line(self: TracerBase, *args: Any, **kwargs: Any) -> fx.Node:
            node = create_node(self, *args, **kwargs)
            line = _user_line() if node.op == "call_function" else ""
            if line and not node.meta.get("stack_trace"):
                node.meta["stack_trace"] = line
            return node

        TracerBase.create_node = create_with_line
        try:
            yield
        finally:
            TracerBase.create_node = create_node


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
