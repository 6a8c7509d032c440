"""The intermediate representation of one training step: ops on storages.

| term | what it is |
|---|---|
| storage | memory that one or more tensors share; its identity is the fake tensor's storage |
| op | a call that makes at least one storage |
| view | a call that makes none (`view`, `getitem`, `detach`); it belongs to the viewed storage |
| phase | when an op must run: forward, late, backward |
| role | what an input or output of the joint graph is, such as a parameter or its gradient |
| static storage | a parameter, buffer, constant or input; live throughout the step, never counted |
| tangent | the gradient of an output, made by autograd before the backward and held to its end |
| result | an output, or a gradient that the backward returns; its receiver holds it to the end |
| gradient sink | the receiver of parameter gradients, which adds each to `.grad` when it is final |

The size of a storage is what its device's allocator counts. Views cost neither bytes nor time. The
order of `Graph.ops` respects every dependency; a schedule may run ops in another order, and
forward and late ops more than once.

`build.py` makes a graph from a captured one, `passes.py` lists the passes over it. Analyses such
as liveness stand beside the representation (`rockmate/schedule/`), not in it.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import call_name
from rockmate.capture.roles import Role, RoleKind
from rockmate.ops.kernel_layouts import as_tuple, call_key
from rockmate.ops.rng import CPU_STATE_BYTES

# Roles of outputs that the forward makes.
FORWARD_ENDS = {RoleKind.OUTPUT, RoleKind.BUFFER_UPDATE, RoleKind.INPUT_UPDATE}

# Key in a node's `meta`: its op runs once, in the forward, though only the backward reads it.
IN_FORWARD = "in_forward"

# Roles of outputs that are copied into a static storage when the forward ends.
_UPDATES = {RoleKind.BUFFER_UPDATE, RoleKind.INPUT_UPDATE}


class Phase(enum.Enum):
    """When an op must run.

    FORWARD: before the loss. LATE: in the backward, though it depends on no tangent. BACKWARD: in
    the backward and once, since it depends on a tangent or makes a gradient.
    """

    FORWARD = "forward"
    LATE = "late"
    BACKWARD = "backward"


@dataclass(eq=False, slots=True)
class Storage:
    """Memory that one or more tensors share.

    Attributes:
        index: position in `Graph.storages`.
        num_bytes: bytes that the allocator counts. For a gradient that is added to `.grad` slice
            by slice: bytes of the largest slice.
        root: the node whose tensor the producer makes. Every other node of the storage is a view.
        is_static: a parameter, buffer, constant or input. It is live throughout, never counted.
        is_tangent: autograd makes it before the backward and holds it to the end.
        is_output: the forward returns it. The user is assumed to hold it to the backward's end.
        is_kept_to_end: a gradient that the backward returns.
        is_updated: static, and overwritten when the forward ends.
        producer: the op that makes it. None for static storages and tangents.
        mark: "save" or "recompute" where the user has marked it; else "".
        mark_sources: what asked for that.
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
    mark: str = ""
    mark_sources: tuple[str, ...] = ()

    @property
    def phase(self) -> Phase | None:
        """That of its producer."""
        return self.producer and self.producer.phase

    @property
    def must_recompute(self) -> bool:
        """Whether it must not be live across the border between forward and backward."""
        return self.mark == "recompute"

    @property
    def is_result(self) -> bool:
        """Whether its receiver holds it to the end: an output, or a returned gradient."""
        return self.is_output or self.is_kept_to_end

    @property
    def name(self) -> str:
        """The root's name."""
        return self.root.name

    def __repr__(self) -> str:
        return f"Storage({self.name}, {self.num_bytes:,} B)"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedMatmul:
    """How to add a matrix product to `.grad` slice by slice.

    Attributes:
        is_flipped: whether the gradient is the product's transpose.
        dim: dim of the product along which it is sliced.
        slice_size: rows or columns of one slice.
        is_one_of_several: whether the gradient is a sum of several such products. Each is then
            added to `.grad` in one call (BLAS accumulates), without a product in memory.
    """

    is_flipped: bool
    dim: int
    slice_size: int
    is_one_of_several: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseEmbeddingGradient:
    """How to add an embedding's gradient to `.grad` without the rows that no token touches.

    Attributes:
        num_rows: upper limit on the number of touched rows: the number of tokens.
    """

    num_rows: int


