"""Behaviour of PyTorch and transformers that a planned step relies on, tried on something tiny.

Names are no check: no private name has vanished between PyTorch 2.11 and 2.15, and two functions
that a capture replaces were no longer called. So each replacement and each private interface is
used once. What misses is an error, never a capture that is silently another.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.checkpoint
from torch import fx, nn

from rockmate._torch import aot, checkpoints, dispatch, engine, fake, functions, graphs
from rockmate._torch.allocator import Recording, peak_beyond_result
from rockmate._torch.pytree import tree_leaves
from rockmate._torch.version import is_check_skipped
from rockmate.capture.huggingface import known_masks
from rockmate.capture.trace_state import no_random_state_set
from rockmate.errors import UnsupportedModelError, UntestedVersionError

_CPU = torch.device("cpu")
_ROWS = torch.arange(6.0).view(2, 3)


def _checkpoints() -> None:
    for use_reentrant in (False, True):
        seen: list[tuple[bool, bool]] = []

        def region(*told: bool, seen: Any = seen) -> contextlib.AbstractContextManager[None]:
            seen.append(told)
            return contextlib.nullcontext()

        rows = _ROWS.clone().requires_grad_()
        with checkpoints.checkpoints_observed(region):
            result = torch.utils.checkpoint.checkpoint(
                torch.sin, rows, use_reentrant=use_reentrant, preserve_rng_state=False
            )
        (gradient,) = torch.autograd.grad(result.sum(), rows)
        _expect(seen == [(False, False)], "the call is not seen")
        _expect(torch.equal(gradient, _ROWS.cos()), "its gradient differs")


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 2


_Doubled.__module__ = "tried"  # functions of this package are not replaced
_doubled = _Doubled.apply  # as libraries keep it


def _functions() -> None:
    for apply in (_doubled, _Doubled.apply):
        rows = _ROWS.clone().requires_grad_()
        with functions.applications_replaced(
            lambda cls, run, args: args[0] * 3 if cls is _Doubled else run(*args)
        ):
            result = apply(rows)
            (gradient,) = torch.autograd.grad(result, rows, _ROWS)
        _expect(torch.equal(result, _ROWS * 3), "an application is not seen")
        _expect(torch.equal(gradient, _ROWS * 3), "the gradient is the replaced function's")
    _expect(torch.equal(_doubled(_ROWS), _ROWS * 2), "the function is not put back")


class _Product(nn.Module):
    def forward(self, rows: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor]:
        return ((rows * factor).sin().sum(),)


def _joint_graph() -> None:
    rows, factor = _ROWS.clone().requires_grad_(), (_ROWS + 1).requires_grad_()
    (loss,) = _Product()(rows, factor)
    gradients = torch.autograd.grad(loss, (rows, factor))
    with contextlib.ExitStack() as stack:
        graph, _ = aot.joint_graph(stack, _Product(), [rows, factor])
    with torch.no_grad():
        found = graph([rows, factor], [torch.ones(())])
    flat = [each for each in tree_leaves(found) if each is not None]
    _expect(len(flat) == 3, f"it returns {len(flat)} results for 3")
    for ours, eager in zip(flat, (loss, *gradients), strict=True):
        _expect(torch.equal(ours, eager), "its results differ from eager's")


def _compile_flags() -> None:
    with aot.compile_flags():
        _expect(torch.compiler.is_compiling(), "torch.compiler.is_compiling() is false")
        _expect(torch.compiler.is_exporting(), "torch.compiler.is_exporting() is false")
    _expect(not torch.compiler.is_compiling(), "the flag stays set")


class _Checked(nn.Module):
    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor]:
        aot.check_values(rows >= 0, "negative")
        return ((rows + 1).sum(),)


def _nodes() -> None:
    nodes: list[fx.Node] = []
    rows = _ROWS.clone().requires_grad_()
    with (
        contextlib.ExitStack() as stack,
        aot.value_checks_as_ops(),
        graphs.on_node_created(nodes.append),
    ):
        aot.joint_graph(stack, _Checked(), [rows])
    names = {str(node.target) for node in nodes}
    _expect("aten.add.Tensor" in names, "nodes are made elsewhere")
    _expect("aten._assert_async.default" in names, "a check of values is no op")
    boxed = graphs.boxed_module(fx.symbolic_trace(lambda left, right: left + right).graph)
    arguments = [_ROWS, _ROWS]
    _expect(torch.equal(boxed.forward(arguments), _ROWS * 2), "code of a graph differs")
    _expect(not arguments, "code of a graph keeps its arguments")


class _Resized(nn.Module):
    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor]:
        return (nn.functional.interpolate(image, scale_factor=2.0).sum(),)


def _whole_kernels() -> None:
    image = torch.ones(1, 1, 2, 2, requires_grad=True)
    with contextlib.ExitStack() as stack, aot.without_decompositions(["upsample_nearest2d"]):
        graph, _ = aot.joint_graph(stack, _Resized(), [image])
    names = [str(node.target) for node in graph.graph.nodes]
    _expect(any("upsample_nearest2d" in name for name in names), "a formula of it is traced")


def _fake_results() -> None:
    def transposed(op: Any, args: Any, kwargs: Any, result: Any) -> Any:
        return torch.empty(3, 2).t() if op is torch.ops.aten.sin.default else result

    with fake.FakeTensorMode() as mode, fake.results_corrected(transposed):
        result = mode.from_tensor(_ROWS).sin()
    _expect(result.stride() == (1, 2), "layouts of fake results come from elsewhere")


def _ops() -> None:
    seen: list[Any] = []

    def run(op: Any, args: Any, kwargs: Any) -> Any:
        seen.append(op)
        return op(*args, **kwargs)

    with dispatch.ops_observed(run):
        _ROWS.sin()
    _expect(seen == [torch.ops.aten.sin.default], "an op is not seen")
    call = dispatch.dispatched_call(torch.sin, (_ROWS,), {})
    _expect(call is not None and call[0] is torch.ops.aten.sin.default, "a call is not told")


def _accumulation() -> None:
    leaf, fired = torch.ones(2, requires_grad=True), []
    leaf.register_post_accumulate_grad_hook(lambda owner: fired.append(owner.grad.clone()))
    keys = engine.dispatch_keys()
    with engine.below_autograd():
        _expect(not (leaf * 2).requires_grad, "ops are recorded")
        engine.accumulate((leaf,), [torch.full((2,), 3.0)], keys)
    _expect(leaf.grad is not None and leaf.grad.tolist() == [3.0, 3.0], "`.grad` lacks it")
    _expect(len(fired) == 1, f"a hook fires {len(fired)} times")
    ended: list[str] = []

    def at_gradient(gradient: torch.Tensor) -> None:
        engine.at_end_of_backward(lambda: ended.append("at the end"))
        engine.after_backward(lambda: ended.append("after"))

    leaf.register_hook(at_gradient)
    leaf.sum().backward()
    _expect(ended == ["at the end", "after"], "the end of a backward is not told")


def _allocations() -> None:
    if engine.is_profiling():  # one profiler runs at a time
        return
    make = functools.partial(torch.empty, 4000, dtype=torch.int8)
    found = peak_beyond_result(lambda: make().clone().clone(), _CPU)
    _expect(found == 4000, f"{found} bytes are counted for 4000")
    recording = Recording(_CPU)
    kept = make()
    (stretch,) = recording.stop()
    _expect(stretch.peak_bytes == kept.nbytes, f"{stretch.peak_bytes} bytes are counted for 4000")


def _random_state() -> None:
    with contextlib.suppress(UnsupportedModelError), no_random_state_set():
        torch.manual_seed(0)
        _expect(False, "a seed can be set in a forward")
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        first = torch.rand(4)
        torch.set_rng_state(state)
        _expect(torch.equal(first, torch.rand(4)), "random numbers are not repeated")


def _masks() -> None:
    masking = sys.modules["transformers.masking_utils"]
    config = SimpleNamespace(_attn_implementation="sdpa", is_causal=True)
    with fake.FakeTensorMode():
        states, positions = torch.ones(1, 4, 8), torch.arange(4).unsqueeze(0)
    with aot.compile_flags(), known_masks((), {}):
        mask = masking.create_causal_mask(config, states, None, None, positions)
    _expect(mask is None, "a causal mask is made where eager has none")


_CHECKS: dict[str, Callable[[], None]] = {
    "torch.utils.checkpoint.checkpoint": _checkpoints,
    "torch.autograd.Function.apply": _functions,
    "torch._functorch.aot_autograd.aot_export_joint_with_descriptors": _joint_graph,
    "torch.compiler.is_compiling": _compile_flags,
    "torch.fx.proxy.TracerBase.create_node": _nodes,
    "torch.nn.functional.interpolate": _whole_kernels,
    "torch._subclasses.fake_tensor.FakeTensorMode.dispatch": _fake_results,
    "torch.utils._python_dispatch.TorchDispatchMode": _ops,
    "torch.autograd.Variable._execution_engine": _accumulation,
    "torch._C._autograd._enable_profiler_legacy": _allocations,
    "torch.manual_seed": _random_state,
    "transformers.masking_utils.create_causal_mask": _masks,
}
_passed: set[str] = set()


def check_behaviour() -> None:
    """Tries each interface once a process, those of transformers once it is imported: 20 ms.

    Leaves random state and `.grad` as they were.

    Raises:
        UntestedVersionError: one does not behave as known; the text names it.
    """
    if is_check_skipped():
        return
    has_masks = "transformers.masking_utils" in sys.modules
    for name, check in _CHECKS.items():
        if name in _passed or (check is _masks and not has_masks):
            continue
        try:
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                check()
        except Exception as error:
            raise UntestedVersionError(name, f"{type(error).__name__}: {error}") from error
        _passed.add(name)


class _Missed(Exception):
    """What is tried does not behave as known."""


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _Missed(otherwise)
