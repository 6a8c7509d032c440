"""Runs a model's training calls with some of its submodules' calls as frames."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rockmate._torch.distributed import holds_sharded_parameters, num_collectives
from rockmate._torch.engine import (
    backward_id,
    call_before_backward,
    has_saved_tensor_hooks,
    records_plainly,
)
from rockmate._torch.members import module_at, modules_within
from rockmate.budget import Budget, OnInfeasible, parse_budget
from rockmate.capture.compiled_model import has_compiled, uncompiled
from rockmate.errors import TrialError
from rockmate.frames.agreement import Agreement
from rockmate.frames.budget_check import PeakCheck, lowered
from rockmate.frames.call import Arguments, Call, items_noted, sizes_of
from rockmate.frames.call_history import state_of
from rockmate.frames.frame import Frame, unhooked
from rockmate.frames.memory import Memory
from rockmate.frames.needs import FrameKey, StepNeeds
from rockmate.frames.recorder import StepRecorder
from rockmate.frames.refusal import Refusal
from rockmate.frames.report import FramesReport, report_of
from rockmate.frames.selection import ReplacedForwards, first_paths, frames_to_split, split
from rockmate.frames.step_log import Counts
from rockmate.frames.step_size import StepSize
from rockmate.frames.trials import FrameTrials
from rockmate.memory_limit import MemoryLimit
from rockmate.runtime.ddp import refuse_flat_parameters
from rockmate.state.random_state import ForeignState, random_state_kept
from rockmate.state.tensors import tensors_in
from rockmate.trial.steps import TrialOption

logger = logging.getLogger(__name__)

_MOST_FORGOTTEN = 4  # times that all is measured anew, as frames have a backward that had none
_MOST_TOGETHER = 256  # forwards of one recording: a script may never call backward


class FrameRunner:
    """Training calls of one model within a budget, without a captured graph.

    The first step holds nothing and is measured. So is each step that is larger, in some dimension,
    than all before it that train the same parameters, and one after each split of a frame. From
    then on frames are dropped late, under pressure.
    """

    def __init__(
        self,
        model: nn.Module,
        budget: Budget | MemoryLimit,
        *,
        on_infeasible: OnInfeasible = "error",
        keep: Collection[str] = (),
        is_fallback: bool = False,
        plans_insides: bool = False,
        trial: TrialOption = "log",
    ) -> None:
        """Chooses frames by structure; nothing runs.

        As a fallback, steps of which no call can be a frame run as in eager. A limit of the whole
        device becomes bytes at the first call. The rest is as in `RockmateModule`, where
        `plans_insides` is `plan_frames`.

        Raises:
            UnsupportedModelError: FSDP1 has sharded the model.
        """
        refuse_flat_parameters(model)
        self._model, self._is_fallback, self._budget = model, is_fallback, budget
        self._keep = frozenset(keep)
        self._paths = [path for path in first_paths(model) if path not in self._keep]
        self._module_ids = list(map(id, modules_within(model)))
        tensor = next(iter((*model.parameters(), *model.buffers())), torch.empty(0))
        is_whole = not any(map(holds_sharded_parameters, model.modules()))
        agreement = None if is_whole else Agreement(model)
        end_recording = weakref.WeakMethod(self.end_recording)  # graphs hold the memory
        self._memory = memory = Memory(tensor.device, end_recording, agreement=agreement)
        # Some frame may have no backward. The hook stays as long as this object: while it runs, all
        # hooks are being gone through, and it must not remove itself.
        hook = register_optimizer_step_pre_hook(lambda *_: memory.measuring.end())
        weakref.finalize(self, hook.remove)
        is_compiled = memory.outside.has_compiled_modules = has_compiled(model)
        self._num_calls, self._num_frames, self._num_forgotten = Counter[str](), 0, 0
        self._measured: dict[StepSize, StepNeeds | None] = {}  # None: no call was a frame
        self._recorded_size: StepSize | None = None
        self._without_backward = set[StepSize]()  # of recorded calls
        self._before_split: tuple[list[str], StepNeeds, StepSize] | None = None
        self._is_running = self._is_settled = False
        is_strict = on_infeasible == "error" and not is_fallback
        self._check = PeakCheck(model, memory, may_refuse=is_strict)
        self._captures, self._replaced = None, ReplacedForwards()
        if plans_insides and is_whole and not is_compiled:
            from rockmate.frames.interior_captures import InteriorCaptures  # loads solvers

            self._captures = InteriorCaptures(memory.clock, model, self._check.note_capture)
        self._asked_bytes = self._lowered_bytes = 0  # as given; the same, or where memory ran out
        self._refusal = Refusal(memory, on_infeasible)
        self._trials = FrameTrials(trial, model, memory)

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the submodules whose calls are frames."""
        return tuple(self._paths)

    @property
    def needs(self) -> StepNeeds | None:
        """What the largest measured step needs; None before the first."""
        return self._memory.needs

    @property
    def counts(self) -> Counts:
        """What has happened to the frames of the last call."""
        return self._memory.log.counts

    @property
    def budget_bytes(self) -> int | None:
        """The budget; None until the first step is measured."""
        return self._memory.budget_bytes

    def summary(self) -> str:
        """Budget, peaks, what the last call dropped and recomputed, and a bound of that time."""
        none_yet = f"frames of {len(self._paths)} submodules, not measured yet"
        return none_yet if (report := self.report()) is None else report.summary()

    def report(self) -> FramesReport | None:
        """What the last call did; None until the first step is measured."""
        return report_of(self._memory)

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output for a training call.

        Raises:
            InfeasibleBudgetError: the budget is below the smallest peak, as the first step shows.
            InfeasibleMemoryLimitError: parameters, gradients and optimizer state reach the limit.
            TrialError: the step differs from eager, though no inside is planned. It is undone.
        """
        memory = self._memory
        num_together = memory.in_flight.num_together
        self._end_step_before(goes_on=0 < num_together < _MOST_TOGETHER)
        modules = modules_within(self._model)
        ids = list(map(id, modules))
        if ids != self._module_ids and self._num_forgotten < _MOST_FORGOTTEN:
            self._module_ids = ids
            self._begin_with(first_paths(self._model))
            self._num_forgotten += 1
        self._refusal.of_peak = self._refusal.of_peak or self._check.refusal_of_last_step()
        if isinstance(self._budget, MemoryLimit):
            self._budget = self._budget.activation_budget_bytes(self._model)
            if memory.agreement is not None:
                self._budget = -memory.agreement.largest([-self._budget])[0]
        state = state_of(modules)
        size = StepSize.of((args, kwargs), memory.held_bytes, state[1:], memory.agreement)
        shapes = sizes_of((args, kwargs)), size.trained

        def step() -> Any:
            memory.begin_step(state, size.held_bytes)
            self._num_calls.clear()
            return self._run_frames(args, kwargs)

        call, is_unknown = (args, kwargs), memory.needs is None and self._is_fallback
        if is_unknown or (memory.log.undropped and not self._trials.have_tried(self._paths)):
            self._leave_whole(call, step)
        is_known = self._take_needs(size, shapes)
        self._check.note_profiler(self._budget, is_unmeasured=size.is_profiled and not is_known)
        self._refusal.raise_if_due(is_known=is_known or size.is_profiled)
        is_new = not is_known and not size.is_profiled
        self._record(size, is_new=is_new, is_first=num_together == 0)
        if memory.measuring.is_on and self._captures is not None:
            self._captures.note_step(shapes)
        try:
            return self._trials.run(call, step)
        except TrialError as error:
            if not memory.log.counts.num_planned:
                raise
            logger.warning("insides of frames are planned no longer, since %s", error)
        self._captures = None
        self._trials.repeat()
        return self.run(args, kwargs)

    def _run_frames(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        memory = self._memory
        before = None if memory.outside.draws_foreign else ForeignState.now()
        num_before = num_collectives()
        self._is_running = True
        try:
            noted = items_noted(self._model, (args, kwargs), memory)
            with self._frames_installed(), uncompiled(self._model), noted as (given, named):
                output = self._model(*given, **named)
        except BaseException:
            memory.measuring.leave()
            raise
        finally:
            self._is_running = False
            memory.outside.draws_foreign = before != ForeignState.now()
            step = memory.in_flight.end()
            memory.outside.has_collectives |= num_before != num_collectives()
        if not memory.log.counts.num_frames:
            end = partial(memory.in_flight.begin_backward, step, memory.measuring.end)
            call_before_backward(tensors_in(output), end)
        return output

    def _take_needs(self, size: StepSize, shapes: Hashable) -> bool:
        """Takes what a step of a size needs; whether one was measured that is at least as large.

        Calls that were not recorded may have raised the smallest peak above the budget.
        """
        memory = self._memory
        if memory.measuring.has_new_backward and memory.agreement is None and not size.is_profiled:
            memory.measuring.has_new_backward = False
            self._num_forgotten += 1
            if self._num_forgotten <= _MOST_FORGOTTEN:
                self._measured.clear()
        known = size.smallest_covering(self._measured)
        if known is not None:
            measured = self._measured[known]
            memory.needs = measured or memory.needs
            memory.measuring.is_unmeasured = measured is None
        needs, memory.room.is_capturing = memory.needs, False
        if needs is None:
            return known is not None
        scale = size.num_elements / max(1, needs.num_elements)
        scale = scale if known is not None else max(1.0, scale)
        memory.room.set_scale(size, scale, learns=memory.agreement is None)
        if memory.backward.keeps_graphs or self._captures is None:
            needs.set_schedules(0, {})
        elif known is not None:
            short = memory.available_bytes(self._lowered_bytes) < self._lowered_bytes
            is_due = self._captures.begin_step(shapes, needs, memory.room.scale, is_short=short)
            memory.room.is_capturing = is_due
        if memory.agreement is not None and needs.has_new_calls:
            needs.agree(memory.agreement)
        minimum = memory.minimum_bytes(needs)
        memory.budget_bytes = min(self._asked_bytes, max(self._lowered_bytes, minimum))
        if memory.room.is_capturing:
            self._check.note_minimum(int(memory.room.scale * minimum), memory.budget_bytes)
        elif memory.budget_bytes < minimum:
            measured = self._measured.values()
            memory.budget_bytes = self._refusal.taken(self._asked_bytes, needs, measured)
        return known is not None

    def _end_step_before(self, *, goes_on: bool) -> None:
        """Ends a recording, but a peak's: it is that of all forwards in flight together."""
        memory, recorder = self._memory, self._memory.measuring.recorder
        if recorder is None:
            return
        if not (goes_on and recorder.can_stop) or (memory.measuring.is_on and recorder.has_frames):
            self.end_recording()
            if memory.measuring.recorder is not None:
                memory.measuring.leave()
                logger.info("a step was not measured: its forward ran in a thread of its own")

    def _record(self, size: StepSize, *, is_new: bool, is_first: bool) -> None:
        """Has the allocations of a step recorded, if it is new, or its peak is to be looked at."""
        measuring = self._memory.measuring
        if is_new and measuring.recorder is not None and measuring.recorder.has_frames:
            measuring.leave()
        measuring.is_on = is_new
        is_due = is_new or (is_first and self._check.is_due(is_profiled=size.is_profiled))
        if measuring.recorder is None and is_due:
            self._recorded_size, device = size, self._memory.device
            measuring.recorder = StepRecorder(device, self._model, is_look=not is_new)

    def begin_plain(self) -> int:
        """A call without gradients begins: how many forwards wait for their backwards."""
        self.end_recording(only_finished=True)
        return self._memory.in_flight.num_together

    def end_recording(self, *, only_finished: bool = False) -> None:
        """After the backward of a measured step, or if it has come (`only_finished`): its needs."""
        memory, recorder = self._memory, self._memory.measuring.recorder
        is_within = self._is_running or backward_id() != -1  # as where hooks step optimizers
        # Where an optimizer steps, no backward of a differentiated one is to come.
        memory.in_flight.has_backward |= not (is_within or only_finished)
        if recorder is None or is_within or not recorder.can_stop:
            return
        if only_finished and not recorder.has_ended:
            recorder.pause()
            return
        measuring = memory.measuring
        is_measured, measuring.is_on, measuring.recorder = measuring.is_on, False, None
        size = self._recorded_size
        assert size is not None
        needs = recorder.stop(size.num_elements)
        assert not isinstance(self._budget, MemoryLimit)
        if memory.log.undropped and not self._trials.have_tried(self._paths):
            for key, each in needs.by_key.items():  # in what was measured it counts already
                each.saved_bytes *= key.path not in memory.log.undropped
            self._refusal.note_undropped(parse_budget(self._budget, needs.baseline_bytes), needs)
            return
        if not recorder.has_frames and (is_measured or memory.needs is None):
            self._measured[size] = None  # measured anew where a larger one comes
            refusal = self._check.refusal_without_frames(self._budget, recorder.peak_bytes)
            self._refusal.of_peak = refusal
            return
        if not is_measured:
            peaks = [each.peak_bytes for each in needs.by_key.values() if recorder.has_ended]
            self._check.note(max(peaks, default=0 if recorder.has_frames else recorder.peak_bytes))
            return
        if not recorder.has_ended:  # the script has not called backward
            if size in self._without_backward:
                self._measured[size] = None  # measured anew once a backward comes
            self._without_backward.add(size)
            return
        self._without_backward.discard(size)
        self._take_measured(size, needs)

    def _take_measured(self, size: StepSize, needs: StepNeeds) -> None:
        """Takes what a whole step needs, and the budget; frames that are too large are split."""
        memory = self._memory
        assert not isinstance(self._budget, MemoryLimit)
        if memory.agreement is not None:
            needs.agree(memory.agreement)
        is_split, self._before_split = self._before_split, None
        is_alike = is_split is not None and is_split[2].trained == size.trained
        if is_split and is_alike and is_split[1].minimum_bytes <= needs.minimum_bytes:
            self._paths, needs, size = is_split
            self._is_settled = True
            memory.calls.forget()  # those of the frames that were tried
        measured = [needs, *filter(None, self._measured.values())]
        baseline_bytes = max(each.baseline_bytes for each in measured)
        budget_bytes = parse_budget(self._budget, baseline_bytes)
        large = [] if self._is_settled else frames_to_split(self._model, needs, budget_bytes)
        # Captured insides may need less than frames as in eager.
        may_need_less = self._captures is not None and budget_bytes >= needs.outside_bytes
        if large or may_need_less:
            self._check.note_minimum(needs.minimum_bytes, budget_bytes)
        if large:
            before = self._paths, needs, size
            self._begin_with(reduce(partial(split, self._model), large, self._paths), before)
            return
        self._measured[size] = needs
        memory.needs, self._asked_bytes, self._lowered_bytes = needs, budget_bytes, budget_bytes
        memory.budget_bytes = budget_bytes
        if not may_need_less:
            memory.budget_bytes = self._refusal.taken(budget_bytes, needs, self._measured.values())

    def _begin_with(
        self, paths: Collection[str], before: tuple[list[str], StepNeeds, StepSize] | None = None
    ) -> None:
        """Has these submodules run as frames, of which nothing is known; `before` may be better."""
        self._paths = [path for path in paths if path not in self._keep]
        self._before_split, self._is_settled = before, False
        self._memory.budget_bytes = self._memory.needs = None
        self._memory.calls.forget()
        self._measured.clear()

    def _leave_whole(
        self, call: tuple[tuple[Any, ...], Mapping[str, Any]], step: Callable[[], Any]
    ) -> None:
        """Has frames run whole that do not run again, as forwards show that are undone.

        What one that cannot be dropped holds would count twice, as it is held and in what was
        measured. Those within it may be frames.
        """
        undropped, live_bytes = self._memory.log.undropped, 0
        if undropped:
            self._begin_with(self._paths)
        while True:
            whole, within, num_bytes = self._trials.not_repeated(self._paths, call, step, undropped)
            live_bytes = num_bytes or live_bytes
            self._keep |= whole | within
            self._paths = [each for each in self._paths if each not in whole]
            if not within:
                break
            self._begin_with(reduce(partial(split, self._model), within, self._paths))
        self._refusal.raise_if_held(live_bytes)

    @contextmanager
    def _frames_installed(self) -> Iterator[None]:
        """Has the chosen submodules run as frames."""
        replaced = self._replaced = ReplacedForwards()
        try:
            for path in self._paths:
                module = module_at(self._model, path)
                replaced.replace(module, self._framed(path, module, module.forward))
            yield
        finally:
            replaced.put_back()

    def _framed(
        self, path: str, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def framed(*args: Any, **kwargs: Any) -> Any:
            if self._memory.is_inside or not records_plainly() or has_saved_tensor_hooks():
                return forward(*args, **kwargs)  # a checkpoint keeps what is saved
            return self._run_frame(path, module, Arguments(forward, args, kwargs))

        return framed

    def _run_frame(self, path: str, module: nn.Module, arguments: Arguments) -> Any:
        """The result of a call. Where memory runs out, frames are dropped, and it runs anew."""
        memory = self._memory
        key, order = FrameKey(path, self._num_calls[path]), self._num_frames + 1
        self._num_calls[path], self._num_frames = key.number + 1, order
        sizes, new_call = sizes_of(arguments[1:]), partial(Call, key, module, arguments, memory)
        memory.begin_call(key, lambda: new_call().num_bytes)
        capturing = self._captures if memory.room.is_capturing else None
        find = self._captures and self._captures.find
        kept, run = unhooked(find, memory, key, arguments, sizes=sizes, order=order)
        while True:
            if capturing is not None:
                with self._replaced.suspended():
                    capturing.watch(path, module, arguments)
            # A call takes back a failed run, which matters only where an allocation can fail.
            is_taken = kept is None or memory.room.is_limited
            call = new_call() if is_taken else None
            frame = None if kept is not None or call is None else Frame(call, order, memory)
            present = kept or frame
            assert present is not None
            memory.begin_forward(present)
            try:
                with memory.inside_frame():
                    output = run() if frame is None else frame.run()
                break
            except Exception as error:
                if call is None or not memory.can_retry(error):
                    raise
                call.roll_back()
                # A backward cannot be rolled back: the budget is what is there from now on.
                self._lowered_bytes = lowered(memory, key) or self._lowered_bytes
                kept = None
        if frame is None or call is None:
            assert kept is not None
            kept.end_forward(output)
            return output
        frame.note_backward_of(output)
        memory.end_forward(frame, sizes)
        if memory.measuring.is_on and memory.measuring.recorder is not None:
            memory.measuring.recorder.note_output(key, output)
        if self._captures is not None:
            self._captures.note_output(path, output)
        if capturing is not None:
            alone = random_state_kept([memory.device])
            with self._replaced.suspended(), memory.inside_frame(), alone:
                capturing.take(call, module, arguments, output)
        return output
