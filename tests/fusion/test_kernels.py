"""Compiled groups: right or refused, in place with the same bits, and no compiler at all."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from fused_blocks import Scored
from helpers import assert_alike
from joint_graphs import captured_for
from made_of import made_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config

import rockmate.fusion.kernels
from rockmate import Planner, RockmateModule
from rockmate._torch.inductor import CompilationError
from rockmate.capture.roles import Capture
from rockmate.errors import MissingCompilerError, RockmateError
from rockmate.fusion.rewrite import Fusion
from rockmate.graph.build import build_graph
from rockmate.graph.passes import REWRITES, run_passes
from rockmate.ops.fused import FusedOp

X = torch.randn(256, 64, generator=torch.Generator().manual_seed(5))


@pytest.fixture(autouse=True)
def forgotten_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test compiles for itself; what Inductor keeps on disk makes that quick."""
    monkeypatch.setattr("rockmate.fusion.kernels._COMPILED", {})


def capture() -> Capture:
    return run_passes(REWRITES, captured_for(Scored(), (X,)))


def fused_ops(joined: Capture) -> list[FusedOp]:
    targets = [node.target for node in joined.joint.graph.nodes if node.op == "call_function"]
    return [target for target in targets if isinstance(target, FusedOp)]


def test_what_was_compiled_is_found_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    found = counters["inductor"]
    Fusion().run(capture(), build_graph)
    monkeypatch.setattr("rockmate.fusion.kernels._COMPILED", {})
    found.clear()
    joined = Fusion().run(capture(), build_graph)[1]
    assert fused_ops(joined)
    assert found["fxgraph_cache_hit"] >= len(fused_ops(joined))
    assert not found["fxgraph_cache_miss"] + found["fxgraph_cache_bypass"]


def test_a_kernel_is_for_a_number_of_threads_on_disk_too(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def compile_fx_inner(*_: object, **__: object) -> None:
        seen.append(config.cpp.threads)
        raise RuntimeError("seen")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", compile_fx_inner)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    Fusion().run(capture(), build_graph)
    assert set(seen) == {97}


def test_in_place_forms_give_the_same_bits_in_the_argument() -> None:
    @made_of(lambda: {"layers": nn.ModuleList(nn.Linear(256, 256) for _ in range(3))})
    class Deep(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.sin(layer(x) * 2) * 0.5
            return x.square().mean()

    joint = run_passes(REWRITES, captured_for(Deep(), (torch.randn(256, 256),)))
    joined = Fusion().run(joint, build_graph)[1]
    num_forms = 0
    for node in joined.joint.graph.nodes:
        op = node.target
        for form in op.in_place.values() if isinstance(op, FusedOp) else ():
            num_forms += 1
            values = [torch.randn(argument.meta["val"].shape) for argument in node.args]
            expected = op(*values)
            results = form(*values)
            assert _all(results)[0].data_ptr() == values[form.position].data_ptr()
            assert_alike(_all(results), _all(expected))
    assert num_forms


def _all(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def spoil(result: Tensor) -> Tensor:
    """Off by one percent in one element."""
    wrong = result.clone()
    wrong.view(-1)[0] += 0.01 * result.abs().max()
    return wrong


BROKEN: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "values": (spoil, "differs by"),
    "strides": (lambda result: result.t().contiguous().t(), "strides"),
    "memory": (lambda result: torch.cat([result, result])[: len(result)], "memory of another size"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_wrong_kernel_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, says = BROKEN[kind]
    compile_graph = rockmate.fusion.kernels.compile_graph

    class Broken:
        def __init__(self, pending: object) -> None:
            self._pending = pending

        def result(self) -> Callable[[list[Tensor]], list[Tensor]]:
            kernel = self._pending.result()  # pyright: ignore[reportAttributeAccessIssue]

            def run(tensors: list[Tensor]) -> list[Tensor]:
                return [change(r) if r.ndim == 2 else r for r in kernel(tensors)]

            return run

    monkeypatch.setattr(
        "rockmate.fusion.kernels.compile_graph", lambda *given: Broken(compile_graph(*given))
    )
    fusion, joined = Fusion().run(capture(), build_graph)
    assert fusion.report is not None
    refusals = [group.refusal for group in fusion.report.groups if group.refusal]
    assert any(says in refusal for refusal in refusals)
    assert fusion.refused
    assert not any("aten.tanh.default" in op.calls for op in fused_ops(joined))


def test_a_group_that_cannot_be_compiled_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise CompilationError("LoweringException: no such op")

    monkeypatch.setattr("rockmate.fusion.kernels.compile_graph", refuse)
    caplog.set_level(logging.INFO, "rockmate")
    model = Scored()
    module = RockmateModule(model, (X,), 1.0, kernels="fused")
    assert "cannot be compiled: LoweringException" in str(module.plan.fusion)
    eager = model(X)
    assert torch.equal(module(X), eager)  # every op runs by itself


def test_a_slow_kernel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([2.0, 1.0] * 100)
    monkeypatch.setattr("rockmate.fusion.kernels.time_ms", lambda *_: next(times))
    fusion, joined = Fusion().run(capture(), build_graph)
    assert fusion.report is not None
    assert not fused_ops(joined)
    assert all("takes 2.000 ms" in group.refusal for group in fusion.report.groups)


def test_refused_groups_of_another_process_stay_unfused_whatever_is_measured() -> None:
    first = Fusion().run(capture(), build_graph)[0]
    assert first.report is not None
    key = next(group.name for group in first.report.groups if group.num_places)
    refused = Fusion(refused=(key.removeprefix("fused_"),))
    assert key not in [str(op) for op in fused_ops(refused.run(capture(), build_graph)[1])]


def test_without_a_compiler_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rockmate.fusion.kernels.missing_compiler", lambda _: "a compiler")
    with pytest.raises(MissingCompilerError, match=r'needs a compiler for cpu.*kernels="eager"'):
        RockmateModule(Scored(), (X,), 1.0, kernels="fused")
    assert issubclass(MissingCompilerError, RockmateError)
    planner = Planner(Scored(), (X,), kernels="auto")
    assert planner.fusion is None
    assert "kernels are not fused" in caplog.text
    assert planner.plan(1.0).options.kernels == "eager"


@pytest.mark.parametrize("value", ["inductor", "", None])
def test_unknown_kernels(value: str) -> None:
    with pytest.raises(ValueError, match="choose 'eager', 'fused' or 'auto'"):
        Planner(Scored(), (X,), kernels=value)  # pyright: ignore[reportArgumentType]
