"""A group of ops as a function of its own: what is compiled, and what tells equal groups.

Views between ops of a group, and views of its inputs, go inside. So inputs and results are whole
storages, and views of results stay in the joint graph.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from rockmate._torch.inductor import Layout
from rockmate.capture.nodes import call_name
from rockmate.fusion.groups import Group
from rockmate.graph.ir import Graph, Op, Phase, Storage
from rockmate.ops.kernels import dropout_apply, keep_scale

_DIGEST_LENGTH = 8


@dataclass(frozen=True, eq=False, kw_only=True)
class Subgraph:
    """A group as a function.

    Attributes:
        group: the group.
        module: the function, on the roots of `inputs`; it returns the roots of `results`.
        inputs: storages that it reads.
        results: storages that it makes and others read, the largest first.
    """

    group: Group
    module: fx.GraphModule
    inputs: tuple[Storage, ...]
    results: tuple[Storage, ...]

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layout of each input."""
        return tuple(layout(storage.root.meta["val"]) for storage in self.inputs)

    @cached_property
    def result_layouts(self) -> tuple[Layout, ...]:
        """The layout of each result, as captured."""
        return tuple(layout(storage.root.meta["val"]) for storage in self.results)

    @cached_property
    def kind(self) -> str:
        """Equal for the same ops in the same wiring, at any sizes."""
        return _digest(self._text(lambda value: "_" if type(value) is int else value))

    @cached_property
    def key(self) -> str:
        """Equal for the same ops on the same layouts, in every process; begins with the kind."""
        text = self._text(lambda value: value)
        return self.kind + _digest(f"{text} {self.layouts} {self.result_layouts}")

    def _text(self, constant: Callable[[Any], Any]) -> str:
        names: dict[fx.Node, str] = {}

        def written(value: Any) -> Any:
            return _Name(names[value]) if isinstance(value, fx.Node) else constant(value)

        lines = []
        for node in self.module.graph.nodes:
            names[node] = f"v{len(names)}"
            target = call_name(node) if node.op == "call_function" else node.op
            lines.append(f"{target} {map_aggregate((node.args, node.kwargs), written)}")
        return "\n".join(lines)

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the ops inside, in order."""
        ops = sorted([*self.group.absorbed, *self.group.ops], key=lambda op: op.index)
        return tuple(call_name(op.node) for op in ops)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_LENGTH]


class _Name(str):
    """A name that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def layout(tensor: torch.Tensor) -> Layout:
    """Shape, strides, dtype and device of a tensor."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def subgraph_of(
    graph: Graph, group: Group, group_of: Mapping[Op, Group], absorbing: Mapping[Op, list[Group]]
) -> Subgraph | None:
    """The function of a group; None if nothing outside of it reads a result.

    Others are known by the group of each op and by the groups that absorb an op.
    """
    returned = {graph.storage_of[node] for node, _ in graph.outputs}
    results = [
        storage
        for op in group.ops
        for storage in op.writes
        if storage in returned
        or any(
            other is not group and (other is None or op not in other.absorbed)
            for reader in graph.readers.get(storage, ())
            for other in (group_of.get(reader), *absorbing.get(reader, ()))
        )
    ]
    if not results:
        return None
    results.sort(key=lambda storage: -storage.num_bytes)
    copied = _Copy(graph, group)
    for op in sorted([*group.absorbed, *group.ops], key=lambda op: op.index):
        copied.add(op)
    copied.target.output(tuple(copied.of(storage.root) for storage in results))
    module = fx.GraphModule(torch.nn.Module(), copied.target)
    return Subgraph(group=group, module=module, inputs=tuple(copied.inputs), results=tuple(results))


class _Copy:
    """Copies the calls of a group into a graph of its own."""

    def __init__(self, graph: Graph, group: Group) -> None:
        self.target = fx.Graph()
        self.inputs: list[Storage] = []
        self._graph = graph
        self._inside = {storage for op in (*group.ops, *group.absorbed) for storage in op.writes}
        self._copies: dict[fx.Node, fx.Node] = {}
        self._last_input: fx.Node | None = None

    def add(self, op: Op) -> None:
        """Copies an op."""
        self._copies[op.node] = self._call(op.node)
        for storage in op.writes:
            if storage.root is not op.node:
                item = self.target.call_function(
                    operator.getitem, (self._copies[op.node], storage.root.args[1])
                )
                self._copies[storage.root] = item

    def of(self, node: fx.Node) -> fx.Node:
        """The copy of a value: a result, an input, or a view of one."""
        if node not in self._copies:
            storage = self._graph.storage_of.get(node)
            if storage is None:  # several views, as of `split`
                self._copies[node] = self._call(node)
            elif storage.root is node:
                assert storage not in self._inside, f"{node} is read before it is made"
                self._copies[node] = self._input(storage)
            elif node.target is operator.getitem and node.args == storage.root.args:
                self._copies[node] = self.of(storage.root)
            else:
                self._copies[node] = self._call(node)
        return self._copies[node]

    def _input(self, storage: Storage) -> fx.Node:
        self.inputs.append(storage)
        after = self._last_input
        with self.target.inserting_after(after) if after else self.target.inserting_before():
            placeholder = self.target.placeholder(f"x{len(self.inputs)}")
        self._last_input = placeholder
        return placeholder

    def _call(self, node: fx.Node) -> fx.Node:
        target: Any = node.target
        args: Any
        kwargs: Any
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.of)
        if target is not dropout_apply:
            return self.target.call_function(target, args, kwargs)
        values, mask, probability, *rest = args
        scale = keep_scale(probability, node.meta["val"].dtype)
        return self.target.call_function(apply_mask, (values, mask, scale, *rest), kwargs)


def apply_mask(
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """`dropout_apply` in ops that a compiler knows, with the scale as a number."""
    masked = values * mask * scale
    return masked if memory_format is None else masked.contiguous(memory_format=memory_format)


def has_dead_operand(graph: Graph, subgraph: Subgraph, storage: Storage) -> bool:
    """Whether the last read of an input may be this group's, so that its memory can be taken."""
    if storage.is_static or storage.is_tangent or storage.is_result:
        return False
    last = max(op.index for op in subgraph.group.ops)
    return all(reader.index <= last for reader in graph.readers[storage])


def same_memory(storage: Storage, result: Storage) -> bool:
    """Whether a result fits the memory of an input, element by element."""
    mine, theirs = storage.root.meta["val"], result.root.meta["val"]
    are_dense = mine.is_contiguous() and theirs.is_contiguous()
    is_alike = are_dense and mine.dtype == theirs.dtype and mine.device == theirs.device
    return (
        (is_alike or layout(mine) == layout(theirs))
        and storage.num_bytes == result.num_bytes
        and mine.storage_offset() == theirs.storage_offset() == 0
        and mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes()
    )


def takeable(graph: Graph, subgraph: Subgraph) -> int | None:
    """Position of the input whose memory the first result may take, a gradient if there is one."""
    result = subgraph.results[0]
    found = (
        position
        for position, storage in enumerate(subgraph.inputs)
        if same_memory(storage, result) and has_dead_operand(graph, subgraph, storage)
    )
    inputs, backward = subgraph.inputs, Phase.BACKWARD
    return min(found, key=lambda at: inputs[at].phase is not backward, default=None)
