"""Functions of a call's inputs alone that run as they are in each step, as one op each.

Models of images and text compute positions, windows and boundaries of images from grids, token
types and masks, in Python code that reads values in loops: a graph of its ops would hold for one
layout of a batch. The results depend on no parameter and have no gradient, so a plan calls the
function itself. These are what transformers' own exporters compute before a trace:
`get_rope_index` of a model, and what `transformers.vision_utils` has. Others are traced.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from rockmate._torch.storage import storage_id

_LIBRARY, _PREFIX, _METHOD = "transformers.vision_utils", "get_vision_", "get_rope_index"
_GIVEN = "kwargs"  # the argument from which such a function takes what the caller has computed
_TENSOR = object()  # stands in the place of a tensor
_COMPUTED = re.compile(r"position_ids|(max|cu)_(window_)?seqlens?|window_index|interp_.*|merged_.*")

# Who gives the results of a function in a trace, or None if it is to be traced.
meets: list[Callable[[InputFunction, Sequence[Tensor]], list[Tensor] | None]] = []
_traced: dict[str, InputFunction] = {}  # of the capture that is going on


@torch.library.custom_op("rockmate::input_function", mutates_args=())
def _op(tensors: list[Tensor], sizes: Sequence[int], name: str) -> list[Tensor]:
    raise NotImplementedError


@_op.register_fake
def _(tensors: list[Tensor], sizes: Sequence[int], name: str) -> list[Tensor]:
    given = iter(sizes)
    return [
        torch.empty([*itertools.islice(given, each.ndim)], dtype=each.dtype, device=each.device)
        for each in _traced[name].results
    ]


class InputFunction:
    """One call of such a function as an op: `(tensors) -> tensors`."""

    def __init__(self, run: Callable[..., Any], call: Any) -> None:
        """Of a call of `run`: positional and keyword arguments, `_TENSOR` for each tensor."""
        self._run, self._call = run, call
        self._sample, self.results = list[Tensor](), list[Tensor]()
        self.__name__ = self.__qualname__ = f"input_function_{run.__name__}"

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """What the function returns."""
        rest = iter(tensors)
        args, kwargs = map_aggregate(self._call, lambda x: next(rest) if x is _TENSOR else x)  # pyright: ignore
        return self._run(*args, **kwargs)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that it returns, contiguous and in memory of their own."""
        taken = {storage_id(each) for each in tensors}
        made = [each for each in _parts(self.run(tensors)) if each is not None]
        return [each.clone() if storage_id(each) in taken else each.contiguous() for each in made]

    def on_sample(self, _: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments: the sample's."""
        return self, ([each.clone() for each in self._sample],)

    def on_values(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """The results on the sample's values; None if it returns more than tensors."""
        self._sample = tensors
        found = self.run([each.clone() for each in tensors])
        self._is_tuple = isinstance(found, tuple)
        self._are_there = [each is not None for each in _parts(found)]
        if not all(isinstance(each, Tensor | None) for each in _parts(found)):
            return None
        self.results = self([each.clone() for each in tensors])
        return self.results

    def traced(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """Leaves the op in the trace that goes on; its results have these sizes, one by one."""
        _traced[str(id(self))] = self
        return torch.ops.rockmate.input_function([*tensors], sizes, str(id(self)))

    def returned(self, tensors: Sequence[Tensor]) -> Any:
        """What the function returns, of the tensors in it."""
        rest = iter(tensors)
        parts = tuple(next(rest) if is_there else None for is_there in self._are_there)
        return parts if self._is_tuple else parts[0]


def _parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@contextlib.contextmanager
def input_functions_as_ops(model: nn.Module) -> Iterator[None]:
    """Puts stand-ins, which ask whether they are met, in the places that a model calls from."""
    before = {place: getattr(*place) for place in _places(model)}
    try:
        for place, function in before.items():
            setattr(*place, _stand_in(function))
        yield
    finally:
        _traced.clear()
        for place, function in before.items():
            setattr(*place, function)


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
        tensors, own = list[Tensor](), {n: each for n, each in kwargs.items() if n != _GIVEN}

        def without_tensors(item: Any) -> Any:
            return tensors.append(item) or _TENSOR if isinstance(item, Tensor) else item

        op = InputFunction(function, map_aggregate((args, own), without_tensors))
        is_given = any(map(_COMPUTED.fullmatch, kwargs.get(_GIVEN) or ()))
        made = meets[-1](op, tensors) if meets and tensors and not is_given else None
        return function(*args, **kwargs) if made is None else op.returned(made)

    return call


def install(graph: fx.Graph) -> None:
    """Puts the functions in the place of the ops that stand for them in a trace."""
    for node in graph.find_nodes(
        op="call_function", target=torch.ops.rockmate.input_function.default
    ):
        tensors, _, name = node.args
        node.target, node.args = _traced[name], (tensors,)
