"""The yardstick is the knapsack's optimum, by trying every choice.

The table tells hits from misses; the command prints it.
"""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench import plan_quality
from bench.quality.knapsack import UnsolvedKnapsackError, plain_knapsack
from bench.quality.page import page
from bench.quality.targets import Row, rows
from rockmate import Plan, Planner
from rockmate.schedule.simulate import simulate

# --- the yardstick --------------------------------------------------------------------------------


@cache
def baseline() -> Plan:
    """Nothing recomputed: nine forward ops, one of them random, and two whose results (before a
    tanh) only the forward reads."""
    layers = [
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Dropout(0.1),
    ]
    return Planner(nn.Sequential(*layers, nn.Linear(32, 32)).train(), torch.ones(256, 32)).plan(1.0)


def needed_values(plan: Plan, recomputed: frozenset[int]) -> set[Any]:
    """Forward values that have to be saved if just these ops run again."""
    forward = {storage: op.index for op in plan.graph.forward_ops for storage in op.writes}
    readers = [
        op for op in plan.graph.ops if op.index not in forward.values() or op.index in recomputed
    ]
    read = {storage for op in readers for storage in op.reads if storage in forward}
    return {storage for storage in read if forward[storage] not in recomputed} | {
        s for s in forward if s.is_output
    }


def least_ms(plan: Plan, limit_bytes: int) -> float | None:
    """The least recomputation time over every choice of ops, None where no choice saves so
    little."""
    ops = [op for op in plan.graph.forward_ops if op.recompute_target is not None]
    times = []
    for count in range(len(ops) + 1):
        for chosen in itertools.combinations(ops, count):
            recomputed = frozenset(op.index for op in chosen)
            num_bytes = sum(storage.num_bytes for storage in needed_values(plan, recomputed))
            num_bytes += sum(5056 for op in chosen if op.is_random)
            if num_bytes <= limit_bytes:
                times.append(sum(plan.costs.recompute[index].time_ms for index in recomputed))
    return min(times, default=None)


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.3])
def test_yardstick_recomputes_for_the_least_time_of_all_choices(share: float) -> None:
    plan = baseline()
    limit_bytes = int(share * plan.simulation.saved_bytes)
    schedule = plain_knapsack(plan.graph, plan.costs, limit_bytes)
    schedule.verify(plan.graph)
    recompute = [index for index in schedule.backward if index in schedule.forward]
    assert len(recompute) == len(set(recompute))
    least = least_ms(plan, limit_bytes)
    assert least is not None
    assert (
        least * (1 - 1e-9)
        <= sum(plan.costs.recompute[index].time_ms for index in recompute)
        <= least * 1.003
    )
    assert (share == 1.0) == (not recompute)
    assert simulate(plan.graph, schedule, plan.costs).saved_bytes <= limit_bytes


