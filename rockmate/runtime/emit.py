"""Schedule -> forward and backward functions.

The forward returns the model's outputs, the updated values of buffers and inputs, and the saved
values. The backward runs its ops in schedule order; a recomputed op is a copy of its node.

Generated code drops each name after its last use. So memory is released exactly where the
schedule's liveness says, without explicit frees. The backward takes its arguments in one list that
it empties, the boxed calling convention: the caller's argument tuple would keep them all alive.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from rockmate._torch.dispatch import is_op
from rockmate.capture.roles import Role, RoleKind
from rockmate.capture.wrapping import Wrapping
from rockmate.graph.build import FUNCTIONAL_BATCH_NORM
from rockmate.graph.chunking.calls import HALF_PRECISION
from rockmate.graph.ir import FORWARD_ENDS, Graph, Phase, Storage
from rockmate.graph.snapshot_capture import call_text
from rockmate.ops.collectives import groups_of, is_communication
from rockmate.ops.convolutions import input_gradient
from rockmate.ops.fused import FusedOp
from rockmate.runtime.direct_call import compiled
from rockmate.runtime.graph_writer import GraphWriter, HookSchedule, accumulated_names
from rockmate.runtime.program import Argument, ArgumentKind, Moved, PlannedLayouts, Program
from rockmate.runtime.results import Gradients, Results
from rockmate.runtime.undefined_tangents import variants_of
from rockmate.schedule.flights import Flights
from rockmate.schedule.move import MoveEvent, PlacedEvent, placed_events, plan_slots
from rockmate.schedule.offload_request import OffloadRequest
from rockmate.schedule.schedule import Schedule, last_reads

# Namespaces of PyTorch's own ops.
_NAMESPACES = {"aten", "prims"}
_NO_FLIGHTS = Flights()
_aten = torch.ops.aten


def emit(
    graph: Graph,
    schedule: Schedule,
    owner_of: Mapping[str, str],
    flights: Flights = _NO_FLIGHTS,
    offload: OffloadRequest | None = None,
) -> Program:
    """Writes the two functions of a schedule.

    Args:
        graph: ops and storages.
        schedule: the order in which ops run.
        owner_of: parameter name -> name of the parameter that it is tied to, its own if none. Of
            the gradients that share an owner, only the last one is final.
        flights: collectives that run beside other ops.
        offload: where values move; None if none does.
    """
    recomputed = frozenset(schedule.steps[place] for place in schedule.recomputed_positions())
    ends = last_reads(graph, *schedule.order)
    saved_storages = _saved_storages(graph, schedule)
    results = [(node, role) for node, role in graph.outputs if role.kind in FORWARD_ENDS]
    outputs = {graph.storage_of[node] for node, role in results if role.kind is RoleKind.OUTPUT}
    forward = GraphWriter(graph, schedule, ends, recomputed, flights=flights)
    saved = _write_forward(forward, [node for node, _ in results], saved_storages)
    hooks = HookSchedule(graph, schedule, owner_of, flights)
    backward = GraphWriter(
        graph, schedule, ends, recomputed,
        has_run=forward.has_run, hook_schedule=hooks, flights=flights,
    )  # fmt: skip
    gradients = _returned_gradients(graph)
    _write_backward(backward, saved, [node for node, _ in gradients])
    uncounted = frozenset(at for at, (node, _) in enumerate(results) if _is_running_statistic(node))
    tangents = frozenset(role.index for _, role in graph.inputs if role.kind is RoleKind.TANGENT)
    without = variants_of(backward.graph, tuple(backward.arguments), backward.sources)
    return Program(
        forward=compiled(forward.graph, forward.arguments),
        backward=compiled(backward.graph, backward.arguments),
        backward_without=without,
        results=Results([role for _, role in results], uncounted, tangents),
        gradients=Gradients(
            [role for _, role in gradients],
            _own_gradients(gradients, saved_storages, graph.storage_of),
            tuple(dict.fromkeys(accumulated_names(graph, schedule))),
            _wrappings(graph),
        ),
        recomputes=bool(recomputed),
        product_dtypes=_product_dtypes(graph),
        saved=tuple(saved),
        saved_outputs=tuple(at for at, each in enumerate(saved_storages) if each in outputs),
        collectives=_collectives(graph, schedule, flights),
        constants=graph.constants,
        layouts=_layouts(graph),
        runs_below_autograd=all(_is_own(op.node.target) for op in graph.ops),
        num_in_flight=graph.num_in_flight,
        moved=_moved(graph, schedule, offload),
    )


def _is_running_statistic(node: fx.Node) -> bool:
    """Whether a value is what a batch normalization makes of its running mean or variance."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    is_made = isinstance(source, fx.Node) and source.target is FUNCTIONAL_BATCH_NORM
    return is_made and node.args[1] in (3, 4)


