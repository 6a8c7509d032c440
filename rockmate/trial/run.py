"""Runs a step beside the plain model's forward, and raises where the two differ.

[Note: the trial of a step]

1. The state of the call is taken: see `CallState`.
2. The plain model's forward runs, with gradients on, so that it takes the branches and kernels of
   training, and with nothing saved. What ops write is copied right before (`Writes`), and bytes are
   counted: a run that is about to pass the budget is stopped, and the log says so.
3. What it has given and left behind is noted in a few bytes (`Outcome`), and all is put back.
4. Where that takes little time, the plain backward runs, too, and is undone (`PlainGradients`).
5. The step's own forward runs. Its outcome is held against the first. So are the gradients of its
   backward, after which all is put back, and the forward runs again.

So a difference needs no guard that has thought of it. Where the two differ, the state is put back
once more, so that nothing of the step remains, and the plain forward runs once more: where it
differs from its first run, something could not be put back.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate._torch.autocast import autocast_as, autocast_dtypes, autocast_uncached
from rockmate._torch.cuda import TF32_EPS, rounds_to_tf32
from rockmate._torch.fake import is_fake
from rockmate._torch.members import module_hooks_of, modules_within
from rockmate.budget import size_text
from rockmate.capture.compiled_model import uncompiled
from rockmate.capture.huggingface import switched_off
from rockmate.capture.trace_state import DifferentiatedError, nothing_saved
from rockmate.errors import NotRepeatableError, TrialError
from rockmate.state.call_state import CallState
from rockmate.state.iterators import IteratorError, iterators_guarded
from rockmate.state.tensors import tensors_in
from rockmate.state.writes import OutOfBudget, Writes
from rockmate.trial.conditions import Conditions
from rockmate.trial.gradients import PlainGradients, Saving
from rockmate.trial.outcome import Comparison, Outcome, Reader
from rockmate.trial.steps import TrialSteps

logger = logging.getLogger(__name__)

_ROUNDING_ULPS = 1024
"""Of single precision and finer: what sums in another order, over the depth of a model, amount to.
Values that belong to another step differ by a thousand times as much."""
_COARSE_ULPS = 8  # of shorter formats, in which each op rounds that much
_PLAIN = "Train the plain model, module.original"
_OF_NO_REPEAT = (
    "%s cannot be held against eager, since the plain model's forward does not repeat itself: in a "
    "second run from the same state, %s. It reads or changes something that cannot be put back: a "
    "file, a process, memory of a library, a clock, the system's random numbers. Capture and trial "
    "have run it several times, so what it counts there has gone on. Keep it in a buffer "
    "(register_buffer) or an attribute, or pass it as an argument; or begin anew with the plain "
    "model, module.original."
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
    writes = Writes(conditions.most_bytes, conditions.largest_bytes)
    random = before.random_now()
    has_labels, autocast = kwargs.get("labels") is not None, autocast_dtypes()
    undo = partial(before.put_back, writes, random)
    reader = Reader(
        before, writes,
        is_exact=conditions.is_exact, has_labels=has_labels, only_loss=conditions.only_loss,
    )  # fmt: skip

    def plain() -> Any:
        guarded = iterators_guarded(before.objects)
        with guarded, _as_in(conditions, model), autocast_as(autocast), torch.enable_grad():
            return model(*args, **kwargs)

    eager = _of_plain(plain, undo, before, writes, reader, conditions, steps)
    if eager is None:
        return ours()
    gradients = None
    if conditions.has_backward and steps.has_time:
        gradients = PlainGradients(plain, undo, before, writes, conditions, has_labels=has_labels)
    output, rounding = ours(), _rounding(before)
    tolerance = 0.0 if conditions.is_exact else rounding
    compared = Comparison(before, reader, eager, reader.outcome(output), tolerance)
    found = compared.difference()
    if not found and (gradients is None or gradients.reason):
        return output
    if not found and gradients is not None:
        found = gradients.difference(output, rounding)
    del output
    undo()
    if not found:  # a backward of the first run is over
        return ours()
    again = None
    if not any(compared.changed_alone()):
        again = _of_plain(plain, undo, before, writes, reader, conditions, steps)
    if again and (other := Comparison(before, reader, eager, again, rounding).of_numbers()):
        raise NotRepeatableError(_OF_NO_REPEAT % (conditions.what, other))
    tables = {id(each) for part in modules_within(model) for each in module_hooks_of(vars(part))}
    sets_up = not tables.isdisjoint(eager.contents)
    raise TrialError(_text(found, model, conditions, sets_up=sets_up), sets_up=sets_up)


def _of_plain(
    plain: Callable[[], Any],
    undo: Callable[[], None],
    before: CallState,
    writes: Writes,
    reader: Reader,
    conditions: Conditions,
    steps: TrialSteps,
) -> Outcome | None:
    """The outcome of the plain forward, which is undone; None where it cannot run in the budget."""
    reason, outcome, saving = "", None, Saving(plain, undo, before.storages)
    try:
        unsaved = nothing_saved()(plain), lambda: False
        for run, evict in (unsaved, (saving.run, saving.evict), (plain, lambda: False)):
            try:
                begin_s = time.thread_time()
                with writes.noted(evict):
                    output = run()
                steps.forward_s = time.thread_time() - begin_s
                outcome = reader.outcome(output)
                break
            except (DifferentiatedError, RuntimeError) as error:
                if isinstance(error, RuntimeError) and "saved tensor hooks" not in str(error):
                    raise  # else within torch.func no such hooks may be on
                undo()
    except IteratorError:
        reason = "the plain forward would use an iterator up"
    except (OutOfBudget, torch.OutOfMemoryError):
        reason = f"the plain forward takes more than {size_text(conditions.most_bytes)}"
    finally:
        output = None
        undo()
        writes.release()
    if outcome is not None and writes.num_bytes > conditions.most_copied_bytes:
        reason = f"copies of what the forward changes take {size_text(writes.num_bytes)}"
        outcome = None
    if reason:
        logger.info("%s is not held against eager, since %s", conditions.what, reason)
    return outcome


@contextlib.contextmanager
def _as_in(conditions: Conditions, model: nn.Module) -> Iterator[None]:
    """Runs a plain model as the step runs: uncompiled, and as it was captured."""
    switches = switched_off(model) if conditions.is_captured else contextlib.nullcontext()
    with switches, uncompiled(model), autocast_uncached():
        yield


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
    return (
        f"{text}"
        "What a forward reads and changes in Python is fixed when it is planned: keep what changes "
        "from step to step in a buffer (register_buffer) or pass it as an argument; or plan "
        'nothing, mode="frames". trial="never" looks away: the step is then as it was planned.'
    )
