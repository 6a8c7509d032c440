"""Users' marks on real models: gradients stay eager's, counted runs obey, errors name the mark.

Behaviours of selective checkpointing are those that PyTorch documents: ops of a list are saved, all
decisions of a policy are asked for in the forward, and what must be saved never runs twice.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from typing import Any

import models
import pytest
import torch
from helpers import check_against_eager, counts_of, same_gradients, workload_loss
from made_of import made_of
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

import rockmate
from rockmate import MarkError, Plan, Planner, RockmateModule

_aten = torch.ops.aten


class Net(nn.Module):
    """Layers whose activations a backward needs, with two named values."""

    def __init__(self, how: str = "", depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(depth))
        self.how = how

    def block(self, layer: nn.Module, x: Tensor) -> Tensor:
        h = torch.sin(torch.tanh(layer(x)).exp())
        return h + x if self.how == "reentrant of residuals" else h

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.block(layer, x)
            if self.how == "name":
                x = rockmate.name(x, f"block_{index}")
            elif self.how == "save" and index == 1:
                x = rockmate.save(x)
            elif self.how == "recompute" and index == 1:
                x = rockmate.recompute(x, "second")
        return x.square().mean()


def sample() -> Tensor:
    return torch.randn(64, 32)


def marked(plan: Plan) -> dict[str, str]:
    return {storage.name: storage.mark for storage in plan.snapshot.storages if storage.mark}


# --- real models ----------------------------------------------------------------------------------

MARKS: dict[str, list[Mapping[str, str]]] = {
    "gpt2": [
        {"transformer.h.*.mlp": "recompute", "transformer.h.*.attn": "save"},
        {"aten.addmm": "save", "aten.native_layer_norm": "recompute"},
    ],
    "hf-resnet": [{"aten.convolution": "save"}, {"resnet.encoder.stages.*": "recompute"}],
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("name", MARKS)
def test_gradients_are_eagers_at_every_budget(name: str, index: int) -> None:
    workload, marks = models.tiny(name), MARKS[name][index]
    check_against_eager(
        workload.model, workload.sample, workload_loss(workload), num_steps=2, marks=marks
    )


def test_a_submodule_keeps_what_it_hands_on_free() -> None:
    planner = Planner(Net(), sample(), marks={"layers.*": "recompute"})
    # What a layer makes is read outside of it, so nothing is marked, and nothing is recomputed.
    assert not marked(planner.plan(1.0))
    workload = models.tiny("gpt2")
    marks = {"transformer.h.*": "recompute"}
    plan = Planner(workload.model, workload.sample, marks=marks).plan(1.0)
    assert plan.predicted_peak_bytes < 0.6 * plan.baseline_peak_bytes
    assert plan.optimality_gap < 1e-9


# --- names ----------------------------------------------------------------------------------------


def test_a_name_does_nothing_outside_of_a_capture() -> None:
    x = sample().requires_grad_()
    assert rockmate.name(x, "x") is x
    assert rockmate.save(x) is x
    assert rockmate.recompute(x) is x
    plain, named, x = Net(), Net("name"), sample()
    named.load_state_dict(plain.state_dict())
    assert counts_of(plain, x) == counts_of(named, x)


@pytest.mark.parametrize("how", ["name", "save", "recompute"])
def test_the_captured_step_is_that_without_names(how: str) -> None:
    def calls(how: str) -> list[str]:
        return [op.call for op in Planner(Net(how), sample()).plan(1.0).snapshot.ops]

    assert calls(how) == calls("")


def test_a_named_value_is_saved_or_recomputed() -> None:
    planner = Planner(Net("name"), sample(), marks={"block_0": "recompute", "block_1": "save"})
    plan = planner.plan(1.0)
    assert marked(plan) == {"sin": "recompute", "sin_1": "save"}
    assert "'block_0'" in plan.summary()
    assert "recompute, by 'block_0'" in str(plan.explain("sin"))
    assert not plan.residency.is_saved(plan.snapshot.names.index("sin"))
    for strategy in ("none", "chen", "rotor"):
        other = planner.plan(1.0, strategy=strategy)
        assert other.recompute_counts[plan.snapshot.names.index("sin")] == 1


def test_every_name_of_a_pattern_is_marked() -> None:
    plan = Planner(Net("name"), sample(), marks={"block_*": "recompute"}).plan(1.0)
    assert marked(plan) == dict.fromkeys(("sin", "sin_1", "sin_2"), "recompute")


@pytest.mark.parametrize(("how", "word"), [("save", "save"), ("recompute", "recompute")])
def test_marks_in_the_forward_need_no_argument(how: str, word: str) -> None:
    torch.manual_seed(0)
    plan = Planner(Net(how), sample()).plan(1.0)
    assert marked(plan) == {"sin_1": word}
    check_against_eager(Net(how), sample(), lambda module, _: ((), module(sample())))


@made_of(lambda: {"first": nn.Linear(32, 32), "last": nn.Linear(32, 1)})
class InPlace(nn.Module):
    """Changes a named value in place, through the name and through a view of it."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        named = rockmate.name(hidden.view(8, 8, 32), "view")
        named.mul_(2.0)
        return self.last(torch.tanh(hidden) + named.view(64, 32)).square().mean()


