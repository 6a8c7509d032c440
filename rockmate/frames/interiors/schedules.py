"""The schedules of one captured step that are worth running, by what each holds.

A step whose backward follows at once needs a small peak. A frame waits for its backward while
other frames run, so what it holds until then counts most. `checkmate` finds the sets of values to
save for each level of saved bytes, and the default search adds schedules with small peaks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from rockmate.capture.roles import RoleKind
from rockmate.costs.cost import Costs
from rockmate.frames.interiors.gradients import casts_of
from rockmate.frames.needs import ScheduleCost
from rockmate.graph.ir import Graph, Op, Storage
from rockmate.planning.form import Form
from rockmate.planning.search_problem import StoppingRule
from rockmate.planning.starts import KnapsackFamily
from rockmate.planning.step import CapturedStep
from rockmate.schedule.schedule import Schedule, baseline_schedule
from rockmate.schedule.simulate import simulate

_MOST_SCHEDULES = 32
_MOST_SAVED_SETS = 24
_NUM_BUDGETS = 6
"""How many peaks, from the least to the largest, are searched for."""
_SECONDS = 5.0
"""Limit of the search."""
_GAP = 0.01
"""To the bound, at which the search ends."""


class PricedSchedule(NamedTuple):
    """A schedule and what it costs."""

    cost: ScheduleCost
    schedule: Schedule


class PlannedSchedules:
    """The schedules of all insides of one structure, planned once. Their trials add up.

    Attributes:
        costs: of each schedule, of rising seconds; a trial changes them.
        schedules: in the same order.
    """

    def __init__(self, step: CapturedStep, costs: Costs) -> None:
        """Plans.

        Args:
            step: the inside of a frame; gradients are returned.
            costs: of its ops.
        """
        found = [_priced(step.graph, each, costs) for each in _schedules(step, costs)]
        kept = _worth_running(found)
        self.costs = [each.cost for each in kept]
        self.schedules = [each.schedule for each in kept]
        self._eager_s = self._fastest_s = math.inf

    @property
    def was_tried(self) -> bool:
        """Whether it has run, so that its time is known."""
        return math.isfinite(self._fastest_s)

    def take(self, *, eager_s: float, fastest_s: float) -> None:
        """Takes seconds of forward and backward, as in eager and by the first schedule."""
        self._eager_s = min(self._eager_s, eager_s)
        self._fastest_s = min(self._fastest_s, fastest_s)
        more_s = self._fastest_s - self._eager_s - self.costs[0].seconds
        self.costs[:] = [replace(each, seconds=each.seconds + more_s) for each in self.costs]


def structure_of(graph: Graph) -> Hashable:
    """Equal for graphs of equal calls, which run by the same schedules."""
    return tuple([(_kind_of(op), *map(_use_of, (*op.reads, *op.writes))) for op in graph.ops])


def _kind_of(op: Op) -> Hashable:
    is_recomputed = op.recompute_target is not None
    return op.call_key, op.phase, is_recomputed, len(op.reads), len(op.final_gradients)


def _use_of(storage: Storage) -> Hashable:
    number = -1 if storage.is_static else storage.index
    return number, storage.num_bytes, storage.is_result, storage.is_output, storage.must_recompute


def _schedules(step: CapturedStep, costs: Costs) -> Iterator[Schedule]:
    graph, form = step.graph, Form(step, costs, StoppingRule(_GAP, _SECONDS))
    yield baseline_schedule(graph)
    yield from KnapsackFamily(graph, form.blocks, costs).spread(_MOST_SAVED_SETS)
    search = form.local_search
    least, most = search.minimum().peak_bytes, form.baseline.peak_bytes
    budgets = {least + (most - least) * each // _NUM_BUDGETS for each in range(_NUM_BUDGETS)}
    for candidate in search.best_within_each(sorted(budgets)).values():
        yield candidate.schedule


def _priced(graph: Graph, schedule: Schedule, costs: Costs) -> PricedSchedule:
    simulation = simulate(graph, schedule, costs)
    num_forward = len(schedule.forward)
    read = {storage for index in schedule.backward for storage in graph.ops[index].reads}
    outputs = [each for each in graph.storages if each.is_output]
    output_bytes = sum(each.num_bytes for each in outputs)
    read_output_bytes = sum(each.num_bytes for each in outputs if each in read)
    gradient_bytes = sum(each.num_bytes for each in graph.storages if each.is_tangent)
    live = simulation.live_bytes
    # The simulation has all outputs and their gradients live to the end.
    running_bytes = max(live[num_forward:], default=0) - output_bytes - gradient_bytes
    returned_bytes, added_bytes = _returned_bytes(graph)
    cast_bytes = sum(each.nbytes for _, each in casts_of(graph).values())  # those of autocast
    times_ms, recomputed = costs.recompute_arrays.time_ms, schedule.recomputed_positions()
    cost = ScheduleCost(
        held_bytes=max(0, simulation.saved_bytes - output_bytes),
        read_output_bytes=read_output_bytes,
        forward_bytes=max(live[:num_forward], default=0) + cast_bytes,
        backward_bytes=max(running_bytes, returned_bytes),
        added_bytes=added_bytes,
        output_gradient_bytes=gradient_bytes,
        recompute_s=float(sum(times_ms[schedule.steps[at]] for at in recomputed)) / 1e3,
        seconds=simulation.time_ms / 1e3,
    )
    return PricedSchedule(cost, schedule)


def _returned_bytes(graph: Graph) -> tuple[int, int]:
    """Bytes when the backward has ended, and with a parameter's gradient added to another.

    All gradients that it returns are there while autograd adds up one of them. It may have to make
    a third tensor for that, since the other one's memory, or this one's, may have further readers.
    An argument may always have readers elsewhere. The gradient of a cast is cast to the type of the
    parameter.
    """
    inputs, parameters = (
        [node.meta["val"].nbytes for node, role in graph.outputs if role.kind is kind]
        for kind in (RoleKind.INPUT_GRADIENT, RoleKind.PARAMETER_GRADIENT)
    )
    kept_bytes = sum(each.num_bytes for each in graph.storages if each.is_kept_to_end)
    kept_bytes += max([parameter.nbytes for parameter, _ in casts_of(graph).values()], default=0)
    most_of_inputs = max(inputs, default=0)
    return kept_bytes + most_of_inputs, kept_bytes + max(parameters, default=most_of_inputs)


def _worth_running(priced: Iterable[PricedSchedule]) -> list[PricedSchedule]:
    """Those that no faster one betters in all bytes; so many at most, first and last included."""
    kept: list[PricedSchedule] = []
    taken: list[tuple[int, int, int]] = []
    for each in sorted(priced, key=lambda each: each.cost.seconds):
        mine = each.cost.held_bytes, each.cost.forward_bytes, each.cost.backward_bytes
        if not any(all(map(operator.le, known, mine)) for known in taken):
            kept.append(each)
            taken.append(mine)
    if len(kept) <= _MOST_SCHEDULES:
        return kept
    step = (len(kept) - 1) / (_MOST_SCHEDULES - 1)
    return [kept[round(step * number)] for number in range(_MOST_SCHEDULES)]
