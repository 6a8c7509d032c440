"""Schedules held against the step that they are of."""

from __future__ import annotations

import functools
from dataclasses import replace

from rockmate.capture.signature import flatten_call
from rockmate.graph.ir import Graph
from rockmate.graph.snapshot import StepSnapshot
from rockmate.graph.snapshot_capture import snapshot_of
from rockmate.plan.faults import fault_of
from rockmate.schedule.schedule import Schedule, find_in_place


@functools.lru_cache(maxsize=8)
def _snapshot(graph: Graph, *, is_marked: bool) -> StepSnapshot:
    snapshot = snapshot_of(graph, flatten_call((), {})[1])
    if is_marked:
        return snapshot
    return replace(snapshot, storages=tuple(replace(each, mark="") for each in snapshot.storages))


def verify(graph: Graph, schedule: Schedule, *, keeps_marks: bool = True) -> None:
    """Asserts that a schedule computes the step of a graph, in place only where it may."""
    fault = fault_of(_snapshot(graph, is_marked=keeps_marks), schedule)
    assert not fault, fault
    assert schedule.in_place <= find_in_place(graph, *schedule.order)
