"""Each wrapper of a private PyTorch interface does on the installed version what it promises."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.utils.checkpoint
from made_of import made_of
from torch import fx, nn
from torch.distributed import fsdp as fsdp_of_torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_debug_enabled,
)
from torch.utils.flop_counter import FlopCounterMode

import rockmate._torch
from rockmate._torch import (
    allocator,
    aot,
    autocast,
    checkpoints,
    compiler_process,
    cuda,
    dispatch,
    distributed,
    dynamo,
    engine,
    fake,
    fsdp,
    functions,
    graphs,
    inductor,
    members,
    pytree,
    settings,
    storage,
    subclasses,
    symbolic_sizes,
    version,
)

CPU = torch.device("cpu")
aten = torch.ops.aten


def test_every_wrapper_is_used_here() -> None:
    own = {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    (folder,) = rockmate._torch.__path__
    wrappers = {
        f"{path.stem}.{node.name}"
        for path in Path(folder).glob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    assert wrappers - own == set()


def noting(seen: list[tuple[bool, bool]]) -> Any:
    """Contexts of checkpointed calls that do nothing, but for a note of what they are told."""
    return lambda *told: seen.append(told) or contextlib.nullcontext()


class TestCheckpoints:
    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_calls_run_in_the_context(self, use_reentrant: bool) -> None:
        seen: list[tuple[bool, bool]] = []
        x = torch.randn(3, requires_grad=True)
        before = torch.utils.checkpoint.CheckpointFunction
        with checkpoints.checkpoints_observed(noting(seen)):
            y = checkpoint(torch.sin, x, use_reentrant=use_reentrant)
            checkpoint(torch.sin, x, use_reentrant=use_reentrant, preserve_rng_state=False)
        assert seen == [(False, True), (False, False)]
        (gradient,) = torch.autograd.grad(y.sum(), x)  # which a reentrant call does not allow
        assert torch.equal(gradient, x.cos())
        assert torch.utils.checkpoint.CheckpointFunction is before

    def test_a_reentrant_call_without_gradients_has_none(self) -> None:
        weight = torch.ones(3, requires_grad=True)
        with checkpoints.checkpoints_observed(lambda *_: contextlib.nullcontext()):
            y = checkpoint(lambda x: x * weight, torch.ones(3), use_reentrant=True)
        assert not y.requires_grad

    def test_contexts_of_a_call_are_entered_in_a_trace(self) -> None:
        entered: list[str] = []

        @contextlib.contextmanager
        def entering(name: str) -> Any:
            entered.append(name)
            yield

        def contexts() -> Any:
            return entering("forward"), entering("recomputation")

        def step(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts)

        def debugged(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(torch.sin, x, use_reentrant=False, debug=True)

        seen: list[tuple[bool, bool]] = []
        x = torch.randn(3)
        with pytest.raises(AssertionError, match="TorchDispatchMode"):
            make_fx(step)(x)
        entered.clear()
        with checkpoints.checkpoints_observed(noting(seen)):
            make_fx(step)(x)
            make_fx(debugged)(x)
            with set_checkpoint_debug_enabled(True):
                make_fx(step)(x)
                assert torch.utils.checkpoint._checkpoint_debug_enabled
            _ = step(x.requires_grad_()).sum().backward()
        assert seen == [(False, True)] * 4
        assert entered == ["forward", "forward", "forward", "recomputation"]

    def test_a_selection_is_told_from_other_modes(self) -> None:
        select = functools.partial(create_selective_checkpoint_contexts, [aten.sin.default])
        seen: list[tuple[bool, bool]] = []
        x = torch.randn(3, requires_grad=True)
        with checkpoints.checkpoints_observed(noting(seen)):
            for contexts in (select, lambda: (FlopCounterMode(display=False),) * 2):
                checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts)
        assert seen == [(True, True), (False, True)]

    def test_what_dynamo_writes_for_a_call(self) -> None:
        def contexts() -> Any:
            return create_selective_checkpoint_contexts([])

        def inner(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(torch.sin, x, use_reentrant=False).cos()

        def outer(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(
                inner, x, use_reentrant=False, context_fn=contexts, preserve_rng_state=False
            )

        graphs: list[fx.GraphModule] = []

        def backend(graph: fx.GraphModule, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        torch.compile(outer, backend=backend, fullgraph=True)(torch.randn(3))
        torch.compiler.reset()
        (graph,) = graphs
        (call,) = graph.graph.find_nodes(op="call_function", target=dynamo.checkpointed_call)
        assert call.kwargs == {"use_reentrant": False, "preserve_rng_state": False}
        bodies = dynamo.checkpointed_bodies(graph)
        of_bodies = list(map(dynamo.checkpoint_contexts, bodies))
        assert of_bodies == [{"context_fn": contexts}, {}]


class TestAllocator:
    def test_bytes_of_a_function(self) -> None:
        def two_steps() -> torch.Tensor:
            return torch.empty(1000).clone().clone()

        assert allocator.peak_beyond_result(two_steps, CPU) == 4000
        assert allocator.net_allocated(two_steps, CPU)[0] == 4000
        assert allocator.workspace_bytes(lambda: (torch.clone, (torch.ones(1000),)), CPU) == 0

    def test_out_of_memory(self) -> None:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 55, dtype=torch.uint8)
        assert allocator.is_out_of_memory(caught.value)
        assert not allocator.is_out_of_memory(RuntimeError("size mismatch"))

    def test_free_bytes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        limits = pytest.importorskip("resource")
        monkeypatch.setattr(limits, "getrlimit", lambda _: (limits.RLIM_INFINITY,) * 2)
        assert allocator.free_bytes(CPU) is None
        monkeypatch.setattr(limits, "getrlimit", lambda _: (1 << 50, 1 << 50))
        free = allocator.free_bytes(CPU)
        assert free is not None
        assert 0 < free < 1 << 50

    def test_timeline(self) -> None:
        def labelled() -> None:
            values = torch.empty(1000)
            with torch.profiler.record_function("label"):
                del values

        line = allocator.timeline(labelled)
        assert line.peak_bytes == 4000
        assert line.points[-1][1] == 0
        assert "label" in line.marks
        assert line.points == sorted(line.points)
        assert allocator.timeline(lambda: torch.empty(64)).points[-1][1] == 256
        with pytest.raises(ZeroDivisionError):
            allocator.timeline(lambda: 1 / 0)
        assert allocator.timeline(lambda: None).points == [(0.0, 0)]


class TestAot:
    def test_joint_graph(self) -> None:
        values = torch.ones(3, requires_grad=True)
        with contextlib.ExitStack() as stack:
            module, wrapped = aot.joint_graph(stack, _Sum(torch.square), [values])
        inputs = module.graph.find_nodes(op="placeholder")
        kinds = {type(node.meta["desc"]).__name__ for node in inputs}
        assert kinds == {"PlainAOTInput", "TangentAOTInput"}
        assert not wrapped

    def test_joint_graph_of_a_wrapper(self) -> None:
        x = TwoTensor(torch.ones(3), torch.ones(3)).requires_grad_()
        with contextlib.ExitStack() as stack:
            module, wrapped = aot.joint_graph(stack, _Sum(torch.square), [x])
        inputs = [str(node.meta["desc"]) for node in module.graph.find_nodes(op="placeholder")]
        assert [text.rpartition("attr=")[2] for text in inputs[:2]] == ["'a')", "'b')"]
        ((descriptor, like),) = wrapped
        assert type(descriptor).__name__ == "PlainAOTInput"
        assert isinstance(like, TwoTensor)

    def test_compile_flags(self) -> None:
        with aot.compile_flags():
            assert torch.compiler.is_compiling()
            assert torch.compiler.is_exporting()
        with aot.compile_flags(asked=(asked := set[str]())):
            assert not torch._dynamo.is_compiling()
        assert asked == {__file__}
        assert not torch.compiler.is_compiling()
        assert not torch.compiler.is_exporting()

    def test_an_op_is_traced_as_it_is_and_one_that_is_missing_is_passed_over(self) -> None:
        def targets() -> set[str]:
            with contextlib.ExitStack() as stack:
                image = torch.ones(1, 1, 4, 4, requires_grad=True)
                graph, _ = aot.joint_graph(stack, _Sum(nn.Upsample(scale_factor=2.0)), [image])
            return {str(node.target) for node in graph.graph.nodes}

        formula = targets()
        with aot.without_decompositions(["upsample_nearest2d", "no_such_op_in_any_version"]):
            kernel = targets()
        assert kernel & {"aten.upsample_nearest2d.vec", "aten.upsample_nearest2d.default"}
        assert not any("upsample" in target for target in formula)
        assert targets() == formula

    def test_value_checks_as_ops(self) -> None:
        checks: list[Any] = []
        with aot.value_checks_as_ops(), graphs.on_node_created(checks.append):
            graph = make_fx(_checked, tracing_mode="fake")(torch.ones(3))
        targets = [str(node.target) for node in graph.graph.nodes]
        assert "aten._assert_async.default" in targets
        assert checks

    def test_the_check_of_a_singular_matrix_is_kept(self) -> None:
        matrix = torch.eye(3, requires_grad=True)
        with aot.linalg_checks_kept(), contextlib.ExitStack() as stack:
            graph, _ = aot.joint_graph(stack, _Sum(torch.linalg.inv), [matrix])
        effects = [node.args[1] for node in graph.graph.nodes if "effects" in str(node.target)]
        assert effects == [aten._linalg_check_errors.default]


@made_of(lambda function: {"function": function})
class _Sum(nn.Module):
    """Of what a function makes of its argument."""

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.function(values).sum(),)


def _checked(values: torch.Tensor) -> torch.Tensor:
    aot.check_values(values > 0, "not positive")
    return values + 1


def test_autocast() -> None:
    assert autocast.autocast_dtypes() == {}
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast.autocast_dtypes() == {"cpu": torch.bfloat16}
        with autocast.autocast_off():
            assert autocast.autocast_dtypes() == {}
            with autocast.autocast_around():
                assert autocast.autocast_dtypes() == {"cpu": torch.bfloat16}
        with autocast.autocast_as({}):
            assert autocast.autocast_dtypes() == {}
    with autocast.autocast_as({"cpu": torch.bfloat16}):
        assert autocast.autocast_dtypes() == {"cpu": torch.bfloat16}


def test_settings_are_put_back() -> None:
    before = settings.Settings.now()
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.backends.cudnn.flags(enabled=False),
        sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    ):
        inner = settings.Settings.now()
    assert settings.Settings.now() == before != inner
    assert sum(one != other for one, other in zip(before[1], inner[1], strict=True)) == 3 + (
        torch.backends.cuda.cudnn_sdp_enabled()
    )
    with inner.applied():
        assert settings.Settings.now() == inner
    assert settings.Settings.now() == before
    assert before.difference(before) == ""
    assert before.difference(inner).startswith("autocast was off and is (('cpu', torch.bfloat16)")


@pytest.mark.parametrize("num_dims", [1, 2, 3, 4, 5])
def test_the_cast_that_autocast_keeps(num_dims: int) -> None:
    parameter = nn.Parameter(torch.randn((2, 3, 2, 1, 4)[:num_dims]))
    with torch.autocast("cpu", torch.bfloat16):
        cast = autocast.cached_cast(parameter)
        assert torch.equal(cast, parameter.to(torch.bfloat16))
        again = autocast.cached_cast(parameter)
        assert again.grad_fn is cast.grad_fn
        assert again.data_ptr() == cast.data_ptr()
        if num_dims == 2:  # an op's own cast is that one
            output = torch.ones(4, 2, requires_grad=True) @ parameter
            edges = [node for node, _ in output.grad_fn.next_functions]  # type: ignore[union-attr]
            assert cast.grad_fn in edges


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by torch.func.jvp
def test_transforms_are_known_by_name() -> None:
    seen: list[str | None] = [engine.active_transform()]

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(engine.active_transform())
        return x.sum()

    row = torch.ones(2)
    torch.func.grad(note)(row)
    torch.func.vmap(note)(row.unsqueeze(0))
    torch.func.jvp(note, (row,), (row,))
    with torch.autograd.forward_ad.dual_level():
        note(row)
    names = ["torch.func.grad", "torch.func.vmap", "torch.func.jvp", "torch.autograd.forward_ad"]
    assert seen == [None, *names]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_known(use_reentrant: bool) -> None:
    seen: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.append(engine.is_checkpointed())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(note, x, use_reentrant=use_reentrant).sum().backward()
    assert seen
    assert all(seen)
    x.register_hook(note)
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
        torch.autograd.grad(note(x).sum(), x, create_graph=True)
    assert seen[-2:] == [False, False]


def test_transforms_have_tensors_of_their_own() -> None:
    found: list[tuple[bool, bool]] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append((engine.records_plainly(), engine.is_batched(x)))
        return x.sum()

    note(torch.ones(2))
    torch.func.vmap(note)(torch.ones(1, 2))
    with torch.no_grad():
        note(torch.ones(2))

    def noting_alone(gradient: torch.Tensor) -> None:
        note(gradient)

    x = torch.ones(2, requires_grad=True)
    doubled = 2 * x
    doubled.register_hook(noting_alone)
    _ = torch.autograd.grad(doubled, x, torch.eye(2), is_grads_batched=True)
    assert found[0] == (True, False)
    assert not found[1][0]
    assert found[2] == (False, False)
    assert found[3][1]


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (1, 512),
        (513, 1024),
        (3 << 20, 3 << 20),  # cut from a segment of 20 MiB
        ((49 << 20) + (1 << 18), 50 << 20),  # whole: the rest of its segment is below 1 MiB
        ((48 << 20) + (1 << 19), (48 << 20) + (1 << 19)),  # its segment is split
    ],
)
def test_blocks_of_cudas_allocator(asked: int, given: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # On an H200, 254 tensors of 49.25 MiB took 0.75 MiB more each than multiples of 512 bytes.
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert allocator.block_bytes(asked, allocator.CUDA_BLOCK_BYTES) == given
    assert allocator.block_bytes(asked, 1) == asked
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert allocator.block_bytes(asked, allocator.CUDA_BLOCK_BYTES) == -(-asked // 512) * 512


def test_products_that_round_to_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    convolution, product = torch.empty(2, 2, 3, 3), torch.empty(2, 2)
    assert cuda.rounds_to_tf32([convolution, torch.empty(2)])
    assert not cuda.rounds_to_tf32([product, convolution.bfloat16()])
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert not cuda.rounds_to_tf32([convolution])
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert cuda.rounds_to_tf32([product])
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestCuda:
    device = torch.device("cuda", 0)

    def test_kernel_time_excludes_launches(self) -> None:
        values = torch.ones(1 << 26, device=self.device)
        assert cuda.kernel_ms(lambda: None, self.device) < 0.01
        one, ten = (
            min(
                cuda.kernel_ms(lambda n=n: [values.neg() for _ in range(n)], self.device)
                for _ in range(5)
            )
            for n in (1, 10)
        )
        assert 8 * one < ten < 12 * one

    def test_used_bytes_are_those_of_live_tensors(self) -> None:
        cuda.make_workspaces(self.device)
        before = cuda.used_bytes(self.device)
        values = torch.ones(1 << 26, device=self.device)
        assert values.nbytes <= cuda.used_bytes(self.device) - before <= 1.1 * values.nbytes

    def test_pinned_memory_is_seen_from_the_device(self) -> None:
        memory = cuda.pinned(1 << 20)
        memory.fill_(3)
        before = torch.cuda.memory_allocated()
        view = cuda.device_view(memory, 512, 1024, self.device)
        assert (memory.is_pinned(), view.device) == (True, self.device)
        assert view.add_(1).sum().item() == 4 * 1024
        assert memory.sum().item() == 3 * (1 << 20) + 1024
        del view
        assert torch.cuda.memory_allocated() == before

    def test_the_callers_stream_waits_for_a_backward_on_another(self) -> None:
        joined = []

        class Identity(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
                return values.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                joined.append(torch.cuda.current_stream(self.device))
                torch.cuda._sleep(100_000_000)
                cuda.join_stream_at_end(self.device)
                return gradient

        values = torch.ones(3, device=self.device, requires_grad=True)
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            loss = Identity.apply(values).sum()
        loss.backward()
        end = torch.cuda.current_stream(self.device).record_event()
        assert joined[0] != torch.cuda.current_stream(self.device)
        assert not end.query(), "the caller's stream has a wait before this event"


class TestDispatch:
    def test_the_op_of_a_function_is_seen_and_not_run(self) -> None:
        values = torch.ones(2)
        call = dispatch.dispatched_call(torch.relu_, (values,), {})
        assert call is not None
        assert call[0] is aten.relu_.default
        assert call[1][0] is values
        assert storage.version_of(values) == 0
        with torch.inference_mode():
            uncounted = torch.ones(2)
        assert storage.versions_of([values.add_(1), uncounted]) == [1, 0]

    def test_arguments_that_do_not_fit(self) -> None:
        assert dispatch.dispatched_call(torch.mm, (1, 2), {}) is None

    def test_ops_observed(self) -> None:
        seen: list[tuple[Any, ...]] = []

        def run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            own = fake.is_plain(values), fake.functional_part(values)
            seen.append((op, args[0] is values, *own))
            with dispatch.outside_of_modes():
                return op(*args, **kwargs) + 1

        values = torch.ones(2)
        with dispatch.ops_observed(run):
            result = values.sin()
        assert torch.equal(result, torch.ones(2).sin() + 1)
        assert seen == [(aten.sin.default, True, True, None)]

    def test_tensors_of_a_trace_are_not_plain(self) -> None:
        found: list[tuple[bool, bool, bool]] = []

        class Model(nn.Module):
            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
                part = fake.functional_part(x)
                assert part is not None
                is_same = part is fake.functional_part(x)
                found.append((fake.is_plain(x), fake.is_plain(part), is_same))
                with fake.attributes_answered(lambda wrapper, name: (wrapper is x, name)):
                    asked = x.mask  # pyright: ignore[reportAttributeAccessIssue]
                assert asked == (True, "mask")
                assert not hasattr(x, "mask")
                return (x.sin(),)

        with contextlib.ExitStack() as stack:
            aot.joint_graph(stack, Model(), [torch.ones(3, requires_grad=True)])
        assert set(found) == {(False, False, True)}

    def test_generated_functions(self) -> None:
        assert list(dispatch.generated_functions(aten.mm.default)) == [torch.mm, torch.Tensor.mm]
        assert list(dispatch.generated_functions(aten.gelu.default)) == [torch.nn.functional.gelu]
        assert list(dispatch.generated_functions(aten.slice.Tensor)) == []

    @pytest.mark.parametrize(
        ("num_images", "num_dims", "size", "dtype", "expected"),
        [
            (1, 3, 3, torch.float32, True),
            (2, 3, 3, torch.float64, True),
            (2, 3, 3, torch.float32, False),
            (1, 2, 3, torch.float32, False),
            (1, 3, 1, torch.float32, False),
        ],
    )
    def test_which_convolutions_write_out_their_windows(
        self, num_images: int, num_dims: int, size: int, dtype: torch.dtype, expected: bool
    ) -> None:
        values = torch.randn(num_images, 4, *[8] * num_dims, dtype=dtype)
        weight = torch.randn(4, 4, *[size] * num_dims, dtype=dtype)
        how = [*([each] * num_dims for each in (1, size // 2, 1)), False, [0] * num_dims, 1]
        assert dispatch.makes_columns(values, weight, *how) == expected
        run = functools.partial(aten.convolution, values, weight, None, *how)
        assert (allocator.peak_beyond_result(run, CPU) >= 27 * values.nbytes) == expected


class TestRecording:
    def test_stretches_between_marks(self) -> None:
        recording = allocator.Recording(torch.device("cpu"))
        held = torch.empty(1000, dtype=torch.uint8)
        assert recording.mark() == 1
        large = torch.empty(9000, dtype=torch.uint8)
        del large
        first, second = recording.stop()
        assert (first.begin_bytes, first.peak_bytes) == (0, held.nbytes)
        assert second.begin_bytes == held.nbytes
        assert second.peak_bytes == held.nbytes + 9000
        assert recording.stop() == [first, second]
        assert not engine.is_profiling()

    def test_what_is_left_out_counts_from_there_on(self) -> None:
        recording = allocator.Recording(torch.device("cpu"), leaves_out=True)
        allocator.Recording.leave_out(3000)
        gradient = torch.empty(3000, dtype=torch.uint8)
        held = torch.empty(1000, dtype=torch.uint8)
        first, second = recording.stop()
        assert (first.peak_bytes, second.peak_bytes) == (0, held.nbytes)
        others = allocator.Recording(torch.device("cpu"))
        allocator.Recording.leave_out(gradient.nbytes)
        assert len(others.stop()) == 1

    def test_one_at_a_time_and_none_left_behind(self) -> None:
        first = allocator.Recording(torch.device("cpu"))
        second = allocator.Recording(torch.device("cpu"))
        assert len(first.stop()) == 1
        assert engine.is_profiling()
        allocator.refuse_profiler()
        assert not engine.is_profiling()
        with torch.profiler.profile(), pytest.raises(rockmate.RockmateError, match="is running"):
            allocator.refuse_profiler()
        del second
        third = allocator.Recording(torch.device("cpu"))
        assert allocator.Recording.is_under_way()
        del third
        assert not engine.is_profiling()
        assert not allocator.Recording.is_under_way()

    def test_only_its_own_thread_can_stop_it(self) -> None:
        first = allocator.Recording(torch.device("cpu"))
        with ThreadPoolExecutor(1) as pool:
            assert not pool.submit(lambda: first.can_stop).result()
            assert pool.submit(first.stop).result() == []
        assert engine.is_profiling()  # in this thread, until the next begins
        assert len(allocator.Recording(torch.device("cpu")).stop()) == 1
        assert not engine.is_profiling()


def test_a_callback_at_the_end_of_a_backward() -> None:
    found: list[str] = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: engine.at_end_of_backward(lambda: found.append("end")))
    x.register_hook(lambda _: found.append("last gradient"))
    y.sum().backward()
    assert found == ["last gradient", "end"]


def test_a_backward_that_returns_gradients() -> None:
    found: list[bool] = []
    x = torch.ones(2, requires_grad=True)
    for run in (lambda y: y.backward(), lambda y: torch.autograd.grad(y, x)):
        y = (x * 2).sum()
        assert engine.nodes_of([x, y, y]) == {y.grad_fn}
        engine.call_before_backward([y], lambda _: found.append(engine.returns_gradients_of([x])))
        run(y)
    assert found == [False, True]


class TestDistributed:
    def test_outside_of_a_group(self) -> None:
        assert distributed.active_data_parallel() is None
        with pytest.raises(ValueError, match="not been initialized"):
            distributed.default_store()
        assert distributed.first_offer("a choice", "own") == "own"

    def test_a_plain_module_is_not_sharded(self) -> None:
        module = nn.Linear(2, 2)
        assert not distributed.holds_sharded_parameters(module)
        assert not distributed.is_gathered_by_fsdp1(module)
        module.weight._fsdp_flattened = True  # pyright: ignore
        assert distributed.holds_sharded_parameters(module)
        assert distributed.is_gathered_by_fsdp1(module)

    def test_collectives(self, tmp_path: Path) -> None:
        ops: Any = torch.ops._c10d_functional
        reduce = ops.all_reduce.default
        assert distributed.is_collective(reduce)
        assert not distributed.is_wait(reduce)
        assert distributed.is_wait(ops.wait_tensor.default)
        assert not distributed.is_collective(ops.wait_tensor.default)
        assert not distributed.is_collective(aten.add.Tensor)
        store = f"file://{tmp_path / 'store'}"
        torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            group = torch.distributed.group.WORLD
            assert group is not None
            assert distributed.ranks_of(group.group_name) == [0]
            before = distributed.num_collectives()
            total = distributed.wait_for(reduce(torch.ones(3), "sum", group.group_name))
            assert total.tolist() == [1.0] * 3
            assert distributed.num_collectives() == before + 1
            distributed.default_store().set("key", "value")
            self.check_shards(group.group_name)
        finally:
            torch.distributed.destroy_process_group()

    @staticmethod
    def check_shards(group: str) -> None:
        assert distributed.rank_in(group) == 0
        memory, part = torch.zeros(2), torch.ones(2)
        distributed.wait_for(distributed.start_gather(memory, part, 1, group))
        assert memory.tolist() == [1.0, 1.0]
        total = distributed.wait_for(distributed.start_all_reduce(memory, "sum", group))
        assert total.tolist() == [1.0, 1.0]
        wait = distributed.start_reduction(memory, "avg", 1, group)
        assert wait().tolist() == [1.0, 1.0]
        distributed.free(memory)
        assert memory.untyped_storage().nbytes() == 0


class TestFullyShard:
    """What PyTorch's `fully_shard` makes of a small model, on ranks that are not there."""

    @pytest.fixture
    def model(self) -> Iterator[nn.Module]:
        model = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False))
        model[1].requires_grad_(False)
        policy = fsdp_of_torch.MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32)
        with distributed.fake_group(4):
            names = ("replicate", "shard")
            mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
            for module in (model[0], model):
                fsdp_of_torch.fully_shard(module, mesh=mesh, mp_policy=policy)
            yield model

    def test_units(self, model: Any) -> None:
        root, inner = fsdp.sharded_units(model)
        assert (root.modules, inner.modules) == ((model,), (model[0],))
        assert (root.input_dtype, root.output_dtype) == (torch.bfloat16, torch.float32)
        ((parameter,), (other,)) = root.groups[0].parameters, inner.groups[0].parameters
        assert other.places == ((model[0], "weight"),)
        assert list(fsdp.modules_with_shards(model)) == [model[1], model[0]]
        assert parameter.tensor is root.groups[0].shards[0]
        assert (parameter.dim, parameter.size, parameter.padded_shape) == (0, 3, (2, 5))
        is_new = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
        assert (parameter.dtype, parameter.rest) == (torch.bfloat16, None)
        assert parameter.reduce_dtype == (torch.float32 if is_new else None)

    def test_switches(self, model: Any) -> None:
        group, _ = groups = fsdp.sharded_groups(model)
        assert (group.num_ranks, distributed.ranks_of(group.name)) == (2, [0, 1])
        assert distributed.ranks_of(group.replicas) == [0, 2]
        assert not group.unplanned_setting
        assert not group.holds_gradients
        model.set_requires_gradient_sync(False)
        assert group.holds_gradients
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(False)
        assert group.unplanned_setting == "set_requires_all_reduce"
        model.set_requires_all_reduce(True)
        model.set_gradient_divide_factor(2.0)
        assert fsdp.unplanned_setting(groups) == "set_gradient_divide_factor"

    def test_gathered_parameters_are_put_away(self, model: Any) -> None:
        group = fsdp.sharded_units(model)[0].groups[0]
        assert not fsdp.put_shards(model)
        model.unshard()
        assert type(model[1].weight) is nn.Parameter
        assert fsdp.put_shards(model)
        assert group.shards == [model[1].weight]

    def test_hooks(self, model: Any) -> None:
        model.register_forward_hook(lambda *_: None)
        assert [is_before for *_, is_before in fsdp.fsdp_hooks(model)] == [True, False]
        for table, key, _ in fsdp.fsdp_hooks(model):
            assert fsdp.is_fsdp_hook(table[key])
        assert not list(fsdp.fsdp_hooks(model[1]))

    def test_a_wrapper_that_is_sharded(self, model: Any) -> None:
        inner, wrapper = nn.Linear(2, 2), nn.Linear(2, 2)
        members.share_members(wrapper, inner)
        assert not fsdp.move_unit(wrapper, inner)
        fsdp_of_torch.fully_shard(wrapper)
        assert fsdp.move_unit(wrapper, inner)
        inner.__class__ = type(wrapper)
        (unit,) = fsdp.sharded_units(inner)
        assert unit.modules == (inner,)
        places = {place for each in unit.groups[0].parameters for place in each.places}
        assert places == {(inner, "weight"), (inner, "bias")}
        assert not list(fsdp.fsdp_hooks(wrapper))
        assert len(list(fsdp.fsdp_hooks(inner))) == 2

    def test_what_plans_do_not_follow(self, model: Any) -> None:
        other = nn.Linear(2, 2)
        policy = fsdp_of_torch.CPUOffloadPolicy(pin_memory=False)
        fsdp_of_torch.fully_shard(other, offload_policy=policy)
        with pytest.raises(NotImplementedError, match="CPUOffloadPolicy"):
            fsdp.sharded_units(other)
        assert not fsdp.sharded_units(nn.Linear(2, 2))


