"""Attention within windows as one op, whatever their number.

Models of images that attend in windows (Qwen2.5-VL and those that share its code) call attention
once for each window, so that a graph holds for one number of windows. Their code has a second way,
for kernels that take all windows at once, with the boundaries between them. The trace goes that
way, with an op that calls the model's own attention for each window: the same calls, and so the
same bits, as in eager. Its backward runs the forward of one window after the other once more.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from rockmate._util import attributes_set
from rockmate.capture.input_functions import meets

# What the file of such a model has, and which arguments those of its modules take that attend.
_WINDOWS, _KERNELS = "get_vision_window_index", "ALL_ATTENTION_FUNCTIONS"
_TAKES_ALL, _LONGEST = "is_flash_attention_requested", "get_max_seqlen"
_ARGUMENTS = {"cu_seqlens", "max_seqlen"}

_traced: dict[str, Windows] = {}  # of the capture that is going on


@torch.library.custom_op("rockmate::window_attention", mutates_args=())
def _forward(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, name: str) -> Tensor:
    raise NotImplementedError


@torch.library.custom_op("rockmate::window_attention_backward", mutates_args=())
def _backward(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, boundaries: Tensor, name: str
) -> list[Tensor]:
    raise NotImplementedError


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, name: str) -> Tensor:
    batch, heads, length, _ = query.shape
    return query.new_empty(batch, length, heads, value.shape[-1])


@_backward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, gradient: Tensor, boundaries: Tensor, name: str
) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (query, key, value)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.name = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    *values, boundaries = ctx.saved_tensors
    op = torch.ops.rockmate.window_attention_backward
    return *op(*values, gradient.transpose(1, 2), boundaries, ctx.name), None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


class Windows:
    """The attention of a module, window by window: `(query, key, value, boundaries) -> values`."""

    name, num_tensors = "window_attention", 3  # before the boundaries

    def __init__(self, attend: Callable[..., Tensor], boundaries: Tensor) -> None:
        """Of the model's own attention, within one window; boundaries are the sample's."""
        self.attend, self.boundaries = attend, boundaries
        self.__name__ = self.__qualname__ = self.name

    def __str__(self) -> str:
        return f"rockmate.{self.__name__}"

    def __call__(self, *given: Tensor) -> Any:
        """Values of shape (batch, length, heads, width), from (batch, heads, length, width)."""
        return torch.cat([self.attend(*window) for window in _windows(*given)], 1)

    def on_sample(
        self, made_up: Callable[[int], Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments: with the sample's boundaries, moved to the length."""
        tensors = [made_up(each) for each in range(self.num_tensors)]
        boundaries = self.boundaries.long() * tensors[0].shape[2] // self.boundaries[-1]
        return self, (*tensors, boundaries)


class WindowsBackward(Windows):
    """The backward: `(query, key, value, gradient, boundaries) -> gradients` of the first three."""

    name, num_tensors = "window_attention_backward", 4

    def __call__(self, *given: Tensor) -> list[Tensor]:
        """Of the shapes of query, key and value, as the gradient is."""
        gradients = []
        for *window, gradient in _windows(*given):
            with torch.enable_grad():
                leaves = [each.detach().requires_grad_() for each in window]
                values = self.attend(*leaves)
            gradients.append(torch.autograd.grad(values, leaves, gradient.transpose(1, 2)))
        return [torch.cat(each, 2).contiguous() for each in zip(*gradients, strict=True)]


def _windows(*given: Tensor) -> Iterator[tuple[Tensor, ...]]:
    *tensors, boundaries = given
    lengths = (boundaries[1:] - boundaries[:-1]).tolist()
    return zip(*(each.split(lengths, 2) for each in tensors), strict=True)


@contextlib.contextmanager
def windows_as_ops(model: nn.Module) -> Iterator[None]:
    """Has the modules that attend in windows call one op for all of them."""
    kinds = [kind for kind in {type(each) for each in model.modules()} if _has_windows(kind)]
    try:
        with attributes_set(*((kind, "forward", _in_one_op(kind)) for kind in kinds)):
            yield
    finally:
        _traced.clear()


def _has_windows(kind: type[nn.Module]) -> bool:
    names = vars(sys.modules.get(kind.__module__, SimpleNamespace()))
    has_both = all(each in names for each in (_WINDOWS, _KERNELS, _TAKES_ALL, _LONGEST))
    return has_both and inspect.signature(kind.forward).parameters.keys() >= _ARGUMENTS


def _in_one_op(kind: type[nn.Module]) -> Callable[..., Any]:
    forward, file = kind.forward, sys.modules[kind.__module__]
    kernels, takes_all = getattr(file, _KERNELS), getattr(file, _TAKES_ALL)

    @wraps(forward)
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        name = module.config._attn_implementation
        own = kernels.get_interface(name, getattr(file, "eager_attention_forward", None))

        def attention(
            _: nn.Module, *tensors: Tensor, cu_seq_lens_q: Tensor, **options: Any
        ) -> tuple[Tensor, None]:
            given = {each: options[each] for each in ("scaling", "dropout", "is_causal")}

            def attend(*window: Tensor) -> Tensor:
                return own(module, *window, attention_mask=None, **given)[0]

            boundaries = meets[-1].value_of(cu_seq_lens_q)
            if boundaries is None:
                return Windows(attend, cu_seq_lens_q)(*tensors, cu_seq_lens_q), None
            windows = Windows(attend, boundaries)
            _traced[str(id(windows))] = windows
            op = torch.ops.rockmate.window_attention
            return op(*tensors, cu_seq_lens_q, str(id(windows))), None

        if not meets or takes_all(module.config) or getattr(module, "attention_dropout", 0.0):
            return forward(module, *args, **kwargs)
        with attributes_set(
            (file, _KERNELS, SimpleNamespace(get_interface=lambda *_: attention)),
            (file, _TAKES_ALL, lambda *_, **__: True),
            (file, _LONGEST, lambda *_, **__: None),
        ):
            return forward(module, *args, **kwargs)

    return call


def install(graph: fx.Graph) -> None:
    """Puts the attention in the place of the ops that stand for it in a trace."""
    op, backward = torch.ops.rockmate.window_attention, torch.ops.rockmate.window_attention_backward
    for node in graph.find_nodes(op="call_function", target=op.default):
        node.target, node.args = _traced[node.args[-1]], node.args[:-1]
    for node in graph.find_nodes(op="call_function", target=backward.default):
        windows = _traced[node.args[-1]]
        node.target = WindowsBackward(windows.attend, windows.boundaries)
        node.args = node.args[:-1]
