"""A captured step as plain values: the subject of a plan, of its file and of its reports.

A snapshot has no tensor and no fx node. It can be written to a file and compared with the snapshot
of another capture, on another machine. It has everything that a plan depends on: ops with their
constants; shapes, strides and dtypes of their arguments; and the storages that ops read and write.
A view is recorded by the shape and strides in which an op reads it.

A comparison ignores names, module paths and source lines, which serve readers. It also ignores
device indices: a plan of `cuda:0` serves `cuda:1`. And it ignores the order of the trace, but where
that counts; see `snapshot_order.py`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cached_property
from typing import Any

from rockmate.graph.snapshot_order import CanonicalOrder, canonical_order
from rockmate.graph.step_options import StepOptions

_NOT_COMPARED = {"name", "aliases", "module", "source", "mark_sources"}
# Fields that are compared only where they are set, so that steps without them keep their
# fingerprint.
_COMPARED_IF_SET = {"mark"}


class StorageKind(StrEnum):
    """The use of a storage in the step. The kinds up to INPUT are static: no peak counts them."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    TANGENT = "tangent"
    OUTPUT = "output"
    RETURNED_GRADIENT = "returned gradient"
    ACTIVATION = "activation"
    GRADIENT = "gradient"

    @property
    def is_static(self) -> bool:
        """Whether the storage is live throughout the step. If so, no peak counts it."""
        return self in (
            StorageKind.PARAMETER,
            StorageKind.BUFFER,
            StorageKind.CONSTANT,
            StorageKind.INPUT,
        )

    @property
    def is_movable(self) -> bool:
        """Whether the step alone holds it."""
        return self in (StorageKind.ACTIVATION, StorageKind.GRADIENT)

    @property
    def is_result(self) -> bool:
        """Whether the receiver of the storage holds it until the step ends."""
        return self in (StorageKind.OUTPUT, StorageKind.RETURNED_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStorage:
    """Memory that one or more tensors share.

    Attributes:
        name: name of the node that writes it first.
        kind: its use in the step.
        num_bytes: its size.
        aliases: names of the nodes that view it, and of its parameter, buffer or input.
        mark: "save" or "recompute" if the user marks it, else empty.
        mark_sources: what asked for that: patterns, names, "policy", "checkpoint".
    """

    name: str
    kind: StorageKind
    num_bytes: int
    aliases: tuple[str, ...] = ()
    mark: str = ""
    mark_sources: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOp:
    """One op of the step.

    Attributes:
        name: name of its node.
        call: its target with its arguments. Constants are written out. A tensor is a dtype and a
            shape, with strides if it is not contiguous.
        phase: "forward", "late" or "backward".
        reads: indices of the storages of its arguments.
        writes: indices of the storages of its results.
        module: path of the submodule that ran it, empty if unknown.
        source: the user's line that called it, empty if unknown.
        is_recomputable: whether it may be recomputed.
        is_random: whether it draws from the generator.
        state_bytes: bytes of the state that a recomputation takes from the first run. It is the
            state of the generator, or statistics and positions.
        final_gradients: names of the parameters whose gradients are final after it.
    """

    name: str
    call: str
    phase: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    module: str = ""
    source: str = ""
    is_recomputable: bool = False
    is_random: bool = False
    state_bytes: int = 0
    final_gradients: tuple[str, ...] = ()

    @property
    def short_call(self) -> str:
        """The bare name of its target: "addmm" of "aten.addmm.default(...)"."""
        parts = self.call.partition("(")[0].split(".")
        return parts[1] if parts[0] == "aten" else parts[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlock:
    """One block of the chain.

    Attributes:
        name: the longest common path of the submodules of its forward ops.
        ops: indices of its ops, forward ones first.
        input: index of the storage that crosses the cut before it; None for the first block.
        output: index of the storage that crosses the cut after it; None for the last block.
    """

    name: str
    ops: tuple[int, ...]
    input: int | None
    output: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotChain:
    """The blocks in forward order, and the indices of the carried storages."""

    blocks: tuple[SnapshotBlock, ...]
    carried: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StepSnapshot:
    """A captured step as plain values.

    Attributes:
        torch_version: major and minor version of the capturing PyTorch; not compared.
        call: the signature of the call, in words.
        inputs: (role, tensor) of each parameter, buffer, input and constant.
        outputs: (role, index of its storage) of each value that the step returns.
        updates: indices of the storages that the end of the forward copies into a buffer or an
            input.
        storages: all storages.
        ops: all ops, in an order that respects every dependency.
        num_in_flight: number of forwards that run before the backward of the first.
    """

    torch_version: str
    call: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, int], ...]
    updates: tuple[int, ...]
    storages: tuple[SnapshotStorage, ...]
    ops: tuple[SnapshotOp, ...]
    num_in_flight: int = 1

    @property
    def names(self) -> list[str]:
        """The ops' names, by index."""
        return [op.name for op in self.ops]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all compared parts except the call.

        It is equal for equal steps, in every process and on every machine.
        """
        order = self.order
        place = {index: number for number, index in enumerate(order.storages)}
        compared: list[Any] = [
            sorted((re.sub(r"^constant .*", "constant", role), text) for role, text in self.inputs),
            sorted((role, place[storage]) for role, storage in self.outputs),
            sorted(place[storage] for storage in self.updates),
            *(_compared(self.storages[index]) for index in order.storages),
        ]
        for index in order.ops:
            op = self.ops[index]
            renumbered = {
                "reads": [place[storage] for storage in op.reads],
                "writes": [place[storage] for storage in op.writes],
                "origin": order.origins[index],
            }
            compared.append(_compared(op) | renumbered)
        if self.num_in_flight > 1:
            compared.append(self.num_in_flight)
        return digest(compared)

    @cached_property
    def order(self) -> CanonicalOrder:
        """An order of ops and storages that equal steps share."""
        return canonical_order(self)

    @cached_property
    def call_fingerprint(self) -> str:
        """SHA-256 of the signature of the call."""
        return digest(self.call)

    def text(self, options: StepOptions) -> str:
        """Tells the step and its options."""
        return f"{self.fingerprint} {self.call_fingerprint} {options.to_json()}"

    def difference(self, other: StepSnapshot) -> str:
        """How `other` differs from this one, in words; empty if a plan for one serves the other."""
        if self.call != other.call:
            return f"the plan is for calls like\n  {self.call}\nand the sample is\n  {other.call}"
        if self.fingerprint == other.fingerprint:
            return ""
        found = (
            self._different_inputs(other)
            or self._different_ops(other)
            or "the two steps differ in what they return or keep"
        )
        if self.torch_version != other.torch_version:
            found += f". The plan was made with PyTorch {self.torch_version}"
            found += f", and this is {other.torch_version}"
        return found

    def serves_smaller(self, other: StepSnapshot) -> bool:
        """Whether `other` is wired like this one and no tensor of it has more bytes.

        A schedule for this step then serves `other`.
        """
        pairs = zip(self.storages, other.storages, strict=False)
        is_larger = all(mine.num_bytes >= theirs.num_bytes for mine, theirs in pairs)
        return is_larger and self.is_wired_like(other)

    def is_wired_like(self, other: StepSnapshot) -> bool:
        """Whether `other` has the same ops in the same wiring, on tensors of any size."""
        if (
            len(self.ops) != len(other.ops)
            or len(self.storages) != len(other.storages)
            or self.outputs != other.outputs
            or self.num_in_flight != other.num_in_flight
        ):
            return False
        same_ops = all(
            _wiring(mine) == _wiring(theirs)
            for mine, theirs in zip(self.ops, other.ops, strict=True)
        )
        return same_ops and all(
            mine.kind == theirs.kind and mine.mark == theirs.mark
            for mine, theirs in zip(self.storages, other.storages, strict=True)
        )

    def _different_inputs(self, other: StepSnapshot) -> str:
        mine, theirs = dict(self.inputs), dict(other.inputs)
        for what in {**mine, **theirs}:
            if mine.get(what) != theirs.get(what):
                planned, present = mine.get(what, "absent"), theirs.get(what, "absent")
                return f"{what} is {planned} in the plan and {present} in this model"
        return ""

    def _different_ops(self, other: StepSnapshot) -> str:
        mine, theirs = _without_twin(self, other), _without_twin(other, self)
        if theirs:
            op = other.ops[theirs[0]]
            where = f"op {theirs[0]} ({op.name} in {op.module or 'no single submodule'})"
            if mine and self.ops[mine[0]].call != op.call:
                planned, present = f"\n  {self.ops[mine[0]].call}\n", f"\n  {op.call}\n"
                return f"{where} is{planned}in the plan and{present}in this model"
            return f"{where}, {op.call}, reads, writes or serves other values than planned"
        if self.num_in_flight != other.num_in_flight:
            return (
                f"the plan is for {self.num_in_flight} forwards in flight, and "
                f"{other.num_in_flight} are asked for"
            )
        if len(self.ops) != len(other.ops):
            return f"the plan's step has {len(self.ops)} ops and this model's {len(other.ops)}"
        return self._different_storages(other)

    def _different_storages(self, other: StepSnapshot) -> str:
        pairs = zip(self.order.storages, other.order.storages, strict=False)
        for mine, theirs in ((self.storages[i], other.storages[k]) for i, k in pairs):
            if _compared(mine) != _compared(theirs):
                if mine.mark != theirs.mark:
                    return (
                        f"{theirs.name} is marked {theirs.mark or 'by nothing'!r} and in the plan "
                        f"{mine.mark or 'by nothing'!r}"
                    )
                present = f"{theirs.kind.value} of {theirs.num_bytes:,} bytes"
                planned = f"{mine.kind.value} of {mine.num_bytes:,} bytes"
                why = " (PYTORCH_CUDA_ALLOC_CONF decides, too)" if mine.kind == theirs.kind else ""
                return f"{theirs.name} is {present} and in the plan {planned}{why}"
        return ""


def _without_twin(step: StepSnapshot, other: StepSnapshot) -> list[int]:
    """Indices of the ops that compute what no op of the other step computes."""
    left = Counter(other.order.origins)
    left.subtract(step.order.origins)
    return [index for index, origin in enumerate(step.order.origins) if left[origin] < 0]


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _compared(value: SnapshotStorage | SnapshotOp) -> dict[str, Any]:
    names = (each.name for each in fields(value) if each.name not in _NOT_COMPARED)
    found = {name: getattr(value, name) for name in names}
    return {name: item for name, item in found.items() if item or name not in _COMPARED_IF_SET}


def _wiring(op: SnapshotOp) -> tuple[Any, ...]:
    """An op without the sizes of its tensors."""
    return (
        op.short_call,
        op.phase,
        op.reads,
        op.writes,
        op.is_recomputable,
        op.is_random,
        op.final_gradients,
    )
