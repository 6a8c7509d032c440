"""Calls that the plain model runs: without a backward, too early, or not in training mode."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rockmate._torch.engine import is_profiling
from rockmate.capture.forward_attributes import NO_ATTRIBUTES
from rockmate.capture.model_signature import ModelWatch
from rockmate.capture.signature import CallSignature, flatten_call
from rockmate.capture.traced_forward import ModuleReplacedError
from rockmate.errors import RockmateError, TrialError
from rockmate.runtime.model_checks import is_lazy
from rockmate.runtime.pending_steps import pending_steps_of
from rockmate.state.opened_object import tensors_within

logger = logging.getLogger(__name__)

_BETWEEN = (
    "a call without gradients runs while a forward waits for its backward, and may take more than "
    "the budget leaves: nothing counts it. Run it before that forward, or after the backward."
)
_IN_EVAL = (
    "a call in eval mode computes for gradients, which the plain model does without the budget: "
    "evaluate under torch.no_grad(), or plan such a call by rockmate.plan_step(model, budget=...)"
)
_UNGRADED = (
    "no output of this call requires a gradient, so the plain model ran it, without a plan or "
    "budget: nothing is saved for a backward. Later calls like it do the same."
)


class UngradedCalls:
    """The calls of one module whose outputs require no gradient.

    In a GAN, one player's parameters are frozen while the other one trains.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._trained: Tensor | None = None  # a parameter or buffer that required a gradient
        self._found: list[tuple[CallSignature, ModelWatch]] = []  # calls that turned out to be some
        self._is_lazy, self._has_set_up, self._told = False, False, set[str]()

    def begin_plain(self, frames: Any, is_eager: bool) -> None:
        """Before a call in eval mode, without gradients, or of a module whose budget is lost."""
        num_pending = 0 if frames is None else frames.begin_plain()
        if is_eager:
            return
        if not torch.is_grad_enabled():
            if num_pending or pending_steps_of(self._model).runners_of(self._model):
                self._tell(_BETWEEN)
        elif _IN_EVAL not in self._told and any(p.requires_grad for p in self._model.parameters()):
            self._tell(_IN_EVAL)

    def _tell(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)

    def includes(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether a call is one, as far as that is known before it runs."""
        if self._trained is None or not self._trained.requires_grad:
            self._is_lazy = is_lazy(self._model)
            if self._is_lazy:
                return True
            members = (*self._model.parameters(), *self._model.buffers())
            self._trained = next((each for each in members if each.requires_grad), None)
        if self._trained is None:
            return not any(each.requires_grad for each in tensors_within((args, kwargs)))
        if not self._found:
            return False
        call = flatten_call(args, kwargs)[1]
        return any(known == call and not watch.has_changed() for known, watch in self._found)

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Notes that a call is one, which its capture has shown, while the module is as it is."""
        call = flatten_call(args, kwargs)[1]
        self._found = [each for each in self._found if not each[1].has_changed()]
        self._found.append((call, ModelWatch(self._model, NO_ATTRIBUTES)))

    def includes_failed(self, error: RockmateError, *, ends_in_eager: bool) -> bool:
        """Whether a call that ended in an error is one: it sets the model up, or is profiled.

        Args:
            error: of the call.
            ends_in_eager: whether the plain model may run it if it adds hooks, or is profiled.
        """
        if ends_in_eager and type(error) is RockmateError and is_profiling():
            logger.warning("the plain model ran this call, without a budget, since %s", error)
            return True
        is_replaced = isinstance(error, ModuleReplacedError)
        sets_up = is_replaced or (ends_in_eager and isinstance(error, TrialError) and error.sets_up)
        sets_up &= not self._has_set_up
        if sets_up:
            self._has_set_up = True
            logger.warning(
                "this call %s, as a first call may, so the plain model ran it, without a budget. "
                "The next call is planned for.",
                "puts submodules in place" if is_replaced else "adds or removes hooks",
            )
        return sets_up

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The output of a call of `model`, which may be a wrapper of the module."""
        output = model(*args, **kwargs)
        if self._is_lazy:
            logger.warning(
                "this call has made the parameters of lazy modules, so the plain model ran it, "
                "without a budget. The next call is planned for."
            )
            return output
        if any(each.requires_grad for each in tensors_within(output)):
            self._found.clear()
            logger.warning(
                "an output of this call requires a gradient, which reaches the model neither by "
                "its parameters and buffers nor by its inputs, so the plain model ran it without "
                "a budget. Pass the tensors that require a gradient as inputs, or register them."
            )
        else:
            self._tell(_UNGRADED)
        return output
