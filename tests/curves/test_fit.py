"""What fits a memory: the largest size, its memory by part, refusals."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fine_tuning import gpt2, llama
from made_of import made_of
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import rockmate
from rockmate import FitError, FitRow, InvalidBudgetError, MachineError, NothingFitsError, Planner
from rockmate.capture.sample import read_sample
from rockmate.costs.machine import load_machine
from rockmate.curves.least_memory import SizedPlanners, largest_within
from rockmate.curves.size_axis import SizeAxis
from rockmate.curves.sized_steps import SizedSteps
from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.chunking.region import Refusal
from rockmate.graph.snapshot_capture import snapshot_of
from rockmate.graph.step_options import StepOptions
from rockmate.planning.options import PlanOptions
from rockmate.planning.step import capture_step

MIB = 1 << 20


class Mlp(nn.Module):
    """Three layers; a row of its sample saves 5 x 4096 x 4 bytes or less."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 64)
        )

    def forward(self, values: Tensor) -> Tensor:
        return self.layers(values).square().mean()


def words(num_rows: int, num_tokens: int = 16) -> dict[str, Tensor]:
    tokens = torch.zeros(num_rows, num_tokens, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def on_meta(build: Any, **changes: Any) -> nn.Module:
    with torch.device("meta"):
        return build(**changes)


def fit_mlp(memory: int | str, **options: Any) -> rockmate.Fit:
    with torch.device("meta"):
        model = Mlp()
    given = {"machine": "cpu-avx2", "reserve": MIB, **options}
    return rockmate.fit(model, torch.zeros(2, 64), memory, **given)


# --- the search -----------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize("limit", [0, 9, 10, 11, 999, 123_456, 10**9])
@pytest.mark.parametrize("known", [{2, 8}, {1}, set(), {500}])
def test_the_largest_number_is_found(degree: int, limit: int, known: set[int]) -> None:
    asked = []

    def need(number: int) -> int:
        asked.append(number)
        return 5 + 5 * number**degree + number % 3

    most = 5000
    expected = max((number for number in range(1, most + 1) if need(number) <= limit), default=0)
    asked.clear()
    assert largest_within(need, limit, most=most, known=known) == expected
    assert len(asked) == len(set(asked))
    assert len(asked) <= 20


# --- one capture, every size ----------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["cpu-avx2", "h100"])
@pytest.mark.parametrize("build", [gpt2, llama])
@pytest.mark.parametrize("kind", ["batch", "tokens"])
def test_steps_from_one_capture_are_those_of_their_own(build: Any, kind: Any, machine: str) -> None:
    """The same ops on storages of the same sizes as a capture at that size has."""
    changes = {"num_key_value_heads": 2} if build is llama else {}
    model, target = on_meta(build, **changes), load_machine(machine)
    sample = read_sample(model, words(4), target.torch_device)
    axis = SizeAxis.of(sample.call, kind)
    steps = SizedSteps(model, sample, words(4), axis, target, StepOptions())
    for size in (2, 8, 24):
        step = steps.step(size)
        given = words(size) if kind == "batch" else words(4, size)
        alone = capture_step(model, given, machine=target)
        assert step.call == alone.call
        difference = snapshot_of(alone.graph, alone.call).difference(
            snapshot_of(step.graph, step.call)
        )
        assert not difference
    assert steps.num_captures == 1
    assert steps.step(1).call.tensors[0].shape == ((1, 16) if kind == "batch" else (4, 1))
    assert steps.num_captures == 2


@made_of(lambda: {"layers": nn.ModuleList(nn.Linear(16, 16) for _ in range(3))})
class Marked(nn.Module):
    """Checkpointed blocks with a named value each."""

    def block(self, layer: nn.Module, values: Tensor) -> Tensor:
        return torch.sin(rockmate.name(torch.tanh(layer(values)), "hidden").exp())

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = checkpoint(self.block, layer, values, use_reentrant=False)
        return values.square().mean()


def _saves_large(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """A policy that reads a size."""
    is_large = args and isinstance(args[0], Tensor) and args[0].shape[0] > 8
    return CheckpointPolicy.MUST_SAVE if is_large else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("options", "num_captures"),
    [
        ({"marks": {"hidden": "recompute", "aten.sin": "save"}}, 1),
        ({"existing_checkpoints": "honour", "in_flight": 3}, 1),
        ({"policy": _saves_large}, 2),
    ],
)
def test_marks_are_those_of_a_capture_at_that_size(
    options: dict[str, Any], num_captures: int
) -> None:
    model, target = on_meta(Marked), load_machine("cpu-avx2")
    sample = read_sample(model, torch.zeros(4, 16), target.torch_device)
    axis, asked = SizeAxis.of(sample.call, "batch"), PlanOptions(**options).step
    steps = SizedSteps(model, sample, torch.zeros(4, 16), axis, target, asked)
    for size in (4, 12):
        step = steps.step(size)
        alone = capture_step(model, torch.zeros(size, 16), asked, machine=target)
        assert step.options == alone.options
        found = snapshot_of(step.graph, step.call)
        assert not snapshot_of(alone.graph, alone.call).difference(found)
        marks = {storage.mark for storage in found.storages if storage.mark}
        assert marks or size == 4
    assert steps.num_captures == num_captures


def test_lifted_checkpoints_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        rockmate.fit(on_meta(Marked), torch.zeros(4, 16), "1MiB", machine="cpu-avx2", reserve=1)
    lines = [record.message for record in caplog.records if "are lifted" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith("3 checkpointed calls")


# --- the largest batch ----------------------------------------------------------------------------


def test_the_largest_batch_fits_and_the_next_one_does_not() -> None:
    """By planners of fixed sizes, and by parts that are counted here."""
    memory = 400 * MIB
    found = fit_mlp(memory, numerics="bitwise")
    size = found.largest.batch_size
    held = MIB + 4 * sum(parameter.nbytes for parameter in Mlp().parameters())
    for rows, fits in ((size, True), (size + 1, False)):
        with torch.device("meta"):
            planner = Planner(Mlp(), torch.zeros(rows, 64), machine="cpu-avx2")
        assert (held + rows * 256 + planner.minimum_peak_bytes <= memory) is fits
    for row in found.rows:
        assert row.device_bytes + row.parameter_bytes + row.gradient_bytes + row.state_bytes == held
        assert row.input_bytes == row.batch_size * 256
        assert row.total_bytes <= memory
        assert row.overhead >= 0
    sizes = [row.batch_size for row in found.rows]
    assert sizes == sorted(set(sizes))
    assert [row.is_largest for row in found.rows] == [False] * (len(sizes) - 1) + [True]
    assert found.fastest.samples_per_s == max(row.samples_per_s for row in found.rows)


def test_a_row_has_the_plan_of_a_planner() -> None:
    memory = 400 * MIB
    row = fit_mlp(memory, sizes=[64], numerics="bitwise").rows[0]
    assert row.batch_size == 64
    with torch.device("meta"):
        planner = Planner(Mlp(), torch.zeros(64, 64), machine="cpu-avx2")
    held = row.total_bytes - row.peak_bytes
    plan = planner.plan(memory - held)
    assert row.predicted_ms == pytest.approx(plan.predicted_ms)
    assert row.peak_bytes == plan.predicted_peak_bytes
    assert row.baseline_peak_bytes == planner.baseline_peak_bytes
    assert row.baseline_ms == pytest.approx(planner.baseline_ms)


def test_less_state_leaves_room_for_more_rows() -> None:
    sizes = {
        name: fit_mlp("400MiB", optimizer=name, numerics="bitwise", sizes=[1]).largest
        for name in ("adamw", "adamw_8bit", "sgd")
    }
    assert sizes["adamw"].batch_size < sizes["adamw_8bit"].batch_size < sizes["sgd"].batch_size
    assert sizes["sgd"].state_bytes == 0


def test_frozen_parameters_have_neither_gradient_nor_state() -> None:
    model = on_meta(llama)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    row = rockmate.fit(
        model, words(2), "8MiB", machine="cpu-avx2", reserve=1, sizes=[1], numerics="bitwise"
    ).largest
    assert row.gradient_bytes == model.lm_head.weight.nbytes
    assert row.state_bytes == 2 * row.gradient_bytes
    assert row.parameter_bytes >= sum(each.nbytes for each in model.parameters())


def test_a_size_in_chunks_runs_in_as_few_as_are_fastest() -> None:
    @made_of(lambda: {"query": nn.Linear(16, 16), "document": nn.Linear(16, 16)})
    class Towers(nn.Module):
        def forward(self, query: Tensor, document: Tensor) -> Tensor:
            return torch.tanh(self.query(query)).mean() + torch.tanh(self.document(document)).mean()

    def batch(size: int) -> dict[str, Tensor]:
        return {name: torch.ones(size, 16) for name in ("query", "document")}

    model, size = Towers(), 4096
    found = rockmate.fit(model, batch(4), "1MiB", machine="h100", reserve=1024, sizes=[size])
    row = found.rows[0]
    assert row.batch_size == size
    assert row.loss_chunks
    budget = MIB - row.total_bytes + row.peak_bytes
    plan = Planner(model, batch(size), machine="h100").plan(budget)
    assert row.predicted_ms <= 1.01 * plan.predicted_ms


def test_a_step_that_cannot_run_in_chunks_has_no_planner_for_them() -> None:
    step: Any = SimpleNamespace(
        in_chunks=lambda _: Refusal(call="", module="", reason="it mixes rows")
    )
    planners = SizedPlanners(lambda _: step, lambda _: pytest.fail("a planner was made"))
    assert planners.planner(8, Chunks(4, "recompute")) is None


def test_json_and_picture(tmp_path: Path) -> None:
    found = fit_mlp("400MiB", sizes=[4, 64], numerics="bitwise")
    found.save(tmp_path / "fit.json")
    content = json.loads((tmp_path / "fit.json").read_text(encoding="utf-8"))
    assert content["memory_bytes"] == 400 * MIB
    assert len(content["rows"]) == len(found.rows)
    names = set(FitRow.__dataclass_fields__)
    for row, written in zip(found.rows, content["rows"], strict=True):
        assert FitRow(**{name: written[name] for name in names}) == row
        assert written["total_bytes"] == row.total_bytes
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "fit.png")
    picture = (tmp_path / "fit.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 20_000


# --- the axis -------------------------------------------------------------------------------------


def test_an_axis_is_told_or_named() -> None:
    model = on_meta(llama)
    call = read_sample(model, words(2), load_machine("h100").torch_device).call
    assert SizeAxis.of(call, "batch").places == ((0, 0), (1, 0))
    assert SizeAxis.of(call, "tokens").places == ((0, 1), (1, 1))
    assert SizeAxis.of(call, "tokens", {"labels": 1}).places == ((1, 1),)
    with pytest.raises(FitError, match="no such dimension"):
        SizeAxis.of(call, "batch", {"pixels": 0})


@made_of(lambda: {"layer": nn.Linear(8, 8)})
class Pair(nn.Module):
    def forward(self, table: Tensor, values: Tensor) -> Tensor:
        return (self.layer(values) @ table.sum(0)).square().mean()


def test_inputs_that_disagree_need_the_axis() -> None:
    sample = {"table": torch.zeros(3, 8), "values": torch.zeros(4, 8)}
    options = {"machine": "cpu-avx2", "reserve": 1, "most": 64}
    with pytest.raises(FitError, match=r"sizes \[3, 4\] differ.*batch_axis="):
        rockmate.fit(Pair().train(), sample, "1MiB", **options)
    found = rockmate.fit(Pair().train(), sample, "1MiB", batch_axis={"values": 0}, **options)
    assert found.largest.batch_size == 64


@pytest.mark.parametrize("reserve", [0, "0", "0 MiB", "0.0GiB"])
def test_a_device_may_take_nothing(reserve: Any) -> None:
    largest = fit_mlp("512MiB", reserve=reserve, sizes=[1], most=2).largest
    assert largest.device_bytes == 0


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "options", "error", "text"),
    [
        ("much", {}, FitError, "memory 'much' cannot be read"),
        (-5, {}, FitError, "memory -5 cannot be read"),
        (0.5, {}, FitError, "memory 0.5 is a float"),
        ("1GiB", {"reserve": "x"}, FitError, "reserve 'x' cannot be read"),
        ("1GiB", {"reserve": "0XB"}, FitError, "reserve '0XB' cannot be read"),
        ("1GiB", {"reserve": False}, FitError, "reserve False cannot be read"),
        ("1GiB", {"optimizer": "magic"}, InvalidBudgetError, "'magic' has no rule"),
        ("1GiB", {"machine": "magic"}, MachineError, "'magic' is not known"),
        ("1GiB", {"machine": None}, FitError, "on the meta device. Say for which machine"),
        ("1GiB", {"sizes": [0]}, FitError, "size 0 is no whole number"),
        ("1GiB", {"most": -1}, FitError, "size -1 is no whole number"),
        ("1GiB", {"vary": "layers"}, FitError, "choose 'batch' or 'tokens'"),
        ("1GiB", {"measure": True}, FitError, "which is not measured from here"),
        ("1GiB", {"vary": "tokens"}, FitError, "tokens axis of the sample cannot be told"),
    ],
)
def test_refusals(memory: Any, options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        fit_mlp(memory, **options)


def test_a_memory_that_parameters_exceed() -> None:
    with pytest.raises(NothingFitsError) as caught:
        fit_mlp("200MiB")
    text = str(caught.value)
    assert "taken before the first activation: parameters 66.0 MiB, gradients 66.0 MiB" in text
    assert "optimizer state 132.1 MiB" in text
    assert "optimizer adamw_8bit, which would fit" in text
    assert "LoRA or frozen layers" in text
    assert caught.value.least_bytes > caught.value.memory_bytes == 200 * MIB


def test_a_memory_too_small_for_a_batch_of_one() -> None:
    model = on_meta(llama, max_position_embeddings=1 << 14)
    fixed = rockmate.fit(model, words(2), "1GiB", machine="cpu-avx2", reserve=1, most=1).largest
    memory = fixed.total_bytes - fixed.peak_bytes + 20_000
    with pytest.raises(NothingFitsError, match=r"a batch of 1 needs at least.*fewer tokens") as e:
        rockmate.fit(model, words(2, 4096), memory, machine="cpu-avx2", reserve=1)
    least = e.value.least_bytes
    assert rockmate.fit(
        model, words(2, 4096), least, machine="cpu-avx2", reserve=1, sizes=[1]
    ).largest.batch_size == 1  # fmt: skip


def test_the_optimizer_step_has_to_fit() -> None:
    """Adam on a GPU makes a tensor for each parameter, when activations are gone."""
    model = on_meta(Mlp)
    held = 4 * sum(each.nbytes for each in model.parameters())
    options = {"machine": "h100", "reserve": 1, "sizes": [1], "most": 4}
    with pytest.raises(NothingFitsError, match="the optimizer's step needs"):
        rockmate.fit(model, torch.zeros(2, 64), held + 40 * MIB, **options)
    fused = rockmate.fit(
        model, torch.zeros(2, 64), held + 40 * MIB, optimizer="adamw_torch_fused", **options
    )
    assert fused.largest.batch_size == 4
    assert rockmate.fit(model, torch.zeros(2, 64), held + 70 * MIB, **options).is_capped


# --- values that move away ------------------------------------------------------------------------


def fit_deep(**options: Any) -> rockmate.Fit:
    """Twelve layers, of which a row saves 49 kB; the memory holds those of about 150 rows."""
    parts = [part for _ in range(12) for part in (nn.Linear(512, 512), nn.GELU())]
    with torch.device("meta"):
        model = nn.Sequential(*parts, nn.Linear(512, 1))
    given = {"machine": "cpu-avx2", "reserve": 0, "sizes": [256], "numerics": "bitwise"}
    return rockmate.fit(model, torch.zeros(2, 512), "56MiB", **given, **options)


def test_moves_make_a_size_faster_and_the_largest_no_smaller() -> None:
    alone, moving = fit_deep(), fit_deep(offload="disk:/tmp")
    assert moving.largest.batch_size >= alone.largest.batch_size
    for row in moving.rows:
        assert row.total_bytes <= moving.memory_bytes
    slow, fast = alone.rows[0], moving.rows[0]
    assert slow.batch_size == fast.batch_size == 256
    assert slow.num_recomputations
    assert fast.num_moves
    assert fast.host_bytes
    assert fast.predicted_ms < slow.predicted_ms
    assert "moved away" in str(moving)
    assert "values may move to disk:/tmp" in str(moving)
    assert "moved away" not in str(alone)
    content = json.loads(moving.to_json())
    assert content["offload"] == "disk:/tmp"
    assert content["rows"][0]["host_bytes"] == fast.host_bytes
    bounded = fit_deep(offload="disk:/tmp", host_budget=fast.host_bytes // 2).rows[0]
    assert bounded.host_bytes <= fast.host_bytes // 2


def test_a_fit_with_moves_is_measured(tmp_path: Path) -> None:
    parts = [part for _ in range(6) for part in (nn.Linear(256, 256), nn.GELU())]
    model, offload = nn.Sequential(*parts, nn.Linear(256, 1)), f"disk:{tmp_path}"
    options: Any = {"measure": True, "num_steps": 1, "sizes": [64], "most": 256}
    options |= {"machine": None, "reserve": 0, "numerics": "bitwise"}
    found = rockmate.fit(model, torch.zeros(2, 256), "8MiB", offload=offload, **options)
    assert found.largest.measured_peak_bytes
    for row in found.rows:
        assert row.measured_peak_bytes <= row.peak_bytes * 1.01
    assert not list(tmp_path.iterdir())


def test_tiers_that_a_fit_cannot_use() -> None:
    with pytest.raises(FitError, match="choose None"):
        fit_deep(offload="ssd")
    with pytest.raises(FitError, match="bounds what moves"):
        fit_deep(host_budget="1GiB")
    with pytest.raises(rockmate.OffloadError, match="Use offload='disk"):
        fit_deep(offload="host")
