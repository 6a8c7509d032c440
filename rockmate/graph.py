"""The joint graph as ops on storages: a small typed form in which everything after the capture is said.

A *storage* is memory that one or more tensors share, identified by the fake tensor's `untyped_storage()`; its size is that
storage's `nbytes()`. An *op* is a call that makes at least one storage. Views, `getitem` and `detach` are no ops: they belong to the
storage they view. Static storages (parameters, buffers, inputs) are never counted; what the user holds (outputs) and what autograd
holds (tangents) is counted for as long as it is held.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from rockmate.accesses import OpAccesses
from rockmate.capture import Capture, Role, RoleKind
from rockmate.errors import UnsupportedModelError
from rockmate.kernels import (
    batch_norm_again,
    can_normalize_again,
    can_pool_again,
    normalize_again,
    offsets_to_keep,
    pool_again,
    statistics_to_keep,
)
from rockmate.random_state import is_random

_FORWARD_ENDS = {RoleKind.OUTPUT, RoleKind.BUFFER_UPDATE, RoleKind.INPUT_UPDATE}
_CUDA_BLOCK_BYTES = 512
_MAX_POOL = torch.ops.aten.max_pool2d_with_indices.default
_FUNCTIONAL_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_BATCH_NORMS = {_FUNCTIONAL_BATCH_NORM, torch.ops.aten._native_batch_norm_legit.no_stats}
IN_FORWARD = "in_forward"
"""Key in a node's `meta`: what only the backward reads is made in the forward, and only there."""
_UPDATES = {RoleKind.BUFFER_UPDATE, RoleKind.INPUT_UPDATE}


class Phase(enum.Enum):
    """When an op must run: FORWARD before the loss, BACKWARD after the tangents, LATE in the backward though it reads no tangent."""

    FORWARD = "forward"
    LATE = "late"
    BACKWARD = "backward"


