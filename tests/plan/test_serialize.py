"""A plan that was saved and loaded is the same plan.

It runs without a solver, and on nothing but what it was made for.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from helpers import (
    REGIMES,
    assert_alike,
    assert_same_steps,
    budget_for,
    planned,
    train,
    workload_loss,
)
from made_of import made_of
from torch import nn

import rockmate.costs.measure
from rockmate import (
    InvalidBudgetError,
    Plan,
    PlanFileError,
    PlanMismatchError,
    Planner,
    RockmateModule,
    SignatureMismatchError,
)
from rockmate.schedule.schedule import baseline_schedule
from rockmate.schedule.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
FEW = ("gpt2", "hf-resnet", "mlp")
WITHOUT_SOLVERS = """
import sys


class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "highspy":
            raise ModuleNotFoundError(f"{name} is blocked", name=name)


sys.meta_path.insert(0, Blocked())
import torch
import models
import rockmate.costs.measure
from rockmate import Plan, RockmateModule
from rockmate.planning.step import capture_step


def never(*args, **kwargs):
    raise AssertionError("an op was measured")


rockmate.costs.measure._Call.measure_time = rockmate.costs.measure._Call.measure_overhead = never
torch.set_num_threads(1)
torch.manual_seed(0)
model = models.Stack()
x = torch.randn(64, 16)
module = RockmateModule(model, x, plan=Plan.load(sys.argv[1]))
torch.manual_seed(1)
loss = module(x).square().sum()
loss.backward()
print(module.plan.snapshot.fingerprint, module.plan.snapshot.call_fingerprint)
print(loss.item().hex(), *(p.grad.double().sum().item().hex() for p in model.parameters()))
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"highspy", "checkmate", "rotor"}), "end")
try:
    from rockmate import Planner
except ModuleNotFoundError as error:
    print(error)