@dataclass(eq=False)
class Op:
    """One call that makes storages.

    Attributes:
        index: position in `Graph.ops`.
        node: its fx node.
        reads: storages of its tensor arguments, static ones included.
        writes: storages that it makes.
        phase: when it must run.
        recompute_target: function that a recomputation calls. None: no recomputation.
        recompute_args: its arguments. None: those of the node. A result of the op itself among
            them stands for the part of the saved state that belongs to it.
        save_state: function that makes the saved state, a tensor with one item for each such
            result. It takes the list of them, then the node's arguments. None: no saved state.
        saved_state_bytes: bytes of the saved state.
        final_gradients: gradients that are final once the op has run, with their roles.
        gradient_sink_form: how its result is added to `.grad` in slices. None: as a whole.
        module: path of the submodule that ran it; "" for the root and for backward ops of unknown
            origin.
        is_random: whether it draws from the generator.
        in_place_operands: arguments whose memory the result can take if they die. None: unknown.
        keeps_order: whether it runs behind the one before it of which that is true, too.
    """

    index: int
    node: fx.Node
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    phase: Phase
    recompute_target: Any = None
    recompute_args: tuple[Any, ...] | None = None
    save_state: Any = None
    saved_state_bytes: int = 0
    final_gradients: list[tuple[fx.Node, Role]] = field(default_factory=list)
    gradient_sink_form: SlicedMatmul | SparseEmbeddingGradient | None = None
    module: str = ""
    is_random: bool = False
    in_place_operands: tuple[fx.Node, ...] | None = None
    keeps_order: bool = False

    @cached_property
    def call_key(self) -> Hashable:
        """Equal for ops with the same target, constants and tensor metadata."""
        return call_key(self.node.target, self.node.args, self.node.kwargs)

    @cached_property
    def saved_results(self) -> tuple[fx.Node, ...]:
        """Results of its first run that a recomputation needs."""
        return tuple(
            value
            for value in self.recompute_args or ()
            if isinstance(value, fx.Node) and value.args[:1] == (self.node,)
        )

    @property
    def recompute_state_bytes(self) -> int:
        """Bytes live from its first run to its last: its saved state, or the generator's state.

        The state of a CUDA generator is no tensor on the device and counts nothing.
        """
        has_cpu_state = self.is_random and self.device.type == "cpu"
        return CPU_STATE_BYTES if has_cpu_state else self.saved_state_bytes

    @property
    def name(self) -> str:
        """The node's name."""
        return self.node.name

    @property
    def is_recomputable(self) -> bool:
        """Whether it may run a second time."""
        return self.phase is not Phase.BACKWARD and self.recompute_target is not None

    @property
    def written_bytes(self) -> int:
        """Bytes of all storages that it makes."""
        return sum(storage.num_bytes for storage in self.writes)

    @property
    def device(self) -> torch.device:
        """The device of its first result."""
        results = as_tuple(self.node.meta["val"])
        return next(item.device for item in results if isinstance(item, torch.Tensor))

    @property
    def place(self) -> str:
        """The call and the submodule that ran it."""
        return f"{call_name(self.node)} in {self.module or 'the model'}"

    def __repr__(self) -> str:
        return f"Op({self.index}, {self.name})"


