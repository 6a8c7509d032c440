"""Estimated costs: time and workspace of each op, from counts and the description of a machine.

The roofline model (Williams, Waterman and Patterson, CACM 2009) with two further terms:

    time = launch latency + max(operations / (peak * efficiency),
                                bytes / bandwidth,
                                elements * time per element)

* *Operations* are floating point operations, counted from shapes by PyTorch's own formulas
  (`torch.utils.flop_counter`): matrix products, convolutions, fused attention. A causal mask halves
  those of attention, as its kernels on GPUs do. All other ops have none.
* *Bytes* are those of tensors read and results made. An expanded dimension is read once, and a
  lookup reads as many bytes of its table as it returns.
* *Elements* are those written by ops that evaluate transcendental functions, normalize, or draw
  random numbers. These take more time than their bytes on CPUs.
* The addition of a parameter's gradient to `.grad` costs a read of both and a write, twice if it
  goes slice by slice.

The workspace is zero, with these exceptions:

| op | workspace |
|---|---|
| kernels of `rockmate.ops.kernels` | their own temporaries |
| softmax that handles fully masked rows | a boolean for each element |
| layer normalization of non-contiguous rows | a copy |
| fused attention's backward, on CUDA | the queries' gradient in float32; shared keys, by head |
| convolutions and their backward, on CPU | a copy of their inputs in another layout |
| the gradient of a convolution's input | the same, and a copy of the result |
| batch normalization's backward, on CPU | as many bytes as its first result |
| group normalization of channels last and its backward, on CPU | two sums for each channel |
| the latter of a gradient in another layout than the values | a copy of the gradient |

Not counted: workspaces that cuBLAS and cuDNN choose at run time.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from rockmate._torch.dispatch import is_op, schema_of
from rockmate.capture.nodes import reads_no_values, tensors_of
from rockmate.costs.collectives import collective_cost
from rockmate.costs.cost import Cost, Costs
from rockmate.costs.machine import Machine
from rockmate.graph.ir import Graph, Op
from rockmate.ops import kernels
from rockmate.ops.collectives import is_communication
from rockmate.ops.convolutions import (
    convolution_backward_in_slices,
    convolution_in_slices,
    input_gradient,
)
from rockmate.ops.kernel_layouts import call_key

_aten = torch.ops.aten
_GPU_ATTENTION_BACKWARD = {
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
}
_GPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
    *_GPU_ATTENTION_BACKWARD,
}
# Attention on CPUs, and the ops whose formulas count it.
_CPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}
_STANDS_FOR: dict[Any, Any] = {
    convolution_in_slices: _aten.convolution,
    convolution_backward_in_slices: _aten.convolution_backward,
    input_gradient: _aten.convolution_backward,
}
# Group normalizations, with the positions of their values.
_GROUP_NORMS = {_aten.native_group_norm: 0, _aten.native_group_norm_backward: 1}
# Ops that read only some rows of their first argument.
_LOOKUPS = {
    _aten.embedding,
    _aten.index,
    _aten.index_select,
    _aten.gather,
    _aten.nll_loss_forward,
    _aten.nll_loss2d_forward,
}
# Ops that write elements of each kind in `Machine.nanoseconds_per_element`.
_ELEMENT_OPS = {
    "transcendental": {
        _aten.gelu,
        _aten.gelu_backward,
        _aten.silu,
        _aten.silu_backward,
        _aten.tanh,
        _aten.sigmoid,
        _aten.exp,
        _aten.log,
        _aten.erf,
        _aten.sin,
        _aten.cos,
        _aten._softmax,
        _aten._safe_softmax,
        _aten._log_softmax,
        _aten._log_softmax_backward_data,
        _aten.softplus,
        _aten.softplus_backward,
        _aten.elu,
        _aten.elu_backward,
        _aten.mish,
        _aten.mish_backward,
        kernels.cross_entropy_backward,
    },
    "normalization": {
        _aten.native_layer_norm,
        _aten.native_layer_norm_backward,
        _aten.native_group_norm,
        _aten.native_group_norm_backward,
        _aten._native_batch_norm_legit_functional,
        _aten.native_batch_norm_backward,
        kernels.recompute_batch_norm,
    },
    "random": {
        kernels.dropout_mask,
        _aten.native_dropout,
        _aten.bernoulli,
        _aten.rand,
        _aten.randn,
        _aten.rand_like,
        _aten.randn_like,
    },
}


def estimate_costs(graph: Graph, machine: Machine) -> Costs:
    """The costs of all ops on a machine that need not be present.

    Args:
        graph: the ops; only the metadata of their tensors is read.
        machine: the machine that they would run on.

    Raises:
        MachineError: the machine has no peak rate for a dtype in which the graph computes products.
    """
    known: dict[Hashable, Cost] = {}

    def cost(op: Op, target: Any) -> Cost:
        key = call_key(target, op.node.args, op.node.kwargs)
        if key not in known:
            known[key] = (
                collective_cost(op.node, machine)
                if is_communication(target)
                else _cost(op.node, target, machine)
            )
        return known[key]

    first = tuple(_with_accumulation(cost(op, op.node.target), op, machine) for op in graph.ops)
    recompute = tuple(cost(op, op.recompute_target or op.node.target) for op in graph.ops)
    return Costs(first=first, recompute=recompute, num_distinct=len(known))


def num_flops(node: fx.Node) -> float:
    """Floating point operations of a call; 0 if PyTorch has no formula for it."""
    packet = _packet(node.target)
    formula = flop_registry.get(_CPU_ATTENTION.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    if node.target is input_gradient:
        _, _, gradient, weight, *how = args
        args = gradient, node.meta["val"], weight, None, *how, [True, False, False]
    if packet is _aten.convolution_backward:
        return _convolution_backward_flops(args)
    if packet in _GPU_ATTENTION or packet in _CPU_ATTENTION:
        args = _with_equal_heads(args, is_backward="backward" in str(packet))
    flops = formula(*args, **kwargs, out_val=node.meta["val"])
    return flops / 2 if packet in _GPU_ATTENTION and _argument(node, "is_causal") else flops


def _with_equal_heads(args: Any, *, is_backward: bool) -> tuple[Any, ...]:
    """The arguments of attention, with keys and values that several heads share once for each.

    The formulas of PyTorch 2.11 take no shared heads.
    """
    before, (query, key, value, *after) = args[:is_backward], args[is_backward:]
    each = (
        torch.empty(*query.shape[:2], *tensor.shape[2:], dtype=tensor.dtype, device="meta")
        for tensor in (key, value)
    )
    return *before, query, *each, *after


def _convolution_backward_flops(args: Any) -> float:
    """As many operations as the forward has, for each requested gradient.

    PyTorch's own formula counts all pairs of channels, in grouped convolutions too.
    """
    gradient, values, weight, _, stride, padding, dilation, is_transposed, _, _, wanted = args
    forward = flop_registry[_aten.convolution](
        values, weight, None, stride, padding, dilation, is_transposed, out_val=gradient
    )
    return forward * sum(wanted[:2])


def num_bytes(node: fx.Node) -> int:
    """Bytes that a call reads and writes, each once."""
    written = sum(map(_distinct_bytes, tensors_of(node)))
    if node.target is kernels.dropout_apply:
        # The result is scaled in a pass of its own.
        written *= 3
    read = {
        argument: sum(map(_distinct_bytes, tensors_of(argument)))
        for argument in node.all_input_nodes
    }
    if _packet(node.target) in _LOOKUPS:
        table = node.args[0]
        assert isinstance(table, fx.Node)
        read[table] = min(read[table], written)
    elif reads_no_values(node):
        read.clear()
    return written + sum(read.values())


def _cost(node: fx.Node, target: Any, machine: Machine) -> Cost:
    time_ms = _num_launches(node) * machine.launch_ms + max(
        _compute_ms(node, machine),
        machine.memory_ms(num_bytes(node)),
        _elements_ms(node, target, machine),
    )
    overhead_bytes = sum(machine.rounded_bytes(size) for size in _workspaces(node, machine))
    return Cost(time_ms=time_ms, overhead_bytes=overhead_bytes)


def _num_launches(node: fx.Node) -> int:
    """Number of launches of a call: on a GPU two for each chunk of a loss, else one."""
    scores = node.meta["val"]
    if _packet(node.target) is not kernels.cross_entropy_backward or not scores.is_cuda:
        return 1
    return 2 * -(-scores.shape[0] // kernels.chunk_rows(scores))


def _compute_ms(node: fx.Node, machine: Machine) -> float:
    flops = num_flops(node)
    if not flops:
        return 0.0
    operands = [tensor for argument in node.all_input_nodes for tensor in tensors_of(argument)]
    first = next((tensor for tensor in operands if tensor.is_floating_point()), operands[0])
    return machine.compute_ms(flops, first.dtype, _kind(node))


def _elements_ms(node: fx.Node, target: Any, machine: Machine) -> float:
    packet = _packet(target)
    num_elements = max(tensor.numel() for tensor in tensors_of(node))
    return sum(
        machine.elements_ms(num_elements, kind)
        for kind, packets in _ELEMENT_OPS.items()
        if packet in packets
    )


def _kind(node: fx.Node) -> str:
    packet = _packet(node.target)
    if packet in _CPU_ATTENTION or packet in _GPU_ATTENTION:
        return "attention"
    return "convolution" if "conv" in str(packet) else "matmul"


def _with_accumulation(cost: Cost, op: Op, machine: Machine) -> Cost:
    """The cost of an op's first run, with the addition of its gradients to `.grad`."""
    times_ms = [
        machine.launch_ms + machine.memory_ms(3 * _distinct_bytes(node.meta["val"]))
        for node, _ in op.final_gradients
    ]
    num_additions = 2 if op.gradient_sink_form else 1
    return replace(cost, time_ms=cost.time_ms + num_additions * sum(times_ms))


