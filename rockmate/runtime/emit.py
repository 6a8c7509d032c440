"""Schedule -> forward and backward fx graphs.

The forward graph returns the model's outputs, the new values of buffers, and what the schedule keeps. The backward graph is written
in schedule order; recomputed ops are copies of their nodes. Generated code drops each name after its last use, so memory is
released exactly where the schedule's liveness says, without explicit frees. The backward takes its arguments in one list that it
empties (the boxed convention): a caller's argument tuple would keep everything alive.
"""

from __future__ import annotations

import enum
import operator
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rockmate._torch.graphs import boxed_module
from rockmate._torch.ops import is_op
from rockmate.capture.nodes import layout_of
from rockmate.capture.roles import Role, RoleKind
from rockmate.graph.in_place import in_place_call, reusable_operand
from rockmate.graph.ir import Graph, Op, SlicedMatmul, SparseEmbeddingGradient, Storage
from rockmate.ops.rng import exchange_state, keep_state
from rockmate.runtime.direct_call import call_directly
from rockmate.runtime.gradient_sink import (
    emit_embedding_gradient,
    emit_gradient,
    emit_sliced_matmul,
    fire_hooks,
)
from rockmate.schedule.schedule import Schedule, last_reads

_NAMESPACES = {"aten", "prims"}
_UPDATES = {RoleKind.BUFFER_UPDATE, RoleKind.INPUT_UPDATE}


class ArgumentKind(enum.Enum):
    """What an argument of an emitted graph is."""

    STATIC = "static"  # a parameter, buffer, input or constant
    TANGENT = "tangent"
    KEPT = "kept"  # a storage kept from the forward
    STATE = (
        "state"  # the random state before an op's first run, or what is kept of that for another
    )
    SINK = "sink"  # takes the parameter gradients


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of an emitted graph: a role of the joint graph, a kept storage, what an op needs to run again, or the sink."""

    kind: ArgumentKind
    what: Role | Storage | Op | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The planned step as two functions.

    Attributes:
        forward: takes the arguments of `forward_arguments` in one list; returns a tuple: the values of `results`, then those of `kept`.
        backward: takes the arguments of `backward_arguments` in one list, which it empties; returns the values of `gradients`.
        results: roles of what the forward returns first (outputs and updates).
        kept: what the forward returns after that, in this order, which is also that of the backward's arguments.
        held: places in `kept` of what the user holds too, being part of an output.
        gradients: roles of what the backward returns.
        delivered: names of the parameters whose gradients it hands over instead.
        constants: tensors that belong to the graphs themselves, by name.
        differentiable: indices of the outputs that have a gradient.
        layouts: for each input and tangent a fake tensor with the strides that the graphs rely on.
        runs_below_autograd: whether its ops need not pass autograd, which has nothing to do for them; others' own code may differentiate.
    """

    forward: Callable[[list[Any]], tuple[Any, ...]]
    backward: Callable[[list[Any]], tuple[Any, ...]]
    forward_arguments: tuple[Argument, ...]
    backward_arguments: tuple[Argument, ...]
    results: tuple[Role, ...]
    kept: tuple[Argument, ...]
    held: tuple[int, ...]
    gradients: tuple[Role, ...]
    delivered: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    differentiable: frozenset[int]
    layouts: Mapping[Role, torch.Tensor]
    runs_below_autograd: bool
    forward_code: str
    backward_code: str


