"""Finds the modules that a script trains, and the optimizers that hold their parameters.

The outermost module that is called in training mode, with gradients, and has a parameter that an
optimizer holds; or, where there is no optimizer, one that a backward has reached: the script steps
by hand. Modules are looked at until all parameters that optimizers hold are found, or each
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

from rockmate._torch.members import find_calls, modules_within
from rockmate.module import RockmateModule
from rockmate.runtime.ddp import REPLICATED

logger = logging.getLogger(__name__)

_STEPS = 2
Adopt = Callable[[nn.Module, Optimizer | None], Any]
"""A module and the optimizer that holds most of it -> what its calls run; None for the module."""


class Watch:
    """Looks for modules that train.

    Attributes:
        optimizers: all that there are, with the number of their steps while it looked.
    """

    def __init__(self, adopt: Adopt) -> None:
        self.optimizers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._adopt = adopt
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._found: set[int] = set()  # addresses of parameters of known modules
        self._awaited: dict[int, bool] = {}  # of parameters without optimizer: a backward came
        self._step_hook: Any = None

    def install(self) -> None:
        """Has each optimizer that is made from here on looked at."""
        make = Optimizer.__init__

        @functools.wraps(make)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            make(optimizer, *args, **kwargs)
            self.optimizers[optimizer] = 0
            self._begin()

        Optimizer.__init__ = init
        self._begin()

    def ignore(self, module: nn.Module) -> None:
        """Takes a module for found, with all that is in it."""
        self._known.update(modules_within(module))
        self._found.update(map(id, module.parameters()))

    def _begin(self) -> None:
        if self._step_hook is None:
            self._step_hook = register_optimizer_step_post_hook(self._note_step)
            find_calls(self._find)

    def _end(self) -> None:
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook = None
            find_calls(None)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        if optimizer in self.optimizers:
            self.optimizers[optimizer] += 1
        if all(number >= _STEPS for number in self.optimizers.values()):
            self._end()

    def _find(self, module: nn.Module) -> Any:
        if not (module.training and torch.is_grad_enabled()) or module in self._known:
            return None
        if isinstance(module, DistributedDataParallel) or _is_redirected(module):
            return None
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            self.ignore(module)
            logger.warning("%s", REPLICATED)
            return None
        if isinstance(module, nn.DataParallel | torch.jit.ScriptModule):
            return None
        own = set(map(id, module.parameters()))
        held = {each: len(own & _addresses(each)) for each in self.optimizers} if own else {}
        most = max(held, key=held.__getitem__, default=None)
        if (most is None or not held[most]) and not (own and self._is_stepped_by_hand(module)):
            return None
        self.ignore(module)
        call = None if isinstance(module, RockmateModule) else self._adopt(module, most)
        if all(_addresses(each) <= self._found for each in self.optimizers):
            self._end()
        return call

    def _is_stepped_by_hand(self, module: nn.Module) -> bool:
        """Whether a backward has reached a parameter, and no optimizer was ever made."""
        parameters = [each for each in module.parameters() if each.requires_grad]
        known = [self._awaited[id(each)] for each in parameters if id(each) in self._awaited]
        if self.optimizers or not parameters or known:
            return not self.optimizers and any(known)
        first = parameters[0]
        self._awaited[id(first)] = False

        def note(_: torch.Tensor) -> None:
            self._awaited[id(first)] = True
            hook.remove()

        hook = first.register_post_accumulate_grad_hook(note)
        return False


def _addresses(optimizer: Optimizer) -> set[int]:
    return {id(each) for group in optimizer.param_groups for each in group["params"]}


def _is_redirected(module: nn.Module) -> bool:
    """Whether a Lightning strategy calls the module for another method than its forward."""
    return "forward" in vars(module) and hasattr(type(module), "training_step")
