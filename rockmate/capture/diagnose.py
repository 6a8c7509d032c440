"""TODO: capture.diagnose."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from rockmate.errors import InvalidSampleError, UnsupportedModelError

_MOST_NAMED = 4  # submodules in an error


def explain_failure(error: Exception, model: nn.Module, path: str) -> Exception:
    """The tracer's error as one that the user can act on, with the submodule and the line of their code that caused it."""
    where = (f" in {path}" if path else "") + _user_line(error)
    text = str(error).strip().split("\n")[0][:300]
    causes = _causes(error)
    if any(type(cause).__name__ == "DynamicOutputShapeException" for cause in causes):
        msg = (
            f"{type(model).__name__} cannot be captured as one graph: it makes a tensor whose shape depends on values{where}, in "
            f"forward or backward ({text}). Such shapes have no single schedule; replace it by a tensor operation of fixed shape "
            f"(`torch.where` for `x[mask]` and `x[mask] = y`), or{_leave(model, path)}."
        )
        return UnsupportedModelError(msg)
    if any(_reads_values(cause) for cause in causes):
        msg = (
            f"{type(model).__name__} cannot be captured as one graph: its forward reads the value of a tensor{where}. Control flow or "
            f"shapes that depend on data have no single schedule; replace it by a tensor operation, or{_leave(model, path)}. ({text})"
        )
        return UnsupportedModelError(msg)
    if "convert all Tensors to FakeTensors" in str(error):
        msg = (
            f"{type(model).__name__} uses a tensor that is neither parameter, buffer nor input{where}, typically an attribute. "
            "Register it with register_buffer(name, tensor, persistent=False)."
        )
        return UnsupportedModelError(msg)
    if isinstance(
        error, TypeError | ValueError | IndexError | RuntimeError | KeyError | AttributeError
    ):
        msg = f"{type(model).__name__} raised on the sample input{where}: {type(error).__name__}: {text}"
        return InvalidSampleError(msg)
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be captured{where}: {type(error).__name__}: {text}"
    )


def _leave(model: nn.Module, path: str) -> str:
    """What a user can do about a submodule that cannot be captured, and about others of its class."""
    if not path:
        return " keep that part outside"
    kind = type(model.get_submodule(path))
    alike = [other for other, module in model.named_modules() if type(module) is kind]
    around = _around(model, alike)
    several = len(alike) > 1
    what = (
        f"that submodule and the others of its class {kind.__name__} as they are"
        if several
        else "that submodule as it is"
    )
    names = alike if len(alike) <= _MOST_NAMED or not around else [around]
    listed = ", ".join(f'"{name}"' for name in names)
    larger = (
        f', or what contains {"them" if several else "it"} ("{around}")'
        if around and names is alike
        else ""
    )
    return f" run {what}: untraced=[{listed}] (on the command line: --untraced {','.join(names)}){larger}"


def _around(model: nn.Module, paths: Sequence[str]) -> str:
    """Path of the innermost submodule that contains them all and has a forward of its own; empty if that is the whole model."""
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


def _reads_values(error: BaseException) -> bool:
    is_known = type(error).__name__ in {
        "GuardOnDataDependentSymNode",
        "DataDependentOutputException",
        "UserError",
    }
    return is_known or "data-dependent" in str(error) or "_local_scalar_dense" in str(error)


def _user_line(error: BaseException) -> str:
    """The deepest frame outside PyTorch and this package, as text that starts with a blank; empty if there is none."""
    ours, torch_root = Path(__file__).parents[1], Path(torch.__file__).parent
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if ours not in Path(frame.filename).parents
        and torch_root not in Path(frame.filename).parents
        and frame.line
    ]
    frames = [frame for frame in frames if "contextlib" not in frame.filename]
    return f" at {frames[-1].filename}:{frames[-1].lineno} (`{frames[-1].line}`)" if frames else ""
