"""Writes the ops of a schedule into an fx graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict
from itertools import chain, takewhile
from typing import Any

import torch
from torch import fx

from rockmate.capture.nodes import layout_of, sums_of
from rockmate.capture.roles import Role, RoleKind
from rockmate.graph.in_place import in_place_call, reusable_operand
from rockmate.graph.ir import Graph, Op, SlicedMatmul, SparseEmbeddingGradient, Storage
from rockmate.ops.kernels import as_strided
from rockmate.ops.rng import exchange_random_state, get_random_state
from rockmate.ops.shards import REDUCE, finish, issue_gather
from rockmate.runtime.program import Argument, ArgumentKind
from rockmate.schedule.flights import Flights
from rockmate.schedule.move import MoveEvent, PlacedEvent
from rockmate.schedule.schedule import Schedule

_SINK, _MOVES = Argument(ArgumentKind.SINK, None), Argument(ArgumentKind.MOVES, None)


class GraphWriter:
    """One fx graph in the making. It knows which of its nodes holds each value at present.

    Attributes:
        source: the joint graph. Its nodes name the values.
        schedule: the order of ops.
        recomputed: indices of the ops that run more than once.
        has_run: indices of the ops that have run, in the forward too.
        graph: what is written.
        arguments: of `graph` in order, each with its placeholder.
        states: op -> node that holds what its first run saves for its recomputation.
        sources: node of `graph` -> node of the source whose value it holds.
    """

    def __init__(
        self,
        source: Graph,
        schedule: Schedule,
        ends: Sequence[Sequence[Storage]],
        recomputed: AbstractSet[int],
        *,
        has_run: AbstractSet[int] = frozenset(),
        hook_schedule: HookSchedule | None = None,
        flights: Flights,
    ) -> None:
        """Begins an empty graph.

        `ends` has the storages that are read last at each position of the schedule;
        `hook_schedule` says when hooks fire, and is None in the forward.
        """
        self.source, self.schedule = source, schedule
        self.recomputed, self.has_run = recomputed, set(has_run)
        self.graph = fx.Graph()
        self.arguments: dict[Argument, fx.Node] = {}
        self.states: dict[Op, fx.Node] = {}
        self.sources: dict[fx.Node, fx.Node] = {}
        self._ends, self._hook_schedule, self._flights = ends, hook_schedule, flights
        # Position of a collective in flight -> the call that has issued it.
        self._issued: dict[int, fx.Node] = {}
        self._roles = dict(source.inputs)
        # Node of the source -> node of `graph` that holds its value at present.
        self._holders: dict[fx.Node, fx.Node] = {}
        # Storage -> nodes of the source in it that have a holder.
        self._held_in: dict[Storage, list[fx.Node]] = {}

    def argument(self, argument: Argument) -> fx.Node:
        """The placeholder of an argument; one that is new stands behind the others."""
        if argument in self.arguments:
            return self.arguments[argument]
        name = f"{argument.kind.value}_{len(self.arguments)}"
        if self.arguments:
            place = self.graph.inserting_after(next(reversed(self.arguments.values())))
        else:
            place = self.graph.inserting_before(next(iter(self.graph.nodes), None))
        with place:
            node = self.arguments[argument] = self.graph.placeholder(name)
        if argument.kind is ArgumentKind.SAVED:
            assert isinstance(argument.source, Storage)
            self._hold(argument.source.root, node)
        elif argument.kind is ArgumentKind.STATE:
            assert isinstance(argument.source, Op)
            self.states[argument.source] = node
        return node

    def value(self, node: fx.Node) -> fx.Node:
        """The node that holds the value of a node of the source. Views are taken on demand."""
        holder = self._holders.get(node)
        if holder is not None:
            return holder
        role = self._roles.get(node)
        fetched = (each.storage for each in self.schedule.fetches)
        if role is not None and self.source.storage_of[node].index in fetched:
            root = self.source.storage_of[node].root  # a tied weight has several names
            assert node is not root, f"{role.name} is read where it is at home"
            return self.value(root)
        if role is not None:
            kind = ArgumentKind.TANGENT if role.kind is RoleKind.TANGENT else ArgumentKind.STATIC
            holder = self.argument(Argument(kind, role))
        else:
            holder = self._view(node)
        if node in self.source.storage_of:
            self._hold(node, holder)
        return holder

    def run(self, position: int) -> None:
        """Writes the run at a position, and issues and waits of others around it.

        A run is its call, its results, and the gradients that are complete now.
        """
        for ahead in self._flights.issued_before.get(position, ()):
            op = self._op_at(ahead)
            _, args, kwargs = self._call_of(op, is_recompute=op.index in self.has_run)
            self._issued[ahead] = self.graph.call_function(issue_gather, args, kwargs)
        self._run(self._op_at(position), position)
        for awaited in self._flights.awaited_after.get(position, ()):
            self._finish(awaited)

    def _finish(self, position: int) -> None:
        """Writes the wait for a collective that is issued, and what follows its call."""
        op = self._op_at(position)
        self._hold_results(op, self.graph.call_function(finish, (self._issued.pop(position),)))
        self._emit_gradients(op)

    def _op_at(self, position: int) -> Op:
        return self.source.ops[self.schedule.steps[position]]

    def _run(self, op: Op, position: int) -> None:
        is_recompute = op.index in self.has_run
        self.has_run.add(op.index)
        if position in self._issued:
            self._finish(position)
            return
        target, args, kwargs = self._call_of(op, is_recompute=is_recompute)
        if position in self.schedule.in_place:
            operand = reusable_operand(self.source, op, self._ends[position])
            assert operand is not None
            target, args, kwargs = in_place_call(op, operand, args, kwargs, self.value(operand))
        if op.gradient_sink_form is not None:
            self._emit_without_whole(op, args)
            return
        if self._hook_schedule and op.node in self._hook_schedule.first_sums:
            name = self._hook_schedule.first_sums[op.node]
            first = self.graph.call_method("continued", (self.argument(_SINK), name, args[0]))
            first.meta["val"] = op.node.meta["val"]
            if kwargs.get("out") is args[0]:
                kwargs = kwargs | {"out": first}
            args = (first, *args[1:])
        if op.node.target is REDUCE:
            args = (self.argument(_SINK), _reduced_names(self.source, op), *args)
            if self._flights.is_awaited_later(position):
                self._issued[position] = self.graph.call_method("issue", args, kwargs)
                return
            self._hold_results(op, self.graph.call_method("reduce", args, kwargs))
            self._emit_gradients(op)
            return
        present_state = None
        if op.is_random and is_recompute:
            present_state = self.graph.call_function(
                exchange_random_state, (op.device, self.states[op])
            )
        elif op.is_random and op.index in self.recomputed:
            self.states[op] = self.graph.call_function(get_random_state, (op.device,))
        self._hold_results(op, self.graph.call_function(target, args, kwargs))
        if present_state is not None:
            self.graph.call_function(exchange_random_state, (op.device, present_state))
        if op.saved_results and not is_recompute and op.index in self.recomputed:
            results = [self.value(node) for node in op.saved_results]
            self.states[op] = self.graph.call_function(op.save_state, (results, *args))
        self._emit_gradients(op)

    def _emit_gradients(self, op: Op) -> None:
        for node, role in op.final_gradients:
            self.emit_gradient(node, role)

    def move(self, placed: PlacedEvent) -> None:
        """Writes an event of a move, or of a fetch."""
        storage = self.source.storages[self.schedule.copies[placed.index].storage]
        moves, index = self.argument(_MOVES), placed.index
        match placed.event:
            case MoveEvent.SEND:
                self.graph.call_method("send", (moves, self.value(storage.root), index))
            case MoveEvent.SENT:
                self.graph.call_method("sent", (moves, self.value(storage.root), index))
                self._forget(storage)
            case MoveEvent.FETCH:
                self._forget(storage)
                self._hold(storage.root, self.graph.call_method("fetch", (moves, index)))
            case MoveEvent.FETCHED:
                coming = (moves, self.value(storage.root), index)
                self._forget(storage)
                self._hold(storage.root, self.graph.call_method("fetched", coming))

    def emit_gradient(self, node: fx.Node, role: Role) -> None:
        """Writes the call that accumulates a parameter's gradient."""
        value = self._sum_without_kept_dims(node) or self.value(self._same_layout_base(node))
        is_final: dict[str, Any] = {"is_final": self._is_final(role.name)}
        self.graph.call_method("accumulate", (self.argument(_SINK), role.name, value), is_final)

    def fire_hooks_after(self, position: int) -> None:
        """Writes the calls that fire hooks after the op at a position of the backward."""
        assert self._hook_schedule is not None
        for name in self._hook_schedule.names_after.get(position, ()):
            self.graph.call_method("fire_hooks", (self.argument(_SINK), name))

    def _hold(self, node: fx.Node, holder: fx.Node) -> None:
        self._holders[node] = holder
        self.sources[holder] = node
        holder.meta["val"] = node.meta["val"]
        self._held_in.setdefault(self.source.storage_of[node], []).append(node)

    def _view(self, node: fx.Node) -> fx.Node:
        """Copies a view. `value` walks the chain of its bases by recursion; chains are short."""
        assert node in self.source.view_base, f"{node} is not available here"
        root = self.source.storage_of[node].root if node in self.source.storage_of else None
        if root is not None and node.target is operator.getitem and node.args == root.args:
            # A second item node of one result.
            return self.value(root)
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.value)
        target: Any = node.target
        if target is torch.ops.aten.as_strided.default:
            base: Any = node.args[0]
            target = as_strided if base.meta["val"].is_contiguous() else target
        return self.graph.call_function(target, args, kwargs)

    def _call_of(self, op: Op, *, is_recompute: bool) -> tuple[Any, Any, Any]:
        """Target and arguments of a run. A recomputation may have its own, with saved results."""
        if not is_recompute:
            args, kwargs = fx.map_arg((op.node.args, op.node.kwargs), self.value)
            return op.node.target, args, kwargs
        items = [
            self.graph.call_function(operator.getitem, (self.states[op], index))
            for index in range(len(op.saved_results))
        ]
        saved = dict(zip(op.saved_results, items, strict=True))
        source = op.node.args if op.recompute_args is None else op.recompute_args
        args, kwargs = fx.map_arg(
            (source, op.node.kwargs),
            lambda node: saved[node] if node in saved else self.value(node),
        )
        return op.recompute_target, args, kwargs

    def _hold_results(self, op: Op, call: fx.Node) -> None:
        # Results and updates of buffers are the first run's. A recomputation need not return them.
        written = [
            storage
            for storage in op.writes
            if storage.root not in self._holders
            or not (storage.is_result or storage in self.source.updates)
        ]
        for storage in written:
            self._forget(storage)
        for storage in written:
            root: Any = storage.root
            if root is op.node:
                if isinstance(root.meta["val"], torch.Tensor):
                    self._hold(root, call)
            else:
                item = self.graph.call_function(root.target, (call, root.args[1]))
                self._hold(root, item)

    def _forget(self, storage: Storage) -> None:
        """Forgets which nodes hold the storage's values: they are stale, or gone."""
        for stale in self._held_in.pop(storage, ()):
            self._holders.pop(stale, None)

    def _sum_without_kept_dims(self, node: fx.Node) -> fx.Node | None:
        """Lets a sum drop the dimensions that a view of it drops, and returns the sum.

        The gradient of a bias is viewed so. None for any other gradient.
        """
        source = self.source.view_base.get(node)
        call = None if source is None else self._holders.get(source)
        if source is None or call is None or call.target is not torch.ops.aten.sum.dim_IntList:
            return None
        if len(source.users) > 1 or call.users:
            return None
        dims, keeps_dims = call.args[1], call.args[2:] == (True,)
        if not keeps_dims or not isinstance(dims, list):
            return None
        if node.meta["val"].ndim != 1 or source.meta["val"].ndim - len(dims) != 1:
            return None
        call.args = call.args[:2]
        del self._holders[source]
        self._hold(node, call)
        return call

    def _same_layout_base(self, node: fx.Node) -> fx.Node:
        """The value of which `node` is a view in the very same layout; else `node` itself.

        The gradient of a linear layer's weight is such a view: transposed twice.
        """
        found, fake = node, node.meta["val"]
        while not fake.is_complex() and (base := self.source.view_base.get(node)) is not None:
            node, other = base, base.meta["val"]
            if isinstance(other, torch.Tensor) and layout_of(other) == layout_of(fake):
                found = node
        return found

    def _emit_without_whole(self, op: Op, args: tuple[Any, ...]) -> None:
        """Writes the call that accumulates a gradient which never exists as a whole."""
        name = op.final_gradients[0][1].name
        owner: tuple[Any, ...] = (self.argument(_SINK), name)
        is_final: dict[str, Any] = {"is_final": self._is_final(name)}
        match op.gradient_sink_form:
            case SlicedMatmul() as form:
                self.graph.call_method(
                    "accumulate_matmul", (*owner, *args), is_final | asdict(form)
                )
            case SparseEmbeddingGradient():
                self.graph.call_method("accumulate_embedding", (*owner, *args[:4]), is_final)

    def _is_final(self, name: str) -> bool:
        assert self._hook_schedule is not None
        return self._hook_schedule.is_final(name)


