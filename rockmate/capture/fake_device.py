"""A model's tensors, and a step captured with them, as ones of a device that is not here.

Metadata without memory.

The tensors are replaced by fake ones on the CPU for the time of the capture, and the device of all
that was captured is then written as the machine's. Tracing with fake CUDA tensors at once would be
simpler, but a PyTorch built without CUDA cannot run autograd on them (2.13 ends the process), and a
plan would depend on which build made it. Values that the forward reads are those of the sample.

A model that asks which device it is on is told "cpu". What that would change in the graph is set
right where it is known: fused attention is that of a GPU (`_GpuAttention`), and dropout, split on
the CPU, stays whole. Left as on the CPU is batch normalisation, where cuDNN has a kernel of its
own; that keeps the same tensors, and a small reserve. Attention differs in how a GPU fills and pads
a mask, and where values are not as wide as keys, which a GPU fuses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import map_aggregate
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from rockmate._torch import fake as fake_tensors
from rockmate._torch.fake import FakeTensor, FakeTensorMode
from rockmate._torch.subclasses import is_wrapper, wrapped_parts
from rockmate.capture.tensor_parts import has_attributes
from rockmate.capture.trace_state import tensors_kept
from rockmate.errors import UnsupportedModelError

_aten = torch.ops.aten
_MAX_FLASH_WIDTH = 256
_ALIGNED_BYTES = 16  # the efficient kernel reads rows in steps of so many


@contextlib.contextmanager
def fake_device_tensors(
    model: nn.Module,
    tensors: list[torch.Tensor],
    device: torch.device,
    mode: FakeTensorMode | None = None,
) -> Iterator[list[torch.Tensor]]:
    """Puts fake tensors into the model's places and gives those for `tensors`.

    Traced attention is that of `device`. The fake tensors are of `mode`, or of a new one.

    Raises:
        UnsupportedModelError: autocast is on, and the device is a GPU: which ops it casts differs
            from CPU to GPU.
    """
    if device.type == "cuda" and (
        torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    ):
        raise UnsupportedModelError(
            "autocast is on, and the model is captured for a GPU that it is not on, where autocast "
            "cannot be followed. Convert the model "
            "(`model.to(torch.bfloat16)`), or plan on the GPU."
        )
    made = _StandIns(mode or FakeTensorMode())
    attention = _GpuAttention() if device.type == "cuda" else contextlib.nullcontext()
    with tensors_kept(model) as tables:
        for table in tables:
            table.update({name: made.of(each) for name, each in table.items() if each is not None})
        with attention:
            yield [made.of(tensor) for tensor in tensors]


def move_to(joint: fx.GraphModule, device: torch.device) -> None:
    """Writes `device` wherever the graph, captured with stand-ins, says another, in place."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in joint.graph.nodes:
        node.args = map_aggregate(node.args, moved)
        node.kwargs = map_aggregate(node.kwargs, moved)
        value = node.meta.get("val")
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, FakeTensor):
                fake_tensors.move_to(item, device)


class _StandIns:
    """Fake tensors on the CPU: one for each tensor, so that tied parameters stay tied."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if has_attributes(tensor):
            raise UnsupportedModelError(
                f"the model has a parameter or buffer of class {type(tensor).__name__}, whose "
                "attributes belong to the tensors that are here, so it cannot be planned for a "
                "device that is not. Plan on the machine itself."
            )
        if id(tensor) not in self._made:
            made = self._wrapper(tensor) if is_wrapper(tensor) else self._plain(tensor)
            if isinstance(tensor, nn.Parameter) and not isinstance(made, nn.Parameter):
                made = nn.Parameter(made, tensor.requires_grad)
            self._made[id(tensor)] = made
        return self._made[id(tensor)]

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._mode:
            shape, strides = tensor.shape, tensor.stride()
            fake = torch.empty_strided(shape, strides, dtype=tensor.dtype, device="cpu")
        return fake.requires_grad_(tensor.requires_grad and not isinstance(tensor, nn.Parameter))

    def _wrapper(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a wrapper, of stand-ins of what it wraps."""
        parts, context = wrapped_parts(tensor)
        inner = {
            name: self.of(part) if isinstance(part, torch.Tensor) else part
            for name, part in parts.items()
        }
        kind: Any = type(tensor)
        return kind.__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


class _GpuAttention(TorchFunctionMode):
    """Calls the fused attention of a GPU with compute capability 8.0 or above, on any device.

    The order is flash (half precision, no mask), memory-efficient, plain ops. With a new cuDNN,
    PyTorch may prefer that one's kernel, which keeps the same tensors.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.scaled_dot_product_attention:
            return _gpu_attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _gpu_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`scaled_dot_product_attention`, by the kernel that a GPU would run."""
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    width = query.shape[-1]
    is_fusable = (
        query.ndim == 4
        and width == value.shape[-1]
        and width * query.element_size() % _ALIGNED_BYTES == 0
    )
    if is_fusable and is_half and attn_mask is None and width <= _MAX_FLASH_WIDTH:
        return _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    rows_are_aligned = (
        attn_mask is None or attn_mask.shape[-1] * query.element_size() % _ALIGNED_BYTES == 0
    )
    if is_fusable and rows_are_aligned and query.dtype != torch.float64:
        if enable_gqa:
            key, value = (
                tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)
                for tensor in (key, value)
            )
        bias = _bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _bias(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """The mask as what is added to the scores, for every head."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(
            mask.logical_not(), float("-inf")
        )
    return mask.expand(*query.shape[:-1], key.shape[-2])
