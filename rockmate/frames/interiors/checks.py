"""Which insides of frames can be planned; the others run as in eager."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ContextDecorator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from rockmate._torch.members import (
    all_forward_hooks,
    has_accumulation_hooks,
    has_global_hooks,
    has_tensor_hooks,
)
from rockmate._torch.settings import Settings
from rockmate.capture.huggingface import is_recording
from rockmate.capture.model_signature import acting_hooks
from rockmate.capture.roles import Capture
from rockmate.capture.signature import flatten_bare_call
from rockmate.errors import UnsupportedModelError
from rockmate.frames.call import Arguments, Call
from rockmate.runtime.model_checks import check_model
from rockmate.state.call_state import CallState
from rockmate.state.tensors import tensors_in

_HOOKED = (
    torch.Tensor.register_hook,
    torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor.retain_grad,
)


def signature_of(arguments: Arguments) -> tuple[list[torch.Tensor], Hashable]:
    """The tensors of a call, and what a captured inside depends on.

    That has layouts, too: kernels round otherwise for others. And which arguments are one tensor,
    as attention asks, and settings of PyTorch that are read when a forward runs.

    Raises:
        UnsupportedModelError: an argument is neither a tensor nor a constant, or has attributes.
    """
    tensors, call = flatten_bare_call(arguments.args, arguments.kwargs)
    places = {id(each): place for place, each in reversed(list(enumerate(tensors)))}
    same = tuple([places[id(each)] for each in tensors])
    return tensors, (call, tuple([each.stride() for each in tensors]), same, Settings.now())


def share_no_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no argument with a gradient comes twice, nor is a parameter."""
    trained_ones = [each for each in tensors if each.requires_grad]
    ids = {id(each) for each in trained_ones}
    return len(ids) == len(trained_ones) and not any(
        isinstance(each, nn.Parameter) for each in trained_ones
    )


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Whether anything runs around forwards, backwards or gradients that a plan does not run.

    Hooks of parameters do run, but in another order than eager's.
    """
    hooks_of = all_forward_hooks if is_recording() else acting_hooks
    return has_global_hooks() or any(
        hooks_of(module)
        or any(
            has_tensor_hooks(each) or has_accumulation_hooks(each)
            for each in module.parameters(recurse=False)
        )
        for module in modules
    )


def check_call(call: Call, module: nn.Module, before: CallState) -> None:
    """Refuses a call that has run from a state, whose inside a plan would not run as eager does."""
    parameters = [each for _, each in module.named_parameters(remove_duplicate=False)]
    refused = {
        "it, or a submodule or a parameter of it, has hooks": has_hooks(module.modules()),
        "it has one parameter under several names": (
            len(set(map(id, parameters))) < len(parameters)
        ),
        "a buffer of it has a gradient": any(each.requires_grad for each in module.buffers()),
        "it changes attributes, globals, or what it is given": before.objects.has_changed(),
        "it changes its input, or a buffer, in place": call.cannot_repeat,
    }
    _refuse(refused)
    check_model(module, (), None)


def check_capture(capture: Capture) -> None:
    """Refuses a captured inside that leaves something behind."""
    attributes, read = capture.attributes, capture.read_values
    refused = {
        "it assigns attributes": attributes.leaves_any,
        "it reads the values of tensors": read.read is not None,
        "it has checkpoints of its own": capture.num_checkpoints > 0,
        "it has outputs without a gradient": bool(capture.non_differentiable_outputs),
    }
    _refuse(refused)


def _refuse(reasons: Mapping[str, bool]) -> None:
    reason = next((reason for reason, is_refused in reasons.items() if is_refused), "")
    if reason:
        raise UnsupportedModelError(reason)


class EscapedTensors(TorchFunctionMode, ContextDecorator):
    """Decorates a forward: watches for tensors that others hold, and hooks on tensors.

    A captured inside gives back its outputs and nothing else. A loss of a router that goes to a
    list of the whole model, or a gradient that a hook notes, would be missing.
    """

    def __init__(self) -> None:
        """Nothing yet."""
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._has_hooks = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs, and notes which tensors are new."""
        kwargs = kwargs or {}
        self._has_hooks = self._has_hooks or func in _HOOKED
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor | tuple | list):
            given = set(map(id, tensors_in((args, kwargs))))
            new = [each for each in tensors_in(result) if id(each) not in given]
            self._made += map(weakref.ref, new)
        return result

    def found(self) -> str:
        """Describes tensors that outlive the call; empty if none do."""
        if self._has_hooks:
            return "it adds hooks to tensors"
        if any(each() is not None for each in self._made):
            return "tensors that it makes are kept outside of it, in a global list perhaps"
        return ""
