"""Time and workspace of each op, estimated from floating point operations and bytes against a machine's description.

The roofline model (Williams, Waterman and Patterson, CACM 2009) with two terms more:

    time = launch latency + max(operations / (peak * efficiency), bytes / bandwidth, elements * time per element)

* *Operations* are counted by PyTorch's own formulas (`torch.utils.flop_counter`), from shapes: matrix products, convolutions, fused
  attention. With a causal mask half of attention's are left out, as its kernels on GPUs do. All other ops have none.
* *Bytes* are those of tensors read and results made; memory that an operand repeats (an expanded dimension) is read once, and a lookup
  reads as much of its table as it returns.
* *Elements* are those written by ops that evaluate transcendental functions, normalize, or draw random numbers, which take more
  time than bytes on CPUs.
* A parameter's gradient that is added to `.grad` costs a read of both and a write, twice where it goes piece by piece.

Overhead is zero but for these:

* calls of `rockmate/kernels.py`: what they hold; softmax that minds rows fully masked: a boolean for each element; layer
  normalisation of rows that do not lie one after the other: a copy;
* on CUDA the backward of fused attention, which sums the queries' gradient in float32, and that of each head that shares keys;
* on CPU convolutions, which mostly copy what they read into another layout, and the backward of batch normalisation.

What cuBLAS and cuDNN take for themselves is not known without them, and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from rockmate._torch.ops import is_op, schema_of
from rockmate.capture.nodes import tensors_of
from rockmate.costs.cost import Cost, Costs
from rockmate.costs.machine import Machine
from rockmate.graph.ir import Graph, Op, call_key
from rockmate.ops import kernels

_aten = torch.ops.aten
_CPU_ATTENTION = {  # -> the packet whose formula counts it
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
_GPU_ATTENTION_BACKWARD = {
    _aten._scaled_dot_product_flash_attention_backward, _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention_backward,
}  # fmt: skip
_GPU_ATTENTION = {
    _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention, *_GPU_ATTENTION_BACKWARD,
}  # fmt: skip
_LOOKUPS = {
    _aten.embedding, _aten.index, _aten.index_select, _aten.gather, _aten.nll_loss_forward, _aten.nll_loss2d_forward,
}  # fmt: skip
_TRANSCENDENTAL = {
    _aten.gelu, _aten.gelu_backward, _aten.silu, _aten.silu_backward, _aten.tanh, _aten.sigmoid, _aten.exp, _aten.log, _aten.erf,
    _aten.sin, _aten.cos, _aten._softmax, _aten._safe_softmax, _aten._log_softmax, _aten._log_softmax_backward_data, _aten.softplus,
    _aten.softplus_backward, _aten.elu, _aten.elu_backward, _aten.mish, _aten.mish_backward, kernels.cross_entropy_backward,
}  # fmt: skip
_NORMALIZATION = {
    _aten.native_layer_norm, _aten.native_layer_norm_backward, _aten.native_group_norm, _aten.native_group_norm_backward,
    _aten._native_batch_norm_legit_functional, _aten.native_batch_norm_backward, kernels.batch_norm_again,
}  # fmt: skip
_RANDOM = {
    kernels.dropout_mask,
    _aten.native_dropout,
    _aten.bernoulli,
    _aten.rand,
    _aten.randn,
    _aten.rand_like,
    _aten.randn_like,
}


def estimate_costs(graph: Graph, machine: Machine) -> Costs:
    """The costs of every op of a graph on a machine that need not be there.

    Args:
        graph: the ops; only the metadata of their tensors is read.
        machine: what they would run on.

    Raises:
        MachineError: the machine has no peak for a dtype in which the graph computes products.
    """
    known: dict[Hashable, Cost] = {}

    def cost(op: Op, target: Any) -> Cost:
        key = call_key(target, op.node.args, op.node.kwargs)
        if key not in known:
            known[key] = _cost(op.node, target, machine)
        return known[key]

    first = tuple(_with_deliveries(cost(op, op.node.target), op, machine) for op in graph.ops)
    recompute = tuple(cost(op, op.recompute_target or op.node.target) for op in graph.ops)
    return Costs(first=first, recompute=recompute, num_distinct=len(known))


def num_flops(node: fx.Node) -> float:
    """Floating point operations of a call, 0 for one that PyTorch has no formula for."""
    packet = _packet(node.target)
    formula = flop_registry.get(_CPU_ATTENTION.get(packet, packet))
    if formula is None:
        return 0
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda argument: argument.meta["val"])
    if packet is _aten.convolution_backward:
        return _convolution_backward_flops(args)
    flops = formula(*args, **kwargs, out_val=node.meta["val"])
    return flops / 2 if packet in _GPU_ATTENTION and _argument(node, "is_causal") else flops


def _convolution_backward_flops(args: Any) -> float:
    """Those of the forward for each gradient that is asked for; PyTorch's formula counts all pairs of channels though groups are apart."""
    gradient, values, weight, _, stride, padding, dilation, is_transposed, _, _, wanted = args
    forward = flop_registry[_aten.convolution](
        values, weight, None, stride, padding, dilation, is_transposed, out_val=gradient
    )
    return forward * sum(wanted[:2])