def _product_dtypes(graph: Graph) -> frozenset[torch.dtype]:
    """See `Program.product_dtypes`. Sums over chunks of half precision are wider here alone."""
    nodes = [op.node for op in graph.ops if op.phase is Phase.BACKWARD]
    products = [each for each in nodes if each.target in _PRODUCTS]
    own = (each for each in products if not all(map(_is_widened, each.all_input_nodes[-2:])))
    return frozenset(d for d in (each.meta["val"].dtype for each in own) if d.is_floating_point)


def _is_widened(factor: Any) -> bool:
    is_cast = factor.target == _aten._to_copy.default
    return is_cast and factor.args[0].meta["val"].dtype in HALF_PRECISION


def _layouts(graph: Graph) -> PlannedLayouts:
    """The layout of each input of the call and of each tangent whose readers rely on it."""
    kinds = {RoleKind.INPUT, RoleKind.TANGENT}
    fakes = {
        role: node.meta["val"]
        for node, role in graph.inputs
        if role.kind in kinds and not _has_any_strides(node)
    }
    return PlannedLayouts(fakes)


_PRODUCTS = {
    _aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default,
    _aten._trilinear.default,
}  # fmt: skip
# A convolution lays a gradient out itself, and takes the bias's gradient of what it was given.
_OF_ANY_STRIDES = {
    _aten.mm.default, _aten.sum.dim_IntList, _aten.convolution_backward.default, input_gradient,
}  # fmt: skip


def _has_any_strides(matrix: fx.Node) -> bool:
    """Whether what its readers make lies alike for all strides, by which these ops round."""
    return all(
        _has_any_strides(reader)
        if reader.target is _aten.t.default
        else reader.target in _OF_ANY_STRIDES
        or (reader.target is _aten.addmm.default and reader.args[0] is not matrix)
        for reader in matrix.users
    )


def _wrappings(graph: Graph) -> dict[str, Wrapping]:
    return {
        role.name: role.wrapping
        for _, role in graph.outputs
        if role.kind is RoleKind.PARAMETER_GRADIENT and role.wrapping is not None
    }


def _collectives(graph: Graph, schedule: Schedule, flights: Flights) -> tuple[tuple[str, str], ...]:
    """The collectives of a schedule in their order; see `Program.collectives`.

    A reduction of a replicated shard is two: over the ranks that share the whole, and over those
    with the same part.
    """
    steps = schedule.steps
    nodes = [graph.ops[steps[position]].node for position in flights.issue_order(schedule)]
    running = [(node, groups_of(node)) for node in nodes if is_communication(node.target)]
    return tuple(
        (call_text(node, dict.fromkeys(groups, 0)), group)
        for node, groups in running
        for group in groups
    )


def _write_forward(
    writer: GraphWriter, results: Sequence[fx.Node], saved_storages: Sequence[Storage]
) -> list[Argument]:
    """Writes the forward; returns the arguments by which the backward takes its further results."""
    events, num_runs = _events(writer.schedule, is_forward=True), len(writer.schedule.forward)
    for position in range(num_runs):
        for placed in events.get(position, ()):
            writer.move(placed)
        writer.run(position)
    for placed in events.get(num_runs, ()):
        writer.move(placed)
    values = [Argument(ArgumentKind.SAVED, storage) for storage in saved_storages]
    recomputed = [op for op in writer.states if op.index in writer.recomputed]
    returned = [writer.value(node) for node in results]
    returned += [writer.value(storage.root) for storage in saved_storages]
    returned += [writer.states[op] for op in recomputed]
    writer.graph.output(tuple(returned))
    return values + [Argument(ArgumentKind.STATE, op) for op in recomputed]


