"""Errors of a trace as errors that a user can act on: submodule, line, and what to change."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx, nn

from rockmate._torch.allocator import is_out_of_memory
from rockmate._torch.fake import is_fake
from rockmate.capture.attribute_access import Place
from rockmate.capture.attribute_values import traced_in
from rockmate.capture.provenance import THIS_PACKAGE, TORCH
from rockmate.capture.read_values import UnknownValueError
from rockmate.errors import InvalidSampleError, RockmateError, UnsupportedModelError

# Submodules that an error names at most.
_MOST_NAMED = 4
# Errors that a forward raises by itself on a sample that does not fit it. A `RuntimeError` is one,
# but its subclasses are of the tracer and of the device.
_OF_FORWARD = (TypeError, ValueError, IndexError, KeyError, AttributeError)
_INTERNAL = re.compile(r"AOT|[Ff]ake|[Pp]roxy|Functional|Sym(Int|Node)|ASSERT")  # no user's names

# What a trace raises, as a pattern, and why the model cannot be captured, with the next step.
_REASONS = {
    "has_fw_view": "PyTorch does not trace torch.func's hessian, jacfwd or jvp of such a "
    "view{where}. Take the derivative in reverse mode, torch.func.jacrev(torch.func.jacrev(f)) for "
    "hessian(f); or of a batch, by vmap.",
    "entirely functional graph|a non-functional tensor": "its forward changes a tensor in place "
    "that is neither parameter, buffer nor input{where}, typically an attribute. Register it with "
    "register_buffer(name, tensor, persistent=False).",
    "Unexpected fake": "its forward keeps a tensor for later{where}, which a plan does not. Make "
    "it in each call, or before the first one; or register it with register_buffer.",
    "set_ on a graph input": "its forward gives a tensor other memory by set_. Use copy_.",
}


def explain_failure(
    error: Exception, model: nn.Module, path: str, outside: Sequence[Place] = ()
) -> Exception:
    """The tracer's error as one that names the user's submodule and line, and the next step.

    Args:
        error: what the trace raised. PyTorch has no public classes for most of its tracing errors,
            so the classes are told apart by name and, where one class has several causes, by text.
        model: the captured model.
        path: of the submodule that was running.
        outside: places outside of the model, where a tensor of the trace may be.
    """
    kept = [f" in {each}" for each in outside if any(map(is_fake, traced_in(each.value())))]
    where = (f" in {path}" if path else "") + _user_line(error) or " and".join(kept)
    path = path.rpartition(".")[0] if _is_of_a_hook(error) else path  # which is traced beside it
    text = str(error).strip().split("\n")[0][:300]
    causes = _causes(error)
    if any(_makes_shape(cause) for cause in causes):
        return UnknownValueError(
            f"{type(model).__name__} cannot be captured as one graph: it makes a tensor whose "
            f"shape depends on values{where}, in forward or backward ({text}). Such shapes have no "
            "single schedule; replace it by a tensor operation of fixed shape (`torch.where` for "
            f"`x[mask]` and `x[mask] = y`), or{advice_to_leave(model, path)}."
        )
    if any(_reads_values(cause) for cause in causes):
        return UnknownValueError(
            f"{type(model).__name__} cannot be captured as one graph: its forward reads the value "
            f"of a tensor{where}. Control flow or shapes that depend on data have no single "
            "schedule; replace it by a tensor operation (or return, assign or append what is only "
            "logged, by `.item()`), "
            f"or{advice_to_leave(model, path)}.{_layerdrop_advice(model, path)} ({text})"
        )
    for pattern, reason in _REASONS.items():
        if re.search(pattern, str(error)):
            reason = reason.format(where=where)
            return UnsupportedModelError(f"{type(model).__name__} cannot be captured: {reason}")
    what = f"{type(error).__name__}: {text}"
    if any(is_out_of_memory(cause) for cause in causes):
        return RockmateError(
            f"out of memory while {type(model).__name__} is captured{where}: {what}. Release "
            "memory on the device or make the batch smaller."
        )
    is_runtime_error = type(error) is RuntimeError and "INTERNAL ASSERT FAILED" not in str(error)
    if is_runtime_error or isinstance(error, _OF_FORWARD):
        return InvalidSampleError(
            f"{type(model).__name__} raised on the sample input{where}: {what}. Where the plain "
            f'model runs it,{advice_to_leave(model, path)}, or take mode="frames".'
        )
    told = "" if where and _INTERNAL.search(text) else f": {text}"
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be captured{where}{told}. Change what it does there, "
        f"or{advice_to_leave(model, path)}."
    )


def refuse_effects(graph: fx.Graph, model: nn.Module) -> None:
    """Raises for an op that only raises or prints: no result of the step depends on it.

    `torch.linalg.inv`, `solve` and `cholesky` have one, which raises for a singular matrix.
    """
    for node in graph.nodes:
        if str(node.target) == "with_effects":
            op, path = str(node.args[1]), node.meta.get("module", "")
            instead = (
                "It raises for some values. Call the function of torch.linalg that ends in _ex and "
                "raises for none"
                if "linalg" in op
                else "Remove it"
            )
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be captured: {op}{f' in {path}' if path else ''} "
                f"has an effect but no result. {instead}, or{advice_to_leave(model, path)}."
            )


def advice_to_leave(model: nn.Module, path: str) -> str:
    """The advice for a submodule that cannot be captured, and for others of its class."""
    if not path:
        return " keep that part outside, as a plan of the submodules before it does"
    kind = type(model.get_submodule(path))
    alike = [other for other, module in model.named_modules() if other and type(module) is kind]
    around = _around(model, alike)
    what = "that submodule as it is"
    if several := len(alike) > 1:
        what = f"that submodule and the others of its class {kind.__name__} as they are"
    names = alike if len(alike) <= _MOST_NAMED or not around else [around]
    listed = ", ".join(f'"{name}"' for name in names)
    larger = (
        f', or what contains {"them" if several else "it"} ("{around}")'
        if around and names is alike
        else ""
    )
    command = f"on the command line: --untraced {','.join(names)}"
    return f" run {what}: untraced=[{listed}] ({command}){larger}"


def _layerdrop_advice(model: nn.Module, path: str) -> str:
    """The switches of LayerDrop, where the submodule at `path` skips layers by a random number."""
    forward: Any = inspect.unwrap(type(model.get_submodule(path)).forward)
    names = forward.__code__.co_names if inspect.isfunction(forward) else ()
    if not any(name.endswith("layerdrop") for name in names):
        return ""
    owners = [(name, module) for name, module in model.named_modules() if name]
    owners.append(("config", getattr(model, "config", None)))
    switches = [
        f"{owner}.{name}=0.0"
        for owner, holder in owners
        for name, value in getattr(holder, "__dict__", {}).items()
        if name.endswith("layerdrop") and value
    ]
    return f" Or train without LayerDrop, setting {', '.join(switches)}." if switches else ""


def _around(model: nn.Module, paths: Sequence[str]) -> str:
    """Path of the innermost submodule with a forward of its own that contains all `paths`.

    Empty if that is the whole model.
    """
    shared = paths[0].split(".")[:-1]
    while shared:
        around = ".".join(shared)
        is_called = type(model.get_submodule(around)).forward is not nn.Module.forward
        if is_called and all(path.startswith(f"{around}.") for path in paths):
            return around
        shared.pop()
    return ""


def _causes(error: BaseException) -> list[BaseException]:
    """The error and what it was raised from, link by link."""
    return [error, *(_causes(error.__cause__) if error.__cause__ else [])]


def needs_values(error: BaseException) -> bool:
    """Whether what raised an error needs a value of a fake tensor, which has none."""
    return any(_reads_values(cause) or _makes_shape(cause) for cause in _causes(error))


def _makes_shape(error: BaseException) -> bool:
    return type(error).__name__ == "DynamicOutputShapeException"


def _reads_values(error: BaseException) -> bool:
    names = "GuardOnDataDependentSymNode", "DataDependentOutputException", "UserError"
    texts = ("data-dependent", "_local_scalar_dense", ".numpy() is not supported")
    return type(error).__name__ in names or any(text in str(error) for text in texts)


def _is_of_a_hook(error: BaseException) -> bool:
    """Whether a hook of the submodule that was running has raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [each.line or "" for each in frames if each.filename == nn.modules.module.__file__]
    return bool(calls) and " hook(" in calls[-1]


def _user_line(error: BaseException) -> str:
    """The deepest frame outside PyTorch and this package, with a leading blank; empty if none."""
    frames = [
        each
        for each in traceback.extract_tb(error.__traceback__)
        if each.line
        and not each.filename.startswith((TORCH, THIS_PACKAGE))
        and Path(each.filename).stem not in {"contextlib", "functools"}
    ]
    return f" at {frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)" if frames else ""
