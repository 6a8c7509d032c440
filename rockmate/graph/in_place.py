"""In-place forms of ops: the result takes the memory of an operand.

An op may write its result into an operand if no later op reads the operand. The result is bitwise
equal to that of the ordinary form. Eager code uses such forms, as for a ReLU after a convolution or
a sum of gradients. A functional graph without them needs more memory than eager.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from rockmate._util import Ints, once_for_each
from rockmate.capture.opaque_call import OpaqueForward
from rockmate.graph.ir import Graph, Op, Storage
from rockmate.ops.fused import FusedOp
from rockmate.ops.kernels import cross_entropy_backward, dropout_apply, scatter_slice

_aten = torch.ops.aten
_HALF = {torch.float16, torch.bfloat16}


@dataclass(frozen=True, slots=True)
class InPlaceForm:
    """How to run an op on the memory of one of its operands.

    Attributes:
        target: called with the arguments of the op. If `out_name` is set, the operand is passed
            under that keyword too.
        operands: positions of the arguments whose memory may be taken, best first.
        out_name: the keyword of an `out=` variant; empty for a method that writes into its first
            argument.
    """

    target: Callable[..., Any]
    operands: tuple[int, ...]
    out_name: str = ""


# Elementwise ops over values of one dtype. Their `out=` variants have kernels of their own. The
# `out=` variant of any other op makes a temporary and copies it.
_ELEMENTWISE = (
    _aten.abs, _aten.clamp, _aten.clamp_min, _aten.cos, _aten.elu, _aten.erf, _aten.gelu,
    _aten.hardsigmoid, _aten.hardswish, _aten.hardtanh, _aten.leaky_relu, _aten.mish,
    _aten.reciprocal, _aten.rsqrt, _aten.silu, _aten.sin, _aten.softplus, _aten.sqrt,
)  # fmt: skip

# Gradients of elementwise functions, from the gradient of the result and a saved value.
_ELEMENTWISE_BACKWARD = (
    _aten.threshold_backward, _aten.tanh_backward, _aten.sigmoid_backward, _aten.gelu_backward,
    _aten.silu_backward, _aten.hardtanh_backward, _aten.hardsigmoid_backward,
    _aten.leaky_relu_backward, _aten.softplus_backward,
)  # fmt: skip
_OF_TWO = (_aten.add, _aten.sub, _aten.mul, _aten.div)
# Of one value and numbers: their variants that write into the value.
_METHODS = {
    _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.add.Scalar: _aten.add_.Scalar,
    _aten.div.Scalar: _aten.div_.Scalar,
    _aten.neg.default: _aten.neg_.default,
    _aten.relu.default: _aten.relu_.default,
    _aten.tanh.default: _aten.tanh_.default,
    _aten.sigmoid.default: _aten.sigmoid_.default,
    _aten.exp.default: _aten.exp_.default,
    _aten.masked_fill.Scalar: _aten.masked_fill_.Scalar,
    _aten.masked_fill.Tensor: _aten.masked_fill_.Tensor,
}

_FORMS: dict[Any, InPlaceForm] = {
    **{each.default: InPlaceForm(each.out, (0,), "out") for each in _ELEMENTWISE},
    **{
        each.default: InPlaceForm(each.grad_input, (0, 1), "grad_input")
        for each in _ELEMENTWISE_BACKWARD
    },
    **{each.Tensor: InPlaceForm(each.out, (0, 1), "out") for each in _OF_TWO},
    **{target: InPlaceForm(method, (0,)) for target, method in _METHODS.items()},
    _aten.pow.Tensor_Scalar: InPlaceForm(_aten.pow.Tensor_Scalar_out, (0,), "out"),
    _aten.maximum.default: InPlaceForm(_aten.maximum.out, (0, 1), "out"),
    _aten.minimum.default: InPlaceForm(_aten.minimum.out, (0, 1), "out"),
    _aten.where.self: InPlaceForm(_aten.where.self_out, (1, 2), "out"),
    # These kernels read the maximum and the sum of a row before they write the row.
    _aten._softmax.default: InPlaceForm(_aten._softmax.out, (0,), "out"),
    _aten._log_softmax.default: InPlaceForm(_aten._log_softmax.out, (0,), "out"),
    _aten._softmax_backward_data.default: InPlaceForm(
        _aten._softmax_backward_data.out, (0,), "grad_input"
    ),
    _aten._log_softmax_backward_data.default: InPlaceForm(
        _aten._log_softmax_backward_data.out, (0,), "out"
    ),
    _aten.addmm.default: InPlaceForm(_aten.addmm.out, (0,), "out"),
    # As eager writes into a slice or at indices. The functional forms copy the whole first.
    _aten.slice_scatter.default: InPlaceForm(scatter_slice, (0,), "out"),
    _aten.scatter_add.default: InPlaceForm(_aten.scatter_add.out, (0,), "out"),
    _aten.scatter.src: InPlaceForm(_aten.scatter.src_out, (0,), "out"),
    _aten.scatter.value: InPlaceForm(_aten.scatter.value_out, (0,), "out"),
    dropout_apply: InPlaceForm(dropout_apply, (0,), "out"),
    cross_entropy_backward: InPlaceForm(cross_entropy_backward, (1,), "out"),
}


def reusable_operand(graph: Graph, op: Op, ends: Collection[Storage]) -> fx.Node | None:
    """The argument whose memory the op's result can take, or None.

    Args:
        graph: the graph of the op.
        op: the op that writes the result.
        ends: storages without a read after this run of the op.
    """
    operands = _operands_of(graph, op)
    return next((each for each in operands if graph.storage_of[each] in ends), None)


@once_for_each
def operands_in_place(graph: Graph) -> Ints:
    """For each op, the storages whose memory its result can take after their last read.

    Returns:
        Indices of storages, of shape (ops, 2). A place without a storage has -1.
    """
    found = np.full((len(graph.ops), 2), -1, dtype=np.int64)
    for op in graph.ops:
        for place, operand in enumerate(_operands_of(graph, op)):
            found[op.index, place] = graph.storage_of[operand].index
    return found


def _operands_of(graph: Graph, op: Op) -> tuple[fx.Node, ...]:
    if op.in_place_operands is None:
        op.in_place_operands = tuple(_operands(graph, op))
    return op.in_place_operands


def _operands(graph: Graph, op: Op) -> Iterator[fx.Node]:
    if isinstance(op.node.target, FusedOp):
        yield from _operands_of_fused(graph, op, op.node.target)
        return
    form = _FORMS.get(op.node.target)
    if form is None:
        return
    result = op.node.meta["val"]
    if result.dtype in _HALF and not form.out_name and len(op.node.args) > 1:
        # The two forms round a number among the arguments differently.
        return
    for position in form.operands:
        operand = op.node.args[position]
        if not isinstance(operand, fx.Node) or graph.storage_of[operand] in op.writes:
            continue
        if may_be_saved_opaquely(graph, graph.storage_of[operand]):
            continue
        is_alike = _same_memory_layout(operand.meta["val"], result)
        if is_alike and not _reads_twice(graph, op, operand):
            yield operand


def _operands_of_fused(graph: Graph, op: Op, fused: FusedOp) -> Iterator[fx.Node]:
    """The operands whose memory the first result of a fused op can take."""
    for position in fused.in_place:
        operand = op.node.args[position]
        assert isinstance(operand, fx.Node)
        if not may_be_saved_opaquely(graph, graph.storage_of[operand]):
            yield operand


def may_be_saved_opaquely(graph: Graph, storage: Storage) -> bool:
    """Whether an opaque module takes or returns a value. Its own autograd may save it."""
    ops = [op for op in (storage.producer, *graph.readers.get(storage, ())) if op is not None]
    return any(isinstance(op.node.target, OpaqueForward) for op in ops)


def _same_memory_layout(operand: torch.Tensor, result: torch.Tensor) -> bool:
    return (
        operand.dtype == result.dtype
        and operand.shape == result.shape
        and operand.stride() == result.stride()
        and operand.storage_offset() == 0
        and operand.untyped_storage().nbytes() == result.untyped_storage().nbytes()
    )


def _reads_twice(graph: Graph, op: Op, operand: fx.Node) -> bool:
    """Whether another argument shares the operand's storage, and so is read during the write."""
    others = [node for node in op.node.all_input_nodes if node is not operand]
    return any(graph.storage_of[node] is graph.storage_of[operand] for node in others)


def in_place_call(
    op: Op, operand: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target, arguments and keywords of the call that runs `op` on the memory of `operand`.

    Args:
        op: the op. `reusable_operand` gives `operand` for it.
        operand: the argument in the joint graph.
        args: current values of the op's arguments.
        kwargs: current values of its keywords.
        value: current value of the operand.
    """
    if isinstance(op.node.target, FusedOp):
        return op.node.target.in_place[op.node.args.index(operand)], args, kwargs
    form = _FORMS[op.node.target]
    if not form.out_name:
        assert op.node.args[0] is operand
        return form.target, args, kwargs
    return form.target, args, {**kwargs, form.out_name: value}
