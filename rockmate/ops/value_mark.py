"""Names and marks that a model's forward gives to values.

In eager mode each function returns its tensor as it is. While a model is captured, it also leaves
one call in the graph, of `value_mark`, which has a tensor and a text and no reader. A pass
over the captured graph reads these calls and removes them (`rockmate.graph.node_marks`). The tensor
itself goes on unchanged, so views of it, changes in place and gradients are those of a forward
without the call.

Dynamo, which traces for `torch.compile`, is left one call of `mark_if_captured` instead. That op is
composed of others: of `value_mark` while a model is captured, as Dynamo's graph is by the backend
of this package, and of none otherwise. So other backends compile a model as if nothing was there.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx.node import has_side_effect

from rockmate._torch.dynamo import is_exporting
from rockmate.errors import InvalidArgumentError

# Number of captures that are going on; a capture holds a lock, so at most one.
_num_captures = 0
_FRAME = re.compile(r'File "(.*)", line (\d+), in (\S+)')


def _value_mark(value: Tensor, name: str | None, word: str) -> Tensor:
    return torch.empty(0, device=value.device)


torch.library.custom_op("rockmate::value_mark", _value_mark, mutates_args=()).register_fake(
    _value_mark
)
value_mark = torch.ops.rockmate.value_mark.default
# Without this, the tracer removes a call that nothing reads.
has_side_effect(value_mark)
torch.library.define("rockmate::mark_if_captured", "(Tensor value, str? name, str word) -> ()")
torch.library.define("rockmate::refuse_if_captured", "(str fault) -> ()")


@torch.library.impl("rockmate::mark_if_captured", "CompositeImplicitAutograd")
def _mark_if_captured(value: Tensor, name: str | None, word: str) -> None:
    if _num_captures:
        _write(value, name, word)


@torch.library.impl("rockmate::refuse_if_captured", "CompositeImplicitAutograd")
def _refuse_if_captured(fault: str) -> None:
    if _num_captures:
        raise InvalidArgumentError(fault)


has_side_effect(torch.ops.rockmate.mark_if_captured.default)
has_side_effect(torch.ops.rockmate.refuse_if_captured.default)


@contextlib.contextmanager
def values_marked() -> Iterator[None]:
    """Has names and marks of values written into the graph that is captured meanwhile."""
    global _num_captures
    _num_captures += 1
    try:
        yield
    finally:
        _num_captures -= 1


def name(value: Tensor, name: str) -> Tensor:
    """Names a value in a model's forward, so that `marks` can refer to it; returns the value.

    >>> x = rockmate.name(self.attention(x), "attn_out")     # doctest: +SKIP

    Outside of a capture it does nothing. Calls in a loop, or in several layers, may share a name.

    Args:
        value: a tensor of the forward.
        name: the name; `*` and `?` stand for other characters in `marks`, so it has neither.

    Raises:
        InvalidArgumentError: the value is no tensor, or the name no text; the name is empty or has
            a character that patterns use.
    """
    return _marked(value, name, "")


def save(value: Tensor, name: str | None = None) -> Tensor:
    """Marks a value in a model's forward as saved for the backward; returns the value.

    Its op is never recomputed, and the value is in memory from the forward to its last read in the
    backward. Outside of a capture it does nothing.

    Args:
        value: a tensor of the forward.
        name: its name in errors and reports; None for the line that marks it.

    Raises:
        InvalidArgumentError: as for `name`.
    """
    return _marked(value, name, "save")


def recompute(value: Tensor, name: str | None = None) -> Tensor:
    """Marks a value in a model's forward as recomputed in the backward; returns the value.

    It is not in memory when the forward has ended. Outside of a capture it does nothing.
    Arguments and errors are those of `save`.
    """
    return _marked(value, name, "recompute")


def _marked(value: Tensor, name: str | None, word: str) -> Tensor:
    if torch.compiler.is_dynamo_compiling():
        if not is_exporting():  # what is wrong matters only if Dynamo's graph is captured
            if fault := _fault(value, name, word):
                torch.ops.rockmate.refuse_if_captured(fault)
            else:
                torch.ops.rockmate.mark_if_captured(value, name, word)
        return value
    if not _num_captures:
        return value
    if fault := _fault(value, name, word):
        raise InvalidArgumentError(fault)
    if name is None:
        frame = sys._getframe(2)
        name = _line_name(frame.f_lineno, frame.f_code.co_name)
    _write(value, name, word)
    return value


def _fault(value: Any, name: Any, word: str) -> str:
    """What is wrong with the types of a call's arguments; empty if they are right."""
    function = word or "name"
    if not isinstance(value, Tensor):
        msg = f"rockmate.{function} marks tensors, and was given a {type(value).__name__}."
        if isinstance(value, str | torch.nn.Module):
            msg += ' A submodule is marked by its path: marks={"encoder.*.mlp": "recompute"}.'
        return msg
    if not isinstance(name, str) and (name is not None or not word):
        return f"the name that rockmate.{function} was given is {name!r}; a text is needed."
    return ""


def marking_line(stack_trace: str) -> str:
    """The name of a value that was marked without one, from where Dynamo found the call."""
    frames = [each for each in _FRAME.findall(stack_trace) if each[0] != __file__]
    return _line_name(*frames[-1][1:]) if frames else "a line that Dynamo does not name"


def _line_name(line: int | str, function: str) -> str:
    return f"line {line} of {function}"


def _write(value: Tensor, name: str | None, word: str) -> None:
    """Leaves a call of `value_mark` in the graph that is captured.

    Raises:
        InvalidArgumentError: as for `name`.
    """
    if name is not None and (not name or any(character in name for character in "*?[]")):
        function = word or "name"
        msg = f"the name that rockmate.{function} was given is {name!r}; it needs letters, no *?[]."
        raise InvalidArgumentError(msg)
    with torch.no_grad():
        torch.ops.rockmate.value_mark(value, name, word)
