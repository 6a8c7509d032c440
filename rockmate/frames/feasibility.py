"""Whether frames can keep a budget, in lines of the log and as errors."""

from __future__ import annotations

import logging

from torch import nn

from rockmate.budget import Budget, parse_budget, size_text
from rockmate.errors import InfeasibleBudgetError, UnsupportedModelError
from rockmate.frames.needs import FrameKey, StepNeeds

logger = logging.getLogger(__name__)


def refuse_flat_parameters(model: nn.Module) -> None:
    """Raises `UnsupportedModelError` for a model that FSDP1 has sharded."""
    from torch.distributed.fsdp import FullyShardedDataParallel  # takes a second to load

    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        msg = (
            "FullyShardedDataParallel (FSDP1) keeps parameters in one flat tensor, which frames do "
            "not follow. Shard with torch.distributed.fsdp.fully_shard (FSDP2), then wrap the "
            "model."
        )
        raise UnsupportedModelError(msg)


def tell_budget(budget_bytes: int, needs: StepNeeds, num_submodules: int) -> None:
    """Says that a budget holds."""
    logger.info(
        "frames: %d calls of %d submodules, budget %s, smallest peak %s, %s if nothing is dropped",
        len(needs.by_key),
        num_submodules,
        size_text(budget_bytes),
        size_text(needs.minimum_bytes),
        size_text(needs.baseline_bytes),
    )


def too_small(budget_bytes: int, needs: StepNeeds) -> InfeasibleBudgetError:
    """The error for a budget below the smallest peak."""
    largest = max(needs.by_key, key=lambda key: needs.by_key[key].peak_bytes)
    return InfeasibleBudgetError(budget_bytes, needs.minimum_bytes, where=str(largest))


def tell_taken(budget_bytes: int, minimum_bytes: int) -> None:
    """Says that the smallest peak is taken for the budget."""
    logger.warning(
        "the budget of %s is below the smallest peak of frames, %s, which is taken",
        size_text(budget_bytes),
        size_text(minimum_bytes),
    )


def told_no_frames(budget: Budget, peak_bytes: int) -> InfeasibleBudgetError | None:
    """Says that nothing keeps the budget, and gives the error; None if the step is within it."""
    budget_bytes = parse_budget(budget, peak_bytes)
    if budget_bytes >= peak_bytes:
        return None
    logger.warning(
        "no call of a submodule could be a frame, so nothing keeps the budget of %s: the step "
        "takes %s. Frames are calls of submodules that have submodules, outside of checkpoints and "
        "of keep.",
        size_text(budget_bytes),
        size_text(peak_bytes),
    )
    where = "a step of which no call can be a frame"
    return InfeasibleBudgetError(budget_bytes, peak_bytes, where=where)


def tell_lowered(key: FrameKey, before_bytes: int, lowered_bytes: int) -> None:
    """Says that memory ran out in a frame, and what the budget is from now on."""
    logger.warning(
        "out of memory in %s, within the budget of %s, which is %s from now on",
        key,
        size_text(before_bytes),
        size_text(lowered_bytes),
    )
