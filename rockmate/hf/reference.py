"""Reference models of trainers that call them on what the policy gets, as TRL's DPO and KTO do.

A reference runs within the policy's forward, so that it is in its plan and nothing is held for the
policy's backward beside it.
"""

from __future__ import annotations

from collections import deque
from functools import partial, update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import Trainer


class Expected:
    """What a reference has computed within the policy's calls, until the trainer asks for it."""

    def __init__(self, policy: nn.Module) -> None:
        """Begins with nothing."""
        self.policy = policy
        self.kept: deque[tuple[dict[str, Any], Any]] = deque(maxlen=2)  # a batch, and KTO's other

    def __call__(self, _: Any, __: Any, keywords: dict[str, Any], ___: Any) -> None:
        """A hook of the planned policy, whose forward leaves the reference's output there."""
        if "expected" in vars(self.policy):
            self.kept.append((keywords, vars(self.policy).pop("expected")))

    def find(self, keywords: dict[str, Any]) -> Any:
        """The output for these arguments, which the policy had with others; else None."""
        for pair in self.kept:
            if all(key in pair[0] and _is_equal(pair[0][key], keywords[key]) for key in keywords):
                self.kept.remove(pair)
                return pair[1]
        return None


def join_reference(trainer: Trainer) -> Expected | None:
    """Has the policy's forward in training run the trainer's reference first, which is frozen.

    Returns:
        A hook for the planned policy; None where there is no reference that can be joined.
    """
    policy, reference = trainer.model, getattr(trainer, "ref_model", None)
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if reference is None or is_sharded or getattr(trainer, "precompute_ref_logps", False):
        return None
    assert policy is not None
    reference.requires_grad_(requires_grad=False)
    own, other, expected = policy.forward, reference.forward, Expected(policy)
    policy.forward = update_wrapper(partial(_both, policy, own, other), own)
    reference.forward = update_wrapper(partial(_known_or_run, expected, other), other)
    return expected


def _both(policy: Any, own: Any, other: Any, *args: Any, **keywords: Any) -> Any:
    if policy.training and keywords.get("fused_lm_head"):
        with torch.no_grad():
            policy.expected = other(*args, **keywords)
    return own(*args, **keywords)


def _known_or_run(expected: Expected, other: Any, *args: Any, **keywords: Any) -> Any:
    known = None if args else expected.find(keywords)
    return other(*args, **keywords) if known is None else known


def _is_equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value is other or (value.device == other.device and torch.equal(value, other))
    return value is other or value == other