def test_a_named_value_that_is_changed_in_place() -> None:
    torch.manual_seed(0)
    check_against_eager(
        InPlace(), sample(), lambda module, _: ((), module(sample())), marks={"view": "save"}
    )


# --- policies -------------------------------------------------------------------------------------


def test_a_list_of_ops_is_saved() -> None:
    ops = [_aten.tanh.default, _aten.addmm.default]
    plan = Planner(Net(), sample(), policy=ops).plan(1.0)
    saved = {name for name, mark in marked(plan).items() if mark == "save"}
    assert saved == {"tanh", "tanh_1", "tanh_2", "addmm", "addmm_1", "addmm_2"}
    assert not plan.schedule.num_recomputations()


def test_a_policy_sees_each_op_of_the_forward_once_and_in_order() -> None:
    seen: list[tuple[Any, tuple[int, ...]]] = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        assert not context.is_recompute
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        seen.append((op, tuple(tensors[0].shape)))
        return CheckpointPolicy.PREFER_RECOMPUTE

    plan = Planner(Net(), sample(), policy=policy).plan(1.0)
    assert not marked(plan)
    block = [_aten.t.default, _aten.addmm.default, _aten.tanh.default, _aten.exp.default]
    assert [op for op, _ in seen[:5]] == [*block, _aten.sin.default]
    assert seen[2] == (_aten.tanh.default, (64, 32))
    assert len(seen) == 3 * 5 + 2


def test_a_policy_is_part_of_a_plans_file() -> None:
    model, x = Net(), sample()
    plan = Planner(model, x, policy=[_aten.tanh.default]).plan(0.8)
    read = Plan.from_text(plan.to_text())
    assert read.options == plan.options
    assert "s" in read.options.marks.decisions
    assert read.snapshot.fingerprint == plan.snapshot.fingerprint
    assert read.snapshot.fingerprint != Planner(model, x).plan(0.8).snapshot.fingerprint
    module = RockmateModule(model, x, plan=read, trial="never")
    assert counts_of(module, x)["tanh"] == 3


def test_other_sizes_keep_the_policy_and_the_names() -> None:
    model, x = Net("name"), sample()
    module = RockmateModule(
        model, x, 0.95, policy=[_aten.tanh.default], marks={"block_1": "recompute"}
    )
    reference = copy.deepcopy(model)
    for rows in (64, 48, 33, 80):
        part = torch.randn(rows, 32)
        same_gradients(module, reference, lambda each, part=part: each(part).backward())
        assert not module.plan.options.loss_chunks
        assert set(marked(module.plan).values()) == {"save", "recompute"}


# --- checkpoints in the model's code --------------------------------------------------------------


