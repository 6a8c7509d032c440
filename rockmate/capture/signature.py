"""The signature of a call: the metadata of its arguments that the captured graph depends on."""

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

from rockmate._torch.fake import is_fake
from rockmate._torch.subclasses import is_wrapper
from rockmate.capture.structure import Structure, flatten
from rockmate.capture.tensor_parts import description, has_parts, inner_tensors
from rockmate.errors import InvalidSampleError, SignatureMismatchError, UnsupportedModelError

_ONLY_TENSORS = {torch.Tensor}
_OF_TENSORS = ("persistent", "elem")  # what `nn.Buffer` sets, and a tensor of a trace has
_METADATA = attrgetter("shape", "dtype", "device", "requires_grad")


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """Metadata of one tensor.

    Attributes:
        shape: its sizes.
        dtype: of its elements; of a wrapper, the one that it stands for.
        device: where it is.
        requires_grad: whether it gets a gradient.
        strides: of its memory, where they count.
        kind: of a tensor of a class of its own, that class and its constants.
        parts: of such a tensor, the attributes that lead to the tensors inside, with theirs.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    strides: tuple[int, ...] | None = None
    kind: str = ""
    parts: tuple[tuple[tuple[str, ...], TensorSignature], ...] = ()

    @classmethod
    def of(cls, tensor: torch.Tensor, *, with_strides: bool = False) -> TensorSignature:
        """The metadata of `tensor`; strides count where the tensor goes into the graph as it is."""
        has_strides = with_strides and tensor.layout == torch.strided
        strides = tensor.stride() if has_strides else None
        own = tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, strides
        if not has_parts(tensor):
            return cls(*own)
        parts = inner_tensors(tensor).items()
        inner = tuple((path, cls.of(part, with_strides=True)) for path, part in parts)
        return cls(*own, description(tensor), inner)

    def __str__(self) -> str:
        grad = ", requires_grad" if self.requires_grad else ""
        strides = f", strides {list(self.strides)}" if self.strides is not None else ""
        parts = "".join(f", {'.'.join(path)} {part}" for path, part in self.parts)
        kind = f" as {self.kind}{parts}" if self.kind else ""
        return (
            f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on "
            f"{self.device}{grad}{strides}{kind}"
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

    def size_at(self, tensor: int, dim: int) -> int:
        """The size of a dimension of a tensor."""
        return self.tensors[tensor].shape[dim]

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of its tensors, the numbers of dimensions."""
        return tuple(len(tensor.shape) for tensor in self.tensors)

    def has_form_of(self, other: CallSignature) -> bool:
        """Whether the calls differ in sizes, dtypes and devices alone."""
        return self.structure == other.structure and self.ranks == other.ranks

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

    @property
    def broadcast_dims(self) -> tuple[tuple[int, int, int], ...]:
        """(tensor, dim, size) of each dim of size 1 or 0.

        A graph broadcasts such a dim, or has nothing to do. It is another one for other sizes.
        """
        return tuple(
            (index, dim, size)
            for index, tensor in enumerate(self.tensors)
            for dim, size in enumerate(tensor.shape)
            if size < 2
        )

    def part_in(self, other: CallSignature) -> CallSignature:
        """The same call without the keywords that `other` has not."""
        stand_ins = [torch.empty(0) for _ in self.tensors]
        args, named = self.structure.rebuild([*stand_ins])
        kept = {name: value for name, value in named.items() if name in other.keywords}
        tensors, structure = flatten((args, kept), what="the call", takes_objects=True)
        place_of = {id(stand_in): place for place, stand_in in enumerate(stand_ins)}
        return CallSignature(tuple(self.tensors[place_of[id(each)]] for each in tensors), structure)

    def __str__(self) -> str:
        return str(self.structure.shown([str(tensor) for tensor in self.tensors]))


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A sample input as positional and keyword arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, sample_input: Any) -> SampleCall:
        """What the user gives: a tensor, a tuple or list (positional), or a mapping (keyword).

        Raises:
            InvalidSampleError: it is none of these, nor a `SampleCall`.
        """
        if isinstance(sample_input, SampleCall):
            return sample_input
        if isinstance(sample_input, torch.Tensor):
            return cls((sample_input,), {})
        if isinstance(sample_input, Mapping):
            return cls((), {str(name): value for name, value in sample_input.items()})
        if isinstance(sample_input, tuple | list):
            return cls(tuple(sample_input), {})
        raise InvalidSampleError(
            f"the sample input is a {type(sample_input).__name__}. Pass a tensor, a tuple or list "
            "of positional arguments, or a mapping of keyword arguments."
        )


