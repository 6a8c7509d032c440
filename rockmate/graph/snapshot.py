"""A captured step as plain values: the subject of a plan, of its file and of its reports.

A snapshot has no tensor and no fx node. It can be written to a file and compared with the snapshot
of another capture, on another machine. It has all that a plan depends on: the ops with their
constants, the shapes, strides and dtypes of their arguments, and their wiring through storages.
Views count by the shapes and strides in which ops read them. Names, module paths and source lines
are for readers and are not compared. Nor are device indices: a plan of `cuda:0` serves `cuda:1`.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rockmate._torch.ops import is_op
from rockmate.capture.roles import Role, RoleKind
from rockmate.capture.signature import CallSignature
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph, Op, Phase, Storage

_FRAME = re.compile(
    r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s*(?P<code>\S.*))?'
)
_NOT_COMPARED = {"name", "aliases", "module", "source"}


class StorageKind(StrEnum):
    """The use of a storage in the step. All kinds down to INPUT are static and never counted."""

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
        """Whether it is live throughout the step and never counted."""
        return self in (
            StorageKind.PARAMETER,
            StorageKind.BUFFER,
            StorageKind.CONSTANT,
            StorageKind.INPUT,
        )

    @property
    def is_result(self) -> bool:
        """Whether its receiver holds it until the step ends."""
        return self in (StorageKind.OUTPUT, StorageKind.RETURNED_GRADIENT)


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotStorage:
    """Memory that one or more tensors share.

    Attributes:
        name: of the node that makes it.
        kind: its use in the step.
        num_bytes: its size.
        aliases: names of the nodes that view it, and of its parameter, buffer or input.
    """

    name: str
    kind: StorageKind
    num_bytes: int
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOp:
    """One op.

    Attributes:
        name: of its node.
        call: its target with its arguments: constants as they are, tensors as dtype and shape, with
            strides if they are not contiguous.
        phase: "forward", "late" or "backward".
        reads: indices of the storages of its arguments.
        writes: indices of the storages that it makes.
        module: path of the submodule that ran it, empty if unknown.
        source: the user's line that called it, empty if unknown.
        is_recomputable: whether it may be recomputed.
        is_random: whether it draws from the generator.
        state_bytes: bytes of the state that a recomputation takes from the first run: that of the
            generator, or statistics and positions.
        final_gradients: names of the parameters whose gradients are final with it.
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

    @property
    def state_name(self) -> str:
        """The name of the state that `state_bytes` counts."""
        return "random state" if self.is_random else "saved state"


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotBlock:
    """One block of the chain.

    Attributes:
        name: the submodules that its ops come from.
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
        torch_version: the release family of PyTorch that captured it; not compared.
        call: the signature of the call, in words.
        inputs: (role, tensor) of each parameter, buffer, input and constant.
        outputs: (role, index of its storage) of each value that the step returns.
        updates: indices of the storages that are copied into a buffer or an input when the forward
            ends.
        storages: all storages.
        ops: all ops, in an order that respects every dependency.
    """

    torch_version: str
    call: str
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, int], ...]
    updates: tuple[int, ...]
    storages: tuple[SnapshotStorage, ...]
    ops: tuple[SnapshotOp, ...]

    @property
    def names(self) -> list[str]:
        """The ops' names, by index."""
        return [op.name for op in self.ops]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that is compared, without the call.

        Equal for equal steps, in every process and on every machine.
        """
        compared = [
            self.inputs,
            self.outputs,
            self.updates,
            *map(_compared, self.storages),
            *map(_compared, self.ops),
        ]
        return digest(compared)

    @cached_property
    def call_fingerprint(self) -> str:
        """Equal for equal calls: SHA-256 of the signature."""
        return digest(self.call)

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
        return self.is_wired_like(other) and all(
            mine.num_bytes >= theirs.num_bytes for mine, theirs in pairs
        )

    def is_wired_like(self, other: StepSnapshot) -> bool:
        """Whether `other` has the same ops in the same wiring, on tensors of any size."""
        if (
            len(self.ops) != len(other.ops)
            or len(self.storages) != len(other.storages)
            or self.outputs != other.outputs
        ):
            return False
        same_ops = all(
            _wiring(mine) == _wiring(theirs)
            for mine, theirs in zip(self.ops, other.ops, strict=True)
        )
        return same_ops and all(
            mine.kind == theirs.kind
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
        for index, (mine, theirs) in enumerate(zip(self.ops, other.ops, strict=False)):
            if _compared(mine) != _compared(theirs):
                where = f"op {index} ({theirs.name} in {theirs.module or 'no single submodule'})"
                if mine.call != theirs.call:
                    planned, present = f"\n  {mine.call}\n", f"\n  {theirs.call}\n"
                    return f"{where} is{planned}in the plan and{present}in this model"
                return f"{where}, {theirs.call}, reads, writes or serves other values than planned"
        if len(self.ops) != len(other.ops):
            return f"the plan's step has {len(self.ops)} ops and this model's {len(other.ops)}"
        for mine, theirs in zip(self.storages, other.storages, strict=False):
            if _compared(mine) != _compared(theirs):
                present = f"{theirs.kind.value} of {theirs.num_bytes:,} bytes"
                planned = f"{mine.kind.value} of {mine.num_bytes:,} bytes"
                return f"{theirs.name} is {present} and in the plan {planned}"
        return ""


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _compared(value: SnapshotStorage | SnapshotOp) -> dict[str, Any]:
    return {name: item for name, item in asdict(value).items() if name not in _NOT_COMPARED}


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


# --- from a captured graph ------------------------------------------------------------------------


def snapshot_of(graph: Graph, call: CallSignature) -> StepSnapshot:
    """The snapshot of a captured step.

    Args:
        graph: its ops and storages.
        call: signature of the calls that it serves.
    """
    roles = {graph.storage_of[node]: role for node, role in graph.inputs}
    keywords = _keywords(call)
    aliases: dict[Storage, dict[str, None]] = {storage: {} for storage in graph.storages}
    for node, storage in graph.storage_of.items():
        aliases[storage][node.name] = None
    for node, role in graph.inputs:
        keyword = keywords.get(role.index) if role.kind is RoleKind.INPUT else None
        aliases[graph.storage_of[node]][role.name or keyword or _role_text(role)] = None
    storages = (
        SnapshotStorage(
            name=storage.name,
            kind=_kind(storage, roles.get(storage)),
            num_bytes=storage.num_bytes,
            aliases=tuple(name for name in aliases[storage] if name != storage.name),
        )
        for storage in graph.storages
    )
    # Equal layers share their stack traces.
    traces = {op.node.meta.get("stack_trace") or "" for op in graph.ops}
    source_of = {trace: _source(trace) for trace in traces}
    return StepSnapshot(
        torch_version=".".join(torch.__version__.split(".")[:2]),
        call=_portable(str(call)),
        inputs=tuple(
            (_role_text(role), _tensor_text(node.meta["val"])) for node, role in graph.inputs
        ),
        outputs=tuple(
            (_role_text(role), graph.storage_of[node].index) for node, role in graph.outputs
        ),
        updates=tuple(storage.index for storage in graph.updates),
        storages=tuple(storages),
        ops=tuple(_snapshot_op(op, source_of) for op in graph.ops),
    )


def snapshot_chain(chain: BlockChain) -> SnapshotChain:
    """The blocks of a chain as plain values."""
    blocks = (
        SnapshotBlock(
            name=block.name,
            ops=tuple(op.index for op in (*block.forward, *block.backward)),
            input=block.input.index if block.input else None,
            output=block.output.index if block.output else None,
        )
        for block in chain.blocks
    )
    return SnapshotChain(
        blocks=tuple(blocks), carried=tuple(sorted(storage.index for storage in chain.carried))
    )


def _keywords(call: CallSignature) -> dict[int, str]:
    """Index of a keyword argument's tensor -> its keyword."""
    places = [object() for _ in call.tensors]
    _, given = call.structure.rebuild(places)
    return {
        places.index(value): name
        for name, value in given.items()
        if any(value is place for place in places)
    }