@dataclass(eq=False, slots=True)
class Storage:
    """Memory that one or more tensors share.

    Attributes:
        index: position in `Graph.storages`.
        num_bytes: what the allocator is asked for; of a gradient that is handed over piece by piece, the largest piece.
        root: the node whose tensor the producer makes; every other node of the storage is a view of it.
        is_static: parameter, buffer or input: lives throughout, never counted.
        is_tangent: made by autograd before the backward, held by it until the end.
        is_output: returned by the forward; taken to be held by the user until the backward has ended.
        is_kept_to_end: a gradient that the backward returns.
        is_updated: static, and overwritten when the forward ends.
        producer: the op that makes it, None for static storages and tangents.
    """

    index: int
    num_bytes: int
    root: fx.Node
    is_static: bool = False
    is_tangent: bool = False
    is_output: bool = False
    is_kept_to_end: bool = False
    is_updated: bool = False
    producer: Op | None = None

    @property
    def is_result(self) -> bool:
        """Whether somebody else holds it until the step ends: an output, or a gradient that the backward returns."""
        return self.is_output or self.is_kept_to_end

    @property
    def name(self) -> str:
        """The root's name."""
        return self.root.name

    def __repr__(self) -> str:
        return f"Storage({self.name}, {self.num_bytes:,} B)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """How to add a matrix product to a gradient slice by slice.

    Attributes:
        is_flipped: the gradient is the product's transpose.
        dim: of the product, along which it is sliced.
        slice_size: rows or columns of one slice.
        is_one_of_several: the gradient is a sum of such products, none of which need be rounded by itself, so that each is computed
            onto `.grad` as a whole (BLAS adds to what is there).
    """

    is_flipped: bool
    dim: int
    slice_size: int
    is_one_of_several: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRows:
    """How to add an embedding's gradient to `.grad` without the rows that no token touches.

    Attributes:
        num_rows: at most so many rows are touched: the number of tokens.
    """

    num_rows: int


@dataclass(eq=False)
class Op:
    """One call that makes storages.

    Attributes:
        index: position in `Graph.ops`, which is an order that respects every dependency.
        node: the fx node.
        reads: storages of its tensor arguments, static ones included.
        writes: storages it makes.
        phase: when it must run.
        recompute_target: called instead of the node's target when the op runs again; None if it cannot run again.
        recompute_args: its arguments then; None if they are the node's. A result of the op itself among them stands for what is kept of it.
        state_target: makes what is kept of the first run for further ones, a tensor of `state_bytes` with an item for each such result;
            called with a list of them and the node's arguments. None if there is nothing.
        state_bytes: what that takes.
        delivers: gradients that are final once the op has run, and whose they are.
        handover: set where the op's result is added to `.grad` piece by piece instead of being made as a whole.
        module: path of the submodule that ran it ("" for the root and for backward ops of unknown origin).
        is_random: whether it draws from the generator.
        in_place_operands: arguments whose memory the result may take if they die; None until asked for.
    """

    index: int
    node: fx.Node
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    phase: Phase
    recompute_target: Any = None
    recompute_args: tuple[Any, ...] | None = None
    state_target: Any = None
    state_bytes: int = 0
    delivers: list[tuple[fx.Node, Role]] = field(default_factory=list)
    handover: Product | EmbeddingRows | None = None
    module: str = ""
    is_random: bool = False
    in_place_operands: tuple[fx.Node, ...] | None = None

    @cached_property
    def call_key(self) -> Hashable:
        """Equal for ops with the same target, constants and tensor metadata."""
        return call_key(self.node.target, self.node.args, self.node.kwargs)

    @cached_property
    def results_to_keep(self) -> tuple[fx.Node, ...]:
        """Results of its first run that it needs in order to run again."""
        return tuple(
            a
            for a in self.recompute_args or ()
            if isinstance(a, fx.Node) and a.args[:1] == (self.node,)
        )

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    @property
    def can_run_again(self) -> bool:
        """Whether it may run a second time."""
        return self.phase is not Phase.BACKWARD and self.recompute_target is not None

    @property
    def written_bytes(self) -> int:
        """Bytes of all storages it makes."""
        return sum(storage.num_bytes for storage in self.writes)

    @property
    def device(self) -> torch.device:
        """Where its results are."""
        value = self.node.meta["val"]
        return (
            value.device
            if isinstance(value, torch.Tensor)
            else next(v.device for v in value if isinstance(v, torch.Tensor))
        )

    def __repr__(self) -> str:
        return f"Op({self.index}, {self.name})"


@dataclass(eq=False)
class Graph:
    """Ops and storages of one training step.

    Attributes:
        ops: forward, late and backward ops in the order of the joint graph.
        storages: all storages.
        inputs: placeholder and constant nodes and their roles.
        outputs: returned nodes and their roles.
        storage_of: the storage of each tensor-valued node.
        view_base: for each view node, the node it is taken from.
        constants: tensors that belong to the graph itself, by name.
        initial_deliveries: gradients that are final before any backward op runs.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    inputs: tuple[tuple[fx.Node, Role], ...]
    outputs: tuple[tuple[fx.Node, Role], ...]
    storage_of: Mapping[fx.Node, Storage]
    view_base: Mapping[fx.Node, fx.Node]
    constants: Mapping[str, torch.Tensor]
    initial_deliveries: tuple[tuple[fx.Node, Role], ...] = ()

    @cached_property
    def held(self) -> frozenset[Storage]:
        """Storages that no op's last read releases: static ones, tangents, and results."""
        return frozenset(s for s in self.storages if s.is_static or s.is_tangent or s.is_result)

    @cached_property
    def readers(self) -> Mapping[Storage, Sequence[Op]]:
        """The ops that read each storage, in order."""
        readers: dict[Storage, list[Op]] = {}
        for op in self.ops:
            for storage in op.reads:
                readers.setdefault(storage, []).append(op)
        return readers

    @cached_property
    def updates(self) -> tuple[Storage, ...]:
        """Storages that are copied into a buffer or an input when the forward ends."""
        made = {self.storage_of[node]: None for node, role in self.outputs if role.kind in _UPDATES}
        return tuple(storage for storage in made if not storage.is_static)

    @cached_property
    def op_accesses(self) -> OpAccesses:
        """What each op reads and makes, in arrays."""
        return OpAccesses.of(self)

    @cached_property
    def forward_ops(self) -> tuple[Op, ...]:
        """Ops of the forward, in order."""
        return tuple(op for op in self.ops if op.phase is Phase.FORWARD)

    @cached_property
    def backward_ops(self) -> tuple[Op, ...]:
        """Late and backward ops, in order."""
        return tuple(op for op in self.ops if op.phase is not Phase.FORWARD)

    def verify(self) -> None:
        """Asserts what every pass relies on: order, single producers, phases that do not look ahead."""
        made: set[Storage] = {
            storage for storage in self.storages if storage.is_static or storage.is_tangent
        }
        for position, op in enumerate(self.ops):
            assert op.index == position, f"{op} stands at {position}"
            assert op.writes, f"{op} makes nothing"
            missing = [storage for storage in op.reads if storage not in made]
            assert not missing, f"{op} reads {missing} before it is made"
            made.update(op.writes)
            for storage in op.writes:
                assert storage.producer is op, f"{storage} has another producer than {op}"
                assert not storage.is_static, f"{op} makes the static {storage}"
            if op.phase is Phase.FORWARD:
                late = [
                    s
                    for s in op.reads
                    if s.is_tangent or (s.producer and s.producer.phase is not Phase.FORWARD)
                ]
                assert not late, f"forward {op} reads {late} of the backward"
        assert all(storage in made for storage in self.storages), "a storage has no producer"

    def __str__(self) -> str:
        lines = []
        for op in self.ops:
            reads = " ".join(storage.name for storage in op.reads if not storage.is_static)
            writes = " ".join(f"{storage.name}:{storage.num_bytes}" for storage in op.writes)
            lines.append(
                f"{op.index:5d} {op.phase.value:8s} {writes} = {_target_name(op.node)}({reads})"
            )
        return "\n".join(lines)


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
        known = self.by_identity.get(node.meta["val"].untyped_storage()._cdata)
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
        self.by_identity[memory._cdata] = storage
        self.storage_of[root] = storage
        return storage

    def _add_call(self, node: fx.Node) -> None:
        target, value = node.target, node.meta.get("val")
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            msg = f"{target} changes its arguments in place inside the captured graph ({node.name}), which is not supported"
            raise UnsupportedModelError(msg)
        if isinstance(value, torch.Tensor) and value.layout != torch.strided:
            msg = (
                f"{_target_name(node)} ({node.name}) makes a tensor of layout {value.layout}, which cannot be planned. Use dense ones "
                "(an embedding with sparse=False)."
            )
            raise UnsupportedModelError(msg)
        if _is_getitem(node):
            self._add_getitem(node)
        elif isinstance(value, torch.Tensor):
            known = self.by_identity.get(value.untyped_storage()._cdata)
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
            msg = f"{_target_name(node)} makes a {type(value).__name__}, not a tensor ({node.name}), which is not supported"
            raise UnsupportedModelError(msg)

    def _add_multiple(self, node: fx.Node, values: Iterable[Any]) -> None:
        tensors = {
            index: value for index, value in enumerate(values) if isinstance(value, torch.Tensor)
        }
        known = [
            index
            for index, value in tensors.items()
            if value.untyped_storage()._cdata in self.by_identity
        ]
        if len(known) == len(tensors):  # split, unbind: views only
            self.view_base[node] = node.all_input_nodes[0]
            return
        if known:
            msg = f"{_target_name(node)} makes new memory and views at once ({node.name}), which is not supported"
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
            known = self.by_identity.get(memory._cdata)  # two outputs of one op may share memory
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
        storage = self.by_identity[node.meta["val"].untyped_storage()._cdata]
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
            if role.kind in _FORWARD_ENDS
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
                    normalize_again,
                    (*op.node.args[:3], *statistics),
                )
                op.state_target, op.state_bytes = (
                    statistics_to_keep,
                    sum(node.meta["val"].nbytes for node in statistics),
                )
            elif op.node.target is _MAX_POOL and (indices := _pooled_indices(op)):
                op.recompute_target, op.recompute_args = (
                    pool_again,
                    (op.node.args[0], indices, *op.node.args[1:]),
                )
                op.state_target, op.state_bytes = offsets_to_keep, indices.meta["val"].nbytes // 4
            elif op.node.target is _FUNCTIONAL_BATCH_NORM:
                op.recompute_target = batch_norm_again
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
                    f"the backward reads {overwritten[0].name} ({_target_name(op.node)}), a buffer or input that the forward has "
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
                    producer.delivers.append((node, role))
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
        and can_normalize_again(*operands, *(node.meta["val"] for node in found))
    )
    return found if can else ()


