"""What frames hold, what a step needs beside it, and which frame is dropped.

The live bytes of a step are those that frames hold, which can be dropped, and the rest: inputs of
frames, what is saved between them, results of ops. The rest is measured in a step that holds
nothing. In later steps a frame is dropped before the sum of both would pass the budget.

Dropped is first what was decided ahead, see `knapsack`. Where that is not enough, since other calls
come, the oldest frame is dropped: backwards run in the reverse order of forwards, so its bytes are
free for the longest. A recomputed frame stays until its last read in a backward, so each forward
runs once more for each backward at most.

A frame that is to drop nothing needs no hooks: it is *kept*, and runs as in eager. What
it saves is known from earlier runs with inputs of the same sizes. The frames that are kept leave
room for a step that holds nothing else, so the budget holds whatever calls follow.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from rockmate._torch.allocator import free_bytes, is_out_of_memory
from rockmate._torch.engine import after_backward, at_end_of_backward, backward_id, keeps_graph
from rockmate.budget import size_text
from rockmate.frames.agreement import Agreement
from rockmate.frames.call_history import CallHistory, Outside
from rockmate.frames.in_flight import REMEMBERED, Droppable, Running, StepsInFlight
from rockmate.frames.knapsack import Decision
from rockmate.frames.needs import FrameKey, ScheduleCost, StepNeeds
from rockmate.frames.recorder import Measuring, clock_of, logical_clock
from rockmate.frames.slots import HeldStorages
from rockmate.frames.step_log import StepLog

_SURELY_FREE = 0.8
"""Of what is free when a step begins, the share that it can have: memory is in pieces."""


@dataclass(slots=True)
class Room:
    """What the frames of a step may hold.

    Attributes:
        num_bytes: of the budget, what frames that cannot be dropped, and all that may follow them,
            may take; None where nothing is to be held.
        decision: what was decided ahead.
        scale: size of the step relative to the recorded one.
        is_capturing: whether insides are captured in it, so that it holds nothing.
        is_limited: whether an allocation may fail.
    """

    num_bytes: int | None = None
    decision: Decision = field(default_factory=dict)
    scale: float = 1.0
    is_capturing: bool = False
    is_limited: bool = True
    _inputs: Hashable = None
    _saved_bytes: int = 0
    _known_bytes: int = 0
    _scales: dict[Hashable, float] = field(default_factory=dict)

    def set_scale(self, inputs: Hashable, share: float, *, learns: bool) -> None:
        """Takes inputs of a size, and their share of the recorded ones.

        Where a step with inputs of this size has saved a larger share of the recorded bytes, it
        `learns` that the next one is as large: it may make tensors that do not follow from them.
        """
        if self._known_bytes and learns:
            self._scales[self._inputs] = min(1.0, self._saved_bytes / self._known_bytes)
        self._inputs, self.scale = inputs, max(share, self._scales.get(inputs, share))
        self._saved_bytes = self._known_bytes = 0

    def note_saved(self, num_bytes: int, known_bytes: int) -> None:
        """A frame has saved so much, and in the recorded step the known bytes."""
        self._saved_bytes += num_bytes
        self._known_bytes += known_bytes


@dataclass(slots=True)
class Backward:
    """The backward that runs, or has run last.

    Attributes:
        number: of the engine.
        order: of the frame whose backward runs; None before the first of a step.
        frame: which has recomputed for it, if another one is to come.
        at_end: is called at the end of each.
        keeps_graphs: for how many steps it counts that one has run with retain_graph=True; for
            ever with create_graph=True. What cannot be dropped would be held until the next one
            has run: so nothing is.
    """

    number: int = -1
    order: int | None = None
    frame: weakref.ref[Running] | None = None
    at_end: Callable[[], None] | None = None
    keeps_graphs: float = 0.0


class DropQueue:
    """Frames that may be dropped: first those that were decided on, then the others, in order."""

    def __init__(self) -> None:
        self._decided: deque[weakref.ref[Droppable]] = deque()
        self._others: deque[weakref.ref[Droppable]] = deque()

    def forget_freed(self) -> None:
        """Takes out those that are gone."""
        for frames in (self._decided, self._others):
            live = [each for each in frames if each() is not None]
            frames.clear()
            frames.extend(live)

    def add(self, frame: Droppable, *, is_decided: bool) -> None:
        """Takes a frame whose forward has run."""
        (self._decided if is_decided else self._others).append(weakref.ref(frame))

    def take(self, but: Running | None = None) -> Droppable | None:
        """The next one that can be dropped, apart from one; None if there is none."""
        for frames in (self._decided, self._others):
            for _ in range(len(frames)):
                frame = frames[0]()
                if frame is not None and frame is but:
                    frames.rotate(-1)
                    continue
                frames.popleft()
                if frame is not None and frame.can_be_dropped:
                    return frame
        return None


class Memory:
    """What the frames of one model hold, and the budget for it.

    Attributes:
        device: of the model.
        agreement: with the ranks that hold other shards of the parameters. Frames run collectives
            again, in the same order on all ranks, so nothing that differs between them decides, and
            frames drop what was decided ahead, not what memory is short for.
        clock: seconds, by which frames are timed.
        budget_bytes: None while nothing is to be held.
        needs: of a recorded step; None before the first.
        storages: that frames hold.
        is_inside: whether a frame runs.
        calls: of the last steps.
        in_flight: steps whose backward has not run.
        outside: what calls read and write there.
        log, measuring, room, backward: of this step.
    """

    def __init__(
        self,
        device: torch.device,
        end_recording: Callable[[], Callable[[], None] | None],
        *,
        agreement: Agreement | None = None,
    ) -> None:
        """Holds nothing; for `end_recording`, see `Measuring`."""
        self.device, self.agreement = device, agreement
        self.clock = clock_of(device) if agreement is None else logical_clock()
        self.budget_bytes: int | None = None
        self.needs: StepNeeds | None = None
        self.storages, self.is_inside, self._queue = HeldStorages(), False, DropQueue()
        self.calls, self.in_flight, self.outside = CallHistory(), StepsInFlight(), Outside()
        self.log, self.measuring = StepLog(), Measuring(end_recording)
        self.room, self.backward = Room(), Backward()

    def begin_step(self, state: Any, held_bytes: int) -> None:
        """Forgets what happened in earlier steps; frames of theirs stay.

        Args:
            state: of the model; where it is another than before, frames may save other tensors.
            held_bytes: by these frames, on the rank where they are the most.
        """
        self.log, self.backward.order = StepLog(tried=self.log.tried), None
        self.backward.keeps_graphs = max(0.0, self.backward.keeps_graphs - 1)
        self.calls.begin_step(state)
        self.room.decision, self.room.num_bytes = {}, None
        needs = self.needs
        after_bytes = 0 if needs is None else int(needs.last_bytes * self.room.scale)
        self.in_flight.begin(after_bytes)
        self._queue.forget_freed()
        if self.measuring.is_on or needs is None or self.budget_bytes is None:
            return
        least_bytes = int(needs.minimum_bytes * self.room.scale)
        share = partial(self.in_flight.share, least_bytes=least_bytes, after_bytes=after_bytes)
        available_bytes = self.available_bytes(self.budget_bytes) - self.storages.kept_bytes
        self.room.num_bytes = self.storages.kept_bytes + share(available_bytes)
        if not self.room.is_capturing:
            left_bytes = share(self.budget_bytes - held_bytes)
            self.room.decision = self.calls.decision(needs, left_bytes, self.room.scale)

    def minimum_bytes(self, needs: StepNeeds, *, counts_one: bool = False) -> int:
        """The smallest peak, beside as many other steps in flight as there were.

        That so many were in flight once alone counts if it is asked for.
        """
        beside_bytes = self.in_flight.most_beside(needs.last_bytes, counts_one=counts_one)
        return needs.minimum_bytes + beside_bytes

    def available_bytes(self, budget_bytes: int) -> int:
        """What frames that cannot be dropped, and those to come, may take.

        What they hold cannot be dropped when memory runs out, so it has to fit into what is free.
        """
        free = free_bytes(self.device) if self.agreement is None else None
        self.room.is_limited = free is not None
        if free is None:
            return budget_bytes
        return min(budget_bytes, self.held_bytes + int(_SURELY_FREE * free))

    # --- frames -----------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Of all frames, kept ones too."""
        return self.storages.num_bytes + self.storages.kept_bytes

    @contextmanager
    def inside_frame(self) -> Iterator[None]:
        """Calls within are part of a frame."""
        was_inside, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = was_inside

    def bytes_if_kept(self, key: FrameKey, sizes: Any) -> int | None:
        """Bytes that a frame saves if it is kept; None if it is to have hooks."""
        option, needs = self.room.decision.get(key), self.needs
        is_kept = option is not None and option.is_kept and not self.backward.keeps_graphs
        if not is_kept or self.room.num_bytes is None or needs is None:
            return None
        num_bytes = self.calls.saved_bytes(key, sizes)
        least_bytes = self.storages.kept_bytes + int(needs.minimum_bytes * self.room.scale)
        has_room = num_bytes is not None and least_bytes + num_bytes <= self.room.num_bytes
        return num_bytes if has_room else None

    def may_run_schedule(self, key: FrameKey) -> bool:
        """Whether a frame runs a schedule, if its inside is captured.

        It does, too, where there is no room for it as it would run in eager: the smallest peak
        relies on schedules.
        """
        if self.room.num_bytes is None or self.room.is_capturing or self.backward.keeps_graphs:
            return False
        option = self.room.decision.get(key)
        is_decided = option is not None and option.schedule is None
        return not is_decided or not self._has_room(key, None)

    def schedule_for(self, key: FrameKey, schedules: Sequence[ScheduleCost]) -> int | None:
        """The number of the schedule that a frame runs; None if there is room for none.

        What it holds is not dropped later. So each schedule is weighed against the least that the
        rest of the step takes: what was decided on, and the others from the fastest on.
        """
        option = self.room.decision.get(key)
        numbers = list(range(len(schedules)))
        if option is not None and option.schedule in numbers:
            numbers.insert(0, option.schedule)
        fitting = (number for number in numbers if self._has_room(key, schedules[number]))
        return next(fitting, None)

    def _has_room(self, key: FrameKey, schedule: ScheduleCost | None) -> bool:
        assert self.needs is not None
        assert self.room.num_bytes is not None
        peak_bytes = self.needs.peak_from(key, schedule, self.room.scale)
        if schedule is not None and self.in_flight.num_to_come > 1:  # beside it, with all it holds
            least_bytes = int(self.needs.minimum_bytes * self.room.scale)
            peak_bytes = max(peak_bytes, schedule.held_bytes + least_bytes)
        return self.storages.kept_bytes + peak_bytes <= self.room.num_bytes

    def begin_call(self, key: FrameKey, call_bytes: Callable[[], int]) -> None:
        """A call comes, as a frame. One that was not recorded adds to what a step needs.

        `call_bytes` gives what it takes for a second run, its arguments among that.
        """
        present, needs = self.calls.present, self.needs
        before = present[-1] if present else None
        present.append(key)
        if not self.measuring.is_on and needs is not None and key not in needs.by_key:
            needs.take(key, before, int(call_bytes() / self.room.scale))

    def begin_forward(self, frame: Running) -> None:
        """Makes room for a frame's forward."""
        if self.measuring.recorder is not None:
            self.measuring.recorder.mark(frame.key, "forward_bytes")
        if self.needs is not None and not self.measuring.is_on:
            needed = self.needs.of(frame.key).forward_peak(frame.schedule, self.room.scale)
            self._make_room(needed)

    def end_forward(self, frame: Droppable, sizes: Any) -> None:
        """Takes a frame whose forward has run, and makes room for what follows."""
        self._begin_step_of(frame)
        if self.log.tried is not None and frame.can_be_dropped:
            self.log.tried.append(frame)
        self.calls.note_saved(frame.key, sizes, frame.num_bytes)
        if self.measuring.recorder is not None:
            self.measuring.recorder.saved[frame.key] = frame.num_bytes, frame.seconds
        is_alone = self.measuring.is_on and self.agreement is None
        is_tried = is_alone or self.log.tried is not None
        if is_tried and frame.num_bytes and not frame.can_be_dropped:
            self.log.undropped.add(frame.key.path)
        if self.needs is not None and not self.measuring.is_on:
            # A step that saves as much as the recorded one is as large, whatever its inputs are.
            known_bytes = self.needs.of(frame.key).saved_bytes
            self.room.note_saved(frame.num_bytes, known_bytes)
            self.room.scale = max(self.room.scale, min(1.0, frame.num_bytes / max(1, known_bytes)))
            self.needs.learn(frame.key, int(frame.num_bytes / self.room.scale))
        self.hold(frame)
        self._make_room_after(frame)

    def hold(self, frame: Droppable) -> None:
        """Has a frame dropped when there is no room, or now if the step holds nothing."""
        option = self.room.decision.get(frame.key)
        is_kept = option is not None and option.is_kept
        holds_nothing = self.budget_bytes is None or self.measuring.is_on or self.room.is_capturing
        if holds_nothing or (self.agreement is not None and not is_kept):
            self._drop(frame)
        else:
            is_decided = option is not None and option.schedule is None and not is_kept
            self._queue.add(frame, is_decided=is_decided)

    def _begin_step_of(self, frame: Running) -> None:
        self.log.counts.num_frames += 1
        if frame.step.first_order is None and frame.num_bytes:
            frame.step.first_order = frame.order

    def end_kept(self, frame: Running) -> None:
        """Takes a frame that is kept, or planned, when its forward has run."""
        self._begin_step_of(frame)
        if self.measuring.recorder is not None:
            self.measuring.recorder.saved[frame.key] = frame.num_bytes, 0.0
        self.storages.kept_bytes += frame.num_bytes
        if frame.schedule is None:
            if self.needs is not None and not self.measuring.is_on:
                self.room.note_saved(frame.num_bytes, self.needs.of(frame.key).saved_bytes)
            self.log.counts.num_kept += 1
            self.log.dropped[frame.key] = "nothing, without hooks"
        else:
            self.log.counts.num_planned += 1
            self.log.counts.num_dropped += frame.schedule.recompute_s > 0
            saved_bytes = 0 if self.needs is None else self.needs.of(frame.key).saved_bytes
            dropped_bytes = max(0, saved_bytes - frame.schedule.held_bytes)
            self.log.dropped[frame.key] = f"{size_text(dropped_bytes)}, as planned"
            if frame.schedule.recompute_s:
                self._count_recomputation(frame.schedule.recompute_s)
        self._make_room_after(frame)

    def _make_room_after(self, frame: Running) -> None:
        if self.needs is not None and not self.measuring.is_on:
            needed = self.needs.of(frame.key).after_bytes * self.room.scale
            self._make_room(int(needed))
        if self.measuring.recorder is not None:
            self.measuring.recorder.mark(frame.key, "after_bytes")

    def begin_backward(self, frame: Running) -> None:
        """Makes room for a frame's backward, when it begins."""
        is_differentiated = torch.is_grad_enabled()  # what it reads is saved again
        is_kept = keeps_graph() or is_differentiated  # another backward is to come
        kept_for = math.inf if is_differentiated else REMEMBERED if is_kept else 0
        backward, measuring, recorder = self.backward, self.measuring, self.measuring.recorder
        backward.keeps_graphs = max(backward.keeps_graphs, kept_for)
        if backward.order == frame.order:
            return
        before = backward.frame and backward.frame()
        if before is not None:
            before.take_back()
        backward.frame = weakref.ref(frame) if is_kept and not is_differentiated else None
        backward.order = frame.order
        is_last = frame.order == frame.step.first_order and not is_kept
        self.in_flight.note_backward(frame.step, is_last, is_differentiated=is_differentiated)
        measuring.has_new_backward |= measuring.is_unmeasured and recorder is None
        is_new, backward.number = backward.number != backward_id(), backward_id()
        if is_new and backward.at_end is not None:
            at_end_of_backward(backward.at_end)
        if recorder is not None:
            if is_new and is_differentiated:  # the step goes on
                recorder.has_ended = True
            elif is_new:
                at_end_of_backward(recorder.end)
                if not is_kept:
                    after_backward(measuring.end_if_whole)
            recorder.mark(frame.key, "backward_bytes")
        if self.needs is not None and not measuring.is_on:
            needs = self.needs.of(frame.key)
            needed = needs.backward_peak(frame.schedule, self.room.scale)
            if frame.key in self.needs.without_backward:  # not measured: gradients of all it saves
                measuring.has_new_backward = True
                guess = max(needs.backward_bytes, needs.forward_bytes + needs.saved_bytes)
                needed = int(self.room.scale * guess)
            self._make_room(needed - frame.num_bytes, but=frame)

    def end_backward(self, key: FrameKey, order: int, _: Any) -> None:
        """The backward goes on before a frame, if none has begun since its own."""
        if self.measuring.recorder is not None and self.backward.order == order:
            self.measuring.recorder.mark(key, "between_bytes")

    def note_recomputation(self, key: FrameKey, seconds: float) -> None:
        """Takes what a second run of a forward has taken."""
        self._count_recomputation(seconds)
        if self.measuring.is_on and self.measuring.recorder is not None:
            self.measuring.recorder.note_seconds(key, seconds)
        elif self.needs is not None:
            self.needs.learn_seconds(key, seconds / self.room.scale)

    def _count_recomputation(self, seconds: float) -> None:
        self.log.counts.num_recomputed += 1
        self.log.counts.recomputed_s += seconds

    # --- dropping ---------------------------------------------------------------------------------

    def drop_one(self, but: Running | None = None) -> bool:
        """Drops the next frame; whether there was one."""
        frame = self._queue.take(but)
        if frame is not None:
            self._drop(frame)
        return frame is not None

    def can_retry(self, error: Exception, but: Running | None = None) -> bool:
        """Whether a run that failed can run anew: memory had run out, and there is more now.

        Not where other ranks would not run it again.
        """
        if self.agreement is not None or not is_out_of_memory(error):
            return False
        return self.drop_one(but)

    def _make_room(self, needed: int, *, but: Running | None = None) -> None:
        assert self.budget_bytes is not None
        needed += self.in_flight.other_bytes
        while self.agreement is None and self.held_bytes + needed > self.budget_bytes:
            if not self.drop_one(but):
                break
        self.log.peak_bytes = max(self.log.peak_bytes, self.held_bytes + needed)

    def _drop(self, frame: Droppable) -> None:
        if frame.can_be_dropped:
            self.log.counts.num_dropped += 1
            self.log.dropped[frame.key] = f"all, {size_text(frame.num_bytes)}"
            frame.drop()
