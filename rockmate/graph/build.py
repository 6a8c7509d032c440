"""Makes the graph of ops and storages (`ir.py`) from a captured joint graph.

Tensors share a storage if their fake tensors do. A call that makes no storage of its own is a view.
The joint graph must be functional: calls that change their arguments are refused.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from rockmate._torch.allocator import CUDA_BLOCK_BYTES, block_bytes
from rockmate._torch.dispatch import is_op, schema_of
from rockmate._torch.storage import storage_id
from rockmate.capture.nodes import call_name, items_of
from rockmate.capture.roles import Capture, Role, RoleKind
from rockmate.errors import UnsupportedModelError
from rockmate.graph.ir import FORWARD_ENDS, IN_FORWARD, Graph, Op, Phase, Storage
from rockmate.graph.node_marks import is_saved
from rockmate.ops.kernels import (
    can_recompute_max_pool,
    can_recompute_normalization,
    recompute_batch_norm,
    recompute_max_pool,
    recompute_normalization,
    saved_offsets,
    saved_statistics,
)
from rockmate.ops.rng import is_random

_aten = torch.ops.aten

_AS_STRIDED = _aten.as_strided.default
_BY_POSITION = (_AS_STRIDED, _aten.as_strided_scatter.default)
_MAX_POOL = _aten.max_pool2d_with_indices.default
FUNCTIONAL_BATCH_NORM = _aten._native_batch_norm_legit_functional.default
_BATCH_NORMS = {FUNCTIONAL_BATCH_NORM, _aten._native_batch_norm_legit.no_stats}


def build_graph(
    capture: Capture, *, returned_gradients: bool = False, allocation_bytes: int | None = None
) -> Graph:
    """The ops and storages of a joint graph.

    Args:
        capture: the joint graph with the roles of its inputs and outputs.
        returned_gradients: whether the backward returns the gradients of parameters. By default
            they go to the gradient sink as soon as they are final.
        allocation_bytes: bytes that storage sizes are rounded up to a multiple of. None: as the
            allocator of their device does.

    Raises:
        UnsupportedModelError: a call mutates its arguments, makes no tensor or a sparse one, makes
            new memory and views at once, or goes by positions in the storage of an input; or the
            backward reads a value that the forward has overwritten.
    """
    builder = _Builder(capture, allocation_bytes)
    for node in capture.joint.graph.nodes:
        builder.add(node)
    return builder.finish(returned_gradients=returned_gradients)


class _Builder:
    """Adds nodes in graph order, then finds what depends on the whole graph."""

    def __init__(self, capture: Capture, allocation_bytes: int | None) -> None:
        self._capture = capture
        self._allocation_bytes = allocation_bytes
        self._roles = dict(capture.inputs)
        self._ops: list[Op] = []
        self._storages: list[Storage] = []
        self._by_identity: dict[int, Storage] = {}
        self._storage_of: dict[fx.Node, Storage] = {}
        self._view_base: dict[fx.Node, fx.Node] = {}

    def add(self, node: fx.Node) -> None:
        if node in self._roles:
            self._add_input(node)
        elif node.op == "call_function":
            self._add_call(node)
        elif node.op != "output":
            raise _unsupported(f"the captured graph holds a node of kind {node.op} ({node.name})")

    def finish(self, *, returned_gradients: bool) -> Graph:
        self._mark_outputs(returned_gradients=returned_gradients)
        self._set_phases()
        for op in self._ops:
            if op.phase is not Phase.BACKWARD and not _runs_once_in_forward(op):
                _set_recomputation(op)
        self._refuse_overwritten_reads()
        initial = () if returned_gradients else self._set_final_gradients()
        return Graph(
            tuple(self._ops),
            tuple(self._storages),
            self._capture.inputs,
            self._capture.outputs,
            self._storage_of,
            self._view_base,
            self._capture.constants,
            initial,
        )

    # --- nodes -----------------------------------------------------------------------------------

    def _add_input(self, node: fx.Node) -> None:
        value = node.meta["val"]
        if value.layout != torch.strided:
            self._add_unread(node, value)
            return
        # A tied parameter comes in under each of its names.
        known = self._by_identity.get(storage_id(value))
        if known is not None:
            self._storage_of[node] = known
            return
        storage = self._new_storage(value, node)
        storage.is_tangent = self._roles[node].kind is RoleKind.TANGENT
        storage.is_static = not storage.is_tangent

    def _add_unread(self, node: fx.Node, value: torch.Tensor) -> None:
        """An input that is not laid out by strides and that no op reads; raises if one does."""
        if node.users:
            role = self._roles[node]
            msg = (
                f"the step reads {role.name or f'input {role.index}'}, a tensor of layout "
                f"{value.layout}, which cannot be planned. Use dense tensors."
            )
            raise UnsupportedModelError(msg)
        storage = self._storage_of[node] = Storage(len(self._storages), 0, node)
        self._storages.append(storage)
        storage.is_static = True

    def _add_call(self, node: fx.Node) -> None:
        target, value = node.target, node.meta.get("val")
        if is_op(target) and schema_of(target).is_mutable:
            raise _unsupported(
                f"{target} changes its arguments in place inside the captured graph ({node.name})"
            )
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            msg = (
                f"{node.meta.get('module') or call_name(node)} makes a {value.layout} tensor, "
                "which cannot be planned. Use dense tensors, as of an embedding with sparse=False."
            )
            raise UnsupportedModelError(msg)
        if target in _BY_POSITION:
            _check_storage_is_own(node)
        if node.target is operator.getitem:
            self._add_getitem(node)
        elif isinstance(value, torch.Tensor):
            self._add_tensor(node, value)
        elif isinstance(value, tuple | list):
            self._add_multiple(node, value)
        else:
            kind = type(value).__name__
            raise _unsupported(f"{call_name(node)} ({node.name}) makes a {kind}, not a tensor")

    def _add_tensor(self, node: fx.Node, value: torch.Tensor) -> None:
        known = self._by_identity.get(storage_id(value))
        if known is None:
            self._add_op(node, [(value, node)])
            return
        self._storage_of[node] = known
        self._view_base[node] = next(
            operand for operand in node.all_input_nodes if self._storage_of.get(operand) is known
        )

    def _add_multiple(self, node: fx.Node, values: Sequence[Any]) -> None:
        tensors = {
            index: value for index, value in enumerate(values) if isinstance(value, torch.Tensor)
        }
        num_known = sum(storage_id(value) in self._by_identity for value in tensors.values())
        # `split` and `unbind` make views only.
        if num_known == len(tensors):
            self._view_base[node] = node.all_input_nodes[0]
            return
        if num_known:
            raise _unsupported(
                f"{call_name(node)} ({node.name}) makes new memory and views at once"
            )
        items = items_of(node)
        used = [(tensors[index], items[index]) for index in sorted(items) if index in tensors]
        unused = [(value, node) for index, value in tensors.items() if index not in items]
        self._add_op(node, used + unused)

    def _add_getitem(self, node: fx.Node) -> None:
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        storage = self._by_identity[storage_id(node.meta["val"])]
        self._storage_of[node] = storage
        # An item of a view, such as of `split`.
        if parent in self._view_base:
            self._view_base[node] = parent
        elif storage.root is not node:
            self._view_base[node] = storage.root

    def _add_op(self, node: fx.Node, made: Sequence[tuple[torch.Tensor, fx.Node]]) -> None:
        reads = {self._storage_of[operand]: None for operand in node.all_input_nodes}
        writes: dict[Storage, None] = {}
        for value, root in made:
            # Two results of one op may share memory.
            storage = self._by_identity.get(storage_id(value)) or self._new_storage(value, root)
            self._storage_of[root] = storage
            writes[storage] = None
        op = Op(
            len(self._ops),
            node,
            tuple(reads),
            tuple(writes),
            Phase.LATE,
            module=node.meta.get("module", ""),
            is_random=is_random(node.target),
        )
        for storage in writes:
            storage.producer = op
        self._ops.append(op)

    def _new_storage(self, value: torch.Tensor, root: fx.Node) -> Storage:
        # As the allocator counts, unless told otherwise: on a CPU as asked for, on CUDA in blocks.
        own_bytes = CUDA_BLOCK_BYTES if value.device.type == "cuda" else 1
        size = value.untyped_storage().nbytes()
        num_bytes = block_bytes(size, self._allocation_bytes or own_bytes)
        storage = Storage(len(self._storages), num_bytes, root)
        self._storages.append(storage)
        self._by_identity[storage_id(value)] = storage
        self._storage_of[root] = storage
        return storage

    # --- the whole graph -------------------------------------------------------------------------

    def _mark_outputs(self, *, returned_gradients: bool) -> None:
        static = {role: node for node, role in self._capture.inputs}
        for node, role in self._capture.outputs:
            storage = self._storage_of[node]
            if role.kind is RoleKind.OUTPUT:
                storage.is_output = not storage.is_static
            elif role.kind is RoleKind.BUFFER_UPDATE:
                self._storage_of[static[replace(role, kind=RoleKind.BUFFER)]].is_updated = True
            elif role.kind is RoleKind.INPUT_UPDATE:
                self._storage_of[static[replace(role, kind=RoleKind.INPUT)]].is_updated = True
            elif role.kind is RoleKind.INPUT_GRADIENT or returned_gradients:
                storage.is_kept_to_end = not storage.is_static

    def _set_phases(self) -> None:
        """Sets phases: FORWARD above ends of the forward, LATE if only the backward reads it.

        BACKWARD below tangents, and where gradients are made that depend on none, such as zeros.
        """
        for op in self._ops:
            parents = [storage.producer for storage in op.reads if storage.producer]
            is_below = any(parent.phase is Phase.BACKWARD for parent in parents)
            if is_below or any(storage.is_tangent for storage in op.reads):
                op.phase = Phase.BACKWARD
        ends = [
            self._storage_of[node].producer
            for node, role in self._capture.outputs
            if role.kind in FORWARD_ENDS
        ]
        pending = [op for op in ends if op]
        pending += [op for op in self._ops if op.is_random and op.phase is Phase.LATE]
        pending += [op for op in self._ops if _runs_once_in_forward(op)]
        while pending:
            op = pending.pop()
            if op.phase is Phase.FORWARD:
                continue
            assert op.phase is Phase.LATE, f"the forward needs {op} of the backward"
            op.phase = Phase.FORWARD
            pending += [storage.producer for storage in op.reads if storage.producer]
        gradients = {
            self._storage_of[node].producer
            for node, role in self._capture.outputs
            if role.kind in (RoleKind.PARAMETER_GRADIENT, RoleKind.INPUT_GRADIENT)
        }
        for op in self._ops:
            parents = (storage.producer for storage in op.reads)
            if op.phase is Phase.LATE and (
                op in gradients or any(each and each.phase is Phase.BACKWARD for each in parents)
            ):
                op.phase = Phase.BACKWARD

    def _refuse_overwritten_reads(self) -> None:
        for op in self._ops:
            if op.phase is Phase.FORWARD:
                continue
            for storage in op.reads:
                if storage.is_updated:
                    msg = (
                        f"the backward reads {storage.name} ({call_name(op.node)}), a buffer or "
                        "input that the forward has overwritten by then. Copy it before it changes."
                    )
                    raise UnsupportedModelError(msg)

    def _set_final_gradients(self) -> tuple[tuple[fx.Node, Role], ...]:
        """Notes each gradient at the op that makes it; returns those that no op makes."""
        initial = []
        for node, role in self._capture.outputs:
            if role.kind is RoleKind.PARAMETER_GRADIENT:
                producer = self._storage_of[node].producer
                if producer is None:
                    initial.append((node, role))
                else:
                    producer.final_gradients.append((node, role))
        return tuple(initial)


def _runs_once_in_forward(op: Op) -> bool:
    """Whether a pass or a user's mark keeps what the op makes in the forward."""
    return bool(op.node.meta.get(IN_FORWARD)) or is_saved(op.node)


