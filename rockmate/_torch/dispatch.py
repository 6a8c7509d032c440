"""Which op a call reaches, and the Python functions that PyTorch generates for ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

# Types of the functions that PyTorch generates. Other functions of the same name are Python code,
# which may do more than call the op.
_GENERATED_TYPES = (type(torch.mm), type(torch.Tensor.mm))
_CONVOLUTIONS: Any = torch._C._ConvBackend  # pyright: ignore[reportAttributeAccessIssue]
_COLUMN_BACKENDS = (_CONVOLUTIONS.Slow3d, _CONVOLUTIONS.SlowDilated3d)
_NN_FUNCTIONS: Any = torch._C._nn  # pyright: ignore[reportAttributeAccessIssue]


DispatchedCall = tuple[OpOverload, tuple[Any, ...], dict[str, Any]]
"""An op as the dispatcher receives it, with its arguments."""


def generated_functions(op: OpOverload) -> Iterator[Callable[..., Any]]:
    """The functions of Python that PyTorch generates under an op's name; none for most ops.

    They stand in `torch`, in `torch.Tensor` and in the private module that `torch.nn.functional`
    calls. No public table says which function calls which op.
    """
    name = op._schema.name.removeprefix("aten::")
    for holder in (torch, _NN_FUNCTIONS, torch.Tensor):
        function: Any = getattr(holder, name, None)
        if type(function) in _GENERATED_TYPES:
            yield function


def dispatched_call(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> DispatchedCall | None:
    """The op that a call reaches first. Nothing is run.

    `TorchDispatchMode` is documented for subclassing and lives in a private module; autograd's own
    layer above it has no public switch that leaves version counters alone.

    Returns:
        None if the function does not take the arguments.
    """

    def intercept(op: OpOverload, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        raise _Intercepted(op, tuple(given), dict(named))

    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd(), _Observer(intercept):
            function(*args, **kwargs)
    except _Intercepted as intercepted:
        return intercepted.args
    except (TypeError, RuntimeError, ValueError, IndexError):
        return None
    return None


def ops_observed(run: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Has `run(op, args, kwargs)` answer for each op within; it may call the op.

    It stands before the tracer's own modes, so that it sees the tensors that Python code has.
    """
    return _Observer(run)


def outside_of_modes() -> AbstractContextManager[Any]:
    """Runs ops for themselves, though a tracer is at work."""
    return _disable_current_modes()


class _Observer(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiled code runs within, so each op is spared a wrapper that keeps Dynamo away."""
        return False

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, args, kwargs or {})


class _Intercepted(Exception):
    """Carries the first dispatched call out of the function, before anything is run."""

    args: DispatchedCall


def is_op(target: object) -> TypeGuard[OpOverload]:
    """Whether a call target is an op, of ATen or of another library. The class is private."""
    return isinstance(target, OpOverload)


def schema_of(op: Any) -> torch.FunctionSchema:
    """Names, types, defaults and aliasing of an op's arguments and results.

    `str(op)` has the name alone; nothing public has the schema.
    """
    return op._schema


def makes_columns(
    values: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    is_transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> bool:
    """Whether the kernel of a convolution in three dimensions writes out its windows, on a CPU.

    Which kernel takes a call goes by dtype, sizes and number of threads. No public name tells it.
    The arguments are those of `aten.convolution`, the bias aside.
    """
    if groups > 1 or prod(weight.shape[2:]) == 1:
        return False
    how = stride, padding, dilation, is_transposed, output_padding, groups
    return torch._C._select_conv_backend(values, weight, None, *how) in _COLUMN_BACKENDS