class Checkpointed(Net):
    """Each block is a checkpointed call of some kind."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            run = functools.partial(self.block, layer)
            if self.how == "reentrant of residuals":  # the input has three gradients, two inside
                x = checkpoint(run, x, use_reentrant=True) - x.cos()
            elif self.how == "reentrant":
                x = checkpoint(run, x, use_reentrant=True)
            else:
                x = checkpoint(run, x, use_reentrant=False)
        return x.square().mean()


@pytest.mark.parametrize("how", ["plain", "reentrant", "reentrant of residuals"])
def test_checkpoints_are_lifted(how: str, caplog: pytest.LogCaptureFixture) -> None:
    x = sample().requires_grad_()
    with caplog.at_level(logging.WARNING):
        plan = Planner(Checkpointed(how), x).plan(1.0)
    lines = [record.message for record in caplog.records if "are lifted" in record.message]
    assert len(lines) == 1
    assert lines[0].startswith("3 checkpointed calls")
    assert not plan.schedule.num_recomputations()
    assert not marked(plan)
    check_against_eager(Checkpointed(how), x, lambda module, _: ((), module(x)))


@pytest.mark.parametrize("how", ["plain", "reentrant"])
def test_checkpoints_are_honoured(how: str) -> None:
    x = sample().requires_grad_()
    plan = Planner(Checkpointed(how), x, existing_checkpoints="honour").plan(1.0)
    inner = {f"{op}{suffix}" for op in ("addmm", "tanh", "exp") for suffix in ("", "_1", "_2")}
    assert marked(plan) == dict.fromkeys(sorted(inner), "recompute") | {}
    assert plan.options.marks.honours_checkpoints
    options = {"existing_checkpoints": "honour"}
    check_against_eager(Checkpointed(how), x, lambda module, _: ((), module(x)), **options)


def test_a_reentrant_checkpoint_without_gradients_at_its_inputs_has_none_here() -> None:
    """Eager gives parameters inside of it no gradient, with a warning."""
    x = sample()
    message = "None of the inputs have requires_grad=True"
    with pytest.warns(UserWarning, match=message), pytest.raises(RuntimeError):
        Checkpointed("reentrant")(x).backward()
    with pytest.raises(rockmate.InvalidSampleError):
        Planner(Checkpointed("reentrant"), x)


def test_hugging_face_checkpointing_is_honoured() -> None:
    workload = models.tiny("gpt2")
    name = "activation_checkpointing_enable"
    model = workload.model
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    planner = Planner(workload.model, workload.sample, existing_checkpoints="honour")
    plan = planner.plan(1.0)
    assert set(marked(plan).values()) == {"recompute"}
    assert plan.predicted_peak_bytes < 0.6 * plan.baseline_peak_bytes


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("marks", "words"),
    [
        ({"layers.*": "keep"}, ["'keep'", "'save'", "'recompute'"]),
        ({"layer.*": "save"}, ["'layer.*'", "layers.0"]),
        ({"aten.addm": "save"}, ["'aten.addm'", "aten.addmm"]),
        ({"blok_1": "save"}, ["'blok_1'", "block_1"]),
        ({"block_1": "save", "aten.sin": "recompute"}, ["'block_1'", "'aten.sin'", "sin_1"]),
        ("layers", ["'layers'"]),
        ({"": "save"}, ["''"]),
    ],
)
def test_marks_that_cannot_be_read_or_kept(marks: Any, words: list[str]) -> None:
    with pytest.raises(MarkError) as raised:
        Planner(Net("name"), sample(), marks=marks)
    assert all(word in str(raised.value) for word in words), raised.value


@made_of(lambda names_input: {"layer": nn.Linear(32, 32), "names_input": names_input})
class Returning(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.names_input:
            rockmate.name(x, "value")
        hidden = torch.tanh(self.layer(x))
        if not self.names_input:
            rockmate.name(hidden, "value")
        return {"loss": hidden.square().mean(), "hidden": hidden.detach()}


def test_values_that_no_plan_can_recompute() -> None:
    with pytest.raises(MarkError, match="input or a parameter"):
        Planner(Returning(True), sample(), marks={"value": "recompute"})
    with pytest.raises(MarkError, match="the model returns it"):
        Planner(Returning(False), sample(), marks={"value": "recompute"})


@pytest.mark.parametrize("policy", [5, [torch.ops.aten.mm], lambda *_, **__: "save"])
def test_policies_that_cannot_be_read(policy: Any) -> None:
    with pytest.raises(MarkError, match="polic"):
        Planner(Net(), sample(), policy=policy)


def test_an_infeasible_budget_says_what_the_marks_cost() -> None:
    planner = Planner(
        Net("name", depth=6), sample(), marks={"aten.tanh": "save", "block_1": "save"}
    )
    least = planner.minimum_peak_bytes
    with pytest.raises(rockmate.InfeasibleBudgetError) as raised:
        planner.plan(least // 2)
    text = str(raised.value)
    assert text.index("without 'aten.tanh'") < text.index("without 'block_1'")
    without = Planner(Net("name", depth=6), sample(), marks={"block_1": "save"})
    assert without.minimum_peak_bytes < least
    assert f"without 'aten.tanh' it is {without.minimum_peak_bytes:,} bytes" in text