def _check_storage_is_own(node: fx.Node) -> None:
    """Refuses positions in a storage that a plan need not have as eager has it.

    An input may be a view of a larger tensor, which the trace does not see.
    """
    given = node.args[0]
    assert isinstance(given, fx.Node)
    value = given.meta["val"]
    is_whole = value.storage_offset() == 0 and value.is_contiguous()
    if given.op == "placeholder" or (node.target is not _AS_STRIDED and not is_whole):
        msg = (
            f"{call_name(node)} ({node.name}) goes by positions in the storage of an input or of a "
            "view, which a plan may hold otherwise. Clone the tensor first, in the model, or train "
            'with mode="frames".'
        )
        raise UnsupportedModelError(msg)


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{what}, which is not supported")


def _set_recomputation(op: Op) -> None:
    """Sets how an op is recomputed.

    Batch normalisation and max-pooling replay what their first run has found, where that gives the
    same bits. An op that reads an updated buffer or input cannot be recomputed.
    """
    target, args = op.node.target, op.node.args
    if target in _BATCH_NORMS and (statistics := _statistics(op)):
        op.recompute_target, op.recompute_args = recompute_normalization, (*args[:3], *statistics)
        op.save_state = saved_statistics
        op.saved_state_bytes = sum(node.meta["val"].nbytes for node in statistics)
    elif target is _MAX_POOL and (indices := _pooled_indices(op)):
        op.recompute_target, op.recompute_args = recompute_max_pool, (args[0], indices, *args[1:])
        op.save_state = saved_offsets
        op.saved_state_bytes = indices.meta["val"].nbytes // 4
    elif target is FUNCTIONAL_BATCH_NORM:
        # The running statistics may have changed by then.
        op.recompute_target = recompute_batch_norm
        op.recompute_args = (*args[:3], None, None, *args[5:])
    elif not getattr(target, "runs_once", False) and not any(s.is_updated for s in op.reads):
        op.recompute_target = target


def _statistics(op: Op) -> tuple[fx.Node, ...]:
    """Mean and inverse deviation of a batch normalization in training, if a replay can use them."""
    items, args = items_of(op.node), op.node.args
    found = tuple(items[index] for index in (1, 2) if index in items)
    is_training = args[5 if op.node.target is FUNCTIONAL_BATCH_NORM else 3]
    if is_training is not True or len(found) < 2:
        return ()
    operands = [value.meta["val"] if isinstance(value, fx.Node) else None for value in args[:3]]
    can = can_recompute_normalization(*operands, *(node.meta["val"] for node in found))
    return found if can else ()


def _pooled_indices(op: Op) -> fx.Node | None:
    """The indices that max-pooling has found, if they suffice to replay it."""
    values, *rest = op.node.args
    assert isinstance(values, fx.Node)
    can = can_recompute_max_pool(values.meta["val"], *rest)  # pyright: ignore[reportArgumentType]
    return items_of(op.node).get(1) if can else None