def emit(graph: Graph, schedule: Schedule, owner_of: Mapping[str, str]) -> Program:
    """Writes the two graphs of a schedule.

    Args:
        graph: ops and storages.
        schedule: the order in which they run.
        owner_of: for each parameter's name that of the parameter it is tied to (its own if none); of the gradients that share
            such a name, only the last to arrive is final.
    """
    runs = Counter(schedule.steps)
    ends = last_reads(graph, schedule.forward, schedule.backward)
    recompute = {index for index, number in runs.items() if number > 1}
    forward = _Writer(graph, schedule, ends, recompute)
    for position, index in enumerate(schedule.forward):
        forward.run(graph.ops[index], position)
    backward_reads = _kept_storages(graph, schedule)
    kept = [Argument(ArgumentKind.KEPT, storage) for storage in backward_reads]
    states = [Argument(ArgumentKind.STATE, op) for op in forward.states if op.index in recompute]
    results = [
        (node, role)
        for node, role in graph.outputs
        if role.kind is RoleKind.OUTPUT or role.kind in _UPDATES
    ]
    shown = {graph.storage_of[node] for node, role in results if role.kind is RoleKind.OUTPUT}
    returned = [forward.value(node) for node, _ in results]
    returned += [forward.value(storage.root) for storage in backward_reads]
    returned += [forward.states[argument.what] for argument in states]  # pyright: ignore[reportArgumentType]
    forward.graph.output(tuple(returned))

    backward = _Writer(
        graph,
        schedule,
        ends,
        recompute,
        ran=forward.ran,
        gradient_sink_forms=_Handovers(graph, schedule, owner_of),
    )
    for argument in (*kept, *states):
        backward.take(argument)
    for node, role in graph.initial_gradients:
        backward.hand_over(node, role)
    for offset, index in enumerate(schedule.backward):
        backward.run(graph.ops[index], len(schedule.forward) + offset)
        backward.fire_hooks_after(offset)
    gradient_kinds = {RoleKind.INPUT_GRADIENT} | (
        {RoleKind.PARAMETER_GRADIENT} if _are_returned(graph) else set()
    )
    gradients = [(node, role) for node, role in graph.outputs if role.kind in gradient_kinds]
    backward.graph.output(tuple(backward.value(node) for node, _ in gradients))
    runs_below_autograd = all(_is_own(op.node.target) for op in graph.ops)
    forward_module, backward_module = _compile(forward.graph), _compile(backward.graph)
    return Program(
        forward=forward_module.forward,
        backward=backward_module.forward,
        forward_arguments=tuple(forward.arguments),
        backward_arguments=tuple(backward.arguments),
        results=tuple(role for _, role in results),
        kept=(*kept, *states),
        held=tuple(place for place, storage in enumerate(backward_reads) if storage in shown),
        gradients=tuple(role for _, role in gradients),
        delivered=tuple(dict.fromkeys(_delivery_order(graph, schedule))),
        constants=graph.constants,
        differentiable=frozenset(
            role.index for _, role in graph.inputs if role.kind is RoleKind.TANGENT
        ),
        layouts={
            role: node.meta["val"]
            for node, role in graph.inputs
            if role.kind in {RoleKind.INPUT, RoleKind.TANGENT}
        },
        runs_below_autograd=runs_below_autograd,
        forward_code=forward_module.code,
        backward_code=backward_module.code,
    )


def _is_own(target: Any) -> bool:
    """Whether it is an op of PyTorch or a function of this package."""
    return (
        target.namespace in _NAMESPACES if is_op(target) else isinstance(target, types.FunctionType)
    )


def _are_returned(graph: Graph) -> bool:
    """Whether parameter gradients are returned: then no op delivers any."""
    return not graph.initial_gradients and not any(op.final_gradients for op in graph.ops)


def _kept_storages(graph: Graph, schedule: Schedule) -> list[Storage]:
    """Storages of the forward that the backward reads before it makes them anew, in order of their making."""
    made: set[Storage] = set()
    read: dict[Storage, None] = {}
    for index in schedule.backward:
        op = graph.ops[index]
        read.update(
            {s: None for s in op.reads if s not in made and not s.is_static and not s.is_tangent}
        )
        made.update(op.writes)
    for node, role in graph.outputs:  # a gradient that is a value of the forward
        storage = graph.storage_of[node]
        if (
            role.kind in {RoleKind.INPUT_GRADIENT, RoleKind.PARAMETER_GRADIENT}
            and storage.producer
            and storage not in made
        ):
            read[storage] = None
    return sorted(read, key=lambda storage: storage.index)


def _compile(graph: fx.Graph) -> fx.GraphModule:
    call_directly(graph)
    return boxed_module(graph)


def _delivery_order(graph: Graph, schedule: Schedule) -> list[str]:
    """Names of parameters, once for each gradient that is handed over, in order."""
    order = [role.name for _, role in graph.initial_gradients]
    return order + [
        role.name for index in schedule.backward for _, role in graph.ops[index].final_gradients
    ]


