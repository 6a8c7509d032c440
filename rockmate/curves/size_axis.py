"""The dimensions of a sample that grow with the batch, or with the length of its sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from rockmate.capture.signature import CallSignature, SampleCall, flatten_call, resized_call
from rockmate.capture.size_template import SizeGroups
from rockmate.curves.errors import FitError

Kind = Literal["batch", "tokens"]
Dims = int | Mapping[str | int, int]
"""The dimension that counts: one number for all tensors, or a number by keyword or position."""

_HOW = {
    "batch": 'batch_axis={"pixel_values": 0, "labels": 0} (--batch-axis pixel_values=0,labels=0)',
    "tokens": 'token_axis={"input_ids": 1, "labels": 1} (--token-axis input_ids=1,labels=1)',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeAxis:
    """Which dimensions of a call have the size that varies.

    Attributes:
        kind: "batch" or "tokens".
        call: the call of the sample.
        places: the (tensor, dimension) pairs that have the size.
    """

    kind: Kind
    call: CallSignature
    places: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, call: CallSignature, kind: Kind, dims: Dims | None = None) -> SizeAxis:
        """The axis of a call.

        Without `dims`, the batch is the first dimension of every tensor that has one, if they
        agree. The tokens are every later dimension of the size that dimension 1 of the first tensor
        of integers has.

        Raises:
            FitError: there is no such dimension, several differ in size, or `dims` name none.
        """
        if dims is not None:
            places = _named_places(call, kind, dims)
        elif kind == "batch":
            places = [(index, 0) for index, tensor in enumerate(call.tensors) if tensor.shape]
        else:
            places = _token_places(call)
        sizes = {call.tensors[tensor].shape[dim] for tensor, dim in places}
        if len(sizes) != 1:
            what = f"sizes {sorted(sizes)} differ" if sizes else "there is no such dimension"
            raise FitError(
                f"the {kind} axis of the sample cannot be told: {what} in {call}. Name the "
                f"dimension of each tensor that has one, as {_HOW[kind]}."
            )
        return cls(kind=kind, call=call, places=tuple(places))

    @property
    def size(self) -> int:
        """The size in the sample."""
        tensor, dim = self.places[0]
        return self.call.tensors[tensor].shape[dim]

    @property
    def groups(self) -> SizeGroups:
        """The dimensions as one group of equal sizes; all others are fixed."""
        return SizeGroups((self.places,))

    def call_at(self, size: int) -> CallSignature:
        """The call at another size."""
        tensors = list(self.call.tensors)
        for index, dim in self.places:
            shape = tensors[index].shape
            tensors[index] = replace(tensors[index], shape=(*shape[:dim], size, *shape[dim + 1 :]))
        return replace(self.call, tensors=tuple(tensors))

    def sample_at(self, sample_input: Any, size: int) -> SampleCall:
        """A sample at another size, its values those of `sample_input` over and over."""
        given = SampleCall.of(sample_input)
        tensors, call = flatten_call(given.args, given.kwargs)
        return resized_call(tensors, call, self.call_at(size))


def input_bytes(call: CallSignature) -> int:
    """Bytes of the tensors of a call."""
    return sum(torch.Size(tensor.shape).numel() * tensor.dtype.itemsize for tensor in call.tensors)


def _token_places(call: CallSignature) -> list[tuple[int, int]]:
    of_numbers = (n for n in call.tensors if not (n.dtype.is_floating_point or n.dtype.is_complex))
    first = next((each for each in of_numbers if len(each.shape) > 1), None)
    if first is None:
        return []
    return [
        (index, dim)
        for index, tensor in enumerate(call.tensors)
        for dim, size in enumerate(tensor.shape)
        if dim and size == first.shape[1]
    ]


def _named_places(call: CallSignature, kind: Kind, dims: Dims) -> list[tuple[int, int]]:
    if isinstance(dims, int):
        return [
            (index, dims) for index, tensor in enumerate(call.tensors) if len(tensor.shape) > dims
        ]
    args, named = call.structure.rebuild(list(call.tensors))
    given: dict[str | int, Any] = {**dict(enumerate(args)), **named}
    places = []
    for name, dim in dims.items():
        found = [index for index, each in enumerate(call.tensors) if each is given.get(name)]
        if not found or not 0 <= dim < len(call.tensors[found[0]].shape):
            known = ", ".join(map(repr, given))
            raise FitError(
                f"{kind}_axis names dimension {dim} of {name!r}, and the sample has no such "
                f"dimension. Its inputs are {known}."
            )
        places.append((found[0], dim))
    return places
