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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rockmate._torch.allocator import free_bytes, is_out_of_memory
from rockmate._torch.engine import after_backward, at_end_of_backward, backward_id, keeps_graph
from rockmate.budget import size_text
from rockmate.frames.agreement import Agreement
from rockmate.frames.call_history import CallHistory
from rockmate.frames.in_flight import REMEMBERED, Droppable, Running, StepsInFlight
from rockmate.frames.knapsack import Decision
from rockmate.frames.needs import FrameKey, ScheduleCost, StepNeeds
from rockmate.frames.recorder import StepRecorder, clock_of, logical_clock
from rockmate.frames.slots import HeldStorages

_SURELY_FREE = 0.8
"""Of what is free when a step begins, the share that it can have: memory is in pieces."""


@dataclass(slots=True)
class Counts:
    """What happened to frames.

    Attributes:
        num_frames: calls that were frames.
        num_kept: how many of them ran without hooks, as decided ahead.
        num_planned: how many ran a schedule of their captured inside.
        num_dropped: how many of them were dropped.
        num_recomputed: how many times a forward ran again.
        recomputed_s: seconds of these runs.
    """

    num_frames: int = 0
    num_kept: int = 0
    num_planned: int = 0
    num_dropped: int = 0
    num_recomputed: int = 0
    recomputed_s: float = 0.0