def test_a_group_of_ranks_that_are_not_there() -> None:
    with distributed.fake_group(8):
        assert torch.distributed.get_world_size() == 8
        assert torch.distributed.get_rank() == 0
    assert not torch.distributed.is_initialized()


def test_applications_of_autograd_functions() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    apply, seen, x = Double.apply, [], torch.ones(1, requires_grad=True)

    def replacement(kind: type, run: Any, args: tuple[Any, ...]) -> Any:
        seen.append(kind)
        return run(*args) + 1

    with functions.applications_replaced(replacement):
        assert Double.apply(x).item() == 3  # pyright: ignore
        apply(x).backward()  # pyright: ignore
    assert x.grad is not None
    assert x.grad.item() == 2
    assert Double.apply(x).item() == 2  # pyright: ignore
    assert seen == [Double, Double]


class TestSubclasses:
    def test_plain_tensors(self) -> None:
        for tensor in (torch.ones(2), nn.Parameter(torch.ones(2))):
            assert not subclasses.is_subclassed(tensor)
            assert not subclasses.is_wrapper(tensor)

    def test_a_wrapper(self) -> None:
        inner = torch.ones(2), torch.zeros(2)
        wrapper = TwoTensor(*inner)
        assert subclasses.is_subclassed(wrapper)
        assert subclasses.is_wrapper(wrapper)
        parts, _ = subclasses.wrapped_parts(wrapper)
        assert list(parts.values()) == list(inner)
        assert subclasses.at_path(wrapper, ["b"]) is inner[1]
        assert subclasses.at_path(wrapper, []) is wrapper

    def test_a_class_by_name_alone(self) -> None:
        class Named(torch.Tensor):
            pass

        tensor = torch.ones(2)
        named = tensor.as_subclass(Named)
        assert subclasses.is_subclassed(named)
        assert not subclasses.is_wrapper(named)
        plain = subclasses.without_class(named)
        assert type(plain) is torch.Tensor
        assert plain.data_ptr() == tensor.data_ptr()