def _reduced_names(graph: Graph, op: Op) -> tuple[str, ...]:
    """The parameters of which an op reduces the gradients, in the order of its arguments.

    The gradient of a tied one may be a sum of several that are reduced.
    """
    roles = {
        node: role.name for node, role in graph.outputs if role.kind is RoleKind.PARAMETER_GRADIENT
    }
    items: dict[Any, fx.Node] = {user.args[1]: user for user in op.node.users}
    gradients: Any = op.node.args[0]
    return tuple(_name_of(items.get(index), roles) for index in range(len(gradients)))


def _name_of(result: fx.Node | None, roles: Mapping[fx.Node, str]) -> str:
    waiting = [] if result is None else [result]
    for node in waiting:
        if node in roles:
            return roles[node]
        waiting += node.users
    return ""


def accumulated_names(graph: Graph, schedule: Schedule) -> list[str]:
    """The parameter name of each gradient that the backward accumulates, in order."""
    names = [role.name for _, role in graph.initial_gradients]
    for index in schedule.backward:
        names += [role.name for _, role in graph.ops[index].final_gradients]
    return names


def _first_sum(gradient: fx.Node) -> fx.Node | None:
    """The first of the additions whose result is a gradient, and which nothing else reads."""
    sums = [*takewhile(lambda each: len(each.users) == 1, sums_of(gradient))]
    return sums[-1] if sums else None


