"""What a plan says of itself is what its schedule does.

Checked by a replay of its own, that knows nothing of the reports.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import REGIMES, budget_for, planned
from made_of import mlp
from torch import nn

from rockmate import Plan, Planner, UnknownNameError
from rockmate.capture.provenance import source_lines
from rockmate.graph.ir import Graph, Storage
from rockmate.ops.rng import CPU_STATE_BYTES
from rockmate.plan.block_table import live_at
from rockmate.schedule.schedule import Schedule

FEW = ("gpt2", "hf-resnet", "mlp")


def plans_of(name: str, number: int) -> list[Plan]:
    planner = planned(name).planner
    low, high = planner.minimum_peak_bytes, planner.baseline_peak_bytes
    return [planner.plan(low + (high - low) * index // (number - 1)) for index in range(number)]


def plan_of(name: str, regime: str) -> Plan:
    planner = planned(name).planner
    return planner.plan(budget_for(planner, regime))


@dataclass
class Replay:
    """A schedule walked step by step: which run of which op made what a step reads."""

    kept: set[str]
    backward_readers: dict[str, list[str]]
    num_runs: Counter[str]


def replay(graph: Graph, schedule: Schedule) -> Replay:
    made_at: dict[Storage, int] = {}
    kept, readers = set(), {}
    for position, index in enumerate(schedule.steps):
        op = graph.ops[index]
        is_backward = position >= len(schedule.forward)
        for storage in op.reads:
            if is_backward:
                readers.setdefault(storage.name, []).append(op.name)
                if storage in made_at and made_at[storage] < len(schedule.forward):
                    kept.add(storage.name)
        made_at.update(dict.fromkeys(op.writes, position))
    kept |= {storage.name for storage in graph.storages if storage.is_output}
    return Replay(kept, readers, Counter(graph.ops[index].name for index in schedule.steps))


# --- one value ------------------------------------------------------------------------------------


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("name", FEW)
def test_every_storage_is_explained_as_the_schedule_treats_it(name: str, regime: str) -> None:
    plan = plan_of(name, regime)
    truth = replay(plan.graph, plan.schedule)
    for storage in plan.graph.storages:
        (told,) = plan.explain(storage.name).storages
        assert (told.name, told.num_bytes) == (storage.name, storage.num_bytes)
        assert told.backward_readers == tuple(
            dict.fromkeys(truth.backward_readers.get(storage.name, ()))
        )
        if storage.producer is None:
            continue
        assert told.module == storage.producer.module
        assert told.num_recomputations == max(0, truth.num_runs[storage.producer.name] - 1)
        assert told.recompute_ms == pytest.approx(
            told.num_recomputations * plan.costs.recompute[storage.producer.index].time_ms
        )
        assert told.is_kept == (storage.name in truth.kept)
        assert len(told.residency) == truth.num_runs[storage.producer.name]


def test_known_answer_on_a_small_model() -> None:
    """Two layers: at the least budget the first layer's GELU runs again, and its input is what is
    kept."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(mlp(16, 64) for _ in range(2)))
    planner = Planner(model, torch.randn(256, 16))
    plan = planner.plan(1.0)
    (told,) = plan.explain("0.1").storages
    found = told.name, told.num_bytes, told.is_kept, told.num_recomputations
    assert found == ("gelu", 256 * 64 * 4, True, 0)
    assert told.made_by == "aten.gelu.default(float32[256, 64])"
    (reader,) = [
        op.name
        for op in plan.graph.ops
        if "0.2.weight" in [role.name for _, role in op.final_gradients]
    ]
    assert told.backward_readers == (reader,)
    steps = plan.schedule.rows(plan.snapshot.names)
    made, released = (
        next(i for i, row in enumerate(steps) if row.split()[2] == op) for op in ("gelu", reader)
    )
    assert told.residency == (
        f"made at step {made} (forward), released after {reader} at step {released} (backward)",
    )
    tight = planner.plan(planner.minimum_peak_bytes)
    text = str(tight.explain("gelu"))
    assert "not saved, recomputed once" in text
    assert "strategy 'rockmate', block " in text
    assert text.count("in memory") == 2
    assert "recomputed at step" in text


