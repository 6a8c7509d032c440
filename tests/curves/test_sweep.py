"""Sweeps: rows, their measurement against independent meters, resuming, refusals."""

from __future__ import annotations

import copy
import csv
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from layered import layered, layered_batch
from made_of import made_of
from torch import Tensor, nn

import rockmate
from bench import measure
from rockmate import InvalidBudgetError, Plan, Planner, RockmateModule, SweepRow
from rockmate.curves import measure as measurement
from rockmate.curves.errors import SweepError
from rockmate.curves.measure import SideBySide, tensor_difference
from rockmate.curves.page import page
from rockmate.curves.sweep import Sweep
from rockmate.curves.sweep_run import SweepOptions, run_sweep
from rockmate.planning.options import PlanOptions

MACHINE = "cpu-avx2"  # estimated times: two planners plan alike


def stack() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return models.Stack(2).train(), torch.randn(64, 16)


def by_budget(rows: Iterable[SweepRow], strategy: str = "rockmate") -> dict[int, SweepRow]:
    return {row.budget_bytes: row for row in rows if row.strategy == strategy}


# --- predicted ------------------------------------------------------------------------------------


def test_rows_are_what_a_planner_of_its_own_plans() -> None:
    model, x = stack()
    rows = rockmate.sweep(model, x, budgets=[0.7, 0.6, 1.0, 0.6], machine=MACHINE)
    planner = Planner(model, x, machine=MACHINE)
    assert [row.budget_bytes for row in rows] == [
        int(share * planner.baseline_peak_bytes) for share in (0.6, 0.7, 1.0)
    ]
    for row in rows:
        plan = planner.plan(row.budget_bytes)
        predicted = plan.predicted_peak_bytes, plan.predicted_ms
        assert (row.predicted_peak_bytes, row.predicted_ms) == predicted
        assert row.predicted_ratio == plan.predicted_ms / planner.baseline_ms
        assert row.budget_share == row.budget_bytes / planner.baseline_peak_bytes
        assert row.minimum_bytes == planner.minimum_peak_bytes
        assert not row.is_measured


def test_both_curves_are_shown_where_chunks_are_faster() -> None:
    planner = layered()
    options = SweepOptions(budgets=[0.5, 0.8, 1.0])
    model, batch = planner.model, layered_batch()
    found = run_sweep(model, batch, options, PlanOptions(machine=MACHINE), title="layered")
    fastest, bitwise = by_budget(found.rows), by_budget(found.rows, "bitwise")
    assert list(fastest) == list(bitwise)
    assert [bool(row.loss_chunks) for row in fastest.values()] == [True, True, False]
    assert [row.is_feasible for row in bitwise.values()] == [False, False, True]
    assert not any(row.loss_chunks for row in bitwise.values())
    table = found.text(width=200)
    assert "bitwise" in table
    assert "2 at_once" in table
    html = page(found)
    assert ">bitwise</text>" in html
    assert "2 at_once" in html
    planning = PlanOptions(machine=MACHINE, numerics="bitwise")
    alone = run_sweep(model, batch, options, planning, title="")
    assert alone.strategies == ("rockmate",)
    assert not any(row.loss_chunks for row in alone.rows)


def test_rows_become_a_data_frame() -> None:
    model, x = stack()
    row = rockmate.sweep(model, x, budgets=[0.9], machine=MACHINE)[0].as_dict()
    assert row["strategy"] == "rockmate"
    assert json.loads(json.dumps(row)) == row


def test_default_budgets_are_tenths_and_the_smallest_peak() -> None:
    model, x = stack()
    rows = rockmate.sweep(model, x, machine=MACHINE)
    assert all(row.is_feasible for row in rows)
    assert rows[0].budget_bytes == rows[0].minimum_bytes
    shares = [round(row.budget_share, 3) for row in rows[1:]]
    first = round(10 * shares[0])
    assert shares == [tenth / 10 for tenth in range(first, 11)]


