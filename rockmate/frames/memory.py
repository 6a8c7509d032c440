"""What frames hold, what a step needs beside it, and which frame is dropped.

The live bytes of a step are those that frames hold, which can be dropped, and the rest: inputs of
frames, what is saved between them, results of ops. The rest is measured in a step that holds
nothing. In later steps a frame is dropped before the sum of both would pass the budget.

Dropped is first what was decided ahead, see `ahead`. Where the calls are others than those, it is
the frame with the least seconds / (bytes x distance to its backward). Backwards run in the reverse
order of forwards, so the distance is known. A frame that was made again stays until its last read,
so each forward runs at most twice.

A frame that gives up nothing, as decided, needs no hooks: it is *kept*, and runs as in eager. What
it saves is known from earlier runs with inputs of the same sizes. The frames that are kept leave
room for a step that holds nothing else, so the budget holds whatever calls follow.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rockmate._torch.allocator import free_bytes, is_out_of_memory
from rockmate._torch.engine import after_backward, at_end_of_backward
from rockmate._torch.ops import OpOverload
from rockmate.frames.agreement import Agreement
from rockmate.frames.ahead import Decision
from rockmate.frames.cheapest import cheapest
from rockmate.frames.clock import clock_of, logical_clock
from rockmate.frames.foreign_random import ForeignRandom
from rockmate.frames.menu import Offer, offer_of_way
from rockmate.frames.menus import Menus
from rockmate.frames.module_state import ChangingBuffers
from rockmate.frames.needs import FrameKey, StepNeeds, StepRecorder
from rockmate.frames.room import Room, backward_bytes, forward_bytes, least_way
from rockmate.frames.running import Frame, Kept, Running
from rockmate.frames.sequence import KnownCalls
from rockmate.frames.storages import HeldStorages
from rockmate.frames.tape import Recipe
from rockmate.frames.way import Way

_REMEMBERED_STEPS = 4
_SURELY_FREE = 0.8
"""Of what is free when a step begins, the share that it can have: memory is in pieces."""
_CHECKED_EVERY = 16
"""A frame that is kept has hooks in one of so many steps, to see whether it saves as much."""


@dataclass(slots=True)
class Counts:
    """What happened to frames.

    Attributes:
        num_frames: calls that were frames.
        num_kept: how many of them ran without hooks, as decided ahead.
        num_planned: how many ran a schedule of their captured inside.
        num_dropped: how many of them were dropped.
        num_made_again: how many times a forward, or a part of one, ran again.
        made_again_s: seconds of these runs.
    """

    num_frames: int = 0
    num_kept: int = 0
    num_planned: int = 0
    num_dropped: int = 0
    num_made_again: int = 0
    made_again_s: float = 0.0


class Memory:
    """What the frames of one model hold, and the budget for it.

    Attributes:
        device: of the model.
        budget_bytes: None while nothing is to be held.
        needs: of a recorded step; None before the first.
        scale: size of the present call relative to the recorded one.
        changing_buffers: for each path, the buffers that its forward changes.
        foreign_random: whether forwards draw random numbers of Python's or NumPy's.
        counts: since the last reset.
        storages: that frames hold.
        kept_bytes: of frames that are kept.
        is_learning: whether insides are captured in this step, so that it holds nothing.
        is_profiling: whether menus are made from the frames of this step.
        can_profile: whether they could be, as the step is as large as the recorded one.
        menus: what each frame may give up.
        decision: what was decided ahead for this step.
        is_limited: whether an allocation may fail.
        given_up: what frames of this step have given up; None of one that is kept.
        peak_bytes: the largest predicted sum of held and needed bytes since the last reset.
        room: what captured insides may hold in this step; None where nothing is to be held.
        agreement: with the ranks that hold other shards of the parameters. Frames run collectives
            again, in the same order on all ranks, so nothing that differs between them decides, and
            frames give up what was decided ahead, not what memory is short for.
        wrong_ops: of a call with certain ops, positions of those that make nothing again.
        clock: seconds, by which frames and their parts are timed.
        part_s: seconds that it takes a part to be able to run again, and to begin.
        has_new_backward: whether one ran that the measured step did not have.
        is_unmeasured: whether steps of this size were without a backward when they were measured.
        backward_order: of the frame whose backward is under way; None before the first of a step.
    """

    def __init__(
        self,
        device: torch.device,
        end_recording: Callable[[], None],
        *,
        agreement: Agreement | None = None,
    ) -> None:
        """Holds nothing.

        Args:
            device: of the model.
            end_recording: is called after the backward of a recorded step.
            agreement: see the attribute.
        """
        self.device, self._on_recorded = device, end_recording
        self.agreement = agreement
        self.clock = clock_of(device) if agreement is None else logical_clock()
        self.part_s = 0.0
        self.budget_bytes: int | None = None
        self.needs: StepNeeds | None = None
        self.recorder: StepRecorder | None = None
        self.scale = 1.0
        self.changing_buffers, self.foreign_random = ChangingBuffers(), ForeignRandom()
        self.counts = Counts()
        self.storages, self.kept_bytes = HeldStorages(), 0
        self.peak_bytes = 0
        self.is_inside = self.has_new_backward = self.is_unmeasured = False
        self.has_compiled_modules = False
        self.is_profiling = self.can_profile = False
        self.wrong_ops: dict[tuple[FrameKey, tuple[OpOverload, ...]], frozenset[int]] = {}
        self.menus, self.calls = Menus(), KnownCalls()
        self.decision = Decision()
        self.given_up: dict[FrameKey, Offer | None] = {}
        self.room: Room | None = None
        self.is_limited, self.is_learning = True, False
        self.backward_order: int | None = None
        self._part_paths: dict[str, set[str]] = {}
        self._region_paths: dict[str, set[str]] = {}
        self._wanted_at: dict[tuple[str, str], int] = {}  # (path, part's path) -> last step
        self._num_steps = 0
        self._frames: dict[int, weakref.ref[Frame]] = {}
        self._begun: list[weakref.ref[Kept]] = []

    def begin_step(self, state: Any, held_bytes: int) -> None:
        """Forgets what happened in earlier steps; frames of theirs stay.

        Args:
            state: of the model; where it is another than before, frames may save other tensors.
            held_bytes: by these frames, on the rank where they are the most.
        """
        self.counts, self.peak_bytes, self.backward_order = Counts(), 0, None
        self.given_up = {}
        self._num_steps += 1
        self.menus.make(self.agreement)
        self.calls.begin_step(state)
        self.decision, self.room = Decision(), None
        if self.recorder is None and self.needs is not None and self.budget_bytes is not None:
            left_bytes = self.budget_bytes - held_bytes
            available_bytes = self.available_bytes(self.budget_bytes)
            self.room = Room(self.needs, available_bytes, self.scale)
            if not self.is_learning:
                self.decision = self.calls.decision(self.needs, self.menus, left_bytes, self.scale)
        self._part_paths = {}
        for (path, part), step in self._wanted_at.items():
            if self._num_steps - step <= _REMEMBERED_STEPS:
                self._part_paths.setdefault(path, set()).add(part)
        self._region_paths = {}
        for key, offer in self.decision.offers.items():
            self._part_paths.setdefault(key.path, set()).update(part.path for part in offer.parts)
            regions = offer.recipe.regions if offer.recipe is not None else ()
            self._region_paths.setdefault(key.path, set()).update(each.path for each in regions)

    def available_bytes(self, budget_bytes: int) -> int:
        """What frames that cannot give up anything, and those to come, may take.

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

    def profiles(self, path: str) -> bool:
        """Whether menus are made from the frames of a path: in the first steps, or when it comes.

        With LayerDrop, a layer may be absent from the first steps.
        """
        return self.is_profiling or (self.can_profile and self.menus.menu_of_path(path) is None)

    def part_paths(self, path: str) -> set[str]:
        """Paths of the parts of a frame that take what a second run needs.

        Those that are decided on, or that memory was short for in the last steps: each costs a
        fraction of a millisecond.
        """
        return self._part_paths.get(path, set())

    def region_paths(self, path: str) -> set[str]:
        """Paths, within a frame's, of the submodules whose ops are observed in some calls."""
        return self._region_paths.get(path, set())

    def wanted_tape(self, key: FrameKey) -> tuple[bool, Recipe | None]:
        """Whether a frame's ops are noted, and which; all are when it is measured.

        Compiled code has no ops to see, and with sharded parameters ops are collectives, too.
        """
        if self.agreement is not None or self.has_compiled_modules:
            return False, None
        planned = self.decision.offers.get(key)
        if self.is_profiling:
            return True, None
        recipe = None if planned is None else planned.recipe
        return recipe is not None, recipe

    def bytes_if_kept(self, key: FrameKey, sizes: Any, order: int) -> int | None:
        """Bytes that a frame saves if it is kept; None if it is to have hooks.

        Args:
            key: which frame.
            sizes: of its inputs.
            order: of the frame.
        """
        if self.profiles(key.path) or key not in self.decision.kept or self.budget_bytes is None:
            return None
        num_bytes = self.calls.saved_bytes(key, sizes)
        if num_bytes is None or (order + self._num_steps) % _CHECKED_EVERY == 0:
            return None
        has_room = self.room is not None and self.kept_bytes + num_bytes <= self.room.kept_bytes
        return num_bytes if has_room else None

    def may_run_way(self, key: FrameKey) -> bool:
        """Whether a frame runs in a way, if its inside is captured."""
        offer = self.decision.offers.get(key)
        is_eager = offer.way is None if offer is not None else key in self.decision.kept
        return self.is_learning or (self.room is not None and not is_eager)

    def way_for(self, key: FrameKey, ways: Sequence[Way]) -> int | None:
        """The number of the way in which a frame runs; None if there is room for none."""
        if self.is_learning or self.room is None:
            return least_way(ways)
        offer = self.decision.offers.get(key)
        return self.room.number_for(key, ways, offer and offer.way, self.kept_bytes)

    def begin_call(self, key: FrameKey, call_bytes: Callable[[], int]) -> None:
        """A call comes, as a frame. One that was not recorded adds to what a step needs.

        Args:
            key: which.
            call_bytes: gives the bytes that it takes for a second run, its arguments among them.
        """
        present = self.calls.present
        before = present[-1] if present else None
        self.calls.note(key)
        needs = self.needs
        if self.recorder is None and needs is not None and key not in needs.by_key:
            needs.take(key, before, int(call_bytes() / max(self.scale, 1e-9)))

    def begin_forward(self, frame: Running) -> None:
        """Makes room for a frame's forward."""
        if self.recorder is not None:
            self.recorder.mark(frame.key, "forward_bytes")
        elif self.needs is not None:
            needed = forward_bytes(self.needs.of(frame.key), frame.way, self.scale)
            self._make_room(needed, position=frame.order)

    def end_forward(self, frame: Frame, sizes: Any) -> None:
        """Takes a frame whose forward has run, and makes room for what follows."""
        self.counts.num_frames += 1
        self._frames[frame.order] = weakref.ref(frame)
        self.calls.note_saved(frame.key, sizes, frame.num_bytes)
        if self.recorder is not None:
            self.recorder.saved[frame.key] = frame.num_bytes, frame.seconds
            self.recorder.mark(frame.key, "")  # what the check takes is no need of a step
            frame.check_tape()
        elif self.needs is not None:
            self.needs.learn(frame.key, int(frame.num_bytes / self.scale), frame.seconds)
        if self.profiles(frame.key.path):
            self.menus.note(frame.key, frame.profile())
        known = self.menus.menu_of(frame.key)
        frame.offers = (frame.everything(),) if known is None else known
        planned = self.decision.offers.get(frame.key)
        frame.planned = None if planned is None or planned.way is not None else planned
        if self.budget_bytes is None or self.recorder is not None or self.is_learning:
            self._drop_wholly(frame)
        elif self.agreement is not None:
            self._drop_as_decided(frame)
        self._make_room_after(frame)
        if self.recorder is not None:
            self.recorder.mark(frame.key, "after_bytes")

    def end_kept(self, frame: Kept) -> None:
        """Takes a frame that is kept, or planned, when its forward has run."""
        self.counts.num_frames += 1
        self.kept_bytes += frame.num_bytes
        if frame.way is None:
            self.counts.num_kept += 1
            self.given_up[frame.key] = None
        else:
            self.counts.num_planned += 1
            self.counts.num_dropped += frame.way.again_s > 0
            saved_bytes = 0 if self.needs is None else self.needs.of(frame.key).saved_bytes
            self.given_up[frame.key] = offer_of_way(frame.way, saved_bytes)
            if frame.way.again_s:
                self.note_made_again(frame.way.again_s)
        self._make_room_after(frame)

    def _make_room_after(self, frame: Running) -> None:
        if self.needs is not None and self.recorder is None:
            needed = self.needs.of(frame.key).after_bytes * self.scale
            self._make_room(int(needed), position=frame.order + 1)

    def begin_backward(self, frame: Running) -> None:
        """Makes room for a frame's backward, when it begins."""
        present = self.backward_order
        if present == frame.order:
            return
        self.backward_order = frame.order
        self.let_go_begun()
        self.has_new_backward |= self.is_unmeasured and self.recorder is None
        if self.recorder is not None:
            if present is None:
                at_end_of_backward(self.recorder.end)
                after_backward(self._end_recording)
            self.recorder.mark(frame.key, "backward_bytes")
        elif self.needs is not None:
            needed = backward_bytes(self.needs.of(frame.key), frame.way, self.scale)
            if frame.key in self.needs.without_backward:
                self.has_new_backward = True
                needed = int(self.scale * self.needs.guessed_backward_bytes(frame.key))
            needed += frame.extra_bytes - frame.num_bytes
            self._make_room(needed, position=frame.order, but=frame)

    def _end_recording(self) -> None:
        """After a backward, if it was that of all frames: another one may be to come."""
        if self.recorder is not None and self.recorder.is_whole():
            self._on_recorded()

    def end_backward_later(self, frame: Kept) -> None:
        """A frame that is kept is let go when the backward of another one begins.

        Backwards run in reverse order, so what it saved is free by then.
        """
        self._begun.append(weakref.ref(frame))

    def let_go_begun(self) -> None:
        """Lets go of what such frames saved, also if the script still holds a loss of theirs."""
        begun, self._begun = self._begun, []
        for reference in begun:
            frame = reference()
            if frame is not None:
                frame.let_go()

    def note_made_again(self, seconds: float) -> None:
        """Counts a second run of a forward."""
        self.counts.num_made_again += 1
        self.counts.made_again_s += seconds

    # --- dropping ---------------------------------------------------------------------------------

    def drop_one(self, position: int, but: Running | None = None) -> bool:
        """Drops the frame that costs the least; whether there was one."""
        frames = [(order, reference()) for order, reference in self._frames.items()]
        self._frames = {order: weakref.ref(each) for order, each in frames if each is not None}
        live = [each for _, each in frames if each is not None and each is not but]
        untaken = [each for each in live if each.planned is not None and each.taken is None]
        found = cheapest(untaken, position, planned=True) or cheapest(live, position)
        if found is None:
            return False
        self._drop(*found)
        return True

    def has_made_room(self, error: Exception, position: int, but: Running | None = None) -> bool:
        """Whether a run that failed can run anew: memory had run out, and there is more now.

        Not where other ranks would not run it again.
        """
        if self.agreement is not None or not is_out_of_memory(error):
            return False
        return self.drop_one(position, but)

    def lower_budget(self, key: FrameKey, share: float) -> int | None:
        """Takes a share of the live bytes in a frame's forward as the budget, if that is less.

        Returns:
            The new budget; None if it stays.
        """
        if self.needs is None or self.budget_bytes is None:
            return None
        live = self.held_bytes + int(self.needs.of(key).forward_bytes * self.scale)
        lowered = max(int(share * live), self.needs.minimum_bytes)
        if lowered >= self.budget_bytes:
            return None
        self.budget_bytes = lowered
        return lowered

    def _make_room(self, needed: int, *, position: int, but: Running | None = None) -> None:
        assert self.budget_bytes is not None
        while self.agreement is None and self.held_bytes + needed > self.budget_bytes:
            if not self.drop_one(position, but):
                break
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + needed)

    def _drop_wholly(self, frame: Frame) -> None:
        if frame.next_offer is not None:
            self.counts.num_dropped += frame.taken is None
            frame.drop_all()

    def _drop_as_decided(self, frame: Frame) -> None:
        """Drops what was decided ahead; all of a frame that no decision knows."""
        if frame.planned is None and frame.key not in self.decision.kept:
            self._drop_wholly(frame)
        elif frame.planned is not None and frame.next_offer is frame.planned:
            self._drop(frame, frame.planned)

    def _drop(self, frame: Frame, offer: Offer) -> None:
        self.counts.num_dropped += frame.taken is None
        if offer is not frame.planned:
            self._want_parts(frame)
        frame.drop(offer)
        self.given_up[frame.key] = frame.taken

    def _want_parts(self, frame: Frame) -> None:
        """Notes the parts of the best offer of a frame, whether or not they can run."""
        taken_bytes = 0 if frame.taken is None else frame.taken.num_bytes
        best = next((each for each in frame.offers if each.num_bytes > taken_bytes), None)
        for part in best.parts if best is not None else ():
            self._wanted_at[frame.key.path, part.path] = self._num_steps
