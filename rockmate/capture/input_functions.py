"""Functions of a call's inputs alone that run as they are in each step, as one op each.

Models of images and text compute positions, windows and boundaries of images from grids, lists of
token types and masks. That Python code reads values in loops, so a graph of its ops would hold for
one layout of a batch alone. Its results depend on no parameter and have no gradient. So a plan
calls the function itself, and sees its results' sizes alone.

The functions are those that transformers' own exporters compute before a trace: `get_rope_index` of
a model, and what `transformers.vision_utils` has. Others are traced.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx, nn

from rockmate._torch.storage import storage_id

_LIBRARY, _PREFIX, _METHOD = "transformers.vision_utils", "get_vision_", "get_rope_index"
_GIVEN = "kwargs"  # the argument from which such a function takes what the caller has computed
Meet = Callable[["InputFunction", Sequence[Tensor]], list[Tensor] | None]

_meet: ContextVar[Meet | None] = ContextVar("_meet", default=None)
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

    def __init__(
        self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Of this call, whose tensors the op takes."""
        self._run, self._args, self._kwargs = run, args, dict(kwargs)
        self._given = self._kwargs.pop(_GIVEN, None)
        self._sample, self._form = list[Tensor](), ()
        self.results = list[Tensor]()  # of the sample
        self.__name__ = self.__qualname__ = f"input_function_{run.__name__}"

    def __str__(self) -> str:
        return f"rockmate.{self.__name__}"

    @property
    def tensors(self) -> list[Tensor]:
        """Those among its arguments."""
        given = (*self._args, *self._kwargs.values())
        return [each for each in given if isinstance(each, Tensor)]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Runs the function; results are contiguous and in memory of their own."""
        return self._own(_parts(self._result(tensors, {})), tensors)

    def _result(self, tensors: Sequence[Tensor], given: dict[str, Any]) -> Any:
        rest = iter(tensors)
        args = [next(rest) if isinstance(each, Tensor) else each for each in self._args]
        kwargs = {
            name: next(rest) if isinstance(each, Tensor) else each
            for name, each in self._kwargs.items()
        }
        return self._run(*args, **kwargs, **given)

    def _own(self, parts: tuple[Any, ...], tensors: Sequence[Tensor]) -> list[Tensor]:
        given = {storage_id(each) for each in tensors}
        return [
            each.clone() if storage_id(each) in given else each.contiguous()
            for each in parts
            if each is not None
        ]

    def on_values(self, tensors: list[Tensor]) -> list[Tensor] | None:
        """The results on the sample's values; None if they are given, or more than tensors."""
        self._sample = tensors
        given = {} if self._given is None else {_GIVEN: dict(self._given)}
        result = self._result([each.clone() for each in tensors], given)
        is_given = bool(given) and len(given[_GIVEN]) < len(self._given)
        if is_given or not all(isinstance(each, Tensor | None) for each in _parts(result)):
            return None
        self._form = result
        self.results = self._own(_parts(result), ())
        return self.results

    def on_sample(self, _: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """What to measure, and its arguments: the sample's."""
        return self, ([each.clone() for each in self._sample],)

    def traced(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """Leaves the op in the trace that goes on; its results have these sizes, one by one."""
        _traced[str(id(self))] = self
        return torch.ops.rockmate.input_function([*tensors], sizes, str(id(self)))

    def met(self, meet: Meet) -> Any:
        """The result in a trace: of one op if `meet` knows what the function takes."""
        made = meet(self, self.tensors) if self.tensors else None
        if made is None:
            given = {} if self._given is None else {_GIVEN: self._given}
            return self._result(self.tensors, given)
        rest = iter(made)
        parts = tuple(each if each is None else next(rest) for each in _parts(self._form))
        return parts if isinstance(self._form, tuple) else parts[0]


def _parts(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


@contextlib.contextmanager
def input_functions_met(meet: Meet) -> Iterator[None]:
    """Has `meet` give the results of what is called within, None for those to be traced."""
    token = _meet.set(meet)
    try:
        yield
    finally:
        _meet.reset(token)


@contextlib.contextmanager
def input_functions_as_ops(model: nn.Module) -> Iterator[None]:
    """Puts stand-ins, which ask whether they are met, in the places that a model calls from."""
    before = {place: getattr(*place) for place in _places(model)}
    try:
        for (owner, name), function in before.items():
            setattr(owner, name, _stand_in(function))
        yield
    finally:
        _traced.clear()
        for (owner, name), function in before.items():
            setattr(owner, name, function)


def _places(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Owners and names: modules that have imported a function, and classes with a method."""
    for kind in {type(each) for each in model.modules()}:
        yield from ((each, _METHOD) for each in kind.__mro__ if _METHOD in vars(each))
        namespace = sys.modules.get(kind.__module__)
        for name, value in vars(namespace).items() if namespace else ():
            if name.startswith(_PREFIX) and getattr(value, "__module__", "") == _LIBRARY:
                yield namespace, name


def _stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        meet = _meet.get()
        if meet is None:
            return function(*args, **kwargs)
        return InputFunction(function, args, kwargs).met(meet)

    return call


def install(graph: fx.Graph) -> None:
    """Puts the functions in the place of the ops that stand for them in a trace."""
    for node in graph.nodes:
        if node.target is torch.ops.rockmate.input_function.default:
            tensors, _, name = node.args
            node.target, node.args = _traced[name], (tensors,)