def _workspaces(node: fx.Node, machine: Machine) -> Iterator[int]:
    """Bytes of each allocation of a call beside its results."""
    packet = _packet(node.target)
    if packet is kernels.cross_entropy_backward:
        result = node.meta["val"]
        row_bytes = max(1, result.shape[1] * result.element_size())
        # One chunk is made while the one before it is still live.
        yield min(result.shape[0], 2 * kernels.chunk_rows(result)) * row_bytes
    elif packet is kernels.dropout_apply:
        values, mask = (argument.meta["val"] for argument in node.all_input_nodes)
        yield kernels.converted_numel(values, mask) * values.element_size()
    elif (
        packet is kernels.dropout_mask and node.meta["val"].numel() >= 2 * kernels.DRAW_CHUNK_NUMEL
    ):
        # Random numbers, and the one that they are compared with.
        yield (kernels.DRAW_CHUNK_NUMEL + 1) * torch.int64.itemsize
    elif packet is _aten._safe_softmax:
        yield node.meta["val"].numel()
    elif packet in (_aten.native_layer_norm, _aten.native_layer_norm_backward):
        rows = [
            argument.meta["val"]
            for argument in node.args[: 1 + packet.__name__.endswith("backward")]
            if isinstance(argument, fx.Node)
        ]
        yield from (_distinct_bytes(operand) for operand in rows if not operand.is_contiguous())
    elif packet in _GPU_ATTENTION_BACKWARD:
        yield from _attention_sum_bytes(node)
    elif node.target is input_gradient:
        yield num_bytes(node)
    elif machine.device == "cpu" and packet in (_aten.convolution, _aten.convolution_backward):
        yield num_bytes(node) - sum(map(_distinct_bytes, tensors_of(node)))
        yield _unrequested_bytes(node)
    elif machine.device == "cpu" and packet is _aten.native_batch_norm_backward:
        gradient = node.meta["val"][0]  # None if it is not asked for
        yield 0 if gradient is None else _distinct_bytes(gradient)
    elif machine.device == "cpu" and packet in _GROUP_NORMS:
        yield from _group_norm_bytes(node, _GROUP_NORMS[packet])


