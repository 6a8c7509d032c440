"""The other ways to train a workload that ours is measured against, each as its documentation says.

A peer lends a callable model for the duration of a context manager and puts everything back afterwards, so all peers share one set of
weights, any order of use is fair, and a peer can be lent any number of times. Forward and backward both have to run inside the context.
The part of a name before a colon is the family, the rest its setting. A new peer is one entry of `peers_for`.

====================== ==================================================================================================================
family                 what it does
====================== ==================================================================================================================
eager                  nothing: the model as it is
checkpoint             `torch.utils.checkpoint`, non-reentrant, around every k-th layer; by `activation_checkpointing_enable` where the
                       model has that; "stages" are larger modules, of models that have some
sqrt(n) segments       one checkpoint around each of sqrt(n) runs of layers (Chen et al., 2016)
checkpoint_sequential  `torch.utils.checkpoint.checkpoint_sequential` with sqrt(n) segments, the last of which saves everything
selective              a checkpoint around every layer that saves results of matrix products, attention and convolutions
default partitioner    `torch.compile`, AOT eager backend: PyTorch's kernels, every intermediate that the backward reads is saved
min-cut                `torch.compile`, AOT eager backend with the min-cut partitioner, at an `activation_memory_budget`, with the
                       knapsack solver named
min-cut by layer       the same with each layer compiled by itself (regional compilation)
offload                `torch.autograd.graph.save_on_cpu`: what is saved waits in pinned host memory; CUDA only
====================== ==================================================================================================================

The AOT eager backend runs the same kernels as eager does, so that what is compared is what is saved and what is recomputed, not fusion.
It draws random numbers anew where the min-cut partitioner recomputes dropout, and then has other gradients than eager: the comparison
shows that, and no setting of it avoids it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo import lookup_backend
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import (
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from bench.models import Workload

Peer = Callable[[Workload], AbstractContextManager[Callable[..., Any]]]

_aten = torch.ops.aten
SAVED_OPS = [
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
"""What selective checkpointing saves, as in PyTorch's description of the technique: what takes long to compute."""

STAGES = "checkpoint: stages"
"""Name of the peer that only models with stages have."""

_COMPILATION = {  # many settings of one model are compiled in one process; past the limit Dynamo would run eager without a word
    "recompile_limit": 10_000,
    "accumulated_recompile_limit": 10_000,
    "fail_on_recompile_limit_hit": True,
}


def peers_for(device: str = "cpu", *, quick: bool = False) -> dict[str, Peer | None]:
    """Name to peer, eager first; None where the peer cannot run on that kind of device.

    Args:
        device: "cpu" or "cuda".
        quick: some settings of each family.
    """
    whole = (
        ((0.5, "dp"),)
        if quick
        else _settings((1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0), (0.5, 0.3, 0.1))
    )
    by_layer = (
        ((0.5, "dp"), (0.5, "ilp"))
        if quick
        else _settings((1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0), (0.5, 0.3, 0.2, 0.1))
    )
    return {
        "eager": eager,
        "checkpoint": checkpoint_per_layer,
        **{
            f"checkpoint: every {k}": partial(checkpoint_layers, every=k)
            for k in ((2,) if quick else (2, 3, 4))
        },
        "sqrt(n) segments": checkpoint_segments,
        "checkpoint_sequential": checkpoint_in_sequence,
        "selective": partial(
            checkpoint_layers, context_fn=partial(create_selective_checkpoint_contexts, SAVED_OPS)
        ),
        "default partitioner": partial(
            compiled, backend=lookup_backend("aot_eager_default_partitioner")
        ),
        **{
            f"min-cut: {budget:g} {solver}": partial(compiled, backend=min_cut(budget, solver))
            for budget, solver in whole
        },
        **{
            f"min-cut by layer: {budget:g} {solver}": partial(
                compiled_by_layer, backend=min_cut(budget, solver)
            )
            for budget, solver in by_layer
        },
        "offload": offloaded if device == "cuda" else None,
    }


def _settings(dp: Sequence[float], ilp: Sequence[float]) -> tuple[tuple[float, str], ...]:
    return (*((budget, "dp") for budget in dp), *((budget, "ilp") for budget in ilp))


