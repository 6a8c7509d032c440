"""Makes a schedule keep marks: values that must not cross into the backward are made there.

Solvers and families propose schedules without a thought for marks. Each goes through
`with_marks_kept` before it is simulated. A marked value that is live at the border between forward
and backward is recomputed right before its first read in the backward, together with whatever of
its inputs is not in memory there. All else stays as it was, so a schedule that keeps the marks is
returned as it is.
"""

from __future__ import annotations

from bisect import bisect_left

from rockmate.graph.ir import Graph, Op, Storage
from rockmate.schedule.liveness import op_def_use
from rockmate.schedule.schedule import Schedule, finish


def with_marks_kept(graph: Graph, schedule: Schedule) -> Schedule:
    """The schedule with each marked value made in the backward before it is read there."""
    if not op_def_use(graph).must_recompute.any():
        return schedule
    writer = _Backward(graph, schedule)
    backward = writer.rewritten()
    return finish(graph, schedule.forward, backward) if writer.is_changed else schedule


class _Backward:
    """The backward of a schedule, written anew."""

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.is_changed = False
        self._ops = [graph.ops[index] for index in schedule.backward]
        self._made: set[Storage] = set()
        self._steps: list[int] = []
        # For each storage the positions at which it is made or read, and whether it is read there.
        self._events: dict[Storage, list[tuple[int, bool]]] = {}
        for position, op in enumerate(self._ops):
            for storage in op.reads:
                self._events.setdefault(storage, []).append((position, True))
            for storage in op.writes:
                self._events.setdefault(storage, []).append((position, False))

    def rewritten(self) -> list[int]:
        """The runs, with recomputations of marked values before their first reads."""
        for position, op in enumerate(self._ops):
            self._provide(op, position)
            self._steps.append(op.index)
            self._made.update(op.writes)
        return self._steps

    def _provide(self, op: Op, position: int) -> None:
        """Recomputes the marked values that an op reads and that the backward has not made yet."""
        missing = [s for s in op.reads if s.must_recompute and s not in self._made]
        if not missing:
            return
        self.is_changed = True
        inserted: set[Op] = set()
        pending = [storage.producer for storage in missing]
        while pending:
            maker = pending.pop()
            if maker is None or maker in inserted:
                continue
            inserted.add(maker)
            pending += [s.producer for s in maker.reads if not self._is_at_hand(s, position)]
        for maker in sorted(inserted, key=lambda each: each.index):
            self._steps.append(maker.index)
            self._made.update(maker.writes)

    def _is_at_hand(self, storage: Storage, position: int) -> bool:
        """Whether a value need not be recomputed to be read before the run at `position`."""
        maker = storage.producer
        if maker is None or storage.is_result or not maker.is_recomputable:
            return True
        if storage.must_recompute:
            return storage in self._made
        events = self._events.get(storage, [])
        if all(is_read for _, is_read in events):
            # The schedule never recomputes it, so the forward's value may live until here.
            return True
        place = bisect_left(events, (position, False))
        return place < len(events) and events[place][1]