def _write_backward(
    writer: GraphWriter, saved: Sequence[Argument], gradients: Sequence[fx.Node]
) -> None:
    source, schedule = writer.source, writer.schedule
    for argument in saved:
        writer.argument(argument)
    for node, role in source.initial_gradients:
        writer.emit_gradient(node, role)
    events = _events(schedule, is_forward=False)
    for offset, position in enumerate(range(len(schedule.forward), len(schedule.steps))):
        for placed in events.get(position, ()):
            writer.move(placed)
        writer.run(position)
        writer.fire_hooks_after(offset)
    writer.graph.output(tuple(writer.value(node) for node in gradients))


def _events(schedule: Schedule, *, is_forward: bool) -> dict[int, list[PlacedEvent]]:
    """The events of moves and fetches in one half of a schedule, in their order, by their gap."""
    found: dict[int, list[PlacedEvent]] = {}
    for placed in placed_events(schedule.copies):
        if placed.is_in_forward(len(schedule.forward)) == is_forward:
            found.setdefault(placed.gap, []).append(placed)
    return found


def _moved(graph: Graph, schedule: Schedule, offload: OffloadRequest | None) -> Moved:
    if not schedule.copies:
        return Moved(offload=offload)
    sizes = [graph.storages[move.storage].num_bytes for move in schedule.moves]
    roles = {graph.storage_of[node].index: role for node, role in graph.inputs if role.name}
    fetched = tuple(roles[each.storage] for each in schedule.fetches)
    return Moved(plan_slots(schedule.moves, sizes), fetched, offload)


def _returned_gradients(graph: Graph) -> list[tuple[fx.Node, Role]]:
    """The gradients that the backward returns: those of parameters only if none is accumulated."""
    kinds = {RoleKind.INPUT_GRADIENT}
    if not graph.initial_gradients and not any(op.final_gradients for op in graph.ops):
        kinds.add(RoleKind.PARAMETER_GRADIENT)
    return [(node, role) for node, role in graph.outputs if role.kind in kinds]


def _own_gradients(
    gradients: Sequence[tuple[fx.Node, Role]],
    saved: Sequence[Storage],
    storage_of: Mapping[fx.Node, Storage],
) -> frozenset[int]:
    storages = [storage_of[node] for node, _ in gradients]
    numbers = Counter(storages)
    others = set(saved)
    return frozenset(
        place
        for place, storage in enumerate(storages)
        if numbers[storage] == 1 and storage.producer is not None and storage not in others
    )


def _saved_storages(graph: Graph, schedule: Schedule) -> list[Storage]:
    """Storages that the backward reads before it writes them, in the order of their first write."""
    fetched = {each.storage for each in schedule.fetches}
    written: set[Storage] = set()
    saved: set[Storage] = set()
    num_forward = len(schedule.forward)
    events = _events(schedule, is_forward=False)
    for position, index in enumerate(schedule.backward, start=num_forward):
        for placed in events.get(position, ()):
            moved = graph.storages[schedule.copies[placed.index].storage]
            if placed.event is MoveEvent.FETCH:
                written.add(moved)
            elif moved not in written:
                saved.add(moved)
        op = graph.ops[index]
        saved.update(
            storage
            for storage in op.reads
            if storage not in written
            and not storage.is_tangent
            and (not storage.is_static or storage.index in fetched)
        )
        written.update(op.writes)
    for node, role in graph.outputs:
        # A gradient may be a value of the forward.
        storage = graph.storage_of[node]
        is_gradient = role.kind in {RoleKind.INPUT_GRADIENT, RoleKind.PARAMETER_GRADIENT}
        if is_gradient and storage.producer and storage not in written:
            saved.add(storage)
    return sorted(saved, key=lambda storage: storage.index)


def _is_own(target: Any) -> bool:
    """Whether a call target is an op of PyTorch or a function of this package."""
    if is_op(target):
        return target.namespace in _NAMESPACES
    return isinstance(target, types.FunctionType | FusedOp)