def family(name: str) -> str:
    """What a method's name says ahead of its setting."""
    return name.partition(":")[0]


# --- one layer at a time --------------------------------------------------------------------------------


@contextmanager
def eager(workload: Workload) -> Iterator[nn.Module]:
    """The model as it is: nothing recomputed."""
    yield workload.model


@contextmanager
def checkpoint_layers(workload: Workload, *, every: int = 1, **options: Any) -> Iterator[nn.Module]:
    """One non-reentrant checkpoint around every layer, or around the first of each `every`.

    Gradients equal eager's, for the random state is restored for the second run. The buffers do not: a BatchNorm inside a layer updates
    its running statistics twice a step, as torch's checkpoint does.

    Args:
        workload: the model.
        every: as `every_n_layers` of Hugging Face models: layers 0, `every`, 2 * `every`, ... are checkpointed.
        **options: further ones of `torch.utils.checkpoint.checkpoint`.
    """
    model: Any = workload.model
    if getattr(model, "supports_gradient_checkpointing", False):
        model.activation_checkpointing_enable(
            {"use_reentrant": False, **options}, every_n_layers=every
        )
        try:
            yield model
        finally:
            model.activation_checkpointing_disable()
            model.disable_input_require_grads()  # whose hook enabling leaves on the embeddings
        return
    layers = workload.layers(model)[::every]
    wrapped = {
        layer: partial(
            checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=True, **options
        )
        for layer in layers
    }
    with _forwards(wrapped):
        yield model


def checkpoint_per_layer(workload: Workload) -> AbstractContextManager[nn.Module]:
    """One checkpoint a layer, the usual setting."""
    return checkpoint_layers(workload)


@contextmanager
def checkpoint_stages(workload: Workload) -> Iterator[nn.Module]:
    """One non-reentrant checkpoint around every stage.

    Raises:
        ValueError: the model has none.
    """
    if workload.stages is None:
        raise ValueError(f"{workload.name} has no stages")
    stages = workload.stages(workload.model)
    with _forwards(
        {
            stage: partial(checkpoint, stage.forward, use_reentrant=False, preserve_rng_state=True)
            for stage in stages
        }
    ):
        yield workload.model


@contextmanager
def _forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    for layer, forward in forwards.items():
        layer.forward = forward  # on the instance, where it shadows the class's method and `del` uncovers it again
    try:
        yield
    finally:
        for layer in forwards:
            del layer.forward


# --- runs of layers -------------------------------------------------------------------------------------
#
# A model calls its layers one by one. To put a run of them under one checkpoint, the first one's forward runs them all, and the forward
# of each other one hands on what came out. That is right where each layer's arguments are known without the model's own code: they are what
# the layer before it had, or what that layer returned. One call of the model shows where this is so.

_Key = int | str  # position or keyword of an argument
_Wiring = Mapping[_Key, tuple[int, ...] | None]
"""Argument to where it comes from: None is the same argument of the layer before, a path leads into what that layer returned."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Layers that can be called one after the other; a wiring for each but the first."""

    layers: tuple[nn.Module, ...]
    wirings: tuple[_Wiring, ...]

    def parts(self, length: int) -> Iterator[_Run]:
        for start in range(0, len(self.layers), length):
            stop = start + length
            yield _Run(self.layers[start:stop], self.wirings[start : stop - 1])


