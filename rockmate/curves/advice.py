"""What to say where nothing fits: what takes the memory, and what would fit."""

from __future__ import annotations

from torch import nn

from rockmate.budget import size_text
from rockmate.curves.device_memory import FixedMemory
from rockmate.curves.errors import NothingFitsError
from rockmate.curves.fit_options import FitOptions
from rockmate.memory_limit import MemoryLimit, missing_state_bytes

_LEANER = ("adamw_8bit", "adafactor", "sgd")


def nothing_fits(
    fixed: FixedMemory,
    limit: MemoryLimit,
    model: nn.Module,
    options: FitOptions,
    *,
    least_bytes: int | None = None,
) -> NothingFitsError:
    """The error for a memory that the smallest size exceeds.

    `least_bytes` is the least memory at that size; None if parameters, gradients and state alone,
    or the optimizer's step, exceed the memory.
    """
    memory_bytes = limit.limit_bytes
    if least_bytes is not None:
        smallest = "a batch of 1" if options.vary == "batch" else f"{options.step} tokens"
        peak = size_text(least_bytes - fixed.held_bytes)
        what = (
            f"{smallest} needs at least {size_text(least_bytes)}: {peak} at the smallest peak of "
            f"its activations, {fixed.describe()}"
        )
        needed = least_bytes
    elif fixed.held_bytes >= memory_bytes:
        needed = fixed.held_bytes
        what = f"{size_text(needed)} are taken before the first activation: {fixed.describe()}"
    else:
        needed = fixed.held_bytes + fixed.step_bytes
        what = (
            f"the optimizer's step needs {size_text(needed)}: {size_text(fixed.step_bytes)} of "
            f"temporary tensors, {fixed.describe()}"
        )
    text = (
        f"nothing fits {size_text(memory_bytes)} ({memory_bytes:,} bytes): {what}. What would "
        f"help: {'; '.join(_remedies(fixed, limit, model, options, needed))}."
    )
    return NothingFitsError(text, memory_bytes=memory_bytes, least_bytes=needed)


def _remedies(
    fixed: FixedMemory, limit: MemoryLimit, model: nn.Module, options: FitOptions, needed: int
) -> list[str]:
    """What takes less memory, the ones that are known to suffice first."""
    memory_bytes = limit.limit_bytes
    trained = [each for each in model.parameters() if each.requires_grad]
    found = []
    for name in _LEANER:
        saved = fixed.state_bytes - missing_state_bytes(name, trained)
        if isinstance(limit.optimizer, str) and saved > 0 and needed - saved <= memory_bytes:
            found.append(f"optimizer {name}, which would fit with {size_text(saved)} less state")
    trainable = fixed.gradient_bytes + fixed.state_bytes
    if trainable > fixed.parameter_bytes // 10:
        would = ", which would fit" if needed - trainable * 9 // 10 <= memory_bytes else ""
        found.append(
            f"LoRA or frozen layers, without most of {size_text(trainable)} of gradients and "
            f"state{would}"
        )
    frozen_bytes = sum(each.nbytes for each in model.parameters() if not each.requires_grad)
    if frozen_bytes and options.planning.offload is None and needed - frozen_bytes <= memory_bytes:
        found.append(f"offload, with {size_text(frozen_bytes)} of frozen weights at home there")
    if needed > fixed.held_bytes + fixed.step_bytes and options.vary == "batch":
        found.append("fewer tokens in a sequence")
    return [*found, f"a memory of {needed:,} bytes or more"]
