"""The joint graph with a role for each of its inputs and outputs: what a capture returns."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from rockmate._torch.dispatch import is_op
from rockmate._torch.graphs import module_without_code
from rockmate.capture.forward_attributes import NO_ATTRIBUTES, ForwardAttributes
from rockmate.capture.nodes import call_name, storage_ids
from rockmate.capture.read_values import NO_VALUES, ReadValues
from rockmate.capture.structure import Structure
from rockmate.capture.wrapping import Wrapping
from rockmate.ops.collectives import is_communication
from rockmate.ops.kernel_layouts import as_tuple, call_key
from rockmate.ops.rng import is_seed


class RoleKind(enum.Enum):
    """What an input or output of the joint graph stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    INPUT = "input"
    TANGENT = "tangent"
    OUTPUT = "output"
    BUFFER_UPDATE = "buffer_update"
    INPUT_UPDATE = "input_update"
    PARAMETER_GRADIENT = "parameter_gradient"
    INPUT_GRADIENT = "input_gradient"


@dataclass(frozen=True, slots=True)
class Role:
    """One input or output of the joint graph.

    Attributes:
        kind: what it stands for.
        name: of a parameter, buffer or constant.
        index: of any other, among the tensors of the call or of the output.
        inner: attributes that lead from the tensor of that name or index to the one that is meant,
            such as the integers of a quantized weight; empty if it is that tensor itself.
        wrapping: of a gradient that is a wrapper, how to wrap the tensor that the graph returns.
    """

    kind: RoleKind
    name: str = ""
    index: int = -1
    inner: tuple[str, ...] = ()
    wrapping: Wrapping | None = field(default=None, compare=False, repr=False)

    @property
    def path(self) -> str:
        """The name with the attributes behind it; empty for a role without a name."""
        return ".".join((self.name, *self.inner)) if self.name else ""


@dataclass(frozen=True, slots=True)
class Capture:
    """A joint graph and the meaning of its ends.

    Each node's `meta["module"]` is the path of the innermost submodule that ran it, or whose op it
    differentiates.

    Attributes:
        joint: the functional forward and backward in one graph.
        inputs: the role of each placeholder and of each constant tensor, in order.
        output_roles: the role of each value that the graph returns; None for the gradient of an
            input that needs none.
        constants: tensors that the model's code made of Python numbers, by name.
        output_structure: rebuilds the model's output from its tensors, in the order of
            `Role.index`.
        non_differentiable_outputs: indices of the outputs with a gradient in eager and none here.
        attributes: what the forward reads and leaves behind in attributes.
        read_values: values of tensors that it reads.
        num_checkpoints: number of calls in the forward that the model's code checkpoints.
        traced: the distinct calls of the joint graph before any pass; none where sizes are symbols.
    """

    joint: fx.GraphModule
    inputs: tuple[tuple[fx.Node, Role], ...]
    output_roles: tuple[Role | None, ...]
    constants: Mapping[str, torch.Tensor]
    output_structure: Structure
    non_differentiable_outputs: tuple[int, ...]
    attributes: ForwardAttributes = NO_ATTRIBUTES
    read_values: ReadValues = NO_VALUES
    num_checkpoints: int = 0
    traced: tuple[TracedCall, ...] = ()

    @property
    def outputs(self) -> tuple[tuple[fx.Node, Role], ...]:
        """Each value that the graph returns now, with its role."""
        returned: Any = self.joint.graph.output_node().args[0]
        return tuple(
            (node, role)
            for node, role in zip(returned, self.output_roles, strict=True)
            if role is not None
        )


def with_graph(capture: Capture, graph: fx.Graph, twins: Mapping[fx.Node, fx.Node]) -> Capture:
    """The capture on a copy of its graph. `twins` maps its nodes to their copies.

    No code is written for the copy, since it is never run.
    """
    joint = module_without_code(capture.joint, graph)
    return replace(
        capture, joint=joint, inputs=tuple((twins[node], role) for node, role in capture.inputs)
    )


def copied_capture(capture: Capture) -> Capture:
    """A copy of a capture with its own graph. The fake tensors are shared."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    returned = graph.graph_copy(capture.joint.graph, copies)
    graph.output(returned)
    return with_graph(capture, graph, copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedCall:
    """One call of an op that makes memory.

    Attributes:
        key: equal for calls of equal metadata.
        target: the op.
        args: its arguments, with fake tensors, and seeds as `Drawn`.
        kwargs: its keywords.
        results: its fake results.
        place: the op and the submodule that called it.
    """

    key: Hashable
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: Any
    place: str

    @property
    def cuda_devices(self) -> set[int]:
        """Indices of the GPUs of its results."""
        results = as_tuple(self.results)
        devices = [each.device for each in results if isinstance(each, torch.Tensor)]
        return {each.index or 0 for each in devices if each.type == "cuda"}


def traced_calls(graph: fx.Graph) -> tuple[TracedCall, ...]:
    """The distinct calls of a joint graph as it was traced, views left out.

    Passes replace and remove calls. What they leave is measured; these are all that autograd went
    by.
    """
    found = dict[Hashable, TracedCall]()
    for node in graph.nodes:
        if node.op != "call_function" or not is_op(node.target) or is_communication(node.target):
            continue
        made = set(storage_ids(node))
        if not made or any(not made.isdisjoint(storage_ids(read)) for read in node.all_input_nodes):
            continue
        key = call_key(node.target, node.args, node.kwargs)
        if key not in found:
            found[key] = TracedCall(
                key=key,
                target=node.target,
                args=fx.map_arg(node.args, _fake),
                kwargs=fx.map_arg(node.kwargs, _fake),
                results=node.meta["val"],
                place=f"{call_name(node)} in {node.meta.get('module') or 'the model'}",
            )
    return tuple(found.values())


class Drawn(NamedTuple):
    """A seed or an offset, as `ops.rng.is_seed` says.

    Attributes:
        target: the op that returns it.
        args: the op's arguments, with fake tensors.
        kwargs: its keywords.
        index: position among its results.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int


def _fake(node: fx.Node) -> Any:
    """A node's fake tensor, or the call that returns it where it has to run."""
    if not is_seed(node):
        return node.meta["val"]
    producer, index = node.args
    args, kwargs = fx.map_arg((producer.args, producer.kwargs), _fake)  # pyright: ignore
    return Drawn(producer.target, args, kwargs, index)  # pyright: ignore