def refuse_attributes(tensors: Sequence[torch.Tensor], *, of: str = "call") -> None:
    """Raises `UnsupportedModelError` for a tensor that has attributes which users have set.

    A plan takes and gives tensors without them, so a reader would miss them or take a default.
    Names with an underscore are those of libraries; a wrapper has its parts there.
    """
    for name in chain.from_iterable(vars(each) for each in tensors if not is_wrapper(each)):
        if not name.startswith("_") and name not in _OF_TENSORS:
            raise UnsupportedModelError(
                f"a tensor of the {of} has an attribute of its own, {name}, which a plan does not "
                f"pass on. Have {name} be a part of the {of} by itself."
            )


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
    tensors, structure = flatten((args, named), what="the call", takes_objects=True)
    return tensors, CallSignature(tuple(map(TensorSignature.of, tensors)), structure)


def flatten_bare_call(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], optional: frozenset[str] = frozenset()
) -> tuple[list[torch.Tensor], CallSignature]:
    """As `flatten_call`; raises as `refuse_attributes` does."""
    tensors, call = flatten_call(args, kwargs, optional)
    refuse_attributes([each for each in tensors if vars(each) and not is_fake(each)])
    return tensors, call


@lru_cache(maxsize=1024)
def _call_of_tensors(
    num_positional: int, names: tuple[str, ...], metadata: tuple[Any, ...]
) -> CallSignature:
    """The signature of a call of tensors only.

    Making and comparing it would take longer than all else about a call.
    """
    signatures = tuple(TensorSignature(tuple(shape), *others) for shape, *others in metadata)
    anything = torch.empty(0)
    call = (anything,) * num_positional, dict.fromkeys(names, anything)
    return CallSignature(signatures, flatten(call, what="the call")[1])


def check_call(planned: CallSignature, actual: CallSignature) -> None:
    """Raises `SignatureMismatchError`, naming both, unless the call equals the planned one."""
    if actual != planned:
        raise SignatureMismatchError(
            "this call differs from the sample that the plan was made for.\n  planned: "
            f"{planned}\n  called:  {actual}\n"
            f"{_advice(planned, actual)}, or make another RockmateModule (or Planner) with a "
            "sample like this call."
        )


def _advice(planned: CallSignature, actual: CallSignature) -> str:
    if planned.structure != actual.structure:
        return "Pass the planned keywords and constants"
    if differs_in_shapes(planned, actual):
        return "Pad to the planned shapes"
    if planned.kind == actual.kind:
        return "An input requires a gradient in one of them alone: set its requires_grad as planned"
    return "Pass tensors of the planned dtypes and devices"


def difference_in_constants(planned: CallSignature, actual: CallSignature) -> str:
    """The first argument that differs in more than tensors, in words.

    The calls have the same keywords.
    """
    (args, named), (others, others_named) = (
        call.structure.shown(["a tensor"] * len(call.tensors)) for call in (planned, actual)
    )
    pairs = {f"argument {at}": pair for at, pair in enumerate(zip(args, others, strict=False))}
    pairs |= {f"the argument {name}": (named[name], others_named[name]) for name in named}
    for name, (mine, theirs) in pairs.items():
        if repr(mine) != repr(theirs):
            return (
                f"{name} was {mine!r:.60} and is {theirs!r:.60} (pass a number as a tensor, and "
                "leave out what the forward does not read)"
            )
    return "the call has another number of arguments"


def differs_in_shapes(planned: CallSignature, actual: CallSignature) -> bool:
    """Whether the calls differ in the sizes of their tensors and in nothing else."""
    if planned == actual or planned.structure != actual.structure:
        return False
    pairs = zip(planned.tensors, actual.tensors, strict=True)
    return all(
        replace(mine, shape=theirs.shape) == theirs and len(mine.shape) == len(theirs.shape)
        for mine, theirs in pairs
    )


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