def test_yardstick_recomputes_right_before_the_first_reader() -> None:
    plan = baseline()
    ops = plan.graph.ops
    backward = plain_knapsack(plan.graph, plan.costs, plan.simulation.saved_bytes // 2).backward
    for position, index in enumerate(backward):
        if ops[index].phase.value == "forward":
            made = set(ops[index].writes)
            reader = next(
                later
                for later in range(position + 1, len(backward))
                if made & set(ops[backward[later]].reads)
            )
            assert all(
                ops[between].phase.value == "forward" for between in backward[position + 1 : reader]
            )


def test_yardstick_refuses_a_limit_below_what_has_to_be_saved() -> None:
    plan = baseline()
    held_bytes = sum(storage.num_bytes for storage in plan.graph.storages if storage.is_output)
    assert least_ms(plan, held_bytes - 1) is None
    with pytest.raises(UnsolvedKnapsackError, match=f"{held_bytes - 1:,} bytes"):
        plain_knapsack(plan.graph, plan.costs, held_bytes - 1)


# --- the table ------------------------------------------------------------------------------------

HEAD = {
    "processor": "p",
    "machine": "m",
    "num_cores": 2,
    "num_threads": 1,
    "load_average": 0.0,
    "python": "3",
    "torch": "2",
    "transformers": "5",
    "commit": "c",
    "command": "x",
    "tiny": False,
}


def model_line(model: str = "llama", **changes: Any) -> dict[str, Any]:
    line = HEAD | {
        "kind": "model",
        "model": model,
        "num_ops": 10,
        "baseline_peak_bytes": 1000,
        "baseline_ms": 100.0,
        "timings_s": {"capture": 50.0, "costs": 1.0, "solve": 1.5},
        "first_plan_s": 0.25,
        "minimum_peak_bytes": {"none": 1000, "chen": 300, "rotor": 200, "rockmate": 100},
        "minimum_places": {"rotor": "one place", "rockmate": "another"},
        "minimum_own_shares": {"rotor": 0.5, "rockmate": 0.75},
        "whole_graph_limit_s": 60.0,
        "proved_minimum_bytes": 90,
        "loss_only_minimum_bytes": {"rotor": 200, "rockmate": 60},
        "frontiers": {"rockmate": [[100, 150.0], [500, 110.0], [1000, 100.0]]},
    }
    return line | changes


def plan_line(budget: float, ms: float, **changes: Any) -> dict[str, Any]:
    line = {
        "kind": "plan",
        "model": "llama",
        "purpose": "budget",
        "strategy": "rockmate",
        "budget": budget,
        "is_feasible": True,
        "budget_bytes": int(1000 * budget),
        "peak_bytes": int(1000 * budget),
        "ms": ms,
        "ratio": ms / 100.0,
        "lower_bound_ms": 100.0,
        "gap": ms / 100.0 - 1.0,
        "is_proved": True,
        "chunks": "",
    }
    return line | changes


def row(start: str, *lines: dict[str, Any]) -> Row:
    """The one row whose text begins like that."""
    found = [row for row in rows(lines) if row.what.startswith(start)]
    assert len(found) == 1, found
    return found[0]


def test_nothing_measured_is_neither_hit_nor_missed() -> None:
    bare = model_line(frontiers={})
    del bare["minimum_peak_bytes"], bare["loss_only_minimum_bytes"]
    assert {found.is_hit for found in rows([bare])} == {None}
    assert "not measured" in row("llama at 0.48:", bare).cells


def test_gap_rows_take_the_largest_and_the_median() -> None:
    lines = [model_line(), plan_line(1.0, 100.0), plan_line(0.5, 101.5), plan_line(0.25, 102.5)]
    largest, median = row("gap to the lower bound", *lines), row("the same: median", *lines)
    assert (largest.figure, largest.is_hit) == ("2.50 %", False)
    assert largest.where == "llama at 0.25; 2 of 3 within"
    assert (median.figure, median.is_hit) == ("1.50 %", False)
    assert row("gap to the lower bound", *lines[:3]).is_hit
    assert row("the same: median", *lines[:3]).is_hit
    below = plan_line(0.25, 0.0, is_feasible=False)
    assert (
        "(1 below the smallest peak left out)"
        in row("gap to the lower bound", *lines[:3], below).what
    )


@pytest.mark.parametrize(
    ("budget", "ratio", "is_hit"), [(0.25, 1.06, True), (0.25, 1.08, False), (0.24, 1.08, None)]
)
def test_gap_of_the_series_counts_budgets_with_a_target(
    budget: float, ratio: float, is_hit: bool | None
) -> None:
    chunked = {
        "kind": "chunked",
        "model": "llama",
        "budget": budget,
        "budget_bytes": 250,
        "peak_bytes": 250,
        "ratio": ratio,
    }
    lines = [model_line(), HEAD | chunked | {"lower_bound_ratio": 1.05, "chunks": ""}]
    assert row("the same of the series", *lines).is_hit is is_hit
    noted = any(
        line.startswith("- llama at 0.25, only the loss returned: 3.00 %, unchunked")
        for line in page(lines)
    )
    assert noted is (is_hit is False)


def test_notes_say_what_is_out_of_reach_and_what_planning_is_spent_on() -> None:
    peaks = {"none": 1000, "chen": 300, "rotor": 200, "rockmate": 160}
    unknown, out_of_reach = (
        model_line(minimum_peak_bytes=peaks),
        model_line(minimum_peak_bytes=peaks, proved_minimum_bytes=150),
    )
    assert "whether 0.7 can be reached is not known: ours has 0.800" in "\n".join(page([unknown]))
    assert "below 0.750 of Rotor's: 0.7 is out of reach." in "\n".join(page([out_of_reach]))
    assert not any(
        line.startswith("- gpt2-12: measuring") for line in page([model_line("gpt2-12")])
    )
    assert any(
        line.startswith("- gpt2-12: measuring")
        for line in page([model_line("gpt2-12", tightest_plan_s=0.5)])
    )


def test_two_layer_models_stand_apart() -> None:
    name = "llama-2layer"
    ours, optimum = (
        plan_line(0.5, 110.0, model=name, purpose="whole graph"),
        plan_line(0.5, 108.0, model=name, purpose="whole graph"),
    )
    optimum["strategy"] = "checkmate"
    lines = [model_line(name), plan_line(0.5, 110.0, model=name), ours, optimum]
    assert row("gap to the lower bound", *lines).is_hit is None
    whole = row("gap to whole-graph", *lines)
    assert (whole.figure, whole.is_hit) == ("2.00 %", False)
    unproved = row("gap to whole-graph", *lines[:3], optimum | {"is_proved": False})
    assert unproved.is_hit is None
    assert "1 not proved" in unproved.what
    assert "60 s a solve of the 600 allowed" in unproved.what


@pytest.mark.parametrize(("ratio", "is_hit"), [(1.10, True), (1.11, False)])
def test_series_rows_hold_the_ratio_against_its_target(ratio: float, is_hit: bool) -> None:
    assert (
        row(
            "llama at 0.48:",
            model_line(),
            plan_line(0.48, 100 * ratio, ratio=ratio, purpose="series"),
        ).is_hit
        is is_hit
    )


def test_series_row_of_an_infeasible_budget_is_missed() -> None:
    found = row(
        "llama at 0.25:", model_line(), plan_line(0.25, 0.0, purpose="series", is_feasible=False)
    )
    assert (found.figure, found.is_hit) == ("infeasible", False)


@pytest.mark.parametrize(
    ("ratio", "peak_bytes", "is_hit"), [(1.10, 480, True), (1.11, 480, False), (1.10, 481, False)]
)
def test_rows_in_chunks_have_the_target_and_fit_the_budget(
    ratio: float, peak_bytes: int, is_hit: bool
) -> None:
    chunked = {
        "kind": "chunked",
        "model": "llama",
        "budget": 0.48,
        "budget_bytes": 480,
        "peak_bytes": peak_bytes,
        "ratio": ratio,
    }
    found = row(
        "llama at 0.48, only the loss",
        model_line(),
        chunked | {"lower_bound_ratio": 1.05, "chunks": "4"},
    )
    assert found.is_hit is is_hit
    assert "in 4 chunks; no considered graph has a schedule below 1.050" in found.where


@pytest.mark.parametrize(("ours_ms", "is_hit"), [(110.0, True), (110.01, False), (None, False)])
def test_yardstick_row(ours_ms: float | None, is_hit: bool) -> None:
    yardstick = {
        "kind": "yardstick",
        "model": "llama",
        "budget_bytes": 500,
        "ms": 110.0,
        "ours_ms": ours_ms,
    }
    assert row("time beyond the plain knapsack", model_line(), yardstick).is_hit is is_hit


def test_soundness_rows_name_what_fails() -> None:
    lines = [
        model_line(),
        plan_line(0.5, 120.0),
        plan_line(0.6, 130.0, peak_bytes=601),
        plan_line(0.7, 99.0, strategy="chen"),
    ]
    assert row("simulated peak", *lines).where == "llama at 0.600"
    assert row("simulated peak", *lines).is_hit is False
    assert row("plans at all budgets", *lines).where == "llama"
    assert row("plans at all budgets", *lines[:2]).is_hit
    assert row("plans at all budgets", *lines[:2], lines[2] | {"chunks": "4 recompute"}).is_hit
    assert (
        row("the same, those in chunks", *lines[:2], lines[2] | {"chunks": "4 recompute"}).where
        == "llama"
    )
    assert row("no schedule", *lines).is_hit
    beaten = row("no schedule", *lines, plan_line(0.7, 101.0, lower_bound_ms=100.0))
    assert (beaten.where, beaten.is_hit) == ("llama chen at 0.700", False)
    assert row("frontier", model_line()).is_hit
    assert (
        row("frontier", model_line(frontiers={"chen": [[100, 120.0], [200, 120.0]]})).where
        == "llama chen"
    )


def test_smallest_peak_planning_and_strategy_rows() -> None:
    assert row("smallest feasible peak", model_line()).figure == "0.500"
    assert (
        row(
            "smallest feasible peak", model_line(minimum_peak_bytes={"rotor": 100, "rockmate": 71})
        ).is_hit
        is False
    )
    assert row("the same where only the loss", model_line()).figure == "0.300"
    assert (
        row(
            "the same where only the loss",
            model_line(loss_only_minimum_bytes={"rotor": 100, "rockmate": 71}),
        ).is_hit
        is False
    )
    assert row("planning, capture not counted, 12", model_line("gpt2-12")).figure == "2.75 s"
    assert (
        row("planning, capture not counted, 12", model_line("gpt2-12", first_plan_s=0.6)).is_hit
        is False
    )
    twelve = row(
        "planning, capture not counted, 12",
        model_line("gpt2-12"),
        model_line("bert-base", first_plan_s=0.6),
    )
    assert (twelve.where, twelve.is_hit) == ("bert-base; 1 of 2 within", False)
    assert (
        row(
            "the same and a second plan, at the smallest peak, 12",
            model_line("gpt2-12", tightest_plan_s=0.5),
        ).figure
        == "3.25 s"
    )
    pair = [plan_line(0.5, 110.0, strategy="chen"), plan_line(0.5, 109.0)]
    assert row("time beyond another", model_line(), *pair).is_hit
    assert (
        row("time beyond another", model_line(), pair[0], pair[1] | {"ms": 110.1}).is_hit is False
    )
    assert row("time beyond another", model_line(), pair[0]).is_hit is False


# --- the command ----------------------------------------------------------------------------------


def test_command_measures_writes_and_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stem = tmp_path / "quality"
    chosen = [
        "--tiny",
        "--quick",
        "--checkmate-limit",
        "1",
        "--model",
        "gpt2-2layer",
        "--model",
        "mlp",
    ]
    plan_quality.main([*chosen, "--output", str(stem)])
    printed = capsys.readouterr().out
    text = Path(f"{stem}.md").read_text()
    assert printed == text
    for name in ("gpt2-2layer", "mlp"):
        assert (stem / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in Path(f"{stem}.jsonl").read_text().splitlines()]
    assert {record["kind"] for record in records} >= {"model", "plan", "yardstick"}
    strategies = {
        record["strategy"]
        for record in records
        if record["kind"] == "plan" and record["model"] == "gpt2-2layer"
    }
    assert strategies == {"none", "chen", "rotor", "checkmate", "rockmate"}
    assert row("simulated peak", *records).is_hit
    assert row("no schedule", *records).is_hit
    monkeypatch.setattr(plan_quality, "measure", None)
    plan_quality.main([*chosen, "--output", str(stem)])
    assert capsys.readouterr().out == text, "a finished model is not measured again"
    plan_quality.main(["--read", f"{stem}.jsonl"])
    assert capsys.readouterr().out == text


def test_command_refuses_a_model_that_is_not_in_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        plan_quality.main(["--model", "gpt3"])
    assert "gpt2-deep" in capsys.readouterr().err
