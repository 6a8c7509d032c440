"""Opaque modules: submodules that are not traced and run as they are.

They are the submodules that the user names, those of registered classes, recurrent layers, and
bitsandbytes' 8-bit layers. An autograd function that is registered is treated as a submodule.

An opaque module is one op of the graph, and its backward is another. The forward op runs the module
with gradients enabled. It returns the outputs and a *handle*: a small tensor that holds the
autograd graph of this run. In the plan, the handle has the size of the tensors that the autograd
graph saves, so it is saved or recomputed like any other value. To release it frees the module's
memory. To recompute it runs the module from the same random state. The backward op differentiates
the graph of the handle.

Inputs that the autograd graph saves count with the handle. An input that another op saves as well
counts twice. Outputs that the graph saves do not count with the handle: the backward op takes them
as arguments, so they are live as long as the handle.

Parameters are inputs of the op too. A frozen one of a class of its own, such as a quantized weight,
is not: the module has it, with all that belongs to it.

Before the capture, the whole model runs once on the sample, without gradients. This run gives the
module's inputs and outputs, the saved tensors, and whether it draws random numbers or changes its
buffers. Time and workspace are measured on the sample's inputs, since a module whose control flow
depends on values may fail on synthetic ones.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rockmate._torch.settings import Settings
from rockmate._torch.storage import versions_of
from rockmate._util import attributes_set
from rockmate.capture.diagnose import explain_failure
from rockmate.capture.input_functions import input_functions_as_ops
from rockmate.capture.opaque_call import OpaqueCall, input_change_error
from rockmate.capture.opaque_functions import (
    FunctionCaller,
    calls_seen,
    is_registered,
    refuse_written,
)
from rockmate.capture.opaque_graph import Layout
from rockmate.capture.opaque_ops import forget_traced
from rockmate.capture.structure import Structure, flatten
from rockmate.capture.tensor_parts import has_parts
from rockmate.capture.trace_state import DifferentiatedError, nothing_saved
from rockmate.capture.window_attention import windows_as_ops
from rockmate.errors import InvalidSampleError, RockmateError, UnsupportedModelError
from rockmate.state.call_state import undone
from rockmate.state.random_state import random_state_kept

# Classes that keep their weights in the attributes of an object, and move them in each call.
_NEVER_TRACED = {("bitsandbytes.nn.modules", "Linear8bitLt")}

# --- finding and recording ------------------------------------------------------------------------


def record_calls(
    model: nn.Module,
    tensors: list[Tensor],
    structure: Structure,
    names: Sequence[str],
    *,
    with_functions: bool,
    as_traced: Callable[[], contextlib.AbstractContextManager[None]],
) -> dict[str, OpaqueCall]:
    """The calls of opaque submodules, and of functions, in one run of the model on its sample.

    The run saves nothing for a backward, and what it changes is undone. It is within `as_traced`,
    since the trace has to call the submodules with the same arguments.

    Raises:
        InvalidSampleError: there is no submodule of such a name, or the forward does not call it.
        UnsupportedModelError: an argument or result is no nesting of tensors and constants.
    """
    modules = opaque_modules(model, names)
    if not modules and not with_functions:
        return {}
    with as_traced():
        try:
            seen = _calls_seen(model, tensors, structure, modules, nothing_saved())
        except DifferentiatedError:  # by the forward itself
            seen = _calls_seen(model, tensors, structure, modules, contextlib.nullcontext())
    named = {model.get_submodule(name) for name in names}
    called = {call.module for call in seen}
    missing = [path for path, module in modules.items() if module in named and module not in called]
    if missing:
        raise InvalidSampleError(
            f"the forward does not call the submodule {missing[0]} on this sample. Leave it out of "
            "`untraced`."
        )
    numbers: dict[str, int] = {}
    calls = {}
    for call in seen:
        number = numbers[call.path] = numbers.get(call.path, 0) + 1
        name = call.path if number == 1 else f"{call.path} ({number})"
        calls[name] = _recorded(name, call)
    return calls


class _Seen(NamedTuple):
    """One call of an opaque submodule."""

    path: str
    module: nn.Module
    arguments: tuple[Any, Any]
    result: Any
    settings: Settings


def _calls_seen(
    model: nn.Module,
    tensors: list[Tensor],
    structure: Structure,
    modules: Mapping[str, nn.Module],
    saving: contextlib.AbstractContextManager[None],
) -> list[_Seen]:
    """The calls of opaque submodules, and of functions, in a run of the model within `saving`."""
    seen: list[_Seen] = []
    running: list[str] = []  # paths of opaque modules

    def versions(path: str, given: Any) -> list[int]:
        what = f"the arguments of {path}"
        return versions_of(flatten(given, what=what, takes_objects=True)[0])

    def watched(path: str, module: nn.Module) -> Callable[..., Any]:
        forward = module.forward

        @functools.wraps(forward)  # whose signature a parent may read
        def call(*args: Any, **kwargs: Any) -> Any:
            before = versions(path, (args, kwargs))
            running.append(path)
            result = forward(*args, **kwargs)
            running.pop()
            if versions(path, (args, kwargs)) != before:
                raise input_change_error(path)
            seen.append(_Seen(path, module, (args, kwargs), result, Settings.now()))
            return result

        return call

    def see(caller: FunctionCaller, run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if running:
            return run(*args)
        name = caller.function.__qualname__
        result = refuse_written(name, args, lambda: run(*args))
        seen.append(_Seen(name, caller, (args, {}), result, Settings.now()))
        return result

    args, kwargs = structure.rebuild(tensors)
    forwards = [(each, "forward", watched(path, each)) for path, each in modules.items()]
    try:
        with (
            undone(model),  # it would empty `seen`, too, if that were within reach as it begins
            attributes_set(*forwards),
            random_state_kept(tensor.device for tensor in tensors),
            torch.enable_grad(),
            saving,
            calls_seen(see),
        ):
            model(*args, **kwargs)
    except RockmateError:
        raise
    except Exception as error:
        raise explain_failure(error, model, "") from error
    return seen


def opaque_modules(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Paths and submodules that are not traced.

    Those named, recurrent layers and 8-bit layers, less what is part of another of them.

    Raises:
        InvalidSampleError: there is no submodule of such a name.
    """
    paths = dict(model.named_modules(remove_duplicate=False))  # a module may have several
    unknown = [name for name in names if not name or name not in paths]
    if unknown:
        nearest = difflib.get_close_matches(unknown[0], paths, n=3, cutoff=0.3)
        hint = f" Near it: {', '.join(nearest)}." if nearest else ""
        raise InvalidSampleError(
            f"untraced names {unknown[0]!r}, which is no submodule of {type(model).__name__}.{hint}"
        )
    named = {paths[name] for name in names}
    chosen = {
        path: module
        for path, module in model.named_modules()
        if module in named
        or isinstance(module, nn.RNNBase)
        or is_registered(module)
        or any((each.__module__, each.__name__) in _NEVER_TRACED for each in type(module).__mro__)
    }
    return {
        path: module
        for path, module in chosen.items()
        if not any(path.startswith(f"{other}.") for other in chosen)
    }