def _pooled_indices(op: Op) -> fx.Node | None:
    """The indices that max-pooling has found, where they are enough to run it again."""
    values, *rest = op.node.args
    assert isinstance(values, fx.Node)
    return _items(op).get(1) if can_pool_again(values.meta["val"], *rest) else None  # pyright: ignore[reportArgumentType]


def _items(op: Op) -> dict[Any, fx.Node]:
    return {user.args[1]: user for user in op.node.users if _is_getitem(user)}


def call_key(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """A key that is equal for calls of the same target with the same constants and the same metadata of tensors."""

    def freeze(value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            fake = value.meta["val"]
            is_tensor = isinstance(fake, torch.Tensor)
            return (
                (tuple(fake.shape), fake.stride(), fake.dtype, fake.device)
                if is_tensor
                else "several tensors"
            )
        if isinstance(value, Mapping):
            return tuple((key, freeze(item)) for key, item in sorted(value.items()))
        if isinstance(value, tuple | list):
            return tuple(freeze(item) for item in value)
        return type(value).__name__, value

    return str(target), freeze(args), freeze(kwargs)


def _allocated_bytes(value: torch.Tensor, granularity: int | None) -> int:
    """What the allocator counts for the tensor's memory: unless told otherwise, as asked for on CPU, in blocks on CUDA."""
    granularity = granularity or (_CUDA_BLOCK_BYTES if value.device.type == "cuda" else 1)
    return -(-value.untyped_storage().nbytes() // granularity) * granularity


def _is_getitem(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def _target_name(node: fx.Node) -> str:
    return (
        str(node.target)
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__name__", str(node.target))
    )