class _Asking(torch.autograd.Function):
    """Asks the engine during its backward."""

    leaf = torch.empty(0, requires_grad=True)
    answers: tuple[bool, bool] | None = None
    backward_ids: ClassVar[list[int]] = []
    is_leaf_asked_for = False

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        node = torch.autograd.graph.get_gradient_edge(_Asking.leaf).node
        _Asking.answers = engine.keeps_graph(), engine.will_execute(node)
        _Asking.backward_ids.append(engine.backward_id())
        _Asking.is_leaf_asked_for = engine.is_asked_for(node)
        return gradients[0], None


class TestEngine:
    def test_a_function_runs_after_the_backward(self) -> None:
        values = torch.ones(2, requires_grad=True)
        order: list[str] = []

        def during(_: torch.Tensor) -> None:
            engine.after_backward(lambda: order.append("after"))
            order.append("during")

        values.register_hook(during)
        values.sum().backward()
        assert order == ["during", "after"]

    def test_hooks_for_saved_tensors(self) -> None:
        assert not engine.has_saved_tensor_hooks()
        with torch.autograd.graph.save_on_cpu():
            assert engine.has_saved_tensor_hooks()
        assert not engine.has_saved_tensor_hooks()

    @pytest.mark.parametrize("respects", [False, True])
    def test_what_selective_checkpoints_save_goes_to_hooks_of_the_user(
        self, respects: bool
    ) -> None:
        """If they respect hooks at all, which PyTorch 2.15 lets a call choose."""
        option = "respect_saved_tensors_hooks"
        is_known = option in inspect.signature(checkpoint).parameters
        options: dict[str, Any] = {option: respects} if is_known else {}
        selected = functools.partial(create_selective_checkpoint_contexts, [aten.sin.default])
        x, users, own = torch.ones(3, requires_grad=True), [], []
        with (
            torch.autograd.graph.saved_tensors_hooks(lambda t: users.append(t) or t, lambda t: t),
            engine.saving(lambda t: own.append(t) or t, lambda t: t),
        ):
            options |= {"use_reentrant": False, "context_fn": selected}
            total = checkpoint(lambda value: value.sin().exp(), x, **options)
        total.sum().backward()
        assert len(users) == options.get(option, False)
        assert own  # what the checkpoint is called with

    def test_a_backward_is_asked(self) -> None:
        values = torch.ones(2, requires_grad=True)
        total = _Asking.apply(values, _Asking.leaf).sum()
        total.backward(retain_graph=True)
        assert _Asking.answers == (True, True)
        assert _Asking.is_leaf_asked_for
        torch.autograd.grad(total, values)
        assert _Asking.answers == (False, False)
        assert len(set(_Asking.backward_ids[-2:])) == 2
        assert engine.backward_id() == -1

    def test_gradients_are_accumulated_and_hooks_fire(self) -> None:
        leaf, seen = torch.ones(2, requires_grad=True), []
        leaf.register_post_accumulate_grad_hook(lambda owner: seen.append(owner.grad.clone()))
        keys = engine.dispatch_keys()
        with engine.below_autograd():
            assert not (leaf * 2).requires_grad
            engine.accumulate((leaf,), [torch.full((2,), 3.0)], keys)
        assert leaf.grad is not None
        assert leaf.grad.tolist() == seen[0].tolist() == [3.0, 3.0]

    def test_profiling(self) -> None:
        assert not engine.is_profiling()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        ) as profile:
            assert engine.is_profiling()
            with engine.profiler_label("rockmate::label"):
                torch.ones(1)
        assert "rockmate::label" in {event.name for event in profile.events() or ()}