"""  # noqa: E501


def plan_of(name: str, regime: str = "binding") -> Plan:
    planner = planned(name).planner
    return planner.plan(budget_for(planner, regime))


@functools.cache
def stack_text() -> str:
    return Planner(models.Stack(), torch.randn(64, 16)).plan(1.0).to_text()


def edited(plan: Plan, change: Callable[[dict[str, Any]], None], *, sealed: bool = False) -> str:
    """The plan's text after a change of its content.

    Sealed, with the digest of what it then holds.
    """
    content = json.loads(plan.to_text())
    change(content)
    if sealed:
        from rockmate.plan.serialize import _digest

        content["digest"] = _digest(content)
    return json.dumps(content)


def set_entry(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.__setitem__(key, value)


# --- the same plan --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FEW)
def test_text_reads_back_as_the_same_plan(name: str) -> None:
    for regime in REGIMES:
        plan = plan_of(name, regime)
        text = plan.to_text()
        recompute = Plan.from_text(text)
        assert recompute.schedule == plan.schedule
        assert recompute.simulation == plan.simulation
        assert recompute.costs == plan.costs
        for promise in ("budget_bytes", "predicted_peak_bytes", "predicted_ms"):
            assert getattr(recompute, promise) == getattr(plan, promise)
        assert recompute.to_text() == text
        assert recompute.summary() == plan.summary()
        assert recompute.block_table() == plan.block_table()
        assert recompute.live_at_peak() == plan.live_at_peak()
        value = plan.snapshot.ops[len(plan.schedule.forward) // 2].name
        assert str(recompute.explain(value)) == str(plan.explain(value))


def test_text_is_readable_json_that_says_what_the_plan_promises() -> None:
    plan = replace(plan_of("gpt2"), strategy="chen", bound=0.75)
    text = plan.to_text()
    content = json.loads(text)
    promised = "budget_bytes predicted_peak_bytes predicted_ms baseline_peak_bytes baseline_ms"
    for key in (*promised.split(), "minimum_peak_bytes"):
        assert content[key] == getattr(plan, key)
    assert content["strategy"] == "chen"
    assert content["schedule"] == plan.schedule.rows(plan.snapshot.names)
    assert tuple(content["live_bytes"]) == plan.simulation.live_bytes
    assert content["torch"] == ".".join(torch.__version__.split(".")[:2])
    assert "int64[2, 16]" in content["call"]
    assert max(len(line) for line in text.splitlines() if "live_bytes" not in line) < 1000
    recompute = Plan.from_text(text)
    assert (recompute.strategy, recompute.lower_bound_ms) == ("chen", 0.75)
    assert recompute.optimality_gap == (plan.predicted_ms - 0.75) / plan.baseline_ms


@pytest.mark.parametrize("name", FEW)
def test_loaded_plan_trains_bit_for_bit_like_the_planned_module(name: str, tmp_path: Path) -> None:
    case = planned(name)
    direct = case.module("minimum")
    direct.plan.save(tmp_path / "plan.json")
    reference = train(direct, case.workload.model, workload_loss(case.workload))
    case.module("minimum")  # puts the weights back
    loaded = RockmateModule(
        case.workload.model, case.workload.sample, plan=Plan.load(tmp_path / "plan.json")
    )
    ours = train(loaded, case.workload.model, workload_loss(case.workload))
    assert_same_steps(ours, reference)
    assert loaded.plan.schedule == direct.plan.schedule
    assert loaded.plan.simulation == direct.plan.simulation


@pytest.mark.parametrize("gradients", ["accumulated", "returned"])
def test_options_of_the_capture_travel_with_the_plan(gradients: Any) -> None:
    model, x = models.Stack(dropout=0.0), torch.randn(64, 16)
    plan = Planner(model, x, gradients=gradients).plan(1.0)
    module = RockmateModule(model, x, plan=Plan.from_text(plan.to_text()))
    parameters = list(model.parameters())
    if gradients == "returned":
        got = torch.autograd.grad(module(x).sum(), parameters)
    else:
        module(x).sum().backward()
        got = [parameter.grad for parameter in parameters]
    assert_alike(got, torch.autograd.grad(model(x).sum(), parameters))


def test_plan_of_another_planner_runs_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Planner(models.Stack(), torch.randn(64, 16)).plan(1.0)
    monkeypatch.setattr(rockmate.costs.measure._Call, "measure_time", None)
    monkeypatch.setattr(rockmate.costs.measure._Call, "measure_overhead", None)
    twin, x = models.Stack(), torch.randn(64, 16)
    module = RockmateModule(twin, x, plan=plan)
    assert module.plan.graph is not plan.graph
    with pytest.raises(SignatureMismatchError):
        module(torch.randn(65, 16))


# --- elsewhere ------------------------------------------------------------------------------------


def test_loaded_plan_runs_in_a_process_without_solvers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = models.Stack()
    x = torch.randn(64, 16)
    planner = Planner(model, x)
    plan = planner.plan(planner.minimum_peak_bytes)
    plan.save(tmp_path / "plan.json")
    torch.manual_seed(1)
    loss = model(x).square().sum()
    loss.backward()
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_SOLVERS, str(tmp_path / "plan.json")],
        capture_output=True,
        check=False,
        text=True,
        env={
            "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}",
            "PYTHONHASHSEED": "12345",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert ran.returncode == 0, ran.stderr
    fingerprints, numbers, loaded, planning = ran.stdout.splitlines()
    assert fingerprints.split() == [plan.snapshot.fingerprint, plan.snapshot.call_fingerprint]
    sums = [
        parameter.grad.double().sum().item().hex()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    assert numbers.split() == [loss.item().hex(), *sums]
    assert loaded == "end"
    assert "highspy is blocked" in planning  # so the block works


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "sample", "named"),
    [
        (models.Stack(num_layers=3), torch.randn(64, 16), "layers.3.0.weight"),
        (models.Stack(dropout=0.5), torch.randn(64, 16), "0.5"),
        (models.Stack(), torch.randn(32, 16), r"float32\[32, 16\]"),
        (models.Stack().double(), torch.randn(64, 16).double(), r"float64\[64, 16\]"),
        (models.Stack(), {"x": torch.randn(64, 16)}, "'x'"),
        (models.Stack(), torch.randn(16, 64).t(), "input 0 is"),
        (
            models.Stack().requires_grad_(False).requires_grad_(True).bfloat16(),
            torch.randn(64, 16).bfloat16(),
            "bfloat16",
        ),
        (nn.Linear(16, 16), torch.randn(64, 16), "layers.0.0.weight"),
    ],
    ids=["layers", "dropout", "batch", "dtype", "keyword", "strides", "half", "architecture"],
)
def test_plan_for_something_else_is_refused_by_name(
    model: nn.Module, sample: Any, named: str
) -> None:
    with pytest.raises(PlanMismatchError, match=named):
        RockmateModule(model.train(), sample, plan=Plan.from_text(stack_text()))


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_file_that_was_cut_off_is_refused(share: float, tmp_path: Path) -> None:
    text = plan_of("mlp").to_text()
    (tmp_path / "plan.json").write_text(text[: int(share * len(text))])
    with pytest.raises(PlanFileError, match=r"plan\.json.*Save the plan again"):
        Plan.load(tmp_path / "plan.json")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_entry("format", "something"), "no plan"),
        (set_entry("version", 2), "format version 2"),
        (set_entry("budget_bytes", 1 << 40), "damaged or edited"),
        (lambda content: content["costs"][3].__setitem__(1, 7), "damaged or edited"),
        (lambda content: content["ops"][3].__setitem__("reads", []), "damaged or edited"),
        (lambda content: content.pop("schedule"), "no schedule"),
    ],
)
def test_damaged_file_is_refused(change: Callable[[dict[str, Any]], None], said: str) -> None:
    with pytest.raises(PlanFileError, match=said):
        Plan.from_text(edited(plan_of("mlp"), change))


@pytest.mark.parametrize(
    "change",
    [lambda c: c.pop("storages"), lambda c: c["costs"].pop(), lambda c: c["ops"][0].pop("call")],
)
def test_file_that_lacks_something_is_refused_even_if_its_digest_fits(
    change: Callable[[dict[str, Any]], None],
) -> None:
    with pytest.raises(PlanFileError, match="no plan that can be read"):
        Plan.from_text(edited(plan_of("mlp"), change, sealed=True))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(PlanFileError, match="no text"):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(PlanFileError, match="no plan"):
        Plan.from_text("[1, 2]")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rows: rows.pop(0), "reads .* before it is made"),
        (lambda rows: rows.pop(), "never runs"),
        (lambda rows: rows.insert(0, "backward 0 addmm"), "after one of the backward"),
        (lambda rows: rows.insert(0, rows[-1].replace("backward", "forward")), "in the forward"),
        (lambda rows: rows.append(rows[-1]), "only once"),
        (lambda rows: rows.append("backward 9999 addmm"), "op 9999"),
        (lambda rows: rows.append("sideways 3 addmm"), "sideways"),
        (lambda rows: rows.__setitem__(0, rows[0] + "_2"), "would have to read"),
    ],
)
def test_invalid_edit_of_the_schedule_is_refused(
    change: Callable[[list[str]], None], said: str
) -> None:
    with pytest.raises(PlanFileError, match=said):
        Plan.from_text(edited(plan_of("mlp"), lambda content: change(content["schedule"])))


@made_of(lambda: {"linear": nn.Linear(16, 16), "mean": nn.Buffer(torch.zeros(16))})
class RunningMean(nn.Module):
    """Copies a mean into a buffer, by an op whose result nothing else reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        self.mean.copy_(hidden.detach().mean(0))
        return hidden.square().sum()


