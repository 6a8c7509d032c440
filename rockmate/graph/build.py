"""The joint graph as ops on storages: a small typed form in which everything after the capture is said.

A *storage* is memory that one or more tensors share, identified by the fake tensor's `untyped_storage()`; its size is that
storage's `nbytes()`. An *op* is a call that makes at least one storage. Views, `getitem` and `detach` are no ops: they belong to the
storage they view. Static storages (parameters, buffers, inputs) are never counted; what the user holds (outputs) and what autograd
holds (tangents) is counted for as long as it is held.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from rockmate._torch.ops import is_op, schema_of
from rockmate._torch.storage import storage_id
from rockmate.capture.nodes import call_name
from rockmate.capture.roles import Capture, Role, RoleKind
from rockmate.errors import UnsupportedModelError
from rockmate.graph.ir import FORWARD_ENDS, IN_FORWARD, Graph, Op, Phase, Storage
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

_CUDA_BLOCK_BYTES = 512
_MAX_POOL = torch.ops.aten.max_pool2d_with_indices.default
_FUNCTIONAL_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_BATCH_NORMS = {_FUNCTIONAL_BATCH_NORM, torch.ops.aten._native_batch_norm_legit.no_stats}


def build_graph(
    capture: Capture, *, returned_gradients: bool = False, allocation_bytes: int | None = None
) -> Graph:
    """Reads ops and storages off a joint fx graph.

    Args:
        capture: the joint graph with the roles of its ends.
        returned_gradients: parameter gradients stay until the backward returns them, instead of being handed over at once.
        allocation_bytes: storages take multiples of it; by default what the allocator of their device does.

    Raises:
        UnsupportedModelError: a call mutates its arguments, makes no tensor, or makes new memory and views at once.
    """
    builder = _Builder(capture, allocation_bytes)
    for node in capture.joint.graph.nodes:
        builder.add(node)
    graph = builder.finish(returned_gradients=returned_gradients)
    graph.verify()
    return graph


class _Builder:
    def __init__(self, capture: Capture, allocation_bytes: int | None) -> None:
        self.capture = capture
        self.allocation_bytes = allocation_bytes
        self.roles = dict(capture.inputs)
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.by_identity: dict[int, Storage] = {}
        self.storage_of: dict[fx.Node, Storage] = {}
        self.view_base: dict[fx.Node, fx.Node] = {}
        self.op_of: dict[fx.Node, Op] = {}

    def add(self, node: fx.Node) -> None:
        if node in self.roles:
            self._add_input(node)
        elif node.op == "call_function":
            self._add_call(node)
        elif node.op != "output":
            msg = f"the captured graph holds a node of kind {node.op} ({node.name}), which is not supported"
            raise UnsupportedModelError(msg)

    def _add_input(self, node: fx.Node) -> None:
        is_tangent = self.roles[node].kind is RoleKind.TANGENT
        known = self.by_identity.get(storage_id(node.meta["val"]))
        if known is not None:  # a tied parameter comes in under each of its names
            self.storage_of[node] = known
            return
        self._new_storage(node.meta["val"], node, is_static=not is_tangent, is_tangent=is_tangent)

    def _new_storage(
        self,
        value: torch.Tensor,
        root: fx.Node,
        *,
        is_static: bool = False,
        is_tangent: bool = False,
    ) -> Storage:
        memory = value.untyped_storage()
        num_bytes = _allocated_bytes(value, self.allocation_bytes)
        storage = Storage(
            len(self.storages), num_bytes, root, is_static=is_static, is_tangent=is_tangent
        )
        self.storages.append(storage)
        self.by_identity[storage_id(memory)] = storage
        self.storage_of[root] = storage
        return storage

    def _add_call(self, node: fx.Node) -> None:
        target, value = node.target, node.meta.get("val")
        if is_op(target) and schema_of(target).is_mutable:
            msg = f"{target} changes its arguments in place inside the captured graph ({node.name}), which is not supported"
            raise UnsupportedModelError(msg)
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            msg = (
                f"{call_name(node)} ({node.name}) makes a tensor of layout {value.layout}, which cannot be planned. Use dense ones "
                "(an embedding with sparse=False)."
            )
            raise UnsupportedModelError(msg)
        if _is_getitem(node):
            self._add_getitem(node)
        elif isinstance(value, torch.Tensor):
            known = self.by_identity.get(storage_id(value))
            if known is None:
                self._add_op(node, [(value, node)])
            else:
                self.storage_of[node] = known
                self.view_base[node] = next(
                    n for n in node.all_input_nodes if self.storage_of.get(n) is known
                )
        elif isinstance(value, tuple | list):
            self._add_multiple(node, value)
        else:
            msg = f"{call_name(node)} makes a {type(value).__name__}, not a tensor ({node.name}), which is not supported"
            raise UnsupportedModelError(msg)

    def _add_multiple(self, node: fx.Node, values: Iterable[Any]) -> None:
        tensors = {
            index: value for index, value in enumerate(values) if isinstance(value, torch.Tensor)
        }
        known = [index for index, value in tensors.items() if storage_id(value) in self.by_identity]
        if len(known) == len(tensors):  # split, unbind: views only
            self.view_base[node] = node.all_input_nodes[0]
            return
        if known:
            msg = f"{call_name(node)} makes new memory and views at once ({node.name}), which is not supported"
            raise UnsupportedModelError(msg)
        items: dict[int, fx.Node] = {
            int(str(user.args[1])): user for user in node.users if _is_getitem(user)
        }
        used = [(tensors[index], items[index]) for index in sorted(items) if index in tensors]
        unused = [(value, node) for index, value in tensors.items() if index not in items]
        self._add_op(node, used + unused)

    def _add_op(self, node: fx.Node, made: list[tuple[torch.Tensor, fx.Node]]) -> None:
        reads = {self.storage_of[arg]: None for arg in node.all_input_nodes}
        writes = {}
        for value, root in made:
            memory = value.untyped_storage()
            known = self.by_identity.get(
                storage_id(memory)
            )  # two outputs of one op may share memory
            if known is None:
                known = self._new_storage(value, root)
            self.storage_of[root] = known
            writes[known] = None
        op = Op(
            len(self.ops),
            node,
            tuple(reads),
            tuple(writes),
            Phase.LATE,
            is_random=is_random(node.target),
        )
        op.module = node.meta.get("module", "")
        for storage in writes:
            storage.producer = op
        self.ops.append(op)
        self.op_of[node] = op

    def _add_getitem(self, node: fx.Node) -> None:
        parent = node.args[0]
        assert isinstance(parent, fx.Node)
        storage = self.by_identity[storage_id(node.meta["val"])]
        self.storage_of[node] = storage
        if parent in self.view_base:  # an item of a view: split
            self.view_base[node] = parent
        elif storage.root is not node:
            self.view_base[node] = storage.root

    def finish(self, *, returned_gradients: bool) -> Graph:
        self._mark_ends(returned_gradients=returned_gradients)
        self._find_phases()
        self._find_recomputable()
        self._refuse_overwritten_reads()
        initial = () if returned_gradients else self._place_deliveries()
        return Graph(
            tuple(self.ops),
            tuple(self.storages),
            self.capture.inputs,
            self.capture.outputs,
            self.storage_of,
            self.view_base,
            self.capture.constants,
            initial,
        )

    def _mark_ends(self, *, returned_gradients: bool) -> None:
        static = {(role.kind, role.name, role.index): node for node, role in self.capture.inputs}
        for node, role in self.capture.outputs:
            storage = self.storage_of[node]
            if role.kind is RoleKind.OUTPUT:
                storage.is_output = not storage.is_static
            elif role.kind is RoleKind.BUFFER_UPDATE:
                self.storage_of[static[RoleKind.BUFFER, role.name, -1]].is_updated = True
            elif role.kind is RoleKind.INPUT_UPDATE:
                self.storage_of[static[RoleKind.INPUT, "", role.index]].is_updated = True
            elif role.kind is RoleKind.INPUT_GRADIENT or returned_gradients:
                storage.is_kept_to_end = not storage.is_static

    def _find_phases(self) -> None:
        for op in self.ops:
            parents = [storage.producer for storage in op.reads if storage.producer]
            if any(s.is_tangent for s in op.reads) or any(
                parent.phase is Phase.BACKWARD for parent in parents
            ):
                op.phase = Phase.BACKWARD
        ends = [
            self.storage_of[node].producer
            for node, role in self.capture.outputs
            if role.kind in FORWARD_ENDS
        ]
        pending = [op for op in ends if op] + [
            op for op in self.ops if op.is_random and op.phase is Phase.LATE
        ]
        pending += [op for op in self.ops if op.node.meta.get(IN_FORWARD)]
        while pending:
            op = pending.pop()
            if op.phase is Phase.FORWARD:
                continue
            assert op.phase is Phase.LATE, f"the forward needs {op} of the backward"
            op.phase = Phase.FORWARD
            pending += [storage.producer for storage in op.reads if storage.producer]

    def _find_recomputable(self) -> None:
        for op in self.ops:
            if op.phase is Phase.BACKWARD or op.node.meta.get(IN_FORWARD):
                continue
            if op.node.target in _BATCH_NORMS and (statistics := _statistics(op)):
                op.recompute_target, op.recompute_args = (
                    recompute_normalization,
                    (*op.node.args[:3], *statistics),
                )
                op.save_state, op.state_bytes = (
                    saved_statistics,
                    sum(node.meta["val"].nbytes for node in statistics),
                )
            elif op.node.target is _MAX_POOL and (indices := _pooled_indices(op)):
                op.recompute_target, op.recompute_args = (
                    recompute_max_pool,
                    (op.node.args[0], indices, *op.node.args[1:]),
                )
                op.save_state, op.state_bytes = saved_offsets, indices.meta["val"].nbytes // 4
            elif op.node.target is _FUNCTIONAL_BATCH_NORM:
                op.recompute_target = recompute_batch_norm
                op.recompute_args = (
                    *op.node.args[:3],
                    None,
                    None,
                    *op.node.args[5:],
                )  # the running statistics may have changed by then
            elif not any(storage.is_updated for storage in op.reads) and not getattr(
                op.node.target, "runs_once", False
            ):
                op.recompute_target = op.node.target

    def _refuse_overwritten_reads(self) -> None:
        for op in self.ops:
            overwritten = [
                storage
                for storage in op.reads
                if storage.is_updated and op.phase is not Phase.FORWARD
            ]
            if overwritten:
                msg = (
                    f"the backward reads {overwritten[0].name} ({call_name(op.node)}), a buffer or input that the forward has "
                    "overwritten by then. Copy it before changing it."
                )
                raise UnsupportedModelError(msg)

    def _place_deliveries(self) -> tuple[tuple[fx.Node, Role], ...]:
        """Hands each gradient over right after the op that makes it; those that no op makes come back, to be handed over first."""
        initial = []
        for node, role in self.capture.outputs:
            if role.kind is RoleKind.PARAMETER_GRADIENT:
                producer = self.storage_of[node].producer
                if producer is None:
                    initial.append((node, role))
                else:
                    producer.final_gradients.append((node, role))
        return tuple(initial)


def _statistics(op: Op) -> tuple[fx.Node, ...]:
    """Mean and inverse deviation that a batch normalisation in training has taken, where they are enough to run it again."""
    items = _items(op)
    found = tuple(items[place] for place in (1, 2) if place in items)
    operands = [
        argument.meta["val"] if isinstance(argument, fx.Node) else None
        for argument in op.node.args[:3]
    ]
    is_training = op.node.args[5 if op.node.target is _FUNCTIONAL_BATCH_NORM else 3]
    can = (
        is_training is True
        and len(found) == 2
        and can_recompute_normalization(*operands, *(node.meta["val"] for node in found))
    )
    return found if can else ()


def _pooled_indices(op: Op) -> fx.Node | None:
    """The indices that max-pooling has found, where they are enough to run it again."""
    values, *rest = op.node.args
    assert isinstance(values, fx.Node)
    return _items(op).get(1) if can_recompute_max_pool(values.meta["val"], *rest) else None  # pyright: ignore[reportArgumentType]


def _items(op: Op) -> dict[Any, fx.Node]:
    return {user.args[1]: user for user in op.node.users if _is_getitem(user)}


def _allocated_bytes(value: torch.Tensor, granularity: int | None) -> int:
    """What the allocator counts for the tensor's memory: unless told otherwise, as asked for on CPU, in blocks on CUDA."""
    granularity = granularity or (_CUDA_BLOCK_BYTES if value.device.type == "cuda" else 1)
    return -(-value.untyped_storage().nbytes() // granularity) * granularity


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"
