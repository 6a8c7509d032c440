"""Runs a step beside the plain model's forward, and raises where the two differ.

[Note: the trial of a step]

1. The state of the call is taken: see `CallState`.
2. The plain model's forward runs, with gradients on, so that it takes the branches and kernels of
   training, and with nothing saved. What ops write is copied right before (`Writes`), and bytes are
   counted: a run that is about to pass the budget is stopped, and the log says so.
3. What it has given and left behind is noted in a few bytes (`Outcome`), and all is put back.
4. Where that takes little time, the plain backward runs, too, and is undone (`PlainGradients`).
5. The step's own forward runs. Its outcome is held against the first. So are the gradients of its
   backward and what it leaves behind, after which all is put back, and the forward runs again.

So a difference needs no guard that has thought of it. Where the two differ, the state is put back
once more, so that nothing of the step remains, and the plain forward runs once more: where it
differs from its first run, something could not be put back.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate._torch.autocast import autocast_uncached
from rockmate._torch.cuda import TF32_EPS, rounds_to_tf32
from rockmate._torch.fake import is_fake
from rockmate._torch.members import module_hooks_of, modules_within
from rockmate._torch.settings import Settings
from rockmate.budget import size_text
from rockmate.capture.compiled_model import uncompiled
from rockmate.capture.huggingface import training_only_features_off
from rockmate.capture.trace_state import DifferentiatedError, nothing_saved
from rockmate.errors import NotRepeatableError, TrialError
from rockmate.state.call_state import CallState
from rockmate.state.iterators import IteratorError, iterators_guarded
from rockmate.state.tensors import tensors_in
from rockmate.state.writes import OutOfBudget, Writes
from rockmate.trial.conditions import Conditions
from rockmate.trial.gradients import PlainGradients, Saving
from rockmate.trial.outcome import OF_STEP_ALONE, Comparison, Difference, Outcome, Reader
from rockmate.trial.steps import TrialSteps

logger = logging.getLogger(__name__)

_ROUNDING_ULPS = 1024
"""Of single precision and finer: what sums in another order, over the depth of a model, amount to.
Values that belong to another step differ by a thousand times as much."""
_COARSE_ULPS = 8  # of shorter formats, in which each op rounds that much
_NUM_REPEATS = 3  # of the plain forward and the step: clocks may give the same twice
_AFTER = "after the backward, "
_TAKES_GRADIENT = (
    "the forward takes a gradient itself (torch.autograd.grad), and took none when it was "
    "captured, where torch.compiler.is_compiling() is true"
)
_FRAMES, _NEVER = 'mode="frames"', 'trial="never" looks away: the step is then as it was planned.'
_PLAIN = "Train the plain model, module.original"
_OF_NO_REPEAT = (
    "%s cannot be held against eager, since the plain model's forward does not repeat itself: in a "
    "second run from the same state, %s. It reads or changes something that cannot be put back: a "
    "file, a process, memory of a library, a clock, the system's random numbers. Capture and trial "
    "have run it several times, so what it counts there has gone on. Keep it in a buffer "
    "(register_buffer) or an attribute, or pass it as an argument; or begin anew with the plain "
    "model, module.original."
)
_NOT_HELD = (
    "%s is not held against eager, since %s. Values that are no tensors are taken as captured. A "
    'larger budget lets eager run; mode="frames" needs no capture.'
)


def run_beside_eager(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    ours: Callable[[], Any],
    conditions: Conditions,
    steps: TrialSteps,
) -> Any:
    """The output of `ours`, a step of a call of a model, held against the plain model's.

    Raises:
        TrialError: they differ.
        NotRepeatableError: so does the plain model from itself, once it is put back and runs again.
    """
    if any(map(is_fake, tensors_in((args, kwargs)))):  # they have no numbers
        return ours()
    before = CallState(model, args, kwargs)
    if before.has_iterators():
        logger.info("%s is not held against eager, which would use an iterator up", conditions.what)
        return ours()
    trial = _Trial(model, before, conditions, steps)
    eager = trial.outcome_of_plain()
    return ours() if eager is None else trial.run(ours, eager)


class _Trial:
    """Runs of the plain model and of a step, from one state."""

    def __init__(
        self, model: nn.Module, before: CallState, conditions: Conditions, steps: TrialSteps
    ) -> None:
        self._model, self._before = model, before
        self._conditions, self._steps = conditions, steps
        before.keeps_results = conditions.is_captured  # else the step's own Python fills caches
        self._writes = Writes(conditions.most_bytes, conditions.largest_bytes)
        self._undo = partial(before.put_back, self._writes, before.random_now())
        self._settings, self._rounding = Settings.now(), _rounding(before)
        self._reader = Reader(before, self._writes, conditions)

    def run(self, ours: Callable[[], Any], eager: Outcome) -> Any:
        """The output of the step, whose outcome is to be that of eager; errors as there."""
        gradients = None
        if self._conditions.has_backward and self._steps.has_time:
            gradients = PlainGradients(self._plain, self._undo, self._reader)
        output = ours()
        plain, step = [eager], [self._reader.outcome(output)]
        found = self._compared(eager, step[0])
        if not found and (gradients is None or gradients.reason):
            return output
        if not found and gradients is not None:
            wrong = gradients.difference(output, self._rounding)
            found = [Difference(wrong)] if wrong else self._left_behind(gradients)
        del output
        self._before.keeps_results &= not found
        self._undo()
        if not found:  # a backward of the first run is over
            return ours()
        for _ in range(_NUM_REPEATS):
            again = None
            if not any(each.text == OF_STEP_ALONE for each in found):
                again = self.outcome_of_plain()
            if again is None:
                break
            for each in self._compared(eager, again, self._rounding):
                if each.is_of_training:
                    raise NotRepeatableError(_OF_NO_REPEAT % (self._conditions.what, each))
            output = ours()
            plain.append(again)
            step.append(self._reader.outcome(output))
            found = self._left(found, plain, step)
            if not found:
                return output
            del output
            self._undo()
        parts = modules_within(self._model)
        tables = {id(each) for part in parts for each in module_hooks_of(vars(part))}
        sets_up = not tables.isdisjoint(eager.contents)
        text = _text(str(found[0]), self._model, self._conditions, sets_up=sets_up)
        raise TrialError(text, sets_up=sets_up)

    def _left_behind(self, gradients: PlainGradients) -> list[Difference]:
        """What the backward of a step has left behind otherwise than eager's does each time."""
        eager = gradients.left
        found = [] if eager is None else self._compared(eager, self._reader.outcome(None))
        if eager is None or not found:
            return []
        self._undo()
        again = PlainGradients(self._plain, self._undo, self._reader).left
        varied = {each.place for each in self._compared(eager, again)} if again else set[str]()
        found = [each for each in found if each.place not in varied]
        return [Difference(f"{_AFTER}{each}") for each in found]

    def _compared(self, one: Outcome, two: Outcome, tolerance: float = 0.0) -> list[Difference]:
        tolerance = max(tolerance, 0.0 if self._conditions.is_exact else self._rounding)
        return [*Comparison(self._reader, one, two, tolerance).differences()]

    def _left(
        self, found: list[Difference], plain: list[Outcome], step: list[Outcome]
    ) -> list[Difference]:
        """Those of the differences of a step that are none from run to run, as the clock's are.

        What counts the runs is left, since they have changed it, and what the step has fixed.
        `plain` and `step` are outcomes of the runs of both so far.
        """

        def varied(runs: list[Outcome]) -> set[str]:
            return {e.place for each in runs[1:] for e in self._compared(runs[0], each)}

        pairs = (step[-2], plain[-1]), (plain[-1], step[-1])  # one right after the other
        first, second = ({e.path: e for e in self._compared(*pair)} for pair in pairs)
        counted = {
            each.place
            for path, each in first.items()
            if path in second and (by := each.by()) is not None and by == second[path].by()
        }
        as_in_eager = {each.place for each in found if each.path not in first}
        free = varied(plain) & (varied(step) | as_in_eager) - counted
        return [each for each in found if each.place not in free]

    def _plain(self) -> Any:
        """The output of the plain model, which runs uncompiled, and as it was captured."""
        args, kwargs = self._before.arguments
        is_captured, model = self._conditions.is_captured, self._model
        with (
            iterators_guarded(self._before.objects),
            self._settings.applied(),
            training_only_features_off(model) if is_captured else contextlib.nullcontext(),
            uncompiled(model),
            autocast_uncached(),
            torch.enable_grad(),
        ):
            return model(*args, **kwargs)

    def outcome_of_plain(self) -> Outcome | None:
        """That of the plain forward, which is undone; None where it cannot run in the budget.

        Where it raises an error of its own, what it has changed stays, as in eager.
        """
        plain, undo, writes = self._plain, self._undo, self._writes
        conditions = self._conditions
        reason, outcome, saving = "", None, Saving(plain, undo, self._before.storages)
        has_failed, takes_gradient = False, False
        try:
            unsaved = nothing_saved()(plain), lambda: False
            for run, evict in (unsaved, (saving.run, saving.evict), (plain, lambda: False)):
                try:
                    begin_s = time.thread_time()
                    with writes.noted(evict):
                        output = run()
                    self._steps.forward_s = time.thread_time() - begin_s
                    outcome = self._reader.outcome(output)
                    break
                except (DifferentiatedError, RuntimeError) as error:
                    if isinstance(error, RuntimeError) and "saved tensor hooks" not in str(error):
                        raise  # else within torch.func no such hooks may be on
                    takes_gradient |= isinstance(error, DifferentiatedError)
                    undo()
        except IteratorError:
            reason = "the plain forward would use an iterator up"
        except (OutOfBudget, torch.OutOfMemoryError):
            reason = f"the plain forward takes more than {size_text(conditions.most_bytes)}"
        except Exception:
            has_failed = True
            raise
        finally:
            output = None
            if not has_failed:
                undo()
            writes.release()
        if outcome is not None and writes.num_bytes > conditions.most_copied_bytes:
            reason = f"copies of what the forward changes take {size_text(writes.num_bytes)}"
            outcome = None
        if reason:
            if takes_gradient and conditions.is_captured and not conditions.takes_gradient:
                raise TrialError(_text(_TAKES_GRADIENT, self._model, conditions, sets_up=False))
            is_warned = saving.num_runs and self._steps.num_trials == 1
            level = logging.WARNING if is_warned else logging.INFO
            logger.log(level, _NOT_HELD, conditions.what, reason)
        return outcome


