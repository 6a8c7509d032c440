"""Log-probabilities of TRL's trainers: the calls around the policy's step run within its plan.

- A reference that the loss calls on what the policy gets, as DPO's and KTO's, runs within the
  policy's forward: nothing is held for the policy's backward beside it. It is a model, or the
  policy with other adapters or none.
- A call of the policy without gradients, as KTO's second batch, is a planned forward. Outside of
  the plan, a buffer of TRL's head may be larger than the rest of the step.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from rockmate._torch.pytree import tree_map_only

logger = logging.getLogger(__name__)


def names_in_loss(trainer: Any) -> set[str]:
    """Names and words of `compute_loss`, and of the trainer's methods that it names."""
    names, words, pending = set[str](), set[str](), ["compute_loss"]
    while pending:
        name = pending.pop()
        for function in filter(None, (vars(each).get(name) for each in type(trainer).__mro__)):
            code = getattr(inspect.unwrap(function), "__code__", None)
            read = set(code.co_names if code else ())
            for each in code.co_consts if code else ():  # those of keywords are in tuples
                words.update(each if isinstance(each, tuple) else [each])
            pending += read - names
            names |= read
            if "super" not in read:
                break
    return names | words


class PolicyCalls:
    """The calls of a policy that computes log-probabilities for a trainer, and of its reference."""

    def __init__(self, trainer: Any) -> None:
        """Has the policy's forward in training run its reference first, which is frozen."""
        self._policy, self._has_told = trainer.model, False
        self._kept: deque[tuple[dict[str, Any], Any]] = deque(maxlen=2)  # KTO has two batches
        self._adapters = _adapters_of(self._policy)
        self._run: Any = self._reference_of(trainer)
        if self._run is not None:
            own = self._policy.forward
            self._policy.forward = update_wrapper(partial(self._both, own), own)

    def _reference_of(self, trainer: Any) -> Callable[..., Any] | None:
        """What the loss calls on what the policy gets; None if that is not within the plan."""
        reference, names = getattr(trainer, "ref_model", None), names_in_loss(trainer)
        is_own = reference is None and bool(names & {"use_adapter", "disable_adapter"})
        if getattr(trainer, "precompute_ref_logps", False):
            return None
        if is_own and self._adapters is not None:
            return self._with_reference_adapters
        is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
        if not isinstance(reference, nn.Module) or is_sharded or "ref_model" not in names:
            if reference is not None:
                _warn("is sharded" if is_sharded else "is not called by the loss")
            return None
        run = reference.requires_grad_(requires_grad=False).forward
        reference.forward = update_wrapper(partial(self._kept_or_run, run), run)
        return run

    def take(self, module: nn.Module) -> None:
        """Has the calls of the planned policy go through here."""
        module.forward = update_wrapper(partial(self._planned, module.forward), module.forward)

    def _both(self, own: Any, *args: Any, **keywords: Any) -> Any:
        is_step = self._policy.training and torch.is_grad_enabled()
        if is_step and keywords.get("fused_lm_head"):
            with torch.no_grad():
                self._policy.expected = self._run(*args, **keywords)
        return own(*args, **keywords)

    def _planned(self, planned: Any, *args: Any, **keywords: Any) -> Any:
        if not (self._policy.training and keywords.get("fused_lm_head")):
            return planned(*args, **keywords)
        if torch.is_grad_enabled():
            output = planned(*args, **keywords)
            if "expected" in vars(self._policy):
                self._kept.append((keywords, vars(self._policy).pop("expected")))
            return output
        if _adapters_of(self._policy) != self._adapters:  # the reference
            return self._kept_or_run(planned, *args, **keywords)
        with torch.enable_grad():
            output = self._planned(planned, *args, **keywords)
        return tree_map_only(Tensor, Tensor.detach, output)

    def _kept_or_run(self, run: Any, *args: Any, **keywords: Any) -> Any:
        for pair in () if args else self._kept:
            if all(key in pair[0] and _is_equal(pair[0][key], keywords[key]) for key in keywords):
                self._kept.remove(pair)
                return pair[1]
        if self._run is not None and self._policy.training and not self._has_told:
            self._has_told = True
            _warn("is called on other inputs than the policy")
        return run(*args, **keywords)

    def _with_reference_adapters(self, *args: Any, **keywords: Any) -> Any:
        """As in TRL: those of a copy if the policy's were trained before, else none."""
        policy = self._policy
        if "ref" not in policy.peft_config:
            with policy.disable_adapter():
                return policy.forward(*args, **keywords)
        own = policy.active_adapter
        policy.set_adapter("ref")
        try:
            return policy.forward(*args, **keywords)
        finally:
            policy.set_adapter(own)


def _adapters_of(policy: Any) -> tuple[Any, Any] | None:
    """Whether a PEFT model has its adapters on, and which; None for other models."""
    if not hasattr(policy, "get_model_status") or policy.active_peft_config.is_prompt_learning:
        return None
    status = policy.get_model_status()
    return status.enabled, status.active_adapters


def _warn(reason: str) -> None:
    logger.warning("the trainer's reference is outside of the budget: it %s.", reason)


def _is_equal(value: Any, other: Any) -> bool:
    are_tensors = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
    return value is other or bool(torch.equal(value, other) if are_tensors else value == other)