@contextmanager
def checkpoint_segments(workload: Workload) -> Iterator[nn.Module]:
    """One checkpoint around each of about sqrt(n) segments of equal length (Chen et al., 2016), none across the model's own code.

    Raises:
        ValueError: no layer can be called right after the one before it.
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
    with _forwards(forwards):
        yield workload.model


@contextmanager
def checkpoint_in_sequence(workload: Workload) -> Iterator[nn.Module]:
    """`checkpoint_sequential` over each run of layers, in the square root of their number of segments.

    Raises:
        ValueError: no layer can be called right after the one before it, or layers hand on more than one tensor.
    """
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for run in _runs(workload):
        if (
            any(
                [path for path in wiring.values() if path is not None] != [()]
                for wiring in run.wirings
            )
            or len(run.layers) < 2
        ):
            continue
        handed_on = next(key for key, path in run.wirings[0].items() if path == ())
        plain = [layer.forward for layer in run.layers]
        forwards |= _as_one(
            run, partial(_in_segments, plain, handed_on, round(math.sqrt(len(plain))))
        )
    if not forwards:
        msg = "checkpoint_sequential takes functions of one tensor, and the layers hand on more or do not follow one another"
        raise ValueError(msg)
    with _forwards(forwards):
        yield workload.model


def _in_segments(
    forwards: Sequence[Callable[..., Any]], key: _Key, num_segments: int, *args: Any, **kwargs: Any
) -> Any:
    arguments = {**dict(enumerate(args)), **kwargs}
    functions = [
        lambda x, forward=forward: _call(forward, {**arguments, key: x}) for forward in forwards
    ]
    return checkpoint_sequential(functions, num_segments, arguments[key], use_reentrant=False)


def _as_one(run: _Run, function: Callable[..., Any]) -> dict[nn.Module, Callable[..., Any]]:
    """Forwards by which the run's first layer returns what `function` does, and the others the same again."""
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
    """The layers in maximal runs, in the order in which the model calls them.

    Raises:
        ValueError: all runs are single layers.
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
        msg = "no layer can be called right after the one before it: the model's own code stands between each two"
        raise ValueError(msg)
    return tuple(_Run(tuple(layers), tuple(wirings)) for layers, wirings in groups)


def _calls(workload: Workload) -> list[tuple[nn.Module, dict[_Key, Any], Any]]:
    """(layer, arguments, what it returned) of one call of the model, which leaves no trace in buffers and random state."""
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
        _forwards({layer: partial(record, layer, layer.forward) for layer in layers}),
    ):
        model(**workload.sample)
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    return calls


def _wiring(
    arguments: Mapping[_Key, Any], before: Mapping[_Key, Any], result: Any
) -> _Wiring | None:
    """Where a layer's arguments come from, None where one comes from elsewhere."""
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


# --- torch.compile --------------------------------------------------------------------------------------


def min_cut(budget: float, solver: str) -> Callable[..., Any]:
    """A backend: AOT eager, whose partitioner is min-cut, at that `activation_memory_budget`.

    Args:
        budget: 1.0 saves what is fastest, 0.0 the inputs of what is compiled.
        solver: of the knapsack: "dp", or "ilp", which needs scipy.
    """
    aot_eager = lookup_backend("aot_eager")

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        with functorch_config.patch(
            activation_memory_budget=budget, activation_memory_budget_solver=solver
        ):
            return aot_eager(graph, inputs)

    return backend


@contextmanager
def compiled(workload: Workload, *, backend: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """The whole model compiled; the first call inside compiles, later ones and later contexts find the code again."""
    with dynamo_config.patch(**_COMPILATION):
        yield _compiled_model(workload, backend)


@contextmanager
def compiled_by_layer(workload: Workload, *, backend: Callable[..., Any]) -> Iterator[nn.Module]:
    """Each layer compiled by itself; equal layers share the code."""
    with dynamo_config.patch(**_COMPILATION), _forwards(_compiled_forwards(workload, backend)):
        yield workload.model


# Made once, since the first call of each costs some milliseconds that no step of a training loop pays.


@functools.cache
def _compiled_model(workload: Workload, backend: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(workload.model, backend=backend)


@functools.cache
def _compiled_forwards(
    workload: Workload, backend: Callable[..., Any]
) -> Mapping[nn.Module, Callable[..., Any]]:
    return {
        layer: torch.compile(layer.forward, backend=backend)
        for layer in workload.layers(workload.model)
    }


# --- host memory ----------------------------------------------------------------------------------------


@contextmanager
def offloaded(workload: Workload) -> Iterator[nn.Module]:
    """Eager, with everything that autograd saves copied to pinned host memory and back."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        yield workload.model


PEERS: dict[str, Peer] = {"eager": eager, "checkpoint": checkpoint_per_layer}
"""Those that `bench.run` measures beside its budgets."""