def test_infeasible_budgets_are_rows_and_the_sweep_goes_on() -> None:
    model, x = stack()
    rows = rockmate.sweep(
        model, x, budgets=["1KiB", 1.0], strategies=("rockmate", "none"), machine=MACHINE
    )
    assert [row.is_feasible for row in rows] == [False, True, False, True]
    tight = rows[0]
    assert tight.predicted_ms is None
    assert tight.minimum_bytes is not None
    assert f"{tight.minimum_bytes:,}" in tight.problem
    planner = Planner(model, x, machine=MACHINE)
    assert planner.plan(tight.minimum_bytes).predicted_peak_bytes <= tight.minimum_bytes
    assert rows[2].minimum_bytes == planner.baseline_peak_bytes


def test_a_budget_that_is_chosen_is_the_one_of_the_sweep() -> None:
    model, x = stack()
    rows = rockmate.sweep(model, x, machine=MACHINE)
    planner = Planner(model, x, machine=MACHINE)
    assert rows.recommended is not None
    assert rows.recommended is rows.knee
    for budget, row in (("knee", rows.recommended), ("1.05x", rows.best(max_slowdown=1.05))):
        plan = planner.plan(budget)
        assert plan.budget_bytes == row.budget_bytes
        assert plan.predicted_peak_bytes == row.predicted_peak_bytes
    assert planner.plan("1x").budget_bytes == rows.best(max_slowdown=1.0).budget_bytes
    chosen: tuple[dict[str, Any], ...] = ({"budget": "knee"}, {"max_slowdown": 1.05})
    for given, row in zip(chosen, (rows.recommended, rows.best()), strict=True):
        module = RockmateModule(model, x, machine=MACHINE, **given)
        assert module.plan.budget_bytes == row.budget_bytes
        module(x).sum().backward()
        module(x[:32]).sum().backward()
        assert module.plan.budget_bytes == row.budget_bytes


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"max_slowdown": 0.9}, InvalidBudgetError, "0.9x is less than the time without"),
        ({"max_slowdown": 1.1, "budget": 0.5}, TypeError, "give one of them"),
        ({"budget": "knee", "strategy": "chen"}, InvalidBudgetError, "has no curve"),
        ({"max_slowdown": "5%"}, InvalidBudgetError, "cannot be read"),
    ],
)
def test_a_choice_that_cannot_be_made(
    given: dict[str, Any], error: type[Exception], text: str
) -> None:
    model, x = stack()
    with pytest.raises(error, match=text):
        RockmateModule(model, x, machine=MACHINE, **given)


# --- measured -------------------------------------------------------------------------------------


def language_model() -> tuple[nn.Module, dict[str, Tensor]]:
    words = torch.randint(23, (8, 12))
    return models.TiedLanguageModel(), {"words": words, "labels": words.clone()}


def convolutions() -> tuple[nn.Module, Tensor]:
    return models.BatchNormNet(), torch.randn(4, 3, 16, 16)


@pytest.mark.parametrize("make", [language_model, convolutions])
def test_measured_figures_are_those_of_another_meter(
    make: Callable[[], tuple[nn.Module, Any]], tmp_path: Path
) -> None:
    model, sample = make()
    model.train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    (row,) = rockmate.sweep(model, sample, budgets=[0.8], measure=True, num_steps=2, out=tmp_path)
    assert not tensor_difference(model.state_dict(), before).where
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert row.gradient_difference == 0.0
    assert not row.broken_promise
    assert row.num_steps == 2
    assert row.measured_ratio is not None
    assert row.measured_ratio > 0
    module = RockmateModule(
        model, sample, plan=Plan.load(tmp_path / "plans" / f"rockmate-{row.budget_bytes}.json")
    )
    assert row.measured_peak_bytes == row.predicted_peak_bytes == peak_of(module, sample)
    assert row.eager_peak_bytes == peak_of(model, sample)