def _group_norm_bytes(node: fx.Node, position: int) -> Iterator[int]:
    """Bytes of the sums of a group normalization, and of the copy of its gradient.

    Its values stand at `position`, behind the gradient. One that autograd has copied is in the
    layout of the values.
    """
    *gradients, values = (each.meta["val"] for each in node.args[: position + 1])  # pyright: ignore
    if gradients or not values.is_contiguous():
        yield 2 * values.shape[0] * values.shape[1] * max(4, values.element_size())
    yield from (each.nbytes for each in gradients if each.stride() != values.stride())


def _unrequested_bytes(node: fx.Node) -> int:
    """Bytes of the weight's gradient, if a convolution's backward makes it without being asked.

    It makes it together with the bias's gradient.
    """
    if _packet(node.target) is not _aten.convolution_backward:
        return 0
    args: Any = node.args
    weight, (_, of_weight, of_bias) = args[2], args[-1]
    return _distinct_bytes(weight.meta["val"]) if of_bias and not of_weight else 0


def _attention_sum_bytes(node: fx.Node) -> Iterator[int]:
    """Bytes of the sums in the backward of fused attention.

    One sum for each row, the gradient of the queries in float32, and the gradients of keys and
    values for each head that shares them.
    """
    query, key, value = (
        argument.meta["val"] for argument in node.args[1:4] if isinstance(argument, fx.Node)
    )
    batch, heads, rows, width = query.shape
    yield 4 * batch * heads * rows
    if query.dtype != torch.float32:
        yield 4 * batch * heads * _rounded_up(rows, 128) * _rounded_up(width, 32)
    if key.shape[1] != heads:
        yield key.element_size() * key.numel() * heads // key.shape[1]
        yield value.element_size() * value.numel() * heads // value.shape[1]


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _argument(node: fx.Node, name: str) -> Any:
    """The value of an ATen call's argument, by its name in the schema."""
    arguments = schema_of(node.target).arguments  # pyright: ignore
    place, default = next(
        (place, each.default_value) for place, each in enumerate(arguments) if each.name == name
    )
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, default)


def _packet(target: Any) -> Any:
    return target.overloadpacket if is_op(target) else _STANDS_FOR.get(target, target)


def _distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements, an expanded dimension counted once."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    sizes = (size for size, stride in dimensions if stride or size == 0)
    return tensor.element_size() * math.prod(sizes)