def _rounding(before: CallState) -> float:
    """How far rounding alone takes a result, relative to its size, in the coarsest format."""
    formats = {each.dtype for each in before.objects.tensors.values() if each.is_floating_point()}
    if torch.is_autocast_enabled("cpu"):
        formats.add(torch.get_autocast_dtype("cpu"))
    if torch.is_autocast_enabled("cuda"):
        formats.add(torch.get_autocast_dtype("cuda"))
    single = torch.finfo(torch.float32).eps
    ulp = max([single, *(torch.finfo(each).eps for each in formats)])
    if rounds_to_tf32(before.objects.tensors.values()):
        ulp = max(ulp, TF32_EPS)
    return _ROUNDING_ULPS * single if ulp <= single else _COARSE_ULPS * ulp


def _text(found: str, model: nn.Module, conditions: Conditions, *, sets_up: bool) -> str:
    what = conditions.what
    text = f"{what} is not what the plain model does: {found}. The call has been undone. "
    if sets_up:
        return (
            f"{text}The plain forward adds or removes hooks, as a first call may. Run the plain "
            "model once before it is wrapped."
        )
    if not conditions.is_captured:
        whole = [path for path, _ in model.named_modules() if found.startswith(f"{path}.")]
        leave = f"Leave the submodule that does it whole, keep={whole!r}" if whole else _PLAIN
        return f'{text}{leave}. trial="never" looks away: the step is then as frames run it.'
    if found.startswith(_AFTER):
        return (
            f"{text}Backwards of a plan run no module again, as a checkpoint of the model's own "
            f"does, and no Python. Take the checkpoint off, or plan nothing, {_FRAMES}. {_NEVER}"
        )
    return (
        f"{text}"
        "What a forward reads and changes in Python is fixed when it is planned: keep what changes "
        "from step to step in a buffer (register_buffer) or pass it as an argument; or plan "
        f"nothing, {_FRAMES}. {_NEVER}"
    )
