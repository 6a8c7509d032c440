"""What a plan is made for.

The metadata of a call, and the state of the module, that the captured graph depends on.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from rockmate._torch.autocast import autocast_dtypes
from rockmate._torch.members import (
    forward_hooks,
    has_tensor_hooks,
    member_tables_of,
    module_hooks_of,
    other_hook_keys,
    tensor_hooks_of,
)
from rockmate.capture.structure import Structure, flatten
from rockmate.errors import InvalidSampleError, SignatureMismatchError

_ONLY_TENSORS = {torch.Tensor}
_METADATA = attrgetter("shape", "dtype", "device", "requires_grad")
_STATE = attrgetter("requires_grad", "dtype", "device", "shape")
_IS_TRAINING = attrgetter("training")  # a scripted module has it elsewhere than other attributes
# Whose hooks a Hugging Face model adds to itself when it is first called.
_RECORDERS = "transformers.utils.output_capturing"


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """Metadata of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor, *, with_strides: bool = False) -> TensorSignature:
        """The metadata of `tensor`; strides count where the tensor goes into the graph as it is."""
        strides = tensor.stride() if with_strides else None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, strides)

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        strides = f", strides {list(self.strides)}" if self.strides is not None else ""
        return (
            f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on "
            f"{self.device}{grad}{strides}"
        )


