"""Reference models of trainers that call them on what the policy gets, as TRL's DPO and KTO do.

A reference runs within the policy's forward, so that it is in its plan, and nothing is held for the
policy's backward beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import nn


def join_reference(policy: nn.Module, reference: nn.Module) -> Callable[..., None]:
    """Has a policy's forward in training run its reference first, which is frozen.

    The reference then has an answer to the trainer's call on equal arguments.

    Returns:
        A hook for the planned policy.
    """
    reference.requires_grad_(requires_grad=False)
    kept: deque[tuple[dict[str, Any], Any]] = deque(maxlen=2)  # KTO has two batches in a step
    own, run = policy.forward, reference.forward
    policy.forward = update_wrapper(partial(_both, policy, own, run), own)
    reference.forward = update_wrapper(partial(_kept_or_run, kept, run), run)
    return partial(_keep, policy, kept)


def _both(policy: Any, own: Any, run: Any, *args: Any, **keywords: Any) -> Any:
    if policy.training and keywords.get("fused_lm_head"):
        with torch.no_grad():
            policy.expected = run(*args, **keywords)
    return own(*args, **keywords)


def _keep(policy: Any, kept: deque[Any], _: Any, __: Any, keywords: Any, ___: Any) -> None:
    if "expected" in vars(policy):
        kept.append((keywords, vars(policy).pop("expected")))


def _kept_or_run(kept: deque[Any], run: Any, *args: Any, **keywords: Any) -> Any:
    for pair in () if args else kept:
        if all(key in pair[0] and _is_equal(pair[0][key], keywords[key]) for key in keywords):
            kept.remove(pair)
            return pair[1]
    return run(*args, **keywords)


def _is_equal(value: Any, other: Any) -> bool:
    are_tensors = isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor)
    return value is other or bool(torch.equal(value, other) if are_tensors else value == other)
