"""Checkpoints around runs of layers: sqrt(n) segments, and `checkpoint_sequential`.

A model calls its layers one by one. To put a run of layers under one checkpoint, the forward of the
first layer runs them all, and the forward of each other layer returns the run's result. This is
right where the arguments of each layer are known without the model's own code: they are those of
the layer before it, or what that layer returned. One call of the model shows where this holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from bench.models import Workload
from bench.peers.checkpoint import replaced_forwards

_Key = int | str  # position or keyword of an argument

_Wiring = Mapping[_Key, tuple[int, ...] | None]
"""Argument to its source.

None is the same argument of the layer before. A path leads into what that layer returned.
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers that can be called one after the other, with a wiring for each but the first."""

    layers: tuple[nn.Module, ...]
    wirings: tuple[_Wiring, ...]

    def parts(self, length: int) -> Iterator[_Run]:
        for start in range(0, len(self.layers), length):
            stop = start + length
            yield _Run(self.layers[start:stop], self.wirings[start : stop - 1])


@contextmanager
def checkpoint_segments(workload: Workload) -> Iterator[nn.Module]:
    """One checkpoint around each of about sqrt(n) segments of equal length (Chen et al., 2016).

    No segment crosses the model's own code.

    Raises:
        ValueError: No layer can be called right after the one before it.
    """
    runs = _runs(workload)
    length = math.ceil(math.sqrt(len(workload.layers(workload.model))))
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for part in (part for run in runs for part in run.parts(length)):
        plain = [layer.forward for layer in part.layers]
        forwards |= _as_one(
            part,
            partial(checkpoint, partial(_call_in_turn, plain, part.wirings), use_reentrant=False),
        )
    with replaced_forwards(forwards):
        yield workload.model


@contextmanager
def checkpoint_in_sequence(workload: Workload) -> Iterator[nn.Module]:
    """`checkpoint_sequential` over each run of layers, in about sqrt(number of layers) segments.

    Raises:
        ValueError: No layer can be called right after the one before it, or layers pass on more
            than one tensor.
    """
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for run in _runs(workload):
        if len(run.layers) < 2 or not all(map(_passes_one_tensor, run.wirings)):
            continue
        handed_on = next(key for key, path in run.wirings[0].items() if path == ())
        plain = [layer.forward for layer in run.layers]
        forwards |= _as_one(
            run, partial(_in_segments, plain, handed_on, round(math.sqrt(len(plain))))
        )
    if not forwards:
        msg = (
            "checkpoint_sequential takes functions of one tensor; "
            "these layers pass on more tensors, or no two of them are adjacent"
        )
        raise ValueError(msg)
    with replaced_forwards(forwards):
        yield workload.model


def _passes_one_tensor(wiring: _Wiring) -> bool:
    return [path for path in wiring.values() if path is not None] == [()]


def _in_segments(
    forwards: Sequence[Callable[..., Any]], key: _Key, num_segments: int, *args: Any, **kwargs: Any
) -> Any:
    arguments = {**dict(enumerate(args)), **kwargs}
    functions = [
        lambda x, forward=forward: _call(forward, {**arguments, key: x}) for forward in forwards
    ]
    return checkpoint_sequential(functions, num_segments, arguments[key], use_reentrant=False)


def _as_one(run: _Run, function: Callable[..., Any]) -> dict[nn.Module, Callable[..., Any]]:
    """Forwards of a run: the first layer's calls `function`, and the others return its result."""
    held: list[Any] = []
    last = len(run.layers) - 1

    def forward(*args: Any, index: int, **kwargs: Any) -> Any:
        if index == 0:
            held[:] = [function(*args, **kwargs)]
        return held.pop() if index == last else held[0]

    return {layer: partial(forward, index=index) for index, layer in enumerate(run.layers)}


def _call_in_turn(
    forwards: Sequence[Callable[..., Any]], wirings: Sequence[_Wiring], *args: Any, **kwargs: Any
) -> Any:
    arguments: dict[_Key, Any] = {**dict(enumerate(args)), **kwargs}
    result = _call(forwards[0], arguments)
    for forward, wiring in zip(forwards[1:], wirings, strict=True):
        arguments = {
            key: arguments[key] if path is None else _at(result, path)
            for key, path in wiring.items()
        }
        result = _call(forward, arguments)
    return result


def _call(forward: Callable[..., Any], arguments: Mapping[_Key, Any]) -> Any:
    positional = [value for key, value in arguments.items() if isinstance(key, int)]
    return forward(
        *positional, **{key: value for key, value in arguments.items() if isinstance(key, str)}
    )


def _at(result: Any, path: tuple[int, ...]) -> Any:
    return result[path[0]] if path else result


@functools.cache
def _runs(workload: Workload) -> tuple[_Run, ...]:
    """The layers in maximal runs, in the model's order.

    Raises:
        ValueError: All runs are single layers.
    """
    calls = _calls(workload)
    groups: list[tuple[list[nn.Module], list[_Wiring]]] = []
    for index, (layer, arguments, _) in enumerate(calls):
        wiring = _wiring(arguments, *calls[index - 1][1:]) if index else None
        if wiring is None:
            groups.append(([layer], []))
        else:
            groups[-1][0].append(layer)
            groups[-1][1].append(wiring)
    if all(len(layers) == 1 for layers, _ in groups):
        msg = (
            "no layer can be called right after the one before it: "
            "the model's own code stands between each two"
        )
        raise ValueError(msg)
    return tuple(_Run(tuple(layers), tuple(wirings)) for layers, wirings in groups)


def _calls(workload: Workload) -> list[tuple[nn.Module, dict[_Key, Any], Any]]:
    """Layer, arguments and result of each call in one run of the model.

    The run changes neither buffers nor the random state.
    """
    calls: list[tuple[nn.Module, dict[_Key, Any], Any]] = []

    def record(layer: nn.Module, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        calls.append((layer, {**dict(enumerate(args)), **kwargs}, result))
        return result

    model = workload.model
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    layers = workload.layers(model)
    with (
        torch.random.fork_rng(),
        torch.no_grad(),
        replaced_forwards({layer: partial(record, layer, layer.forward) for layer in layers}),
    ):
        model(**workload.sample)
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    return calls


def _wiring(
    arguments: Mapping[_Key, Any], before: Mapping[_Key, Any], result: Any
) -> _Wiring | None:
    """The sources of a layer's arguments; None if one has another source."""
    items = (
        {(index,): item for index, item in enumerate(result)}
        if isinstance(result, (tuple, list))
        else {(): result}
    )
    wiring: dict[_Key, tuple[int, ...] | None] = {}
    for key, value in arguments.items():
        paths = [
            path for path, item in items.items() if isinstance(value, Tensor) and item is value
        ]
        if paths:
            wiring[key] = paths[0]
        elif key in before and _is_same(value, before[key]):
            wiring[key] = None
        else:
            return None
    return wiring if any(path is not None for path in wiring.values()) else None


def _is_same(value: Any, other: Any) -> bool:
    return value is other or (isinstance(value, (bool, int, float, str)) and value == other)