def test_submodule_stands_for_what_its_forward_makes() -> None:
    plan = plan_of("gpt2", "binding")
    told = plan.explain("transformer.h.1.mlp")
    inside = [
        op
        for op in plan.graph.ops
        if op.module.startswith("transformer.h.1.mlp") and op.phase.value != "backward"
    ]
    assert [storage.name for storage in told.storages] == [
        storage.name for op in inside for storage in op.writes
    ]
    assert str(told).startswith(f"transformer.h.1.mlp: makes {len(told.storages)} storages")
    assert len(plan.explain("transformer.h").storages) > len(told.storages)


def test_a_frozen_submodule_has_its_name_as_a_trained_one_has() -> None:
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 16), nn.GELU()), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1)
    )
    sample = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))

    def modules() -> list[str]:
        return [op.module for op in Planner(model, sample).plan(1.0).graph.forward_ops]

    trained = modules()
    model[0].requires_grad_(False)
    # The copy of the input belongs to no submodule.
    assert list(filter(None, modules())) == trained == ["0.0", "0.1", "1", "2", "3"]


def test_parameters_inputs_views_and_ops_are_known_by_name() -> None:
    plan = plan_of("gpt2", "binding")
    (weight,) = plan.explain("transformer.h.0.mlp.c_fc.weight").storages
    found = weight.kind.value, weight.num_bytes, weight.residency
    assert found == ("parameter", 32 * 128 * 4, ())
    assert "not counted" in str(weight)
    (tokens,) = plan.explain("input_ids").storages
    assert (tokens.kind.value, tokens.num_bytes) == ("input", 2 * 16 * 8)
    view = next(
        node
        for node, storage in plan.graph.storage_of.items()
        if storage.producer and node is not storage.root
    )
    assert plan.explain(view.name).storages[0].name == plan.graph.storage_of[view].name
    norm = next(op for op in plan.graph.ops if len(op.writes) == 3)
    assert [storage.name for storage in plan.explain(norm.name).storages] == [
        storage.name for storage in norm.writes
    ]


def test_line_of_the_users_code_is_told() -> None:
    plan = Planner(models.Stack(num_layers=1), torch.randn(64, 16)).plan(1.0)
    lines = Path(models.__file__).read_text().splitlines()
    sources = {op.name: op.source for op in plan.snapshot.ops}
    number = next(i for i, line in enumerate(lines, start=1) if "x = x + layer(x)" in line)
    # the layers of torch.nn are no code of the user's
    for name in ("addmm", "gelu", "addmm_1", "add"):
        assert sources[name].endswith(f"models.py:{number} in forward: x = x + layer(x)")
        assert not Path(sources[name]).is_absolute()
    assert {op.source for op in plan.snapshot.ops if op.phase == "backward"} == {""}
    assert f"  at line              models.py:{number}" in str(plan.explain("gelu"))
    with torch.device("meta"):
        model, x = models.Stack(num_layers=1), torch.randn(64, 16)
    elsewhere = Planner(model, x, machine="h100").plan(1.0)
    assert {op.source for op in elsewhere.snapshot.ops} == {op.source for op in plan.snapshot.ops}


def test_recording_lines_leaves_the_tracer_as_it_was() -> None:
    from torch.fx.proxy import TracerBase

    before = TracerBase.create_node
    Planner(models.Stack(num_layers=1), torch.randn(64, 16))
    assert TracerBase.create_node is before
    with pytest.raises(RuntimeError, match="inside"), source_lines():
        raise RuntimeError("inside")
    assert TracerBase.create_node is before


