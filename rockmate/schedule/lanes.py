"""The time of a schedule with moves: three lanes that run side by side.

Runs take the compute lane, copies out and copies back a lane each, in the order in which they are
issued. An issue takes no time; a wait holds the compute lane until its copy has ended. A copy back
begins behind its own copy out, which its place in the order makes certain.

Lanes slow each other down: while both directions copy, each keeps `Link.duplex` of its rate, and
while anything is copied, runs take `Link.slowdown` times as long. Between two changes of what is
busy, all rates are constant, so the replay is exact for this model of the machine. A link with one
lane has one queue for both directions, which is what one thread does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rockmate.costs.cost import Link
from rockmate.schedule.move import Fetch, Move, MoveEvent, placed_events

# Rest of a copy that counts as done, in milliseconds: sums of floats do not end at zero.
_EPSILON_MS = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReplay:
    """The time of a schedule with moves.

    Attributes:
        time_ms: from the start of the first run until the last has ended.
        sent_waits_ms: for each move the time that the step waits for its copy out.
        fetched_waits_ms: the same for its copy back.
    """

    time_ms: float
    sent_waits_ms: tuple[float, ...]
    fetched_waits_ms: tuple[float, ...]

    @property
    def waited_ms(self) -> float:
        """All waits together."""
        return sum(self.sent_waits_ms) + sum(self.fetched_waits_ms)


def replay(
    times_ms: Sequence[float], moves: Sequence[Move | Fetch], num_bytes: Sequence[int], link: Link
) -> LaneReplay:
    """Replays runs of these times by themselves, and moves and fetches of so many bytes."""
    lanes = _Lanes(link)
    until = [0.0]
    for time_ms in times_ms:
        until.append(until[-1] + time_ms)
    waits = [0.0] * len(moves), [0.0] * len(moves)
    gap = 0
    for placed in placed_events(moves):
        lanes.compute(until[placed.gap] - until[gap])
        gap, index = placed.gap, placed.index
        match placed.event:
            case MoveEvent.SEND:
                lanes.issue(index, link.out_ms(num_bytes[index]), is_back=False)
            case MoveEvent.FETCH:
                lanes.issue(index, link.in_ms(num_bytes[index]), is_back=True)
            case MoveEvent.SENT:
                waits[0][index] = lanes.wait(index, is_back=False)
            case MoveEvent.FETCHED:
                waits[1][index] = lanes.wait(index, is_back=True)
    lanes.compute(until[-1] - until[gap])
    return LaneReplay(
        time_ms=lanes.now_ms, sent_waits_ms=tuple(waits[0]), fetched_waits_ms=tuple(waits[1])
    )


class _Lanes:
    """The state of the lanes at one moment."""

    def __init__(self, link: Link) -> None:
        self.now_ms = 0.0
        self._link = link
        out: deque[list[float]] = deque()
        back = out if link.has_one_lane else deque()
        self._queues = (out,) if link.has_one_lane else (out, back)
        self._queue_of = (out, back)
        # Move and direction -> its entry: the rest of its time at full rate. None: ended.
        self._jobs: dict[tuple[int, bool], list[float]] = {}

    def issue(self, index: int, time_ms: float, *, is_back: bool) -> None:
        """Puts a copy at the end of its queue."""
        job = [time_ms]
        self._jobs[index, is_back] = job
        self._queue_of[is_back].append(job)

    def compute(self, work_ms: float) -> None:
        """Goes on until the compute lane has done so much work."""
        while work_ms > 0.0:
            busy = self._busy()
            if not busy:
                self.now_ms += work_ms
                return
            # A copy that ends first changes the rates.
            span_ms = min(work_ms * self._link.slowdown, self._until_change(busy))
            self._advance(busy, span_ms)
            work_ms -= span_ms / self._link.slowdown
            if work_ms < _EPSILON_MS:
                return

    def wait(self, index: int, *, is_back: bool) -> float:
        """Goes on until a copy has ended; returns the time."""
        job, start_ms = self._jobs[index, is_back], self.now_ms
        while job[0] > 0.0:
            busy = self._busy()
            self._advance(busy, self._until_change(busy))
        return self.now_ms - start_ms

    def _busy(self) -> list[deque[list[float]]]:
        return [queue for queue in self._queues if queue]

    def _rate(self, busy: Sequence[deque[list[float]]]) -> float:
        return self._link.duplex if len(busy) > 1 else 1.0

    def _until_change(self, busy: Sequence[deque[list[float]]]) -> float:
        return min(queue[0][0] for queue in busy) / self._rate(busy)

    def _advance(self, busy: Sequence[deque[list[float]]], span_ms: float) -> None:
        self.now_ms += span_ms
        done_ms = span_ms * self._rate(busy)
        for queue in busy:
            head = queue[0]
            head[0] -= done_ms
            if head[0] <= _EPSILON_MS:
                head[0] = 0.0
                queue.popleft()
