"""Notes what a script trains, whoever runs it: Python loads this file at its start.

Losses, the parameters of all optimizers at the end, times of steps, and one step's memory: from
after a step of an optimizer to before its next one, or, where that has a closure, to after it.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import sys
import time
from importlib import import_module
from typing import Any

from rockmate.adoption.script import after_import

_BEGIN = time.perf_counter()
_OUT = os.environ.get("OBSERVED")
# Number of the optimizer step after which memory is recorded; 0 for none.
_ALLOCATOR, _MARK = "rockmate._torch.allocator", "observed::begin"
_MEASURED = int(os.environ.get("MEASURED", "4"))


def _observe(torch: Any) -> None:
    optim_code = import_module("torch.optim.optimizer")
    random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    optimizers: list[Any] = []
    seen: dict[str, Any] = {"losses": [], "times": [_BEGIN], "peak_bytes": None}
    profile = torch._C._autograd
    measured: list[Any] = []  # the optimizer between whose steps memory is recorded
    process = os.getpid()
    make, backward = torch.optim.Optimizer.__init__, torch.Tensor.backward

    def init(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        make(optimizer, *args, **kwargs)
        optimizers.append(optimizer)

    def noted(loss: Any, *args: Any, **kwargs: Any) -> Any:
        # A trial has a backward of its own, which it undoes.
        if loss.numel() == 1 and "/rockmate/" not in sys._getframe(1).f_code.co_filename:
            seen["losses"].append(loss.item())
        return backward(loss, *args, **kwargs)

    def stepped(optimizer: Any, *_: Any) -> None:
        ended(optimizer)
        seen["times"].append(time.perf_counter())
        number = len(seen["times"]) - 1
        if number == _MEASURED and not torch.autograd._profiler_enabled():
            profile._enable_profiler_legacy(import_module(_ALLOCATOR)._profiler_config())
            measured.append(optimizer)
            seen["gradient_bytes"] = _renew_gradients(optimizers)
            with torch.profiler.record_function(_MARK):
                pass

    def stepping(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not any(callable(each) for each in (*args, *kwargs.values())):
            ended(optimizer)

    def ended(optimizer: Any) -> None:
        if optimizer in measured:
            measured.clear()
            live = _peak(profile._disable_profiler_legacy())
            seen["peak_bytes"] = seen["gradient_bytes"] + live

    def end() -> None:
        if os.getpid() != process or not optimizers or _OUT is None:
            return
        held = [each.detach().clone() for one in optimizers for each in _parameters(one)]
        torch.save(held, f"{_OUT}.pt")
        with open(f"{_OUT}.json", "w", encoding="utf-8") as file:
            json.dump(seen, file)

    torch.optim.Optimizer.__init__ = init
    torch.Tensor.backward = noted
    optim_code.register_optimizer_step_post_hook(stepped)
    optim_code.register_optimizer_step_pre_hook(stepping)
    atexit.register(end)


def _parameters(optimizer: Any) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _renew_gradients(optimizers: list[Any]) -> int:
    """Bytes of all gradients; copies take their places: the profiler knows no earlier memory."""
    held = {each for one in optimizers for each in _parameters(one) if each.grad is not None}
    for parameter in held:
        parameter.grad = parameter.grad.clone()
    return sum(each.grad.numel() * each.grad.element_size() for each in held)


def _peak(threads: Any) -> int:
    events = [event for thread in threads for event in thread]
    start = next(event for event in events if event.name() == "__start_profile")
    events.sort(key=start.cpu_elapsed_us)
    live = peak = 0
    for event in events:
        if event.name() == _MARK:
            live = peak = 0
        if event.kind() == "memory_alloc":
            live += event.cpu_memory_usage()
            peak = max(peak, live)
    return peak


if _OUT is not None:
    after_import("torch", _observe)
