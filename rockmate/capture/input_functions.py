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

from rockmate._torch.storage import storage_id
from rockmate._util import attributes_set
from rockmate.capture.opaque_ops import OpaqueOp
from rockmate.capture.structure import Structure, flatten

_LIBRARY, _PREFIX, _METHOD = "transformers.vision_utils", "get_vision_", "get_rope_index"
_GIVEN = "kwargs"  # the argument from which such a function takes what the caller has computed
_COMPUTED = re.compile(r"position_ids|(max|cu)_(window_)?seqlens?|window_index|interp_.*|merged_.*")


meets: list[Any] = []  # the `ValueReader`s of the traces that go on


class InputFunction:
    """One call of such a function as an op: `(tensors) -> tensors`.

    Attributes:
        results: on the sample's values.
        structure: rebuilds what the function returns from them.
    """

    structure: Structure

    def __init__(self, run: Callable[..., Any], arguments: Structure) -> None:
        """Of a call of `run`."""
        self._run, self._arguments = run, arguments
        self.results, self._sample = list[Tensor](), list[Tensor]()
        self.__name__ = self.__qualname__ = f"input_function_{run.__name__}"

    def __str__(self) -> str:
        return f"rockmate.{self.__name__}"

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the function returns, contiguous and in memory of their own."""
        return self._flattened(tensors)[0]

    def _flattened(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Structure]:
        args, kwargs = self._arguments.rebuild([*tensors])
        made, structure = flatten(self._run(*args, **kwargs), what=str(self), takes_objects=True)
        given = {storage_id(each) for each in tensors}

        def own(result: Tensor) -> Tensor:
            # `unique` leaves its result in memory for all elements.
            is_larger = result.untyped_storage().nbytes() > result.nbytes
            return result.clone() if is_larger or storage_id(result) in given else result

        return [own(result.contiguous()) for result in made], structure

    def on_sample(self, _: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments: the sample's."""
        return self, ([each.clone() for each in self._sample],)

    def on_values(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """The results on the sample's values; None if it returns more than tensors."""
        self._sample = tensors
        self.results, self.structure = self._flattened([each.clone() for each in tensors])
        return self.results if all(each is None for each in self.structure.held()) else None

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
        given = args, {name: each for name, each in kwargs.items() if name != _GIVEN}
        tensors, arguments = flatten(given, what=function.__name__, takes_objects=True)
        op = InputFunction(function, arguments)
        is_given = any(map(_COMPUTED.fullmatch, kwargs.get(_GIVEN) or ()))
        made = meets[-1].result_of(op, tensors) if meets and tensors and not is_given else None
        return function(*args, **kwargs) if made is None else op.structure.rebuild(made)

    return call