class _Handovers:
    """Tells when the hooks of each parameter may fire: its gradients have all been handed over, and no run to come reads it.

    A hook may change the parameter (an optimizer inside the backward).
    """

    def __init__(self, graph: Graph, schedule: Schedule, owner_of: Mapping[str, str]) -> None:
        self._owner_of = owner_of
        self._left = Counter(owner_of[name] for name in _delivery_order(graph, schedule))
        last_sink_form = dict.fromkeys(self._left, -1)
        last_read = dict.fromkeys(self._left, -1)
        owner_at = {
            graph.storage_of[node]: owner_of[role.name]
            for node, role in graph.inputs
            if role.kind is RoleKind.PARAMETER
        }
        for position, index in enumerate(schedule.backward):
            op = graph.ops[index]
            last_sink_form.update({owner_of[role.name]: position for _, role in op.final_gradients})
            last_read.update(
                {owner_at[storage]: position for storage in op.reads if storage in owner_at}
            )
        self._read_later = {
            owner for owner, position in last_sink_form.items() if last_read[owner] > position
        }
        # The sink knows a parameter by the names of its gradients, which need not be the owner's.
        name_of = {owner_of[name]: name for name in _delivery_order(graph, schedule)}
        self._firing: dict[int, list[str]] = {}
        for owner in sorted(self._read_later):
            self._firing.setdefault(last_read[owner], []).append(name_of[owner])

    def is_final(self, name: str) -> bool:
        """Whether hooks fire with the next handover to the parameter of that name; to be asked once for each."""
        owner = self._owner_of[name]
        self._left[owner] -= 1
        return self._left[owner] == 0 and owner not in self._read_later

    def firing_after(self, position: int) -> Sequence[str]:
        """Parameters whose hooks fire after the run at that position of the backward, with nothing handed over."""
        return self._firing.get(position, ())


