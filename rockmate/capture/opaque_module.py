"""Submodules that run as they are.

Those that the user names, since they cannot be traced, and recurrent layers.

Such a submodule is one op of the graph, and its backward another. The forward op runs the submodule
with gradients on and returns its outputs and a *handle*, a small tensor that holds the autograd
graph of this one run. In the plan the handle has the size of what that graph saves, so it is kept
or made again like any other value: dropping it frees the submodule's memory, and making it again
runs the submodule once more, from the same random state. The backward op differentiates the graph
that the handle holds.

What the graph saves of the op's own inputs and outputs is the plan's to count, and the backward op
reads it like any other op's would. Outputs need no more than that: they are made with the handle,
so they are in memory while it is. An input may be dropped and made again in between, so the graph
does not hold it: it *borrows* the input, and finds it among the backward's arguments.

What the tracer cannot know is read off one run of the whole model on the sample, without gradients,
before the capture: the submodule's inputs and outputs, what it saves, whether it draws random
numbers and whether it changes its buffers. Time and workspace are measured on those inputs, since a
submodule whose control flow depends on values may not run on made-up ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rockmate._torch.autocast import autocast_dtypes
from rockmate.capture.opaque_call import (
    OpaqueCall,
    by_place,
    input_change_error,
    nothing_saved,
    versions_of,
)
from rockmate.capture.opaque_graph import Layout
from rockmate.capture.structure import Structure, flatten
from rockmate.errors import InvalidSampleError

# --- finding and recording ------------------------------------------------------------------------


def record_calls(
    model: nn.Module, tensors: list[Tensor], structure: Structure, names: Sequence[str]
) -> dict[str, OpaqueCall]:
    """The calls of opaque submodules in one run of the model on its sample.

    The run saves nothing for a backward and leaves buffers and random state as they were.

    Raises:
        InvalidSampleError: there is no submodule of such a name, or the forward does not call it.
        UnsupportedModelError: what goes in or comes out is no nesting of tensors and constants.
    """
    modules = opaque_modules(model, names)
    if not modules:
        return {}
    seen: list[tuple[str, nn.Module, Any, Any, dict[str, torch.dtype]]] = []
    handles = []
    given_versions: dict[str, list[int]] = {}
    for path, module in modules.items():

        def begin(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            given_versions[path] = versions_of(
                flatten((args, kwargs), what=f"the arguments of {path}")[0]
            )

        def note(module: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            if (
                versions_of(flatten((args, kwargs), what=f"the arguments of {path}")[0])
                != given_versions[path]
            ):
                raise input_change_error(path)
            seen.append((path, module, (args, kwargs), result, autocast_dtypes()))

        handles += [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(note, with_kwargs=True),
        ]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = structure.rebuild(tensors)
    devices = sorted(
        {tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"}
    )
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad(), nothing_saved():
            functional_call(model, by_place(model, buffers), args, kwargs, tie_weights=False)
    finally:
        for handle in handles:
            handle.remove()
    named, called = (
        {model.get_submodule(name) for name in names},
        {module for _, module, *_ in seen},
    )
    missing = [path for path, module in modules.items() if module in named and module not in called]
    if missing:
        msg = (
            f"the forward does not call the submodule {missing[0]} on this sample. Leave it out of "
            "`untraced`."
        )
        raise InvalidSampleError(msg)
    numbers: dict[str, int] = {}
    calls = {}
    for path, module, arguments, result, autocast in seen:
        numbers[path] = numbers.get(path, 0) + 1
        name = path if numbers[path] == 1 else f"{path} ({numbers[path]})"
        calls[name] = _recorded(name, module, arguments, result, autocast)
    return calls


def opaque_names(options: Mapping[str, str]) -> tuple[str, ...]:
    """The names that were given, among the options of a captured step."""
    return tuple(name for name in options.get("untraced", "").split(",") if name)


def opaque_modules(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Paths and submodules that are not traced.

    Those named and recurrent layers, less what is part of another of them.

    Raises:
        InvalidSampleError: there is no submodule of such a name.
    """
    paths = dict(model.named_modules(remove_duplicate=False))  # a module may have several
    unknown = [name for name in names if not name or name not in paths]
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], paths, n=3, cutoff=0.3)
        hint = f" Near it: {', '.join(nearest)}." if nearest else ""
        msg = (
            f"untraced names {unknown[0]!r}, which is no submodule of {type(model).__name__}.{hint}"
        )
        raise InvalidSampleError(msg)
    named = {paths[name] for name in names}
    chosen = {
        path: module
        for path, module in model.named_modules()
        if module in named or isinstance(module, nn.RNNBase)
    }
    return {
        path: module
        for path, module in chosen.items()
        if not any(path.startswith(f"{other}.") for other in chosen)
    }


def _recorded(
    name: str, module: nn.Module, arguments: Any, result: Any, autocast: Mapping[str, torch.dtype]
) -> OpaqueCall:
    given, structure = flatten(arguments, what=f"the arguments of {name}")
    returned, result_structure = flatten(result, what=f"the result of {name}")
    parameters = dict(module.named_parameters())
    inputs = (
        *(tensor.detach() for tensor in given),
        *(parameter.detach() for parameter in parameters.values()),
    )
    call = OpaqueCall(
        name=name,
        module=module,
        arguments=structure,
        result=result_structure,
        inputs=inputs,
        parameter_names=tuple(parameters),
        outputs=tuple(map(Layout.of, returned)),
        gradients=tuple(
            Layout.of(tensor) for tensor in (*given, *parameters.values()) if tensor.requires_grad
        ),
        differentiable=tuple(tensor.requires_grad for tensor in (*given, *parameters.values())),
        autocast=autocast,
    )
    call.observe()
    return call
