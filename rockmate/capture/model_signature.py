"""The signature of a model: the state of the module that the captured graph depends on."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn

from rockmate._torch.fsdp import is_fsdp_hook
from rockmate._torch.members import (
    all_forward_hooks,
    forward_hooks,
    has_tensor_hooks,
    member_tables_of,
    module_hooks_of,
    named_members,
    other_hooks,
    tensor_hooks_of,
)
from rockmate._torch.settings import Settings
from rockmate._torch.subclasses import at_path
from rockmate.capture.forward_attributes import AttributeWatch, ForwardAttributes
from rockmate.capture.signature import TensorSignature
from rockmate.capture.tensor_parts import has_parts, inner_tensors

_STATE = attrgetter("requires_grad", "dtype", "device", "shape")
# A scripted module has it elsewhere than other attributes.
_IS_TRAINING, _FORWARD = attrgetter("training"), attrgetter("forward")
FORWARD_BEFORE = "forward_before_frames"
"""Of a function that stands in an instance's place for the time of a step: what stood there."""
# Modules of hooks: those of tensor parallelism, and those that a Hugging Face model adds to itself
# when it is first called.
_TENSOR_PARALLEL = "torch.distributed.tensor."
_RECORDERS = "transformers.utils.output_capturing"
_MARKER = "enable_input_require_grads.<locals>.make_inputs_require_grads"


def hook_keys(module: nn.Module) -> tuple[Hashable, ...]:
    """What tells the hooks around the module's forward and backward.

    Hooks that only record hidden states are left out. Of those that have an output require a
    gradient, one counts: with each step of some of TRL's trainers, transformers adds one more.
    """
    hooks = [
        item
        for item in forward_hooks(module).items()
        if getattr(item[1], "__module__", None) != _RECORDERS
    ]
    keys = [_hook_key(*item) for item in (*hooks, *other_hooks(module).items())]
    return tuple(
        key for at, key in enumerate(keys) if not (key in keys[:at] and _MARKER in str(key))
    )


def _hook_key(key: int, hook: Any) -> Hashable:
    """The code of a hook that is a plain function: registered once more, it is the same.

    Of another hook, the number of its registration.
    """
    is_plain = isinstance(hook, FunctionType) and not (hook.__closure__ or hook.__defaults__)
    return (hook.__qualname__, hook.__code__) if is_plain else key


def acting_hooks(module: nn.Module) -> tuple[Hashable, ...]:
    """Those of `hook_keys` that do something which no graph has.

    Tensor parallelism has hooks that lay a module's inputs and outputs out. They are traced. In the
    places of those of `fully_shard` a trace has its own.
    """
    traced = {
        _hook_key(key, hook)
        for key, hook in all_forward_hooks(module).items()
        if str(getattr(hook, "__module__", None)).startswith(_TENSOR_PARALLEL) or is_fsdp_hook(hook)
    }
    return tuple(key for key in hook_keys(module) if key not in traced)


def _forwards_of(modules: Iterable[nn.Module]) -> list[Any]:
    """What modules and their classes have for forwards, where a script may put another."""
    plain = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]
    return [*map(_own_forward, plain), *map(_FORWARD, dict.fromkeys(map(type, plain)))]