def test_edit_that_leaves_out_the_update_of_a_buffer_is_refused() -> None:
    plan = Planner(RunningMean(), torch.randn(8, 16)).plan(1.0)
    (update,) = plan.snapshot.updates
    maker = next(i for i, op in enumerate(plan.snapshot.ops) if update in op.writes)

    def leave_out(content: dict[str, Any]) -> None:
        del content["schedule"][plan.schedule.steps.index(maker)]

    name = plan.snapshot.ops[maker].name
    with pytest.raises(PlanFileError, match=f"never runs {name}"):
        Plan.from_text(edited(plan, leave_out))


def test_edit_that_draws_in_another_order_is_refused() -> None:
    plan = plan_of("gpt2", "loose")
    masks = [
        position
        for position, index in enumerate(plan.schedule.forward)
        if plan.graph.ops[index].is_random
    ]

    def swap(content: dict[str, Any]) -> None:
        rows = content["schedule"]
        rows[masks[0]], rows[masks[1]] = rows[masks[1]], rows[masks[0]]

    with pytest.raises(PlanFileError, match=r"another order|before it is made"):
        Plan.from_text(edited(plan, swap))


def test_edit_above_the_promised_peak_is_refused_and_one_below_is_taken() -> None:
    case = planned("gpt2")
    tight, loose = plan_of("gpt2", "minimum"), plan_of("gpt2", "loose")
    everything = baseline_schedule(tight.graph).rows(tight.snapshot.names)
    with pytest.raises(
        PlanFileError,
        match=f"{loose.predicted_peak_bytes:,} bytes.* above the {tight.predicted_peak_bytes:,} bytes",  # noqa: E501
    ):
        Plan.from_text(edited(tight, set_entry("schedule", everything)))
    rows = tight.schedule.rows(tight.snapshot.names)
    lower = Plan.from_text(edited(loose, set_entry("schedule", rows)))
    case.module("loose")
    module = RockmateModule(case.workload.model, case.workload.sample, plan=lower)
    assert module.plan.schedule == tight.schedule
    assert module.plan.predicted_peak_bytes == tight.predicted_peak_bytes
    assert module.plan.predicted_ms == simulate(tight.graph, tight.schedule, tight.costs).time_ms