@dataclass(frozen=True, slots=True)
class CallSignature:
    """Metadata of a call: its tensors and everything around them."""

    tensors: tuple[TensorSignature, ...]
    structure: Structure

    def on(self, device: torch.device) -> CallSignature:
        """The same call with all its tensors on `device`."""
        return replace(
            self, tensors=tuple(replace(tensor, device=device) for tensor in self.tensors)
        )

    @property
    def keywords(self) -> frozenset[str]:
        """Names of its keyword arguments."""
        return frozenset(self.structure.rebuild(list(self.tensors))[1])

    @property
    def kind(self) -> CallSignature:
        """The same call, whatever its sizes and whether its inputs require a gradient."""
        tensors = (
            replace(tensor, shape=(0,) * len(tensor.shape), requires_grad=False)
            for tensor in self.tensors
        )
        return replace(self, tensors=tuple(tensors))

    def part_in(self, other: CallSignature) -> CallSignature:
        """The same call without the keywords that `other` has not."""
        fake_device_tensors = [torch.empty(0) for _ in self.tensors]
        args, named = self.structure.rebuild(list(fake_device_tensors))
        kept = {name: value for name, value in named.items() if name in other.keywords}
        tensors, structure = flatten((args, kept), what="the call")
        signature_of = {
            id(stand_in): signature
            for stand_in, signature in zip(fake_device_tensors, self.tensors, strict=True)
        }
        return CallSignature(tuple(signature_of[id(tensor)] for tensor in tensors), structure)

    def __str__(self) -> str:
        return f"{self.structure.rebuild([str(tensor) for tensor in self.tensors])}"


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A sample input of positional and keyword arguments together."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def sample_call(sample_input: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A sample input as positional and keyword arguments.

    Args:
        sample_input: a tensor (the one positional argument), a tuple or list (positional), a
            mapping (keyword), or a `SampleCall`.

    Raises:
        InvalidSampleError: it is none of these.
    """
    if isinstance(sample_input, torch.Tensor):
        return (sample_input,), {}
    if isinstance(sample_input, SampleCall):
        return sample_input.args, dict(sample_input.kwargs)
    if isinstance(sample_input, Mapping):
        return (), {str(name): value for name, value in sample_input.items()}
    if isinstance(sample_input, tuple | list):
        return tuple(sample_input), {}
    msg = (
        f"the sample input is a {type(sample_input).__name__}. Pass a tensor, a tuple or list of "
        "positional arguments, or a mapping of "
        "keyword arguments."
    )
    raise InvalidSampleError(msg)


def check_devices(model: nn.Module, tensors: list[torch.Tensor]) -> None:
    """Raises `InvalidSampleError` if the sample and the model are not all on one device."""
    of_model = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    of_sample = {tensor.device for tensor in tensors if tensor.ndim or tensor.device.type != "cpu"}
    if len(of_model) > 1:
        msg = (
            f"the model is spread over {sorted(map(str, of_model))}; a plan is for one device. "
            "Move it to one."
        )
        raise InvalidSampleError(msg)
    if of_model and not of_sample <= of_model:
        msg = (
            f"the sample is on {sorted(map(str, of_sample))} and the model on {of_model.pop()}. "
            "Move the sample there."
        )
        raise InvalidSampleError(msg)


def optional_keywords(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of the model's forward that default to `None`.

    Passing that is the same as not passing them.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    return frozenset(parameter.name for parameter in parameters if parameter.default is None)


def flatten_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], optional: frozenset[str] = frozenset()
) -> tuple[list[torch.Tensor], CallSignature]:
    """The tensors of a call, and its signature.

    The order of keywords does not count, nor does `None` for one of the `optional` keywords.
    """
    named = (
        {
            name: kwargs[name]
            for name in sorted(kwargs)
            if kwargs[name] is not None or name not in optional
        }
        if kwargs
        else {}
    )
    tensors = [*args, *named.values()]
    if set(map(type, tensors)) == _ONLY_TENSORS:
        return tensors, _call_of_tensors(len(args), tuple(named), tuple(map(_METADATA, tensors)))
    tensors, structure = flatten((args, named), what="the call")
    return tensors, CallSignature(tuple(map(TensorSignature.of, tensors)), structure)


@lru_cache(maxsize=1024)
def _call_of_tensors(
    num_positional: int, names: tuple[str, ...], metadata: tuple[Any, ...]
) -> CallSignature:
    """The signature of a call of tensors only.

    Making and comparing it would take longer than all else about a call.
    """
    signatures = tuple(TensorSignature(tuple(shape), *others) for shape, *others in metadata)
    return CallSignature(signatures, _structure_of_tensors(num_positional, names))


@lru_cache(maxsize=64)
def _structure_of_tensors(num_positional: int, names: tuple[str, ...]) -> Structure:
    anything = torch.empty(0)
    return flatten(((anything,) * num_positional, dict.fromkeys(names, anything)), what="the call")[
        1
    ]


def check_call(planned: CallSignature, actual: CallSignature) -> None:
    """Raises `SignatureMismatchError`, naming both, unless the call equals the planned one."""
    if actual != planned:
        msg = (
            "this call differs from the sample that the plan was made for.\n  planned: "
            f"{planned}\n  called:  {actual}\n"
            f"{_advice(planned, actual)}, or make another RockmateModule (or Planner) with a "
            "sample like this call."
        )
        raise SignatureMismatchError(msg)


def _advice(planned: CallSignature, actual: CallSignature) -> str:
    if planned.structure != actual.structure:
        return "Pass the planned keywords and constants"
    if differs_in_shapes(planned, actual):
        return "Pad to the planned shapes"
    if planned.kind == actual.kind:
        return "An input requires a gradient in one of them alone: set its requires_grad as planned"
    return "Pass tensors of the planned dtypes and devices"


def differs_in_keywords(planned: CallSignature, actual: CallSignature) -> bool:
    """Whether calls have other keywords and are alike, but for sizes, in all that both have."""
    return (
        planned.keywords != actual.keywords
        and planned.part_in(actual).kind == actual.part_in(planned).kind
    )


def differs_in_shapes(planned: CallSignature, actual: CallSignature) -> bool:
    """Whether the calls differ in the sizes of their tensors and in nothing else."""
    if planned == actual or planned.structure != actual.structure:
        return False
    pairs = zip(planned.tensors, actual.tensors, strict=True)
    return all(
        replace(mine, shape=theirs.shape) == theirs and len(mine.shape) == len(theirs.shape)
        for mine, theirs in pairs
    )


def has_same_form(planned: CallSignature, actual: CallSignature) -> bool:
    """Whether the calls have the same structure and the same numbers of dimensions.

    Sizes, dtypes and devices do not count.
    """
    ranks, other_ranks = (
        [len(tensor.shape) for tensor in call.tensors] for call in (planned, actual)
    )
    return planned.structure == actual.structure and ranks == other_ranks


def is_no_larger(actual: CallSignature, planned: CallSignature) -> bool:
    """Whether no tensor of a call that differs in shapes is larger than planned."""
    pairs = zip(actual.tensors, planned.tensors, strict=True)
    return all(
        size <= limit
        for mine, theirs in pairs
        for size, limit in zip(mine.shape, theirs.shape, strict=True)
    )


def resized_call(
    tensors: Sequence[torch.Tensor], call: CallSignature, like: CallSignature
) -> SampleCall:
    """A call with the sizes of another one, its values those at hand over and over.

    A model may not run on values made up for it.

    Args:
        tensors: of the call at hand.
        call: its signature.
        like: the call that has the sizes, of the same structure and numbers of dimensions.
    """
    shapes = (signature.shape for signature in like.tensors)
    args, kwargs = call.structure.rebuild(
        [_repeated(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)]
    )
    return SampleCall(args, kwargs)


def _repeated(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tensor.shape == shape:
        return tensor
    order = sorted(
        range(tensor.ndim), key=lambda dim: tensor.stride(dim), reverse=True
    )  # of memory, which the result keeps
    result = tensor.detach().permute(order)
    for dim, original in enumerate(order):
        result = result.index_select(
            dim, torch.arange(shape[original], device=tensor.device) % result.shape[dim]
        )
    return result.permute([order.index(dim) for dim in range(tensor.ndim)]).requires_grad_(
        tensor.requires_grad
    )


def hook_keys(module: nn.Module) -> tuple[int, ...]:
    """Keys of the hooks around the module's forward and backward.

    Hooks that only record hidden states are left out.
    """
    acting = [
        key
        for key, hook in forward_hooks(module).items()
        if getattr(hook, "__module__", None) != _RECORDERS
    ]
    return (*acting, *other_hook_keys(module))


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """State of the module that the graph depends on.

    Submodules and their hooks, floating point attributes (a dropout's `p`, an `eps`), parameters
    and buffers and which names share one, who is in training mode, autocast. Other attributes are
    fixed when the graph is captured, and not watched. Which parameters have a tensor hook
    (`hooked`) is no difference, since it changes no number.
    """

    modules: tuple[nn.Module, ...]
    tensors: tuple[tuple[str, TensorSignature], ...]
    training: tuple[bool, ...]
    numbers: tuple[dict[str, float], ...]
    hooks: tuple[tuple[int, ...], ...]
    autocast: tuple[torch.dtype | None, torch.dtype | None]
    sharing: tuple[int, ...] = ()
    hooked: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module) -> ModelSignature:
        """The present state of `model`."""
        named = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        return cls(
            tuple(model.modules()),
            tuple((name, TensorSignature.of(tensor, with_strides=True)) for name, tensor in named),
            tuple(module.training for module in model.modules()),
            tuple(
                {name: value for name, value in vars(module).items() if type(value) is float}
                for module in model.modules()
            ),
            tuple(hook_keys(module) for module in model.modules()),
            _autocast_state(),
            _first_places([tensor for _, tensor in named]),
            frozenset(name for name, tensor in named if has_tensor_hooks(tensor)),
        )

    def difference(self, now: ModelSignature) -> str:
        """What has changed, in words; empty if nothing has."""
        if len(self.modules) != len(now.modules) or any(
            a is not b for a, b in zip(self.modules, now.modules, strict=True)
        ):
            return "a submodule has been replaced, added or removed"
        planned, present = dict(self.tensors), dict(now.tensors)
        for name in planned.keys() | present.keys():
            if planned.get(name) != present.get(name):
                return (
                    f"{name} was {planned.get(name, 'absent')} and is {present.get(name, 'absent')}"
                )
        if self.sharing != now.sharing:
            return "names that stood for one tied tensor stand for several, or the other way"
        if self.training != now.training:
            return "a submodule has changed between train and eval mode"
        for module, before, after in zip(self.modules, self.numbers, now.numbers, strict=True):
            changed = [
                name
                for name in before
                if after.get(name) != before[name] and before[name] == before[name]
            ]
            if changed:
                return (
                    f"{changed[0]} of a {type(module).__name__} was {before[changed[0]]} and is "
                    f"{after.get(changed[0])}"
                )
        if self.hooks != now.hooks:
            return "a hook of a submodule has been added or removed"
        if self.autocast != now.autocast:
            return (
                f"autocast was {self.autocast} and is {now.autocast} (dtype on CPU, on CUDA; None "
                "is off)"
            )
        return ""


class ModelWatch:
    """Notices that a module has changed, faster than a comparison of `ModelSignature`s.

    It runs with every call, so loops over tensors and modules are those of C functions.
    """

    def __init__(self, model: nn.Module) -> None:
        """Takes the present state of `model`."""
        self._watched = tuple(model.modules())
        self._attributes = [vars(module) for module in self._watched]
        self._numbers = [
            (attributes, name, value)
            for attributes in self._attributes
            for name, value in attributes.items()
            if type(value) is float and value == value
        ]
        members = self._members()
        self._identities = list(map(id, members))
        self._tensor_places = [
            place for place, member in enumerate(members) if isinstance(member, torch.Tensor)
        ]
        self._seen = self._state_of(members)

    def has_changed(self) -> bool:
        """Whether the module's signature may be another than it was; False is certain."""
        members = self._members()
        if list(map(id, members)) != self._identities or self._state_of(members) != self._seen:
            return True
        return any(attributes.get(name) != value for attributes, name, value in self._numbers)

    def _members(self) -> list[Any]:
        """Submodules, parameters and buffers of each module, each after its mapping."""
        parts = list(chain.from_iterable(map(member_tables_of, self._attributes)))
        return [member for part in parts if part for member in (part, *part.values())]

    def _state_of(self, members: list[Any]) -> tuple[Any, ...]:
        """What else can change about members that are the same objects."""
        tensors = [members[place] for place in self._tensor_places]
        return (
            list(map(_STATE, tensors)),
            list(map(torch.Tensor.stride, tensors)),
            list(map(bool, map(tensor_hooks_of, tensors))),
            list(map(_IS_TRAINING, self._watched)),
            list(map(hook_keys, self._watched))
            if any(chain.from_iterable(map(module_hooks_of, self._attributes)))
            else [],
            _autocast_state(),
        )


def _first_places(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    """For each tensor the place where it stands first."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors))


def _autocast_state() -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtype of autocast on CPU and on CUDA, None where it is off."""
    enabled = autocast_dtypes()
    return enabled.get("cpu"), enabled.get("cuda")
