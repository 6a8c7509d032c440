"""What becomes of a random training script: eager's bits inside the budget, or else what.

The plain model runs the script first, with the same seeds. Its peak comes from the events of
`torch.profiler`, as does that of the wrapped one: nothing here asks the planner. Where the wrapped
script is refused, the advice of the error is followed, as a user would, up to six times.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import logging
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from bench.command import of_tests
from bench.measure import allocator_peak, heard
from rockmate import InfeasibleBudgetError, RockmateError, RockmateModule
from rockmate._torch.autocast import autocast_uncached

random_scripts = of_tests("random_scripts")

Record = dict[str, Any]

RIGHT = ("equal", "unbudgeted", "advised")
FAULTS = ("DIFFERS", "OVER BUDGET", "RAW ERROR", "REFUSED", "timeout", "error")
# Of sums of gradients: of several forwards before one backward, where `.grad` holds something or an
# opaque module sums; of an input that an opaque module and others read: docs/guide/limits.md.
_ROUNDING = 1e-6
_ROUNDED_IN_FLIGHT = {
    "accumulation", "two backwards", "weight replaced", "made by the first call", "layer appended",
    "layer swapped", "submodule replaced", "recurrent", "packed recurrent",
}  # fmt: skip
_PROFILED = "a profiler is running"
NOT_COUNTED = "not in eager"
MEANINGS = {
    "equal": "eager's bits, in a plan under autocast those without its cache, inside the budget",
    "unbudgeted": "eager's bits, above the budget or without one, and a warning said so",
    "advised": "refused; what the error advises led to one of the two above",
}

_NUM_ADVICES = 6
_NUM_WATCHED, _MOST_MEASURED = 4, 7  # steps in which frames look at their peaks, steps after these
# A line of the log that says that nothing keeps the budget, or not in all steps.
_NO_BUDGET = (
    "nothing keeps the budget", "without a budget", "without a plan or budget", "plain model ran",
    "more than the budget", "which is above", "smallest peak", "are in flight",
    "beyond the budget",
)  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """How a script is wrapped.

    Attributes:
        mode: of `RockmateModule`.
        budget: in bytes.
        options: further ones.
        runs_first: whether the plain model runs once before it is wrapped.
        is_plain: whether the plain model is called instead of the wrapped one.
        has_raised: whether the budget was raised to one that an error has named.
    """

    mode: str
    budget: int
    options: dict[str, Any] = field(default_factory=dict)
    runs_first: bool = False
    is_plain: bool = False
    has_raised: bool = False


def outcome(script: Any) -> Record:
    """One of `RIGHT`, `FAULTS` and `NOT_COUNTED`, with what led there."""
    begin = time.perf_counter()
    try:
        theirs = random_scripts.run_of(script).train()
        eager = random_scripts.run_of(script)
        again = random_scripts.difference(eager.train(), theirs)
        peak = _peak(eager)
    except Exception as error:  # noqa: BLE001
        return {"verdict": NOT_COUNTED, "detail": _text(error)}
    if again:
        return {"verdict": NOT_COUNTED, "detail": f"eager differs from itself: {again}"}
    settings = Settings(script.mode, int(script.share * peak))
    record: Record = {"eager_s": round(time.perf_counter() - begin, 2), "eager_peak": peak}
    advices: list[str] = []
    for _ in range(_NUM_ADVICES + 1):
        with heard(logging.WARNING) as lines:
            found = _attempt(script, settings, theirs, lines)
        error = found.pop("error", None)
        if error is None:
            is_advised = advices and found["verdict"] in RIGHT
            verdict = "advised" if is_advised else found["verdict"]
            return record | found | {"verdict": verdict, "advices": advices}
        advised = _advised(settings, error)
        if advised is None:
            return record | found | {"advices": advices}
        advices.append(found["detail"])
        settings = advised
        if settings.runs_first:
            theirs = _after_a_first_run(script).train()
    return record | {"verdict": "REFUSED", "detail": "no end of advice", "advices": advices}


def _after_a_first_run(script: Any, wrap: Callable[..., nn.Module] | None = None) -> Any:
    """A script whose model has run once before it is wrapped."""

    def wrapped(model: Any, inputs: Any) -> nn.Module:
        run = random_scripts.Run(script, model, model, [])
        model(**run.inputs(0))
        return model if wrap is None else wrap(model, inputs)

    return random_scripts.run_of(script, wrapped)


def _attempt(script: Any, settings: Settings, theirs: Any, heard: list[str]) -> Record:
    """One run of the wrapped script; an `error` where it is refused."""
    modules: list[RockmateModule] = []

    def wrap(model: nn.Module, inputs: Any) -> nn.Module:
        options: Record = {**settings.options, "mode": settings.mode}
        if settings.mode != "frames":
            options["numerics"] = "bitwise"
        modules.append(RockmateModule(model, inputs or None, settings.budget, **options))
        return model if settings.is_plain else modules[0]

    try:
        make = _after_a_first_run if settings.runs_first else random_scripts.run_of
        run = make(script, wrap)
        planned = _noted_calls(run, modules[0])
        ours = run.train()
        has_sums = "two calls in flight" in script.kinds
        has_sums &= not _ROUNDED_IN_FLIGHT.isdisjoint(script.kinds)
        has_sums |= "untraced" in settings.options and "features tapped later" in script.kinds
        rounding = _ROUNDING if any(planned) and has_sums else 0.0
        difference = random_scripts.difference(ours, theirs, rounding=rounding)
        # An opaque module has autocast's cache in each of its calls.
        if any(planned) and (difference or "untraced" not in settings.options):
            theirs = _trained_uncached(make(script), planned)
            difference = random_scripts.difference(ours, theirs, rounding=rounding)
        if difference:
            return {"verdict": "DIFFERS", "detail": difference, "heard": heard}
        if settings.is_plain:
            return {"verdict": "unbudgeted", "detail": "the plain model, as advised"}
        return _within(run, settings, heard, modules[0])
    except RockmateError as error:
        return {"verdict": "REFUSED", "detail": _text(error), "error": error}
    except Exception as error:  # noqa: BLE001
        where = "".join(traceback.format_exception(error)[-4:])
        return {"verdict": "RAW ERROR", "detail": _text(error), "where": where}


def _noted_calls(run: Any, module: Any) -> list[bool]:
    """For each call that a run makes from here on, whether a plan gives its output."""
    calls, num_planned, run_planned = list[bool](), 0, module.plan_cache.run

    def noted(*args: Any) -> Any:
        nonlocal num_planned
        output = run_planned(*args)
        num_planned += 1
        return output

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        num_before = num_planned
        yield
        calls.append(num_planned > num_before)

    module.plan_cache.run, run.around = noted, around
    return calls


def _trained_uncached(run: Any, planned: Sequence[bool]) -> Any:
    """What a plain run gives, without autocast's cache in the calls that a plan has run.

    So a plan adds gradients of several uses of a weight under autocast: docs/guide/limits.md.
    """
    calls = iter(planned)
    run.around = lambda: autocast_uncached() if next(calls) else contextlib.nullcontext()
    return run.train()


def _within(run: Any, settings: Settings, heard: list[str], module: RockmateModule) -> Record:
    """Whether a step after those that were compared stays within the budget."""
    found: Record = {"verdict": "equal", "detail": "", "budget": settings.budget}
    found["ran"] = "plan" if module.frames is None else "frames"
    if all(each.is_measured for each in run.habits) and all(map(_is_measurable, run.model.layers)):
        allowed = settings.budget + _beside(run)
        try:
            found["peak"] = _peak(run, allowed)
        except RockmateError as error:
            if _PROFILED not in str(error):
                raise
            found["detail"] = "planned anew in each step, beside which no profiler can run"
        if found.get("peak", 0) > allowed:
            found["verdict"] = "OVER BUDGET"
            found["detail"] = f"{found['peak'] / settings.budget:.3f} of the budget"
    lines = [line for line in heard if any(text in line for text in _NO_BUDGET)]
    if lines:
        found["heard"] = lines[:3]
        if found["verdict"] == "OVER BUDGET":
            found["verdict"] = "unbudgeted"
    return found


def _is_measurable(layer: Any) -> bool:
    return getattr(layer, "is_measured", not hasattr(layer, "extra_loss"))


def _peak(run: Any, budget: int = 0) -> int:
    """Of a step's forward and backward, with gradients in place and the batch made before.

    The first that keeps the budget counts, else the smallest: a call that is planned for, or that
    frames measure, may take more. Frames look at their peaks in steps of their own first.
    """
    first, found = random_scripts.NUM_STEPS, []
    watched = first + (_NUM_WATCHED if budget else 1)
    for step in range(first, watched + _MOST_MEASURED):
        run.prepare_step(first)
        run.prefetch(step)
        if step < watched:
            run.forward_and_backward(step)
        else:
            try:
                found.append(allocator_peak(functools.partial(run.forward_and_backward, step)))
            except RockmateError as error:
                if _PROFILED not in str(error):
                    raise
                run.prefetch(step)
                run.forward_and_backward(step)  # is planned for
                run.prefetch(step)
                found.append(allocator_peak(functools.partial(run.forward_and_backward, step)))
            if budget == 0 or found[-1] <= budget:
                break
        run.optimizer.zero_grad(set_to_none=False)
    return min(found)


def _beside(run: Any) -> int:
    """Bytes that the script takes itself, at most: its loss, and gradients of its inputs."""
    step = random_scripts.NUM_STEPS + 1
    output = run.last_output.detach().requires_grad_()
    habits = copy.copy(run.habits)

    def loss() -> None:
        total = output.float().square().mean()
        for habit in habits:
            total = habit.loss(run, step, output, total)
        total.backward()

    num_calls = max((habit.num_calls for habit in habits), default=1)
    inputs = sum(given["x"].nbytes for given in run.given if hasattr(given["x"], "nbytes"))
    return num_calls * allocator_peak(loss) + inputs


def _advised(settings: Settings, error: RockmateError) -> Settings | None:
    """The settings that an error advises; None if it advises nothing that is left to try."""
    text, options = str(error), settings.options
    if isinstance(error, InfeasibleBudgetError):
        if error.minimum_bytes > settings.budget:
            # A second one: larger calls than the first come later.
            options = options | ({"on_infeasible": "least"} if settings.has_raised else {})
            budget = error.minimum_bytes
            return replace(settings, budget=budget, options=options, has_raised=True)
        return None
    for name in ("untraced", "keep"):
        named = re.search(rf"{name}=(\[[^\]]*\])", text)
        if named and "path" not in named[1]:  # which stands for the user's own
            paths = sorted({*options.get(name, ()), *ast.literal_eval(named[1])})
            is_there = settings.mode != ("frames" if name == "untraced" else "plan")
            if is_there and paths != options.get(name):
                return replace(settings, options=options | {name: paths})
    number = re.search(r"Pass in_flight=(\d+)", text)
    if number and settings.mode == "plan":
        return replace(settings, options=options | {"in_flight": int(number[1])})
    if 'gradients="returned"' in text and "gradients" not in options and settings.mode != "frames":
        return replace(settings, options=options | {"gradients": "returned"})
    is_set_up = "run the model once before" in text.lower().replace("plain ", "")
    if is_set_up and not settings.runs_first:
        return replace(settings, runs_first=True)
    for mode in ("frames", "auto"):
        if f'mode="{mode}"' in text and settings.mode not in (mode, "frames"):
            kept = {name: value for name, value in options.items() if name == "keep"}
            return replace(settings, mode=mode, options=kept)
    if "plan_frames=False" in text and options.get("plan_frames", True):
        return replace(settings, options=options | {"plan_frames": False})
    if "module.original" in text or "plain model" in text:
        return replace(settings, is_plain=True)
    return None


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:900]
