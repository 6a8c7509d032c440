"""Inductor as a compiler of small functional graphs: no Dynamo, no autograd, no CUDA graphs.

`torch.compile` takes a whole function and decides what is saved and in which order ops run. Here
one group of ops is compiled, and all around it stays as planned. The public way to do that,
`torch._inductor.standalone_compile`, runs AOTAutograd once more and takes twice as long per call.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from rockmate._torch.compiler_process import (
    Deadline,
    compilers_end_by,
    in_this_context,
    watch_compilers,
)
from rockmate._util import attributes_set

Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]

# Kernels are called one by one, so nothing may be planned across them. Random ops are never part
# of a graph here. Reordering is of no use within one kernel.
_SETTINGS = {
    "fallback_random": True,
    "memory_planning": False,
    "triton.cudagraphs": False,
    "reorder_for_peak_memory": False,
}


# InductorError is a RuntimeError, and so is what a compiler refuses.
_COMPILER_ERRORS = (RuntimeError, NotImplementedError, AssertionError, subprocess.SubprocessError)
# To tell its version.
_ANSWER_S = 60.0


class CompilationError(Exception):
    """Inductor cannot compile a graph; the text is the first line of its reason."""


@lru_cache(maxsize=1)
def _load() -> None:
    """Imports Inductor, which takes a second and warns of PyTorch's own deprecated calls."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
    watch_compilers(importlib.import_module("torch._inductor.cpp_builder"))


def missing_compiler(device_type: str) -> str:
    """What is missing to compile for a kind of device; empty if nothing is."""
    _load()
    if device_type == "cpu":
        from torch._inductor import cpp_builder, exc

        try:
            with compilers_end_by(Deadline.after(_ANSWER_S)):
                cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            return "a C++ compiler (install g++, or set CXX to one)"
        return ""
    return "" if importlib.util.find_spec("triton") else "Triton (pip install triton)"


def decomposed(graph: fx.GraphModule, layouts: Sequence[Layout]) -> tuple[fx.GraphModule, Any]:
    """The graph in Inductor's own ops, traced on fake inputs of these layouts, and their mode.

    Args:
        graph: takes and returns tensors; functional.
        layouts: shape, strides, dtype and device of each input.

    Raises:
        CompilationError: a call cannot be traced.
    """
    _load()
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # Inductor's cache on disk leaves out graphs of a mode without an environment of shapes.
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=False))
    inputs = fake_inputs(mode, layouts)
    with torch.no_grad(), mode, tracing(TracingContext(mode)):
        try:
            traced = make_fx(graph, decomposition_table=select_decomp_table())(*inputs)
        except (*_COMPILER_ERRORS, TypeError, ValueError) as error:
            raise CompilationError(_first_line(error)) from error
    return traced, mode


def fake_inputs(mode: FakeTensorMode, layouts: Sequence[Layout]) -> list[torch.Tensor]:
    """Fake tensors of these layouts, each in memory of its own."""
    with mode:
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in layouts
        ]


class PendingKernel:
    """A graph whose code a C++ compiler or Triton may still be working on, in other threads."""

    def __init__(self, call: Any, waits: Any, deadline: Deadline) -> None:
        """Takes the function and the waits that were put off, with the scopes of its code."""
        self._call, self._waits, self._deadline = call, waits, deadline

    def result(self) -> Callable[[list[Any]], Sequence[torch.Tensor]]:
        """A function of the list of inputs, which it empties; it returns all results.

        Raises:
            CompilationError: the compiler refuses the code, or has no time left.
        """
        for compiler, scope in self._waits:
            try:
                with compilers_end_by(self._deadline), _waits_end_by(self._deadline):
                    compiler.wait(scope)
            except _COMPILER_ERRORS as error:
                raise CompilationError(_reason(error, self._deadline)) from error
        self._waits.clear()
        return self._call


def compile_graph(
    graph: fx.GraphModule, mode: Any, layouts: Sequence[Layout], deadline: Deadline
) -> PendingKernel:
    """Begins to compile a graph of `decomposed`, which is changed.

    Inductor keeps what it has compiled in a folder, by the graph's content and its settings; loops
    are written for a number of threads, which is one of these. Results keep the strides of the
    graph.

    Raises:
        CompilationError: Inductor cannot lower the graph, or no time is left.
    """
    if not deadline.left_s:
        raise CompilationError(str(deadline))
    _load()
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    output = graph.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple | list)
    output.meta["user_visible_output_idxs"] = list(range(len(results)))
    inputs = fake_inputs(mode, layouts)
    with (
        torch.no_grad(),
        tracing(TracingContext(mode)),
        config.patch({**_SETTINGS, "cpp.threads": torch.get_num_threads()}),
        compilers_end_by(deadline),
        _waits_put_off() as waits,
    ):
        try:
            compiled: Any = compile_fx_inner(graph, inputs, is_inference=True)
        except _COMPILER_ERRORS as error:
            raise CompilationError(_reason(error, deadline)) from error
    # The wrapper around it checks for CUDA graphs and profilers, at every call.
    return PendingKernel(getattr(compiled, "current_callable", None) or compiled, waits, deadline)


@contextlib.contextmanager
def _waits_put_off() -> Iterator[list[tuple[Any, dict[str, Any]]]]:
    """Collects the waits for compilers that Inductor would do when it loads its code.

    The C++ compiler takes most of the time of a compilation, in a process of its own. So several
    graphs are compiled at a time, while Inductor, which is no thread-safe code, lowers the next.
    """
    from torch._inductor.async_compile import AsyncCompile

    waits: list[tuple[Any, dict[str, Any]]] = []
    submit = AsyncCompile.submit
    with attributes_set(
        (AsyncCompile, "wait", lambda self, scope: waits.append((self, scope))),
        (AsyncCompile, "submit", staticmethod(lambda task: submit(in_this_context(task)))),
    ):
        yield waits


@contextlib.contextmanager
def _waits_end_by(deadline: Deadline) -> Iterator[None]:
    """Bounds the waits for workers, which compile Triton's code in processes of their own."""
    from torch._inductor import config

    with contextlib.ExitStack() as stack:
        if hasattr(config, "compile_worker_wait_timeout"):
            # 0 would wait for ever.
            stack.enter_context(
                config.patch(compile_worker_wait_timeout=math.ceil(deadline.left_s) or 1)
            )
        yield


def _reason(error: BaseException, deadline: Deadline) -> str:
    return _first_line(error) if deadline.left_s else str(deadline)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
