"""Plans the calls of a module where it stands.

`nn.Module.compile` leaves a function in the module that its calls run in the place of its forward.
It shows in no `state_dict`, pickle or copy. `plan_in_place` leaves one that asks a
`RockmateModule` beside. While that one runs, the module is as it was, so whatever it captures,
holds against eager, or gives back to the plain model, is the user's.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from rockmate._torch.members import call_after_compile, compiled_call, set_compiled_call
from rockmate.budget import Budget
from rockmate.entry.module import RockmateModule
from rockmate.errors import InvalidArgumentError

logger = logging.getLogger(__name__)


def plan_in_place(
    model: nn.Module, sample_input: Any = None, budget: Budget | None = None, **options: Any
) -> RockmateModule:
    """Has a model train inside a memory budget, and leaves the object what it is.

    Type, identity, `state_dict`, `modules()`, pickle and `copy.deepcopy` stay the model's own; a
    copy has no plan. Eval calls of a model that is compiled by `model.compile()` run compiled.
    `release(model)` undoes it.

    Args:
        model: a module in training mode.
        sample_input: as for `RockmateModule`; with None, the first training call is the sample.
        budget: as for `RockmateModule`.
        **options: as for `RockmateModule`, but for `methods`, which are called past the module.

    Returns:
        What plans and runs the calls: it has the `plan`, or `frames`, to read.

    Raises:
        InvalidArgumentError: the model, or a submodule, is planned already; or `methods` are given.
        RockmateError: as for `RockmateModule`.
    """
    if options.get("methods"):
        msg = "methods cannot be planned in place. Write RockmateModule(model, ..., methods=[...])."
        raise InvalidArgumentError(msg)
    make = partial(RockmateModule, model, budget=budget, **options)
    return InPlace(model, make, sample_input=sample_input).module


def release(model: nn.Module) -> None:
    """Undoes `plan_in_place`; raises `InvalidArgumentError` for a model that is not planned so."""
    call = compiled_call(model)
    if not isinstance(call, InPlace):
        msg = f"the {type(model).__name__} is not planned in place, so there is nothing to release."
        raise InvalidArgumentError(msg)
    call.release()


class InPlace:
    """What the calls of a module run, from when it is made; `module` plans and runs them."""

    is_plan = True  # among compiled calls
    num_running = 0  # of all

    def __init__(self, model: nn.Module, make: Callable[..., Any], **given: Any) -> None:
        """Takes what makes a `RockmateModule` of the model; `given` for the first one alone."""
        self.module: RockmateModule = make(**given)
        self._make, self._before = make, compiled_call(model)  # by `model.compile()`
        self._forward = vars(model).get("forward")
        self._end = weakref.finalize(self, call_after_compile(_leave_plan))
        set_compiled_call(model, self)

    def release(self) -> None:
        """Has the module's calls run what they ran before."""
        self._end()
        set_compiled_call(self.module.original, self._before)

    def renew(self, **changed: Any) -> None:
        """Plans anew at the next training call, with other options."""
        model, self._make = self.module.original, partial(self._make, **changed)
        present = compiled_call(model)
        set_compiled_call(model, self._before)
        try:
            self.module = self._make()
        finally:
            set_compiled_call(model, present)

    def instead(self, error: Exception) -> nn.Module | None:
        """What runs a call that ended in an error once more; None raises the error."""

    def note_call(self) -> None:
        """Comes after each training call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for a call; errors as for `RockmateModule.forward`."""
        if torch.compiler.is_dynamo_compiling():
            from rockmate.runtime.uncompiled import run_uncompiled

            return run_uncompiled(self, args, kwargs)
        return self._run(args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = self.module.original
        set_compiled_call(model, self._before)
        InPlace.num_running += 1
        try:
            return self._output(model, args, kwargs)
        finally:
            InPlace.num_running -= 1
            if self._end.alive:
                set_compiled_call(model, self)

    def _output(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if vars(model).get("forward") is not self._forward:
            self._forward = vars(model).get("forward")
            if self.module.is_planned:
                logger.warning("the model is planned anew, since its forward was replaced")
                self.renew()
        try:
            output = self.module._run(args, kwargs)
            if model.training and torch.is_grad_enabled():
                self.note_call()
            return output
        except Exception as error:
            other = self.instead(error)
            if other is None:
                raise
        return other(*args, **kwargs)

    def __reduce__(self) -> Any:
        """None: where a class has a pickle of its own, its copies have no plan."""
        return type(None), ()


def _leave_plan(model: nn.Module, before: Any) -> None:
    """Leaves a plan where it is, in front of what `model.compile()` has left."""
    if isinstance(before, InPlace):
        before._before = compiled_call(model)
        set_compiled_call(model, before)