def peak_of(call: nn.Module, sample: Any) -> int:
    def step() -> None:
        output = call(**sample) if isinstance(sample, dict) else call(sample)
        end = output["loss"] if isinstance(sample, dict) else output
        end.backward(torch.ones_like(end))

    step()
    call.zero_grad(set_to_none=False)
    return measure.allocator_peak(step)


@made_of(lambda: {"body": models.Stack(1, dropout=0.0)})
class OtherwiseEager(nn.Module):
    """Captured it computes something else: what a wrong plan would look like."""

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * (1.0 if torch.compiler._is_compiling_flag else 1.01)


def test_gradients_that_differ_are_a_broken_promise() -> None:
    (row,) = rockmate.sweep(
        OtherwiseEager().train(), torch.randn(8, 16), budgets=[1.0], measure=True, num_steps=1
    )
    assert row.gradient_difference == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert row.differing_gradient in row.broken_promise


def test_peak_above_the_budget_is_a_broken_promise() -> None:
    row = SweepRow(
        strategy="rockmate",
        budget_bytes=100,
        budget_share=0.5,
        is_feasible=True,
        measured_peak_bytes=103,
    )
    assert "3 bytes above" in row.broken_promise


@made_of(lambda: {"body": models.Stack(1, dropout=0.0)})
class TooLargeForEager(nn.Module):
    """Runs out of memory wherever it is not planned."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler._is_compiling_flag:
            raise torch.OutOfMemoryError("on purpose")
        return self.body(x)


def test_a_model_that_only_a_plan_can_train_is_measured_alone() -> None:
    (row,) = rockmate.sweep(
        TooLargeForEager().train(), torch.randn(8, 16), budgets=[0.8], measure=True, num_steps=1
    )
    assert row.is_measured
    assert row.measured_peak_bytes == row.predicted_peak_bytes
    assert (row.eager_peak_bytes, row.measured_ratio, row.gradient_difference) == (None, None, None)
    assert not row.broken_promise


def test_weights_move_between_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack()
    seen = []

    def noted(call: Any, sample: Any, **options: Any) -> None:
        if call is model:
            seen.append(model.layers[0][0].weight.detach().clone())  # pyright: ignore
        real(call, sample, **options)

    real = measurement.run_step
    monkeypatch.setattr(measurement, "run_step", noted)
    rockmate.sweep(model, x, budgets=[1.0], measure=True, num_steps=2)
    trained = seen[-3:]
    assert not torch.equal(trained[0], trained[1])
    assert not torch.equal(trained[1], trained[2])


# --- folders --------------------------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch, *, interrupt_at: int | None = None) -> list[int]:
    """Notes the budgets that are measured; the call of that number is interrupted instead."""
    measured: list[int] = []
    real = SideBySide.measure

    def noting(self: SideBySide, module: RockmateModule) -> Any:
        if len(measured) + 1 == interrupt_at:
            raise KeyboardInterrupt
        measured.append(module.plan.budget_bytes)
        return real(self, module)

    monkeypatch.setattr(SideBySide, "measure", noting)
    return measured


def run(folder: Path, **options: Any) -> Sweep:
    model, x = stack()
    usual = {"budgets": "0.6:1.0:3", "measure": True, "num_steps": 1}
    return run_sweep(model, x, SweepOptions(**(usual | options)), title="a stack", out=folder)


def read(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "sweep.jsonl").read_text().splitlines()]


def test_an_interrupt_keeps_what_was_measured_and_a_second_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        before = counted(patch, interrupt_at=3)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    kept = read(tmp_path)
    assert [row["measured_peak_bytes"] is not None for row in kept] == [True, True, False]
    assert [row["budget_bytes"] for row in kept[:2]] == before
    assert "was interrupted" in (tmp_path / "sweep.html").read_text()

    after = counted(monkeypatch)
    found = run(tmp_path)
    assert after == [kept[2]["budget_bytes"]]
    assert [row.measured_ms for row in found.rows[:2]] == [row["measured_ms"] for row in kept[:2]]
    assert all(row.is_measured for row in found.rows)
    assert found.rows == [SweepRow(**row) for row in read(tmp_path)]
    assert "was interrupted" not in (tmp_path / "sweep.html").read_text()


def test_other_budgets_and_strategies_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run(tmp_path, budgets=[1.0])
    measured = counted(monkeypatch)
    found = run(tmp_path, budgets=[0.8], strategies=("none", "rockmate"))
    assert measured == [row.budget_bytes for row in found.rows if row.strategy == "rockmate"][:1]
    assert (
        by_budget(found.rows)[first.rows[0].budget_bytes].measured_ms == first.rows[0].measured_ms
    )
    assert [row.is_feasible for row in found.rows if row.strategy == "none"] == [False]


def test_predictions_only_keep_what_was_measured_before(tmp_path: Path) -> None:
    first = run(tmp_path, budgets=[0.8])
    assert run(tmp_path, budgets=[0.8], measure=False).rows == first.rows


def test_more_steps_are_measured_anew(tmp_path: Path) -> None:
    run(tmp_path, budgets=[1.0])
    assert run(tmp_path, budgets=[1.0], num_steps=2).rows[0].num_steps == 2


def test_csv_holds_the_rows(tmp_path: Path) -> None:
    run(tmp_path, measure=False, budgets=["1KiB", 0.8])
    with (tmp_path / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = [(row["is_feasible"], row["predicted_ms"] == "") for row in rows]
    assert found == [("False", True), ("True", False)]
    assert [int(row["budget_bytes"]) for row in rows] == [
        row["budget_bytes"] for row in read(tmp_path)
    ]


def test_a_folder_of_another_model_is_refused_and_left_alone(tmp_path: Path) -> None:
    run(tmp_path, measure=False)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("sweep.*")}
    with pytest.raises(SweepError, match="another model or sample") as refused:
        rockmate.sweep(models.Stack(1).train(), torch.randn(64, 16), out=tmp_path)
    assert "a stack" in str(refused.value)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("sweep.*")} == before


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    run(tmp_path, measure=False)
    model, x = stack()
    with pytest.raises(SweepError, match=r"its machine was None and is 'cpu-avx2' now"):
        rockmate.sweep(model, x, out=tmp_path, machine=MACHINE)


@pytest.mark.parametrize("name", ["sweep.json", "sweep.jsonl"])
def test_a_damaged_folder_is_refused(name: str, tmp_path: Path) -> None:
    run(tmp_path, measure=False)
    (tmp_path / name).write_text((tmp_path / name).read_text()[:-9])
    with pytest.raises(SweepError, match="damaged") as refused:
        run(tmp_path, measure=False)
    assert name in str(refused.value)


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match="Give another --out"):
        rockmate.sweep(nn.Identity(), None, out=tmp_path / "file" / "folder")


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"budgets": []}, InvalidBudgetError, "no budget"),
        ({"budgets": [0.5, 1.5]}, InvalidBudgetError, "1.5"),
        ({"budgets": "1GiB:0.5:3"}, InvalidBudgetError, "fraction to a size"),
        ({"strategies": ("best",)}, SweepError, "'best' is not known; choose among none, chen"),
        ({"strategies": ()}, SweepError, "no strategy"),
        ({"measure": True, "machine": "h100"}, SweepError, "h100"),
        ({"num_steps": 0}, SweepError, "0 steps"),
    ],
)
def test_what_cannot_be_swept_is_told_before_the_work(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        rockmate.sweep(nn.Identity(), None, **options)  # a model that could not be captured


def test_the_name_stays_a_function() -> None:
    assert callable(rockmate.sweep)
    __import__("rockmate.curves.sweep_run")
    assert callable(rockmate.sweep)