def test_in_place_where_nothing_ends_is_refused() -> None:
    case = planned("gpt2")
    plan = plan_of("gpt2")
    position = next(i for i in range(len(plan.schedule.forward)) if i not in plan.schedule.in_place)

    def mark(content: dict[str, Any]) -> None:
        content["schedule"][position] += " in-place"

    case.module("loose")
    with pytest.raises(PlanMismatchError, match=f"step {position} .*in-place"):
        RockmateModule(
            case.workload.model, case.workload.sample, plan=Plan.from_text(edited(plan, mark))
        )


def test_budget_and_plan_exclude_each_other() -> None:
    model, x = models.Stack(), torch.randn(64, 16)
    plan = Planner(model, x).plan(1.0)
    with pytest.raises(TypeError, match="budget and plan; give one of them"):
        RockmateModule(model, x, budget=0.5, plan=plan)
    with pytest.raises(InvalidBudgetError, match=r"a budget .* or a plan"):
        RockmateModule(model, x)
    with pytest.raises(
        TypeError, match=r"outputs cannot be given with a plan\. .* outputs='all'.*Leave that out"
    ):
        RockmateModule(model, x, plan=plan, outputs="loss")
    with pytest.raises(
        TypeError,
        match="strategy cannot be given with a plan. The plan was made with strategy='rockmate', ",  # noqa: RUF043
    ):
        RockmateModule(model, x, plan=plan, strategy="rotor")
    with pytest.raises(TypeError, match=r"a sample must be given with a plan.* Give the sample"):
        RockmateModule(model, plan=plan)


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    model, x = models.Stack(), torch.randn(64, 16)
    planner = Planner(model, x)
    path = tmp_path / "plan.json"
    for given in ("plan.json", path, 3, planner, planner.plan(1.0).to_text()):
        with pytest.raises(
            TypeError, match=rf"is of type {type(given).__name__}; .*plan=Plan\.load\(path\)"
        ) as caught:
            RockmateModule(model, x, plan=given)  # pyright: ignore[reportArgumentType]
        assert len(str(caught.value)) < 400


def test_loaded_plan_has_no_graph_and_says_where_one_is() -> None:
    with pytest.raises(PlanMismatchError, match="RockmateModule"):
        _ = Plan.from_text(plan_of("mlp").to_text()).graph