@dataclass(eq=False)
class Graph:
    """Ops and storages of one training step.

    Attributes:
        ops: forward, late and backward ops, in an order that respects every dependency.
        storages: all storages.
        inputs: placeholder and constant nodes with their roles.
        outputs: returned nodes with their roles.
        storage_of: the storage of each node that is a tensor.
        view_base: for each view, the node that it views.
        constants: tensors that belong to the graph itself, by name.
        initial_gradients: gradients that are final before any backward op runs, with their roles.
        num_in_flight: number of forwards that run before the backward of the first; the saved
            values of all of them are in memory together.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    inputs: tuple[tuple[fx.Node, Role], ...]
    outputs: tuple[tuple[fx.Node, Role], ...]
    storage_of: Mapping[fx.Node, Storage]
    view_base: Mapping[fx.Node, fx.Node]
    constants: Mapping[str, torch.Tensor]
    initial_gradients: tuple[tuple[fx.Node, Role], ...] = ()
    num_in_flight: int = 1

    @cached_property
    def externally_held(self) -> frozenset[Storage]:
        """Storages that their last read does not release: static ones, tangents and results."""
        return frozenset(s for s in self.storages if s.is_static or s.is_tangent or s.is_result)

    @cached_property
    def must_recompute(self) -> frozenset[Storage]:
        """Storages that must not be live across the border between forward and backward."""
        return frozenset(storage for storage in self.storages if storage.must_recompute)

    @cached_property
    def parameters(self) -> Mapping[str, Storage]:
        """Those of the parameters, by name."""
        kind = RoleKind.PARAMETER
        return {role.name: self.storage_of[n] for n, role in self.inputs if role.kind is kind}

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
    def forward_ops(self) -> tuple[Op, ...]:
        """Ops of the forward, in order."""
        return tuple(op for op in self.ops if op.phase is Phase.FORWARD)

    @cached_property
    def backward_ops(self) -> tuple[Op, ...]:
        """Late and backward ops, in order."""
        return tuple(op for op in self.ops if op.phase is not Phase.FORWARD)

    def with_order(self, ops: Sequence[Op]) -> Graph:
        """The graph with its ops in another order; their `index` changes in place."""
        for index, op in enumerate(ops):
            op.index = index
        return replace(self, ops=tuple(ops))

    def verify(self) -> None:
        """Asserts the invariants of the representation, which every pass keeps.

        Each storage has one producer, or is static or a tangent. Each op stands at its index, makes
        something, and reads only what stands before it. A forward op reads nothing of the backward.
        Each gradient of a parameter is final exactly once: with its producer, initially, or
        returned.
        """
        made = {storage for storage in self.storages if storage.is_static or storage.is_tangent}
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
                backward = [storage for storage in op.reads if _is_of_backward(storage)]
                assert not backward, f"forward {op} reads {backward} of the backward"
        assert made == set(self.storages), "a storage has no producer, or is none of the graph's"
        self._verify_gradients()

    def _verify_gradients(self) -> None:
        final = [pair for op in self.ops for pair in op.final_gradients]
        for op in self.ops:
            for node, _ in op.final_gradients:
                assert self.storage_of[node] in op.writes, f"{op} does not make {node}"
        for node, role in (*final, *self.initial_gradients):
            assert role.kind is RoleKind.PARAMETER_GRADIENT, f"{node} is no gradient of a parameter"
        gradients = [pair for pair in self.outputs if pair[1].kind is RoleKind.PARAMETER_GRADIENT]
        if final or self.initial_gradients:
            given = sorted(f"{node} {role}" for node, role in (*final, *self.initial_gradients))
            assert given == sorted(f"{node} {role}" for node, role in gradients), (
                "a gradient is final never or twice"
            )

    def __str__(self) -> str:
        lines = []
        for op in self.ops:
            reads = " ".join(storage.name for storage in op.reads if not storage.is_static)
            writes = " ".join(f"{storage.name}:{storage.num_bytes}" for storage in op.writes)
            call = f"{call_name(op.node)}({reads})"
            lines.append(f"{op.index:5d} {op.phase.value:8s} {writes} = {call}")
        return "\n".join(lines)


def _is_of_backward(storage: Storage) -> bool:
    return storage.is_tangent or storage.phase not in (None, Phase.FORWARD)