def _own_forward(module: nn.Module) -> Any:
    forward = vars(module).get("forward")
    while forward is not None and hasattr(forward, FORWARD_BEFORE):
        forward = getattr(forward, FORWARD_BEFORE)
    return forward


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """State of the module that the graph depends on.

    Submodules, their forwards and hooks, parameters and buffers and which names share one, who is
    in training mode, settings of PyTorch. Other attributes are those of `ForwardAttributes`. Which
    parameters have a tensor hook, or are of a class of their own and trained (`hooked`), is no
    difference, since it changes no number.
    """

    modules: tuple[nn.Module, ...]
    tensors: tuple[tuple[str, TensorSignature], ...]
    training: tuple[bool, ...]
    hooks: tuple[tuple[Hashable, ...], ...]
    settings: Settings
    forwards: tuple[Any, ...]
    sharing: tuple[int, ...] = ()
    hooked: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module) -> ModelSignature:
        """The present state of `model`."""
        named = named_members(model).items()
        first: dict[int, int] = {}
        return cls(
            tuple(model.modules()),
            tuple((name, TensorSignature.of(tensor, with_strides=True)) for name, tensor in named),
            tuple(module.training for module in model.modules()),
            tuple(hook_keys(module) for module in model.modules()),
            Settings.now(),
            tuple(_forwards_of(model.modules())),
            tuple(first.setdefault(id(each), place) for place, (_, each) in enumerate(named)),
            frozenset(
                name
                for name, each in named
                if has_tensor_hooks(each) or (each.requires_grad and has_parts(each))
            ),
        )

    def difference(self, now: ModelSignature, opaque: Iterable[str] = ()) -> str:
        """What has changed, in words; empty if nothing has.

        Args:
            now: the present state.
            opaque: paths of submodules that run as they are. What a parameter of theirs holds in
                its attributes is read by themselves, and may be set up in their first call.
        """
        if len(self.modules) != len(now.modules) or any(
            a is not b for a, b in zip(self.modules, now.modules, strict=True)
        ):
            return "a submodule has been replaced, added or removed"
        planned, present = dict(self.tensors), dict(now.tensors)
        for path in opaque:
            for known in (planned, present):
                inside = [name for name in known if name.startswith(f"{path}.")]
                known |= {name: replace(known[name], kind="", parts=()) for name in inside}
        for name in planned.keys() | present.keys():
            if planned.get(name) != present.get(name):
                return (
                    f"{name} was {planned.get(name, 'absent')} and is {present.get(name, 'absent')}"
                )
        if self.sharing != now.sharing:
            return "names that stood for one tied tensor stand for several, or the other way"
        if self.training != now.training:
            return "a submodule has changed between train and eval mode"
        if self.hooks != now.hooks:
            return "a hook of a submodule has been added or removed"
        if self.forwards != now.forwards:
            return "the forward of a submodule has been replaced"
        return self.settings.difference(now.settings)


class ModelWatch:
    """Notices that a module has changed, faster than a comparison of `ModelSignature`s.

    It runs with every call, so loops over tensors and modules are those of C functions.
    """

    def __init__(self, model: nn.Module, attributes: ForwardAttributes) -> None:
        """Takes the present state of `model`, and of what its forward reads."""
        self._read = AttributeWatch(attributes)
        self._watched = tuple(model.modules())
        scripted = [each for each in self._watched if isinstance(each, torch.jit.ScriptModule)]
        self._attributes = [vars(each) for each in self._watched if each not in scripted]
        # TorchScript never replaces its members.
        self._fixed = [each for module in scripted for each in module.parameters(recurse=False)]
        members = self._members()
        self._identities = list(map(id, members))
        self._tensor_places = [
            place for place, member in enumerate(members) if isinstance(member, torch.Tensor)
        ]
        self._with_parts = [
            (place, list(inner_tensors(members[place])))
            for place in self._tensor_places
            if has_parts(members[place])
        ]
        self._seen = self._state_of(members)

    def has_changed(self) -> bool:
        """Whether the module's signature may be another than it was; False is certain."""
        members = self._members()
        if list(map(id, members)) != self._identities or self._state_of(members) != self._seen:
            return True
        return self._read.has_changed()

    def _members(self) -> list[Any]:
        """Submodules, parameters and buffers of each module, each after its mapping."""
        parts = list(chain.from_iterable(map(member_tables_of, self._attributes)))
        held = [member for part in parts if part for member in (part, *part.values())]
        return held + self._fixed

    def _state_of(self, members: list[Any]) -> tuple[Any, ...]:
        """What else can change about members that are the same objects."""
        tensors = [members[place] for place in self._tensor_places]
        return (
            list(map(_STATE, tensors)),
            [each.stride() for each in tensors if each.layout is torch.strided],
            list(map(bool, map(tensor_hooks_of, tensors))),
            list(map(_IS_TRAINING, self._watched)),
            list(map(hook_keys, self._watched))
            if any(chain.from_iterable(map(module_hooks_of, self._attributes)))
            else [],
            Settings.now(),
            _forwards_of(self._watched),
            [
                id(at_path(members[place], path))
                for place, paths in self._with_parts
                for path in paths
            ],
        )