class _Writer:
    """Writes runs into one fx graph, keeping track of which node stands for which value now."""

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        ends: list[list[Storage]],
        recompute: Iterable[int],
        *,
        ran: Iterable[int] = (),
        gradient_sink_forms: _Handovers | None = None,
    ) -> None:
        self.source = graph
        self.schedule = schedule
        self.ends = ends
        self.recompute = set(recompute)
        self.ran = set(ran)
        self.gradient_sink_forms = gradient_sink_forms
        self.roles = dict(graph.inputs)
        self.graph = fx.Graph()
        self.arguments: list[Argument] = []
        self.states: dict[Op, fx.Node] = {}
        self.present: dict[fx.Node, fx.Node] = {}
        self.nodes_of: dict[Storage, list[fx.Node]] = {}
        self.last_placeholder: fx.Node | None = None
        self.sink: fx.Node | None = None
        self.updates = frozenset(graph.updates)

    def take(self, argument: Argument) -> fx.Node:
        """A new argument of this graph."""
        name = f"{argument.kind.value}_{len(self.arguments)}"
        if self.last_placeholder is None:
            with self.graph.inserting_before(next(iter(self.graph.nodes), None)):
                node = self.graph.placeholder(name)
        else:
            with self.graph.inserting_after(self.last_placeholder):
                node = self.graph.placeholder(name)
        self.last_placeholder = node
        self.arguments.append(argument)
        if argument.kind is ArgumentKind.KEPT:
            assert isinstance(argument.what, Storage)
            self._set(argument.what.root, node)
        elif argument.kind is ArgumentKind.STATE:
            assert isinstance(argument.what, Op)
            self.states[argument.what] = node
        return node

    def _set(self, node: fx.Node, value: fx.Node) -> None:
        self.present[node] = value
        value.meta["val"] = node.meta["val"]
        self.nodes_of.setdefault(self.source.storage_of[node], []).append(node)

    def value(self, node: fx.Node) -> fx.Node:
        """The node that stands for `node` of the joint graph now; views are taken anew where they are needed."""
        found = self.present.get(node)
        if found is not None:
            return found
        role = self.roles.get(node)
        if role is not None:
            kind = ArgumentKind.TANGENT if role.kind is RoleKind.TANGENT else ArgumentKind.STATIC
            value = self.take(Argument(kind, role))
        else:
            value = self._view(node)
        if node in self.source.storage_of:
            self._set(node, value)
        return value

    def _view(self, node: fx.Node) -> fx.Node:
        """Copies a view; a chain of them is walked without recursion by `value` of its base, which is short in practice."""
        assert node in self.source.view_base, f"{node} is not available here"
        root = self.source.storage_of[node].root if node in self.source.storage_of else None
        if root is not None and node.target is operator.getitem and node.args == root.args:
            return self.value(root)  # a second item node of one result
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        assert callable(node.target)
        return self.graph.call_function(node.target, args, kwargs)

    def run(self, op: Op, position: int) -> None:
        """One run of `op`: its call, its outputs, and the gradients that are final now."""
        is_recompute = op.index in self.ran
        self.ran.add(op.index)
        target: Any = op.recompute_target if is_recompute else op.node.target
        source = (
            op.recompute_args if is_recompute and op.recompute_args is not None else op.node.args
        )
        kept = (
            {
                node: self._item(self.states[op], place)
                for place, node in enumerate(op.saved_results)
            }
            if is_recompute
            else {}
        )
        args, kwargs = fx.map_arg(
            (source, op.node.kwargs), lambda node: kept[node] if node in kept else self.value(node)
        )
        if position in self.schedule.in_place:
            operand = reusable_operand(self.source, op, self.ends[position])
            assert operand is not None
            target, args, kwargs = in_place_call(op, operand, args, kwargs, self.value(operand))
        if op.gradient_sink_form is not None:
            self._hand_over_pieces(op, args)
            return
        present = None
        if op.is_random and is_recompute:
            present = self.graph.call_function(exchange_state, (op.device, self.states[op]))
        elif op.is_random and op.index in self.recompute:
            self.states[op] = self.graph.call_function(keep_state, (op.device,))
        self._publish(op, self.graph.call_function(target, args, kwargs))
        if present is not None:
            self.graph.call_function(exchange_state, (op.device, present))
        if op.saved_results and not is_recompute and op.index in self.recompute:
            results = [self.value(node) for node in op.saved_results]
            self.states[op] = self.graph.call_function(op.save_state, (results, *args))
        for node, role in op.final_gradients:
            self.hand_over(node, role)

    def _item(self, several: fx.Node, place: int) -> fx.Node:
        return self.graph.call_function(operator.getitem, (several, place))

    def _publish(self, op: Op, call: fx.Node) -> None:
        # Results and updates of buffers are the first run's. A recomputation need not return them.
        made = [
            storage
            for storage in op.writes
            if storage.root not in self.present
            or not (storage.is_result or storage in self.updates)
        ]
        for storage in made:
            for stale in self.nodes_of.pop(storage, ()):
                self.present.pop(stale, None)
        for storage in made:
            if storage.root is op.node:
                if isinstance(op.node.meta["val"], torch.Tensor):
                    self._set(op.node, call)
            else:
                item = self.graph.call_function(storage.root.target, (call, storage.root.args[1]))  # pyright: ignore[reportArgumentType]
                self._set(storage.root, item)

    def hand_over(self, node: fx.Node, role: Role) -> None:
        """Gives a parameter gradient to the sink."""
        value = self._sum_of_rows(node) or self.value(self._before_views_that_cancel(node))
        self.graph.call_function(
            emit_gradient, (self._sink(), value, role.name, self._is_final(role.name))
        )

    def _sum_of_rows(self, node: fx.Node) -> fx.Node | None:
        """The call that makes a gradient of one dimension, if that is a sum viewed without the others: they are not kept, then.

        The gradient of a bias is such a sum. None for any other gradient.
        """
        source = self.source.view_base.get(node)
        call = None if source is None else self.present.get(source)
        if (
            source is None
            or call is None
            or call.target is not torch.ops.aten.sum.dim_IntList
            or len(source.users) > 1
            or call.users
        ):
            return None
        dims, keeps_dims = call.args[1], call.args[2:] == (True,)
        if (
            not keeps_dims
            or not isinstance(dims, list)
            or node.meta["val"].ndim != 1
            or source.meta["val"].ndim - len(dims) != 1
        ):
            return None
        call.args = call.args[:2]
        del self.present[source]
        self._set(node, call)
        return call

    def _before_views_that_cancel(self, node: fx.Node) -> fx.Node:
        """The value that `node` is a view of with the very same layout, as the gradient of a linear layer's weight is, transposed twice."""
        found, fake = node, node.meta["val"]
        while not fake.is_complex() and (base := self.source.view_base.get(node)) is not None:
            node, other = base, base.meta["val"]
            if isinstance(other, torch.Tensor) and layout_of(other) == layout_of(fake):
                found = node
        return found

    def _hand_over_pieces(self, op: Op, args: tuple[Any, ...]) -> None:
        """Gives a gradient to the sink that is never made as a whole."""
        name = op.final_gradients[0][1].name
        whose = (name, self._is_final(name))
        match op.gradient_sink_form:
            case SlicedMatmul() as product:
                how = (
                    product.is_flipped,
                    product.dim,
                    product.slice_size,
                    product.is_one_of_several,
                )
                self.graph.call_function(emit_sliced_matmul, (self._sink(), *args, *whose, *how))
            case SparseEmbeddingGradient():
                self.graph.call_function(emit_embedding_gradient, (self._sink(), *args[:4], *whose))

    def _sink(self) -> fx.Node:
        if self.sink is None:
            self.sink = self.take(Argument(ArgumentKind.SINK, None))
        return self.sink

    def _is_final(self, name: str) -> bool:
        assert self.gradient_sink_forms is not None
        return self.gradient_sink_forms.is_final(name)

    def fire_hooks_after(self, position: int) -> None:
        """Fires what hooks had to wait for the run at `position` of the backward."""
        assert self.gradient_sink_forms is not None
        for name in self.gradient_sink_forms.firing_after(position):
            self.graph.call_function(fire_hooks, (self._sink(), name))
