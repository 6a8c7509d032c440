"""Finds the modules that a script trains, and the optimizers that hold their parameters.

The outermost module that is called in training mode, with gradients, and has a parameter that an
optimizer holds. Modules are looked at until all parameters that optimizers hold are found, or each
optimizer has stepped twice. Then calls of modules are as PyTorch has them.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from rockmate._torch.members import (
    call_after_compile,
    compiled_call,
    find_calls,
    modules_within,
    set_compiled_call,
)
from rockmate.adoption.in_place import InPlace
from rockmate.entry.module import RockmateModule
from rockmate.runtime.ddp import REPLICATED

logger = logging.getLogger(__name__)
_STEPS = 2


class Watch:
    """Looks for modules that train, and for the optimizer that holds most of each."""

    def __init__(self, adopt: Callable[[nn.Module, Optimizer], Any]) -> None:
        """`adopt` gives what the calls of a module run, or None for the module."""
        self._adopt = adopt
        self._num_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._hook: Any = None

    def begin(self) -> None:
        """Looks from here on."""
        make = Optimizer.__init__

        @functools.wraps(make)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self._num_steps[optimizer] = 0
            self._look()

        def compiled(model: nn.Module, _: Any) -> None:
            if model not in self._known:
                call = compiled_call(model)
                set_compiled_call(model, functools.partial(self._run_compiled, model, call))

        setattr(Optimizer, "__init__", init)  # noqa: B010
        call_after_compile(compiled)

    def _run_compiled(self, model: nn.Module, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Looks at a compiled model, since PyTorch asks no finder for what its calls run."""
        present = compiled_call(model)
        set_compiled_call(model, call)
        found = self._find(model)
        if model not in self._known:
            set_compiled_call(model, present)
        return (found or call)(*args, **kwargs)

    def ignore(self, module: nn.Module) -> None:
        """Takes a module for found, with all that is in it."""
        self._known.update(modules_within(module))

    def _found(self) -> set[int]:
        """Addresses of parameters of known modules that are still there."""
        return {id(own) for each in self._known for own in each.parameters(recurse=False)}

    def _look(self) -> None:
        self._hook = self._hook or register_optimizer_step_post_hook(self._note_step)
        find_calls(self._find)

    def _end_if(self, is_done: bool) -> None:
        if is_done and self._hook is not None:
            self._hook.remove()
            self._hook = None
            find_calls(None)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1
        self._end_if(all(number >= _STEPS for number in self._num_steps.values()))

    def _find(self, module: nn.Module) -> Any:
        if not (module.training and torch.is_grad_enabled()) or module in self._known:
            return None
        if InPlace.num_running:  # a submodule of a planned model that was put there since
            return None
        is_redirected = "forward" in vars(module) and hasattr(type(module), "training_step")
        outer = DistributedDataParallel | nn.DataParallel | torch.jit.ScriptModule
        if is_redirected or isinstance(module, outer):  # redirected by a strategy of Lightning's
            if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
                self.ignore(module)
                logger.warning("%s", REPLICATED)
            return None
        own = set(map(id, module.parameters()))
        held = {each: len(own & _addresses(each)) for each in self._num_steps} if own else {}
        most = max(held, key=held.__getitem__, default=None)
        if most is None or not held[most]:
            return None
        self.ignore(module)
        call = None if isinstance(module, RockmateModule) else self._adopt(module, most)
        found = self._found()
        self._end_if(all(_addresses(each) <= found for each in self._num_steps))
        return call


def _addresses(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}
