"""Attention within windows as one op, whatever their number.

Models of images that attend in windows (Qwen2.5-VL and those that share its code) call attention
once for each window, so that a graph holds for one number of windows. Their code has a second way,
for kernels that take all windows at once, with the boundaries between them. The trace goes that
way, with an op that calls the model's own attention for each window: the same calls, and so the
same bits, as in eager. Its backward runs the forward of one window after the other once more.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from rockmate._util import attributes_set
from rockmate.capture.input_functions import meets
from rockmate.capture.opaque_ops import OpaqueOp

# What the file of such a model has, and which arguments those of its modules take that attend.
_WINDOWS, _KERNELS = "get_vision_window_index", "ALL_ATTENTION_FUNCTIONS"
_TAKES_ALL, _LONGEST = "is_flash_attention_requested", "get_max_seqlen"
_ARGUMENTS = {"cu_seqlens", "max_seqlen"}


class Windows:
    """The attention of a module, window by window: `([query, key, value, boundaries]) -> [values]`.

    Query, key and value are of shape (batch, heads, length, width), values (batch, length, heads,
    width).
    """

    name = "window_attention"

    def __init__(self, attend: Callable[..., Tensor], boundaries: Tensor) -> None:
        """Of the model's own attention, within one window; boundaries are the sample's."""
        self.attend, self.boundaries = attend, boundaries
        self.__name__ = self.__qualname__ = self.name

    def __str__(self) -> str:
        return f"rockmate.{self.__name__}"

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        """One tensor."""
        return [torch.cat([self.attend(*window) for window in _windows(*given)], 1)]

    def on_sample(
        self, made_up: Callable[[int], Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments: with the sample's boundaries, moved to the length."""
        return self, (self._with_boundaries(made_up(0)),)

    def _with_boundaries(self, given: Sequence[Tensor]) -> list[Tensor]:
        *tensors, _ = given
        return [*tensors, self.boundaries.long() * tensors[0].shape[2] // self.boundaries[-1]]

    def traced(self, *given: Tensor) -> Tensor:
        """The values in the trace that goes on."""

        def made(tensors: Sequence[Tensor]) -> list[Tensor]:
            query, _, value, _ = tensors
            batch, heads, length, _ = query.shape
            return [query.new_empty(batch, length, heads, value.shape[-1])]

        op = OpaqueOp(
            forward=self,
            results=made,
            backward=WindowsBackward(self.attend, self.boundaries),
            saved=lambda tensors, _: tensors,
            gradients=lambda saved: [each.new_empty(each.shape) for each in saved[:3]],
            differentiable=(True, True, True, False),
        )
        return op.traced(given)[0]


class WindowsBackward(Windows):
    """The backward: `([gradient], [query, key, value, boundaries]) -> gradients`."""

    name = "window_attention_backward"

    def __call__(self, gradients: Sequence[Tensor], given: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of query, key and value, of their shapes."""
        *tensors, boundaries = given
        found = []
        for *window, gradient in _windows(*tensors, gradients[0].transpose(1, 2), boundaries):
            with torch.enable_grad():
                leaves = [each.detach().requires_grad_() for each in window]
                values = self.attend(*leaves)
            found.append(torch.autograd.grad(values, leaves, gradient.transpose(1, 2)))
        return [torch.cat(each, 2).contiguous() for each in zip(*found, strict=True)]

    def on_sample(
        self, made_up: Callable[[int], Any]
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """As of the forward."""
        return self, (made_up(0), self._with_boundaries(made_up(1)))


def _windows(*given: Tensor) -> Iterator[tuple[Tensor, ...]]:
    *tensors, boundaries = given
    lengths = (boundaries[1:] - boundaries[:-1]).tolist()
    return zip(*(each.split(lengths, 2) for each in tensors), strict=True)


def windows_as_ops(model: nn.Module) -> AbstractContextManager[None]:
    """Has the modules that attend in windows call one op for all of them."""
    kinds = [kind for kind in {type(each) for each in model.modules()} if _has_windows(kind)]
    return attributes_set(*((kind, "forward", _in_one_op(kind)) for kind in kinds))


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
            kept = {each: options[each] for each in ("scaling", "dropout", "is_causal")}

            def attend(*window: Tensor) -> Tensor:
                return own(module, *window, attention_mask=None, **kept)[0]

            boundaries = meets[-1].value_of(cu_seq_lens_q)
            given = *tensors, cu_seq_lens_q
            if boundaries is None:
                return Windows(attend, cu_seq_lens_q)(given)[0], None
            return Windows(attend, boundaries).traced(*given), None

        if not meets or takes_all(module.config) or getattr(module, "attention_dropout", 0.0):
            return forward(module, *args, **kwargs)
        with attributes_set(
            (file, _KERNELS, SimpleNamespace(get_interface=lambda *_: attention)),
            (file, _TAKES_ALL, lambda *_, **__: True),
            (file, _LONGEST, lambda *_, **__: None),
        ):
            return forward(module, *args, **kwargs)

    return call