def _snapshot_op(op: Op, source_of: Mapping[str, str]) -> SnapshotOp:
    return SnapshotOp(
        name=op.name,
        call=_call_text(op.node),
        phase=op.phase.value,
        module=op.module,
        source=source_of[op.node.meta.get("stack_trace") or ""],
        reads=tuple(storage.index for storage in op.reads),
        writes=tuple(storage.index for storage in op.writes),
        is_recomputable=op.recompute_target is not None,
        is_random=op.is_random,
        state_bytes=op.recompute_state_bytes,
        final_gradients=tuple(role.name for _, role in op.final_gradients),
    )


def _kind(storage: Storage, role: Role | None) -> StorageKind:
    if role is not None:
        return StorageKind(role.kind.value)
    if storage.is_output:
        return StorageKind.OUTPUT
    if storage.is_kept_to_end:
        return StorageKind.RETURNED_GRADIENT
    assert storage.producer is not None, f"{storage} has neither a role nor a producer"
    return (
        StorageKind.GRADIENT if storage.producer.phase is Phase.BACKWARD else StorageKind.ACTIVATION
    )


def _role_text(role: Role) -> str:
    return f"{role.kind.value.replace('_', ' ')} {role.name or role.index}"


def _call_text(node: fx.Node) -> str:
    arguments = [_value_text(value) for value in node.args]
    arguments += [f"{name}={_value_text(value)}" for name, value in sorted(node.kwargs.items())]
    return _portable(f"{_target_text(node.target)}({', '.join(arguments)})")


def _target_text(target: Any) -> str:
    if is_op(target):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', str(target))}"


def _value_text(value: Any) -> str:
    if isinstance(value, fx.Node):
        fake = value.meta["val"]
        return _tensor_text(fake) if isinstance(fake, torch.Tensor) else "tensors"
    if isinstance(value, Mapping):
        return (
            f"{{{', '.join(f'{key}: {_value_text(item)}' for key, item in sorted(value.items()))}}}"
        )
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_value_text, value))}]"
    return repr(value)


def _tensor_text(tensor: torch.Tensor) -> str:
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    text += "" if tensor.is_contiguous() else f" strides {list(tensor.stride())}"
    return text if tensor.device.type == "cpu" else f"{text} on {tensor.device.type}"


def _portable(text: str) -> str:
    """The text without addresses and device indices, which differ between processes."""
    return re.sub(r"\b(cuda|xpu|mps):\d+", r"\1", re.sub(r" at 0x[0-9a-fA-F]+", "", text))


def _source(stack_trace: str) -> str:
    """The innermost frame of a stack trace, as `file:line in function: code`.

    The path is relative to its entry of `sys.path`.
    """
    frames = list(_FRAME.finditer(stack_trace))
    if not frames:
        return ""
    frame = frames[-1]
    path = Path(frame["path"])
    roots = [Path(root) for root in sys.path if root and path.is_relative_to(root)]
    if roots:
        path = path.relative_to(max(roots, key=lambda root: len(root.parts)))
    return f"{path.as_posix()}:{frame['line']} in {frame['function']}" + (
        f": {frame['code'].strip()}" if frame["code"] else ""
    )