class Memory:
    """What the frames of one model hold, and the budget for it.

    Attributes:
        device: of the model.
        budget_bytes: None while nothing is to be held.
        needs: of a recorded step; None before the first.
        scale: size of the present call relative to the recorded one.
        changing_buffers: by path and modes of modules, the buffers that forwards change: position
            of the module, and name.
        draws_foreign: whether the model draws random numbers of Python's or NumPy's, as far as is
            known: to look takes a tenth of a millisecond.
        counts: since the last reset.
        storages: that frames hold.
        kept_bytes: of frames that are kept.
        is_capturing: whether insides are captured in this step, so that it holds nothing.
        decision: what was decided ahead for this step.
        is_limited: whether an allocation may fail.
        dropped: what frames of this step have dropped, in words.
        peak_bytes: the largest predicted sum of held and needed bytes since the last reset.
        room_bytes: of the budget, what frames that cannot be dropped, and all that may follow them,
            may take in this step; None where nothing is to be held.
        agreement: with the ranks that hold other shards of the parameters. Frames run collectives
            again, in the same order on all ranks, so nothing that differs between them decides, and
            frames drop what was decided ahead, not what memory is short for.
        clock: seconds, by which frames are timed.
        in_flight: steps whose backward has not run.
        is_measuring: whether this step holds nothing and is measured.
        keeps_graphs: for how many steps it counts that a backward has run with retain_graph=True;
            for ever with create_graph=True. What cannot be dropped would be held until the next
            one has run: so nothing is.
        has_new_backward: whether one ran that the measured step did not have.
        is_unmeasured: whether steps of this size were without a backward when they were measured.
        at_end: is called at the end of each backward.
        backward_order: of the frame whose backward runs; None before the first of a step.
        tried: frames of a step that is undone, see `FrameTrials.repeated`; None in others.
        has_collectives: whether a forward of the model has run one.
        writing: paths of frames that were seen to write outside of their modules.
        num_items: that forwards have taken of iterators, in measured steps.
        taking: paths of frames that take some.
        undropped: paths of frames that this step could not drop, if it is measured or undone.
    """

    def __init__(
        self,
        device: torch.device,
        end_recording: Callable[[], bool],
        *,
        agreement: Agreement | None = None,
    ) -> None:
        """Holds nothing.

        Args:
            device: of the model.
            end_recording: is called after the backward of a recorded step; False if nobody is left
                who asks for it.
            agreement: see the attribute.
        """
        self.device, self._on_recorded = device, end_recording
        self.agreement = agreement
        self.clock = clock_of(device) if agreement is None else logical_clock()
        self.budget_bytes: int | None = None
        self.needs: StepNeeds | None = None
        self.recorder: StepRecorder | None = None
        self.scale = 1.0
        self.changing_buffers: dict[Hashable, set[tuple[int, str]]] = {}
        self.draws_foreign = True
        self.counts = Counts()
        self.storages, self.kept_bytes = HeldStorages(), 0
        self.peak_bytes = 0
        self.is_inside = self.has_new_backward = self.is_unmeasured = False
        self.has_compiled_modules = False
        self.is_measuring, self.keeps_graphs = False, 0.0
        self.calls, self.in_flight = CallHistory(), StepsInFlight()
        self.decision: Decision = {}
        self.dropped: dict[FrameKey, str] = {}
        self.room_bytes: int | None = None
        self.is_limited, self.is_capturing = True, False
        self.backward_order: int | None = None
        self._in_backward: weakref.ref[Running] | None = None
        # In the order of their forwards: those that were decided to be dropped, and all others.
        self._decided: deque[weakref.ref[Droppable]] = deque()
        self._others: deque[weakref.ref[Droppable]] = deque()
        self._backward_id = -1
        self.tried: list[Any] | None = None
        self.has_collectives, self.undropped, self.writing = False, set[str](), set[str]()
        self.num_items, self.taking = 0, set[str]()
        self.at_end: Callable[[], None] | None = None

    def begin_step(self, state: Any, held_bytes: int) -> None:
        """Forgets what happened in earlier steps; frames of theirs stay.

        Args:
            state: of the model; where it is another than before, frames may save other tensors.
            held_bytes: by these frames, on the rank where they are the most.
        """
        self.counts, self.peak_bytes, self.backward_order = Counts(), 0, None
        self.dropped, self.undropped = {}, set()
        self.keeps_graphs = max(0.0, self.keeps_graphs - 1)
        self.calls.begin_step(state)
        self.decision, self.room_bytes = {}, None
        needs = self.needs
        after_bytes = 0 if needs is None else int(needs.last_bytes * self.scale)
        self.in_flight.begin(after_bytes)
        self._decided, self._others = (
            deque(each for each in frames if each() is not None)
            for frames in (self._decided, self._others)
        )
        if self.is_measuring or needs is None or self.budget_bytes is None:
            return
        least_bytes = int(needs.minimum_bytes * self.scale)
        share = partial(self.in_flight.share, least_bytes=least_bytes, after_bytes=after_bytes)
        available_bytes = self.available_bytes(self.budget_bytes) - self.kept_bytes
        self.room_bytes = self.kept_bytes + share(available_bytes)
        if not self.is_capturing:
            left_bytes = share(self.budget_bytes - held_bytes)
            self.decision = self.calls.decision(needs, left_bytes, self.scale)

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
        self.is_limited = free is not None
        if free is None:
            return budget_bytes
        return min(budget_bytes, self.held_bytes + int(_SURELY_FREE * free))

    # --- frames -----------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Of all frames, kept ones too."""
        return self.storages.num_bytes + self.kept_bytes

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
        option, needs = self.decision.get(key), self.needs
        is_kept = option is not None and option.is_kept and not self.keeps_graphs
        if not is_kept or self.room_bytes is None or needs is None:
            return None
        num_bytes = self.calls.saved_bytes(key, sizes)
        least_bytes = self.kept_bytes + int(needs.minimum_bytes * self.scale)
        has_room = num_bytes is not None and least_bytes + num_bytes <= self.room_bytes
        return num_bytes if has_room else None

    def may_run_schedule(self, key: FrameKey) -> bool:
        """Whether a frame runs a schedule, if its inside is captured.

        It does, too, where there is no room for it as it would run in eager: the smallest peak
        relies on schedules.
        """
        if self.room_bytes is None or self.is_capturing or self.keeps_graphs:
            return False
        option = self.decision.get(key)
        is_decided = option is not None and option.schedule is None
        return not is_decided or not self._has_room(key, None)

    def schedule_for(self, key: FrameKey, schedules: Sequence[ScheduleCost]) -> int | None:
        """The number of the schedule that a frame runs; None if there is room for none.

        What it holds is not dropped later. So each schedule is weighed against the least that the
        rest of the step takes: what was decided on, and the others from the fastest on.
        """
        option = self.decision.get(key)
        numbers = list(range(len(schedules)))
        if option is not None and option.schedule in numbers:
            numbers.insert(0, option.schedule)
        fitting = (number for number in numbers if self._has_room(key, schedules[number]))
        return next(fitting, None)

    def _has_room(self, key: FrameKey, schedule: ScheduleCost | None) -> bool:
        assert self.needs is not None
        assert self.room_bytes is not None
        peak_bytes = self.needs.peak_from(key, schedule, self.scale)
        if schedule is not None and self.in_flight.num_to_come > 1:  # beside it, with all it holds
            least_bytes = int(self.needs.minimum_bytes * self.scale)
            peak_bytes = max(peak_bytes, schedule.held_bytes + least_bytes)
        return self.kept_bytes + peak_bytes <= self.room_bytes

    def begin_call(self, key: FrameKey, call_bytes: Callable[[], int]) -> None:
        """A call comes, as a frame. One that was not recorded adds to what a step needs.

        Args:
            key: which.
            call_bytes: gives the bytes that it takes for a second run, its arguments among them.
        """
        present, needs = self.calls.present, self.needs
        before = present[-1] if present else None
        present.append(key)
        if not self.is_measuring and needs is not None and key not in needs.by_key:
            needs.take(key, before, int(call_bytes() / self.scale))

    def begin_forward(self, frame: Running) -> None:
        """Makes room for a frame's forward."""
        if self.recorder is not None:
            self.recorder.mark(frame.key, "forward_bytes")
        if self.needs is not None and not self.is_measuring:
            needed = self.needs.of(frame.key).forward_peak(frame.schedule, self.scale)
            self._make_room(needed)

    def end_forward(self, frame: Droppable, sizes: Any) -> None:
        """Takes a frame whose forward has run, and makes room for what follows."""
        self._begin_step_of(frame)
        if self.tried is not None and frame.can_be_dropped:
            self.tried.append(frame)
        self.calls.note_saved(frame.key, sizes, frame.num_bytes)
        if self.recorder is not None:
            self.recorder.saved[frame.key] = frame.num_bytes, frame.seconds
        is_looked_at = self.tried is not None or (self.is_measuring and self.agreement is None)
        if is_looked_at and frame.num_bytes and not frame.can_be_dropped:
            self.undropped.add(frame.key.path)
        if self.needs is not None and not self.is_measuring:
            # A step that saves as much as the recorded one is as large, whatever its inputs are.
            known_bytes = self.needs.of(frame.key).saved_bytes
            self.scale = max(self.scale, min(1.0, frame.num_bytes / max(1, known_bytes)))
            self.needs.learn(frame.key, int(frame.num_bytes / self.scale))
        self.hold(frame)
        self._make_room_after(frame)

    def hold(self, frame: Droppable) -> None:
        """Has a frame dropped when there is no room, or now if the step holds nothing."""
        option = self.decision.get(frame.key)
        is_kept = option is not None and option.is_kept
        holds_nothing = self.budget_bytes is None or self.is_measuring or self.is_capturing
        if holds_nothing or (self.agreement is not None and not is_kept):
            self._drop(frame)
        else:
            is_decided = option is not None and option.schedule is None and not is_kept
            (self._decided if is_decided else self._others).append(weakref.ref(frame))

    def _begin_step_of(self, frame: Running) -> None:
        self.counts.num_frames += 1
        if frame.step.first_order is None and frame.num_bytes:
            frame.step.first_order = frame.order

    def end_kept(self, frame: Running) -> None:
        """Takes a frame that is kept, or planned, when its forward has run."""
        self._begin_step_of(frame)
        if self.recorder is not None:
            self.recorder.saved[frame.key] = frame.num_bytes, 0.0
        self.kept_bytes += frame.num_bytes
        if frame.schedule is None:
            self.counts.num_kept += 1
            self.dropped[frame.key] = "nothing, without hooks"
        else:
            self.counts.num_planned += 1
            self.counts.num_dropped += frame.schedule.recompute_s > 0
            saved_bytes = 0 if self.needs is None else self.needs.of(frame.key).saved_bytes
            dropped_bytes = max(0, saved_bytes - frame.schedule.held_bytes)
            self.dropped[frame.key] = f"{size_text(dropped_bytes)}, as planned"
            if frame.schedule.recompute_s:
                self._count_recomputation(frame.schedule.recompute_s)
        self._make_room_after(frame)

    def _make_room_after(self, frame: Running) -> None:
        if self.needs is not None and not self.is_measuring:
            needed = self.needs.of(frame.key).after_bytes * self.scale
            self._make_room(int(needed))
        if self.recorder is not None:
            self.recorder.mark(frame.key, "after_bytes")

    def begin_backward(self, frame: Running) -> None:
        """Makes room for a frame's backward, when it begins."""
        is_differentiated = torch.is_grad_enabled()  # what it reads is saved again
        is_kept = keeps_graph() or is_differentiated  # another backward is to come
        kept_for = math.inf if is_differentiated else REMEMBERED if is_kept else 0
        self.keeps_graphs = max(self.keeps_graphs, kept_for)
        if self.backward_order == frame.order:
            return
        before = self._in_backward and self._in_backward()
        if before is not None:
            before.take_back()
        self._in_backward = weakref.ref(frame) if is_kept and not is_differentiated else None
        self.backward_order = frame.order
        is_last = frame.order == frame.step.first_order and not is_kept
        self.in_flight.note_backward(
            frame.step, is_differentiated=is_differentiated, is_last=is_last
        )
        self.has_new_backward |= self.is_unmeasured and self.recorder is None
        is_new, self._backward_id = self._backward_id != backward_id(), backward_id()
        if is_new and self.at_end is not None:
            at_end_of_backward(self.at_end)
        if self.recorder is not None:
            if is_new and is_differentiated:  # the step goes on
                self.recorder.has_ended = True
            elif is_new:
                at_end_of_backward(self.recorder.end)
                if not is_kept:
                    after_backward(self._end_recording)
            self.recorder.mark(frame.key, "backward_bytes")
        if self.needs is not None and not self.is_measuring:
            needs = self.needs.of(frame.key)
            needed = needs.backward_peak(frame.schedule, self.scale)
            if frame.key in self.needs.without_backward:  # not measured: gradients of all it saves
                self.has_new_backward = True
                guess = max(needs.backward_bytes, needs.forward_bytes + needs.saved_bytes)
                needed = int(self.scale * guess)
            self._make_room(needed - frame.num_bytes, but=frame)

    def _end_recording(self) -> None:
        """After a backward, if it was that of all frames: another one may be to come."""
        if self.recorder is not None and self.recorder.is_whole() and not self._on_recorded():
            self.leave_recording()

    def leave_recording(self) -> None:
        """The step is not measured after all."""
        if self.recorder is not None:
            self.recorder.stop(1)
        self.recorder, self.is_measuring = None, False

    def note_recomputation(self, key: FrameKey, seconds: float) -> None:
        """Takes what a second run of a forward has taken."""
        self._count_recomputation(seconds)
        if self.is_measuring and self.recorder is not None:
            self.recorder.note_seconds(key, seconds)
        elif self.needs is not None:
            self.needs.learn_seconds(key, seconds / self.scale)

    def _count_recomputation(self, seconds: float) -> None:
        self.counts.num_recomputed += 1
        self.counts.recomputed_s += seconds

    # --- dropping ---------------------------------------------------------------------------------

    def drop_one(self, but: Running | None = None) -> bool:
        """Drops a frame; whether there was one.

        First those that were decided on, then the others, in the order of their forwards.
        """
        for frames in (self._decided, self._others):
            for _ in range(len(frames)):
                frame = frames[0]()
                if frame is not None and frame is but:
                    frames.rotate(-1)
                    continue
                frames.popleft()
                if frame is not None and frame.can_be_dropped:
                    self._drop(frame)
                    return True
        return False

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
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + needed)

    def _drop(self, frame: Droppable) -> None:
        if frame.can_be_dropped:
            self.counts.num_dropped += 1
            self.dropped[frame.key] = f"all, {size_text(frame.num_bytes)}"
            frame.drop()
