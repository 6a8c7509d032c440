"""TODO: graph.ir."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import call_name
from rockmate.capture.roles import Role, RoleKind
from rockmate.ops.rng import CPU_STATE_BYTES


def state_bytes(op: Op) -> int:
    """Bytes that an op needs of its first run to run again, as its device's allocator counts them: a random state, or what it has found."""
    return CPU_STATE_BYTES if op.is_random and op.device.type == "cpu" else op.state_bytes


FORWARD_ENDS = {RoleKind.OUTPUT, RoleKind.BUFFER_UPDATE, RoleKind.INPUT_UPDATE}
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
class SlicedMatmul:
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
class SparseEmbeddingGradient:
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
        save_state: makes what is kept of the first run for further ones, a tensor of `state_bytes` with an item for each such result;
            called with a list of them and the node's arguments. None if there is nothing.
        state_bytes: what that takes.
        final_gradients: gradients that are final once the op has run, and whose they are.
        gradient_sink_form: set where the op's result is added to `.grad` piece by piece instead of being made as a whole.
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
    save_state: Any = None
    state_bytes: int = 0
    final_gradients: list[tuple[fx.Node, Role]] = field(default_factory=list)
    gradient_sink_form: SlicedMatmul | SparseEmbeddingGradient | None = None
    module: str = ""
    is_random: bool = False
    in_place_operands: tuple[fx.Node, ...] | None = None

    @cached_property
    def call_key(self) -> Hashable:
        """Equal for ops with the same target, constants and tensor metadata."""
        return call_key(self.node.target, self.node.args, self.node.kwargs)

    @cached_property
    def saved_results(self) -> tuple[fx.Node, ...]:
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
    def is_recomputable(self) -> bool:
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
        initial_gradients: gradients that are final before any backward op runs.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    inputs: tuple[tuple[fx.Node, Role], ...]
    outputs: tuple[tuple[fx.Node, Role], ...]
    storage_of: Mapping[fx.Node, Storage]
    view_base: Mapping[fx.Node, fx.Node]
    constants: Mapping[str, torch.Tensor]
    initial_gradients: tuple[tuple[fx.Node, Role], ...] = ()

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
                f"{op.index:5d} {op.phase.value:8s} {writes} = {call_name(op.node)}({reads})"
            )
        return "\n".join(lines)


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