class HookSchedule:
    """Positions in the backward at which the hooks of each parameter may fire.

    They may fire once all partial gradients are accumulated and no later op reads the parameter. A
    hook may change the parameter, as an optimizer inside the backward does. Where the order counts,
    they also wait for those before them.

    Attributes:
        names_after: by position of an op, parameters whose hooks fire after it, without a gradient.
        first_sums: addition of the first two gradients of a parameter -> its name, where the graph
            adds up all of them.
    """

    def __init__(
        self, graph: Graph, schedule: Schedule, owner_of: Mapping[str, str], flights: Flights
    ) -> None:
        names = accumulated_names(graph, schedule)
        self._owner_of = owner_of
        self._num_left = Counter(owner_of[name] for name in names)
        last_gradient = dict.fromkeys(self._num_left, -1)
        last_read = dict.fromkeys(self._num_left, -1)
        owner_at = {
            graph.storage_of[node]: owner_of[role.name]
            for node, role in graph.inputs
            if role.kind is RoleKind.PARAMETER
        }
        for position, index in enumerate(schedule.backward):
            op = graph.ops[index]
            place = len(schedule.forward) + position
            # A reduction hands its gradients over where it is awaited.
            is_later = flights.is_awaited_later(place)
            wait = flights.other_end[place] - len(schedule.forward) if is_later else position
            for _, role in op.final_gradients:
                owner = owner_of[role.name]
                last_gradient[owner] = max(last_gradient[owner], wait)
            for storage in op.reads:
                if storage in owner_at:
                    last_read[owner_at[storage]] = position
        hooked = chain.from_iterable(op.final_gradients for op in graph.ops if op.keeps_order)
        ranked = [owner_of[role.name] for _, role in sorted(hooked, key=operator.itemgetter(0))]
        latest = -1  # of hooks that fire before in eager
        for owner in ranked:
            latest = max(latest, last_gradient[owner], last_read[owner])
            last_read[owner] = latest
        self._read_later = {
            owner for owner, position in last_gradient.items() if last_read[owner] > position
        }
        self.first_sums = {
            first: role.name
            for node, role in chain.from_iterable(op.final_gradients for op in graph.ops)
            if self._num_left[owner_of[role.name]] == 1 and (first := _first_sum(node))
        }
        # The sink knows a parameter by the names of its gradients. The owner's need not be among
        # them.
        name_of = {owner_of[name]: name for name in names}
        self.names_after: dict[int, list[str]] = {}
        for owner in dict.fromkeys((*ranked, *sorted(self._read_later))):
            if owner not in self._read_later:
                continue
            self.names_after.setdefault(last_read[owner], []).append(name_of[owner])

    def is_final(self, name: str) -> bool:
        """Whether hooks fire with the next gradient of that name; to be asked once for each."""
        owner = self._owner_of[name]
        self._num_left[owner] -= 1
        return self._num_left[owner] == 0 and owner not in self._read_later
