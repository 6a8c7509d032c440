"""Functions of a call's inputs alone that run as they are in each step, as one op each.

Models of images and text compute positions, windows and boundaries of images from grids, token
types and masks, in Python code that reads values in loops: a graph of its ops would hold for one
layout of a batch. The results depend on no parameter and have no gradient, so a plan calls the
function itself. These are what transformers' own exporters compute before a trace:
`get_rope_index` of a model, and what `transformers.vision_utils` has. Others are traced.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from rockmate._torch.storage import storage_id
from rockmate._util import attributes_set
from rockmate.capture.opaque_ops import OpaqueOp

_LIBRARY, _PREFIX, _METHOD = "transformers.vision_utils", "get_vision_", "get_rope_index"
_GIVEN = "kwargs"  # the argument from which such a function takes what the caller has computed
_TENSOR = object()  # stands in the place of a tensor
_COMPUTED = re.compile(r"position_ids|(max|cu)_(window_)?seqlens?|window_index|interp_.*|merged_.*")


meets: list[Any] = []  # the `ValueReader`s of the traces that go on


class InputFunction:
    """One call of such a function as an op: `(tensors) -> tensors`."""

    def __init__(self, run: Callable[..., Any], call: Any) -> None:
        """Of a call of `run`, whose arguments are a form."""
        self._run, self._call = run, call
        self.form, self.results, self._sample = None, list[Tensor](), list[Tensor]()
        self.__name__ = self.__qualname__ = f"input_function_{run.__name__}"

    def __str__(self) -> str:
        return f"rockmate.{self.__name__}"

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the function returns, contiguous and in memory of their own."""
        return self._parted(tensors)[1]

    def _parted(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        args, kwargs = filled(self._call, tensors)
        form, made = parted(self._run(*args, **kwargs))
        given = {storage_id(each) for each in tensors}

        def own(result: Tensor) -> Tensor:
            # `unique` leaves its result in memory for all elements.
            is_larger = result.untyped_storage().nbytes() > result.nbytes
            return result.clone() if is_larger or storage_id(result) in given else result

        return form, [own(result.contiguous()) for result in made]

    def on_sample(self, _: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments: the sample's."""
        return self, ([each.clone() for each in self._sample],)

    def on_values(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """The results on the sample's values; None if it returns more than tensors."""
        self._sample = tensors
        self.form, self.results = self._parted([each.clone() for each in tensors])
        parts = self.form if isinstance(self.form, tuple) else (self.form,)
        return self.results if all(each in (None, _TENSOR) for each in parts) else None

    def traced(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """Leaves the op in the trace that goes on; its results have these sizes, one by one."""

        def made(_: Sequence[Tensor]) -> list[Tensor]:
            given = iter(sizes)
            return [
                torch.empty(
                    [*itertools.islice(given, each.ndim)], dtype=each.dtype, device=each.device
                )
                for each in self.results
            ]

        return OpaqueOp(forward=self, results=made).traced(tensors)


def parted(value: Any) -> tuple[Any, list[Tensor]]:
    """The form of nested containers, and the tensors in them."""
    tensors = list[Tensor]()

    def part(item: Any) -> Any:
        return tensors.append(item) or _TENSOR if isinstance(item, Tensor) else item

    return map_aggregate(value, part), tensors


def filled(form: Any, tensors: Sequence[Tensor]) -> Any:
    """The containers of a form with these tensors."""
    rest = iter(tensors)
    return map_aggregate(form, lambda item: next(rest) if item is _TENSOR else item)


def input_functions_as_ops(model: nn.Module) -> AbstractContextManager[None]:
    """Puts stand-ins, which ask whether they are met, in the places that a model calls from."""
    places = [(owner, name, _stand_in(getattr(owner, name))) for owner, name in _places(model)]
    return attributes_set(*places)


def _places(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Owners and names: files that have imported a function, and classes with a method."""
    for kind in {type(each) for each in model.modules()}:
        yield from ((each, _METHOD) for each in kind.__mro__ if _METHOD in vars(each))
        file = sys.modules.get(kind.__module__)
        for name, value in vars(file).items() if file else ():
            if name.startswith(_PREFIX) and getattr(value, "__module__", "") == _LIBRARY:
                yield file, name


def _stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        form, tensors = parted((args, {n: x for n, x in kwargs.items() if n != _GIVEN}))
        op = InputFunction(function, form)
        is_given = any(map(_COMPUTED.fullmatch, kwargs.get(_GIVEN) or ()))
        made = meets[-1].result_of(op, tensors) if meets and tensors and not is_given else None
        return function(*args, **kwargs) if made is None else filled(op.form, made)

    return call