@pytest.mark.parametrize(
    ("asked", "suggested"),
    [
        ("transformer.h.0.mpl", "transformer.h.0.mlp"),
        ("mlp.c_fc", "transformer.h.0.mlp.c_fc"),
        ("native_layer_nrom", "native_layer_norm"),
        ("transformer.wte.wieght", "transformer.wte.weight"),
        ("TRANSFORMER.H.0.MLP", "transformer.h.0.mlp"),
        ("Transformer.WTE.wieght", "transformer.wte.weight"),
        ("MLP.c_fc", "transformer.h.0.mlp.c_fc"),
    ],
)
def test_unknown_name_suggests_close_ones(asked: str, suggested: str) -> None:
    with pytest.raises(UnknownNameError, match=re.escape(repr(asked))) as caught:
        plan_of("gpt2", "binding").explain(asked)
    assert suggested in str(caught.value)


@pytest.mark.parametrize("asked", [None, 3, "", " ", b"gelu", ["gelu"]])
def test_what_is_no_name_is_refused(asked: Any) -> None:
    with pytest.raises(
        UnknownNameError, match=re.escape(f"{asked!r} is no name. ") + r".*plan\.tree\(\)"
    ):
        plan_of("mlp", "binding").explain(asked)


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", models.TINY)
def test_what_is_live_adds_up_to_the_simulated_bytes(name: str) -> None:
    for plan in plans_of(name, 5):
        live = plan.live_at_peak()
        sizes = [num_bytes for _, num_bytes in live]
        live_bytes = plan.simulation.live_bytes[plan.simulation.peak_position]
        assert sum(sizes) == live_bytes == plan.predicted_peak_bytes
        assert sizes == sorted(sizes, reverse=True)
        assert min(sizes) > 0
        # at every step, not the peak alone
        assert plan.residency.simulation(plan.costs) == plan.simulation
        step = len(plan.schedule.forward) // 2
        sizes = (num_bytes for _, num_bytes in live_at(plan, step))
        assert sum(sizes) == plan.simulation.live_bytes[step]


def test_storages_at_the_peak_are_named() -> None:
    plan = plan_of("mlp", "loose")
    described = dict(plan.live_at_peak())
    assert len(described) == len(plan.live_at_peak())
    names = {re.match(r"\w+", text)[0] for text in described if " of " not in text.split(" (")[0]}  # pyright: ignore
    assert names <= {storage.name for storage in plan.graph.storages if not storage.is_static}
    assert any("activation of" in text for text in described)


# --- blocks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_block_table_adds_up(name: str) -> None:
    for plan in plans_of(name, 4):
        rows = plan.block_rows()
        graph, schedule = plan.graph, plan.schedule
        runs = Counter(schedule.steps)
        assert sum(row.num_ops for row in rows) == len(graph.ops)
        assert sum(row.made_bytes for row in rows) == sum(
            op.written_bytes for op in graph.forward_ops
        )
        states = sum(
            CPU_STATE_BYTES if op.is_random else op.saved_state_bytes
            for op in graph.forward_ops
            if runs[op.index] > 1 and schedule.steps.index(op.index) < len(schedule.forward)
        )
        assert sum(row.kept_bytes for row in rows) == plan.simulation.saved_bytes - states
        assert sum(row.num_recomputed for row in rows) == schedule.num_recomputations()
        recompute = sum(
            (count - 1) * plan.costs.recompute[index].time_ms for index, count in runs.items()
        )
        assert sum(row.recompute_ms for row in rows) == pytest.approx(recompute)
        assert max(row.peak_bytes for row in rows) == plan.predicted_peak_bytes
        (peak,) = [row for row in rows if row.is_peak]
        assert peak.peak_bytes == plan.predicted_peak_bytes
        table = plan.block_table().splitlines()
        assert len(table) == len(rows) + 2
        assert all(row.name in line for row, line in zip(rows, table[2:], strict=True))
        assert sum("<- peak" in line for line in table) == 1


# --- picture --------------------------------------------------------------------------------------


def test_peak_note_of_the_plot_names_the_largest_storages() -> None:
    from rockmate.curves.page import peak_text

    plan = plan_of("gpt2", "binding")
    note = peak_text(plan, 3)
    assert note.splitlines()[0] == f"peak in {plan.peak_place()}"
    assert len(note.splitlines()) == 5
    for live, line in zip(plan.live_at_peak(), note.splitlines()[1:4], strict=False):
        assert live.description in line
    assert "more" in note.splitlines()[-1]
