"""The snapshot of a captured graph and of its chain of blocks.

`snapshot.py` defines the values. This file reads them from the graph, its fx nodes and its tensors.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx

from rockmate._torch.dispatch import is_op
from rockmate.capture.roles import Role, RoleKind
from rockmate.capture.signature import CallSignature
from rockmate.graph.blocks import BlockChain
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.graph.snapshot import (
    SnapshotBlock,
    SnapshotChain,
    SnapshotOp,
    SnapshotStorage,
    StepSnapshot,
    StorageKind,
)
from rockmate.ops.collectives import collective, groups_of, is_communication

_FRAME = re.compile(
    r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s*(?P<code>\S.*))?'
)


def snapshot_of(graph: Graph, call: CallSignature) -> StepSnapshot:
    """The snapshot of a captured step, which serves calls of a signature."""
    roles = {graph.storage_of[node]: role for node, role in graph.inputs}
    keywords = _keywords(call)
    aliases: dict[Storage, dict[str, None]] = {storage: {} for storage in graph.storages}
    for node, storage in graph.storage_of.items():
        aliases[storage][node.name] = None
    for node, role in graph.inputs:
        keyword = keywords.get(role.index) if role.kind is RoleKind.INPUT else None
        aliases[graph.storage_of[node]][role.path or keyword or _role_text(role)] = None
    storages = (
        SnapshotStorage(
            name=storage.name,
            kind=_kind(storage, roles.get(storage)),
            num_bytes=storage.num_bytes,
            aliases=tuple(name for name in aliases[storage] if name != storage.name),
            mark=storage.mark,
            mark_sources=storage.mark_sources,
        )
        for storage in graph.storages
    )
    # Equal layers share their stack traces.
    traces = {op.node.meta.get("stack_trace") or "" for op in graph.ops}
    source_of = {trace: _source(trace) for trace in traces}
    collectives = [op.node for op in graph.ops if is_communication(op.node.target)]
    names = dict.fromkeys(name for node in collectives for name in groups_of(node))
    groups = {name: number for number, name in enumerate(names)}  # names differ between ranks
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
        ops=tuple(_snapshot_op(op, source_of, groups) for op in graph.ops),
        num_in_flight=graph.num_in_flight,
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
    places = [torch.empty(0) for _ in call.tensors]  # a `PackedSequence` takes nothing else
    index_of = {id(place): index for index, place in enumerate(places)}
    _, given = call.structure.rebuild(places)
    return {index_of[id(each)]: name for name, each in given.items() if id(each) in index_of}


def _snapshot_op(op: Op, source_of: Mapping[str, str], groups: Mapping[str, int]) -> SnapshotOp:
    return SnapshotOp(
        name=op.name,
        call=call_text(op.node, groups),
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
    which = role.path or ".".join((str(role.index), *role.inner))
    return f"{role.kind.value.replace('_', ' ')} {which}"


def call_text(node: fx.Node, groups: Mapping[str, int]) -> str:
    """A call as text that is equal in all processes and on all ranks.

    Args:
        node: the call, with the fake values of its arguments.
        groups: number of each process group of a collective, by name.
    """
    given = {**dict(enumerate(node.args)), **node.kwargs}
    if is_communication(node.target):
        numbered = {name: f"group {groups[name]}" for name in groups_of(node)}
        for key, value in given.items():
            if isinstance(value, str):
                given[key] = numbered.get(value, value)
            elif node.target is collective and isinstance(value, list):
                sizes: list[Any] = [*value]  # of parts: each rank sends more to another one
                given[key] = sorted(sizes)
    arguments = [_value_text(given[index]) for index in range(len(node.args))]
    arguments += [f"{name}={_value_text(given[name])}" for name in sorted(node.kwargs)]
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
    if tensor.layout is not torch.strided:
        text += f" {tensor.layout}".replace("torch.", "")
    elif not tensor.is_contiguous():
        text += f" strides {list(tensor.stride())}"
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
