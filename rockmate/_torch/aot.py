"""The joint forward and backward graph of a module, and what a capture sets for its duration."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from rockmate._util import attributes_set, is_users


def joint_graph(
    stack: contextlib.ExitStack, forward: nn.Module, tensors: Sequence[torch.Tensor]
) -> tuple[fx.GraphModule, list[tuple[Any, torch.Tensor]]]:
    """Forward and backward of `forward(*tensors)` as one functional ATen graph, with descriptors.

    `torch.export` gives the forward alone; `torch.compile` keeps the joint graph to itself. What
    wraps the gradients that are wrappers stands in the metadata of the trace alone.

    Args:
        stack: holds what the trace needs for its duration.
        forward: the module; it returns a tuple of tensors.
        tensors: its arguments.

    Returns:
        The graph, and for each gradient that is a wrapper the descriptor of its tensor with a
        wrapper of fake tensors like it.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    joint = aot_export_joint_with_descriptors(stack, forward, tuple(tensors))
    of_subclasses = joint._aot_graph_capture.maybe_subclass_meta
    found = of_subclasses.grad_input_metas if of_subclasses else None
    gradients = zip(joint._aot_state.flat_args_descs, found or (), strict=False)
    wrapped = [(of, getattr(meta, "original_subclass", None)) for of, meta in gradients]
    return joint.graph_module, [(of, like) for of, like in wrapped if like is not None]


@contextlib.contextmanager
def compile_flags(*, are_on: bool = True, asked: set[str] | None = None) -> Iterator[None]:
    """Makes `torch.compiler.is_compiling()` and `is_exporting()` true, or leaves them out.

    Code of libraries then reads no tensor values. The user's own files are told what eager tells
    them, and noted in `asked`, unless that is None. Only `torch.compile` and `torch.export` set the
    flags publicly, for all who ask. The backward is traced outside the user's autocast, where eager
    runs it.
    """
    from torch._functorch import config

    def is_told() -> bool:
        frame = sys._getframe(2)
        while frame.f_code.co_name == "is_compiling" and frame.f_back:  # PyTorch's older names
            frame = frame.f_back
        file = frame.f_code.co_filename
        if asked is None or not is_users(file):
            return True
        asked.add(file)
        return False

    flags: list[tuple[Any, str, Any]] = [(torch.compiler, "_is_told", is_told)]
    for name in ("compiling", "exporting") if are_on else ():
        code = compile(f"_is_{name}_flag and _is_told()", __file__, "eval")
        flags.append((getattr(torch.compiler, f"is_{name}"), "__code__", code))
        flags.append((torch.compiler, f"_is_{name}_flag", True))
    with attributes_set(*flags), config.patch(backward_pass_autocast="off"):
        yield


@contextlib.contextmanager
def scripts_traced(model: nn.Module) -> Iterator[None]:
    """Has the interpreter of TorchScript run submodules op by op, where a trace can follow.

    Where `is_exporting()` is true, a script calls the Python code that it was compiled from,
    without its module. `optimized_execution` is no documented switch, and there is no other.
    """

    def run(script: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        exporting = attributes_set((torch.compiler, "_is_exporting_flag", False))
        with exporting, torch.jit.optimized_execution(False):
            return script(*args, **kwargs)

    scripts = [each for each in model.modules() if isinstance(each, torch.jit.ScriptModule)]
    try:
        for each in scripts:
            vars(each)["forward"] = partial(run, each.forward)
        yield
    finally:
        for each in scripts:
            del vars(each)["forward"]  # it is looked up anew


@contextlib.contextmanager
def without_decompositions(names: Sequence[str]) -> Iterator[None]:
    """Traces ATen ops as they are that PyTorch's Python dispatcher would trace as a formula.

    The formulas of composite ops stand in tables of the overloads, which have no public access.
    Names that the installed version does not have are passed over.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    packets = [packet for name in names if (packet := getattr(torch.ops.aten, name, None))]
    overloads: list[Any] = [
        getattr(packet, overload) for packet in packets for overload in packet.overloads()
    ]
    formulas = [
        (op, key, op.py_kernels[key]) for op in overloads for key in keys if key in op.py_kernels
    ]
    try:
        for op, key, _ in formulas:
            del op.py_kernels[key]
            op._dispatch_cache.clear()
        yield
    finally:
        for op, key, formula in formulas:
            op.py_kernels[key] = formula
            op._dispatch_cache.clear()


@contextlib.contextmanager
def value_checks_as_ops() -> Iterator[None]:
    """Captures `torch._check_tensor_all` as an assertion op instead of reading the tensor.

    Model code calls the check; there is no setting that defers it.
    """

    def assert_all(condition: torch.Tensor, message: Callable[[], str] | None = None) -> None:
        torch.ops.aten._assert_async.default(condition.all())

    with attributes_set((torch, "_check_tensor_all", assert_all)):
        yield


def check_values(condition: torch.Tensor, message: str) -> None:
    """The check that `value_checks_as_ops` replaces, as model code calls it."""
    torch._check_tensor_all(condition, lambda: message)


@contextlib.contextmanager
def linalg_checks_kept() -> Iterator[None]:
    """Has the op that raises for a singular matrix count as an effect, as from PyTorch 2.13 on.

    It has no result, so older versions drop it from a captured graph.
    """
    from torch._higher_order_ops.effects import _EffectType, _get_effect, _register_effectful_op

    check = "aten::_linalg_check_errors"
    if _get_effect(check) is not None:
        yield
        return
    handle = _register_effectful_op(check, _EffectType.ORDERED)
    try:
        yield
    finally:
        handle.destroy()