def _recorded(name: str, seen: _Seen) -> OpaqueCall:
    given, structure = flatten(seen.arguments, what=f"the arguments of {name}", takes_objects=True)
    returned, result_structure = flatten(seen.result, what=f"the result of {name}")
    parameters = {}
    for own_name, parameter in seen.module.named_parameters():
        if not has_parts(parameter):
            parameters[own_name] = parameter
        elif parameter.requires_grad:
            raise UnsupportedModelError(
                f"the untraced submodule {name} trains {own_name}, a {type(parameter).__name__}, "
                "which it cannot be given as an input. Freeze it, or leave the submodule traced."
            )
    inputs = (
        *(tensor.detach() for tensor in given),
        *(parameter.detach() for parameter in parameters.values()),
    )
    call = OpaqueCall(
        name=name,
        module=seen.module,
        arguments=structure,
        result=result_structure,
        inputs=inputs,
        parameter_names=tuple(parameters),
        outputs=tuple(map(Layout.of, returned)),
        gradients=tuple(
            Layout.of(each) if each.requires_grad else None
            for each in (*given, *parameters.values())
        ),
        settings=seen.settings,
    )
    call.observe()
    return call


# --- tracing --------------------------------------------------------------------------------------


@contextlib.contextmanager
def traced_as_ops(calls: Mapping[str, OpaqueCall], model: nn.Module) -> Iterator[None]:
    """Makes each of the submodules one op of the trace, as functions of inputs and windows are.

    Only one trace may go on at a time.
    """
    forwards = []
    for module in dict.fromkeys(call.module for call in calls.values()):
        own = [call for call in calls.values() if call.module is module]
        # The tracer runs the model more than once.
        forwards.append((module, "forward", partial(_call_op, module, itertools.cycle(own))))
    try:
        with attributes_set(*forwards), input_functions_as_ops(model), windows_as_ops(model):
            yield
    finally:
        forget_traced()


def _call_op(module: nn.Module, order: Iterator[OpaqueCall], *args: Any, **kwargs: Any) -> Any:
    call = next(order)
    tensors, structure = flatten(
        (args, kwargs), what=f"the arguments of {call.name}", takes_objects=True
    )
    parameters = dict(module.named_parameters())
    given = [*tensors, *(parameters[name] for name in call.parameter_names)]
    if (
        structure != call.arguments
        or tuple(tensor.requires_grad for tensor in given) != call.differentiable
    ):
        raise UnsupportedModelError(
            f"the untraced submodule {call.name} is called in another way when the model is traced "
            "than on the sample."
        )
    return call.traced(given)