def num_bytes(node: fx.Node) -> int:
    """Bytes that a call reads and writes, each once."""
    written = sum(map(_distinct_bytes, tensors_of(node)))
    if node.target is kernels.dropout_apply:  # the result is scaled in a pass of its own
        written *= 3
    read = {
        argument: sum(map(_distinct_bytes, tensors_of(argument)))
        for argument in node.all_input_nodes
    }
    if _packet(node.target) in _LOOKUPS:
        table = node.args[0]
        assert isinstance(table, fx.Node)
        read[table] = min(read[table], written)
    elif _ignores_values(node):
        read.clear()
    return written + sum(read.values())


def _cost(node: fx.Node, target: Any, machine: Machine) -> Cost:
    time_ms = machine.launch_ms + max(
        _compute_ms(node, machine),
        machine.memory_ms(num_bytes(node)),
        _elements_ms(node, target, machine),
    )
    return Cost(
        time_ms=time_ms,
        overhead_bytes=sum(machine.rounded_bytes(size) for size in _workspaces(node, machine)),
    )


def _compute_ms(node: fx.Node, machine: Machine) -> float:
    flops = num_flops(node)
    return machine.compute_ms(flops, _first_float(node).dtype, _kind(node)) if flops else 0.0


def _elements_ms(node: fx.Node, target: Any, machine: Machine) -> float:
    packet = _packet(target)
    kinds = {"transcendental": _TRANSCENDENTAL, "normalization": _NORMALIZATION, "random": _RANDOM}
    num_elements = max(tensor.numel() for tensor in tensors_of(node))
    return sum(
        machine.elements_ms(num_elements, kind)
        for kind, packets in kinds.items()
        if packet in packets
    )


def _kind(node: fx.Node) -> str:
    packet = _packet(node.target)
    return (
        "attention"
        if packet in _CPU_ATTENTION or packet in _GPU_ATTENTION
        else "convolution"
        if "conv" in str(packet)
        else "matmul"
    )


def _with_deliveries(cost: Cost, op: Op, machine: Machine) -> Cost:
    """Adds what handing its gradients over takes at the op's first run."""
    gradients = [node.meta["val"] for node, _ in op.final_gradients]
    times = [
        machine.launch_ms + machine.memory_ms(3 * _distinct_bytes(gradient))
        for gradient in gradients
    ]
    return Cost(
        time_ms=cost.time_ms + sum(times) * (2 if op.gradient_sink_form else 1),
        overhead_bytes=cost.overhead_bytes,
    )


def _workspaces(node: fx.Node, machine: Machine) -> Iterator[int]:
    """Sizes of what a call allocates beside its results, in bytes."""
    packet = _packet(node.target)
    if packet is kernels.cross_entropy_backward:
        result = node.meta["val"]
        row_bytes = max(1, result.shape[1] * result.element_size())
        chunk_rows = max(1, kernels.CHUNK_BYTES // row_bytes)
        yield (
            min(result.shape[0], 2 * chunk_rows) * row_bytes
        )  # one is made while the last is still there
    elif packet is kernels.dropout_apply:
        values, mask = (argument.meta["val"] for argument in node.all_input_nodes)
        yield kernels.converted_numel(values, mask) * values.element_size()
    elif packet is kernels.dropout_mask and node.meta["val"].numel() >= 2 * kernels.DRAWN_AT_ONCE:
        yield (
            kernels.DRAWN_AT_ONCE + 1
        ) * torch.int64.itemsize  # random numbers, and one that they are compared with
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
        yield from _attention_sums(node)
    elif machine.device == "cpu" and packet in (_aten.convolution, _aten.convolution_backward):
        yield num_bytes(node) - sum(map(_distinct_bytes, tensors_of(node)))
        yield _unasked_bytes(node)
    elif machine.device == "cpu" and packet is _aten.native_batch_norm_backward:
        yield _distinct_bytes(node.meta["val"][0])


def _unasked_bytes(node: fx.Node) -> int:
    """Of the weight's gradient, which the backward of a convolution makes with the bias's, asked for or not."""
    if _packet(node.target) is not _aten.convolution_backward:
        return 0
    args: Any = node.args
    weight, (_, of_weight, of_bias) = args[2], args[-1]
    return _distinct_bytes(weight.meta["val"]) if of_bias and not of_weight else 0


def _attention_sums(node: fx.Node) -> Iterator[int]:
    """Gradient of the queries in float32, one sum a row, and the gradients of keys and values for each head that shares them."""
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
    return target.overloadpacket if is_op(target) else target


def _ignores_values(node: fx.Node) -> bool:
    """Whether the call takes only the metadata of its argument (`zeros_like`, `new_empty`)."""
    name = str(_packet(node.target)).removeprefix("aten.")
    return name.startswith("new_") or (
        name.endswith("_like")
        and name.split("_")[0] in {"zeros", "ones", "full", "empty", "rand", "randn"}
    )


def _first_float(node: fx.Node) -> torch.Tensor:
    """The first operand that products are taken of."""
    operands = [tensor for argument in node.all_input_nodes for tensor in tensors_of(argument)]
    return next((tensor for tensor in operands if tensor.is_floating_point()), operands[0])


def _distinct_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's elements, those that an expanded dimension repeats counted once."""
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.element_size() * math.prod(
        size for size, stride in dimensions if stride or size == 0
    )