class TestFake:
    def test_errors_of_ops_are_not_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        logger = logging.getLogger("torch._subclasses.fake_tensor")
        logger.addHandler(caplog.handler)
        for silencer, num_records in ((fake.errors_unlogged(), 0), (contextlib.nullcontext(), 1)):
            with fake.FakeTensorMode(), silencer, pytest.raises(RuntimeError):
                torch.ones(4, 8) @ torch.ones(3, 3)
            assert len(caplog.records) == num_records
        logger.removeHandler(caplog.handler)

    def test_fake_tensors(self) -> None:
        with fake.FakeTensorMode() as mode:
            values: Any = torch.ones(2)
        assert fake.is_fake(values)
        assert isinstance(values, fake.FakeTensor)
        assert fake.mode_of(values) is mode
        fake.move_to(values, torch.device("cuda:0"))
        assert values.device == torch.device("cuda:0")

    def test_tensors_are_forgotten(self) -> None:
        real, other = torch.ones(2), torch.zeros(2)
        with fake.FakeTensorMode() as mode:
            stand_in = mode.from_tensor(real)
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(real, other)
        fake.forget_tensors(stand_in)
        torch.utils.swap_tensors(real, other)
        assert not real.any()

    def test_results_are_corrected_for_the_duration(self) -> None:
        def halved(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
            assert kwargs is not None
            return result[:2] if op is aten.ones.default and args == ([4],) else result

        real = torch.ones(2)
        with fake.FakeTensorMode():
            with fake.results_corrected(halved) as fakes:
                assert torch.ones(4).shape == (2,)
                assert (torch.ones(2) * real).shape == (2,)
                assert fake.is_fake(fakes[id(real)])
            assert torch.ones(4).shape == (4,)

    @pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:`torch.jit")
    def test_scripts_are_traced_op_by_op(self) -> None:
        model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh())))
        stack = contextlib.ExitStack()
        with aot.compile_flags(), aot.scripts_traced(model), stack:
            graph, _ = aot.joint_graph(stack, model, [torch.ones(2, 3)])
        assert "aten.tanh_backward.default" in {str(node.target) for node in graph.graph.nodes}
        assert model(torch.ones(2, 3)).shape == (2, 3)

    def test_symbolic_sizes(self) -> None:
        environment = symbolic_sizes.ShapeEnv()
        symbol = environment.create_symbol(
            5, symbolic_sizes.ConstantSource("rows"), symbolic_sizes.DimDynamic.DYNAMIC
        )
        size = environment.create_symintnode(symbol, hint=5)
        assert isinstance(size, torch.SymInt)
        assert [fake.hint_of(each) for each in (size, 2 * size, 3)] == [5, 10, 3]
        assert not environment.guards


class TestGraphs:
    def test_a_boxed_module_empties_its_list(self) -> None:
        graph = fx.symbolic_trace(lambda left, right: left + right).graph
        arguments = [torch.ones(1), torch.ones(1)]
        assert graphs.boxed_module(graph).forward(arguments).item() == 2
        assert arguments == []

    def test_a_module_without_code(self) -> None:
        root = fx.symbolic_trace(nn.ReLU())
        assert graphs.module_without_code(root, root.graph).graph.nodes

    def test_observers_of_nodes(self) -> None:
        nodes: list[fx.Node] = []
        with graphs.on_node_created(nodes.append):
            fx.symbolic_trace(nn.ReLU())
        assert [node.op for node in nodes] == ["placeholder", "call_function", "output"]
        fx.symbolic_trace(nn.ReLU())
        assert len(nodes) == 3


class TestMembers:
    def test_members_have_names(self) -> None:
        module = nn.BatchNorm1d(2)
        module.add_module("child", nn.Linear(1, 1))
        names = ("weight", "running_mean", "child", "eps")
        assert [members.is_member(module, name) for name in names] == [True, True, True, False]

    def test_modules_below(self) -> None:
        shared = nn.Linear(1, 1)
        module = nn.Sequential(nn.Sequential(shared, nn.ReLU()), shared)
        module.register_module("empty", None)
        assert set(members.modules_within(module)) == set(module.modules())
        assert len(members.modules_within(module)) == 4
        assert members.module_at(module, "0.1") is module.get_submodule("0.1")
        with pytest.raises(KeyError):
            members.module_at(module, "0.2")

    def test_tables(self) -> None:
        module = nn.Sequential(nn.BatchNorm1d(2))
        parameters, buffers = members.tensor_tables(module[0])
        assert [*members.writable_tables(module[0])] == [parameters, buffers]
        assert list(parameters) == ["weight", "bias"]
        assert [*members.named_members(module[0])] == [*parameters, *buffers]
        assert list(buffers) == ["running_mean", "running_var", "num_batches_tracked"]
        assert list(members.submodule_table(module)) == ["0"]
        submodules, *own = members.member_tables_of(vars(module[0]))
        assert submodules == {}
        assert own[0] is parameters
        assert own[1] is buffers

    def test_shared_members(self) -> None:
        module, wrapper = nn.Linear(2, 2), nn.Module()
        members.share_members(wrapper, module)
        wrapper.register_buffer("added", torch.ones(1), persistent=False)
        assert dict(module.named_buffers()).keys() == {"added"}
        assert "added" not in module.state_dict()

    def test_hooks_of_a_module(self) -> None:
        module = nn.Linear(2, 2)
        assert not any(members.module_hooks_of(vars(module)))
        handle = module.register_forward_hook(note := lambda *_: None)
        assert members.hooks_within([module]) == [note]
        before = module.register_forward_pre_hook(lambda *_: None)
        assert list(members.forward_hooks(module)) == [handle.id]
        assert list(members.all_forward_hooks(module)) == [before.id, handle.id]
        assert list(members.other_hooks(module)) == [before.id]
        assert not members.has_global_hooks()
        for register in (
            nn.modules.module.register_module_forward_hook,
            nn.modules.module.register_module_forward_pre_hook,
            nn.modules.module.register_module_full_backward_hook,
            nn.modules.module.register_module_full_backward_pre_hook,
        ):
            everywhere = register(lambda *_: None)
            assert members.has_global_hooks()
            everywhere.remove()
        assert any(members.module_hooks_of(vars(module)))

    def test_cached_parametrizations_are_computed_again_within(self) -> None:
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
        with nn.utils.parametrize.cached():
            held = layer.weight
            with members.parametrizations_afresh():
                assert layer.weight is not held
            assert layer.weight is held

    def test_hooks_of_a_tensor(self) -> None:
        first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
        first.register_hook(lambda gradient: None)
        second.register_post_accumulate_grad_hook(lambda leaf: None)
        assert [members.has_tensor_hooks(each) for each in (first, second)] == [True, False]
        assert [members.has_accumulation_hooks(each) for each in (first, second)] == [False, True]
        assert members.tensor_hooks_of(first)
        assert [bool(hooks) for hooks in members.all_hooks_of(first)] == [False, True]

    @pytest.mark.parametrize("register", ["register_hook", "register_prehook"])
    def test_hooks_of_an_accumulation_node(self, register: str) -> None:
        first, second = (torch.ones(1, requires_grad=True) for _ in range(2))
        node = torch.autograd.graph.get_gradient_edge(first).node
        calls: list[Any] = []
        handle = getattr(node, register)(lambda *given: calls.append(given))
        assert [members.has_node_hooks(each) for each in (first, second)] == [True, False]
        first.sum().backward()
        assert len(calls) == 1
        handle.remove()
        assert not members.has_node_hooks(first)

    @pytest.mark.parametrize("mode", ["all", "any"])
    def test_hooks_of_several_gradients(self, mode: Any) -> None:
        leaf = torch.ones(1, requires_grad=True)
        leaf.register_hook(print)
        torch.autograd.graph.register_multi_grad_hook([leaf], print, mode=mode)
        found = [members.is_of_several(hook) for hook in members.tensor_hooks_of(leaf).values()]
        assert found == [False, True]

    def test_compiled_modules(self) -> None:
        module = nn.Linear(2, 2)
        assert not members.is_compiled(module)
        compiled: Any = torch.compile(module, backend="eager")
        assert members.is_compiled(compiled)
        assert members.innermost(compiled) is module
        assert not members.has_compiled(module)
        module.compile(backend="eager")
        assert members.has_compiled(module)

    def test_a_call_is_set_or_found_and_no_part_of_a_copy(self) -> None:
        module, other = nn.Linear(2, 2), nn.Linear(2, 2)
        members.set_compiled_call(module, lambda x: x + 1)
        assert module(1) == members.compiled_call(module)(1) == 2
        assert members.compiled_call(copy.deepcopy(module)) is None
        members.set_compiled_call(module, None)
        members.find_calls(lambda each: (lambda x: x + 2) if each is module else None)
        assert module(1) == 3
        assert other(torch.ones(2)).shape == (2,)
        members.find_calls(None)
        assert nn.Module._compiled_call_impl is None

    def test_what_follows_a_compilation_gets_the_call_of_before_it(self) -> None:
        module, plain, found = nn.Linear(2, 2), nn.Module.compile, list[Any]()
        members.set_compiled_call(module, print)
        ends = [members.call_after_compile(lambda *given: found.append(given)) for _ in range(2)]
        module.compile(backend="eager")
        assert found == [(module, print)] * 2
        assert members.compiled_call(module) not in (None, print)
        for end in ends:
            assert nn.Module.compile is not plain
            end()
        assert nn.Module.compile is plain


class TestInductor:
    LAYOUTS: ClassVar = [((8, 4), (4, 1), torch.float32, CPU)] * 2

    @pytest.fixture(autouse=True)
    def compiler(self) -> None:
        """Asks for one when a test runs: collecting loads no Inductor."""
        if missing := inductor.missing_compiler("cpu"):
            pytest.skip(missing)

    @staticmethod
    def graph() -> fx.GraphModule:
        def compute(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            product = x.sin() * y
            return product, product.sum(0)

        return fx.symbolic_trace(compute)

    def compiled(self, traced: fx.GraphModule, mode: Any) -> Any:
        deadline = compiler_process.Deadline.after(300)
        return inductor.compile_graph(traced, mode, self.LAYOUTS, deadline).result()

    def test_a_graph_is_compiled_and_its_list_is_emptied(self) -> None:
        traced, mode = inductor.decomposed(self.graph(), self.LAYOUTS)
        x, y = torch.randn(8, 4), torch.randn(8, 4)
        given = [x, y]
        product, total = self.compiled(traced, mode)(given)
        assert given == []
        torch.testing.assert_close(product, x.sin() * y)
        torch.testing.assert_close(total, (x.sin() * y).sum(0))

    def test_fake_inputs(self) -> None:
        strided = ((2, 3), (1, 2), torch.bfloat16, CPU)
        (given,) = inductor.fake_inputs(fake.FakeTensorMode(), [strided])
        assert fake.is_fake(given)
        assert (tuple(given.shape), given.stride(), given.dtype) == strided[:3]

    def test_a_call_that_cannot_be_traced(self) -> None:
        def reads_a_value(x: torch.Tensor) -> torch.Tensor:
            return x * aten.sum.default(x).item()

        graph = fx.Graph()
        x = graph.placeholder("x")
        graph.output((graph.call_function(reads_a_value, (x,)),))
        with pytest.raises(inductor.CompilationError):
            inductor.decomposed(fx.GraphModule(nn.Module(), graph), self.LAYOUTS[:1])

    def test_code_that_the_compiler_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        traced, mode = inductor.decomposed(self.graph(), self.LAYOUTS)
        from torch._inductor import config

        # A name that no library has, so that nothing kept on disk serves.
        settings = {"cpp.cxx": (None, "/nowhere/c++"), "force_disable_caches": True}
        with config.patch(settings), pytest.raises(inductor.CompilationError):
            self.compiled(traced, mode)


class TestCompilerProcess:
    """A module that starts a process, as Inductor's do."""

    def test_a_process_is_stopped_at_the_deadline(self) -> None:
        module = SimpleNamespace(subprocess=subprocess)
        compiler_process.watch_compilers(module)
        command = [sys.executable, "-c", "print('done')"]
        assert module.subprocess.check_output(command).strip() == b"done"
        with compiler_process.compilers_end_by(compiler_process.Deadline.after(0.2)):
            task = compiler_process.in_this_context(
                lambda: module.subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"])
            )
        begin = time.monotonic()
        with ThreadPoolExecutor(1) as pool, pytest.raises(subprocess.TimeoutExpired):
            pool.submit(task).result()
        assert time.monotonic() - begin < 30


def test_ops() -> None:
    assert dispatch.is_op(aten.mm.default)
    assert not dispatch.is_op(torch.mm)
    assert dispatch.schema_of(aten.relu_.default).is_mutable
    arguments = dispatch.schema_of(aten.mm.default).arguments
    assert [argument.name for argument in arguments] == ["self", "mat2"]


def test_pytree() -> None:
    leaves, spec = pytree.tree_flatten({"a": [1, 2], "b": (3,)})
    assert leaves == [1, 2, 3] == pytree.tree_leaves({"a": [1, 2], "b": (3,)})
    assert pytree.tree_unflatten(leaves, spec) == {"a": [1, 2], "b": (3,)}


def test_storage() -> None:
    values = torch.ones(4, requires_grad=True)
    detached, view = values.detach(), values.view(2, 2)
    (shared,) = set(map(storage.storage_id, (values, view, values.untyped_storage())))
    assert shared != storage.storage_id(values.clone())
    detached.add_(1)
    assert storage.version_of(values) == 1
    assert storage.base_of(view) is values
    assert storage.base_of(values) is None
    reference = storage.StorageWeakRef(torch.ones(1).untyped_storage())
    assert reference.expired()


def test_autocast_keeps_no_casts_nor_parametrizations() -> None:
    weight, normed = torch.ones(2, 2, requires_grad=True), nn.utils.parametrizations.weight_norm
    with nn.utils.parametrize.cached():
        layer = normed(nn.Linear(2, 2))
        cached = layer.weight
        with autocast.autocast_uncached():
            assert layer.weight is not cached
        assert layer.weight is cached
    with torch.autocast("cpu", dtype=torch.bfloat16), autocast.autocast_uncached():
        first, second = (torch.mm(weight, weight).grad_fn for _ in range(2))
        assert not torch.is_autocast_cache_enabled()
    assert first is not None
    assert second is not None
    assert first.next_functions[0][0] is not second.next_functions[0][0]
    assert torch.is_autocast_cache_enabled()


def test_bytes_of_sparse_values_are_those_of_indices_and_values() -> None:
    assert storage.bytes_of(torch.ones(2, 3)) == 24
    assert storage.bytes_of(torch.eye(4).to_sparse()) == 2 * 4 * 8 + 4 * 4


def test_versions() -> None:
    assert version.installed_version() == torch.__version__
    assert version.is_tested()
    assert not version.is_check_skipped()
    assert "2.11" in version.known_range()
    with pytest.raises(ImportError, match=r"2\.11"):
        version.refuse_older("2.10.1")


def test_dynamo_reads_whether_it_traces_for_an_export() -> None:
    class Exported(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if dynamo.is_exporting() else x

    x = torch.zeros(2)
    compiled = torch.compile(Exported(), backend="eager")
    exported = torch.export.export(Exported(), (x,), strict=True)
    assert torch.equal(compiled(x), x)
    assert torch.equal(exported.module()(x), x + 1)


def test_what_dynamo_tells_a_backend() -> None:
    told: dict[str, Any] = {}

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        told["places"] = dynamo.placeholders_of(graph)
        told["sizes"] = dynamo.output_examples(graph)
        told["paths"] = {dynamo.module_path(node) for node in graph.graph.nodes}
        told["breaks"] = dynamo.break_of(graph), dynamo.broken_caller()
        told["call"], told["left"] = dynamo.compile_call(), dynamo.compilations_left()
        told["is_training"] = dynamo.guard_training(graph)

        def run(*arguments: Any) -> Any:
            told["num_runs"] = told.get("num_runs", 0) + 1
            assert not dynamo.is_fake_call(arguments)
            return graph(*arguments)

        return run

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    compiled = torch.compile(lambda x: (model(x), x.shape[0] + 1), backend=backend, dynamic=True)
    compiled(torch.ones(3, 4))
    assert {place.path for place in told["places"]} >= {"0.weight", "1.running_mean", ""}
    assert [place.path for place in told["places"] if place.is_buffer][-1].startswith("1.")
    (size,) = [place.size for place in told["places"] if place.size is not None]
    assert dynamo.evaluated(told["sizes"][1], {size: 3}) == 4
    assert {"0", "1"} <= told["paths"]
    assert told["breaks"] == (None, None)
    assert told["call"] is not None
    assert told["left"] > 0
    assert not dynamo.fails_past_limit()
    assert told["is_training"] is True
    model.eval()
    compiled(torch.ones(3, 4))
    assert told["is_training"] is False
    with dynamo.uncompiled_calls():
        compiled(torch.ones(3, 4))
    assert told["num_runs"] == 2
