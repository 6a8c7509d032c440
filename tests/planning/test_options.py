"""Options are written out once, told apart by name at once, and survive a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rockmate
from rockmate import Plan, Planner, PlanOptions, RockmateError, RockmateModule, UnknownOptionError
from rockmate.capture.options import choices_of
from rockmate.cli import main
from rockmate.cli.arguments import planning_options
from rockmate.dynamo.options import Options
from rockmate.graph.chunking.chunks import Chunks
from rockmate.graph.mark_request import MarkRequest
from rockmate.graph.step_options import StepOptions

# Written by the release that had texts for all options.
OLD_PLAN = Path(__file__).parent / "plan_of_texts.json"
OLD_TEXTS = {
    "differentiable": "all", "outputs": "loss", "gradients": "accumulated", "untraced": "a.b,c",
    "in_flight": "3", "hooked": "head.weight", "marks": '[["aten.mm","save"]]', "policy": "2- 1s",
    "existing_checkpoints": "honour", "memory_format": "channels_last",
    "output_layouts": "0231,,10", "contiguous_convolutions": "", "kernels": "fused",
    "unfused": "x y,z", "loss_chunks": "4 recompute, 2 in layers",
}  # fmt: skip
OLD_OPTIONS = StepOptions(
    differentiable="all",
    outputs="loss",
    untraced=("a.b", "c"),
    in_flight=3,
    hooked=("head.weight",),
    marks=MarkRequest(patterns=(("aten.mm", "save"),), decisions="--s", honours_checkpoints=True),
    kernels="fused",
    unfused=("x y", "z"),
    loss_chunks=Chunks(4, "recompute", 2),
)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def test_every_option_is_explained() -> None:
    text = PlanOptions.__doc__ or ""
    assert not [each.name for each in fields(PlanOptions) if f"\n        {each.name}: " not in text]


ENTRIES: dict[str, Callable[..., Any]] = {
    "Planner": lambda **options: Planner(net(), torch.ones(2, 4), **options),
    "RockmateModule": lambda **options: RockmateModule(net(), None, 1.0, **options),
    "a frame": lambda **options: RockmateModule(net(), None, 1.0, mode="frames", **options),
    "sweep": lambda **options: rockmate.sweep(net(), torch.ones(2, 4), **options),
    "fit": lambda **options: rockmate.fit(net(), torch.ones(2, 4), "1GiB", **options),
    "torch.compile": lambda **options: Options.of({"budget": 0.5, **options}, {}),
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_an_unknown_option_is_told_with_the_nearest_one(entry: str) -> None:
    with pytest.raises(UnknownOptionError, match=r"no option 'numrics'. Did you mean numerics\?"):
        ENTRIES[entry](numrics="bitwise")
    assert issubclass(UnknownOptionError, RockmateError)
    assert issubclass(UnknownOptionError, TypeError)


@pytest.mark.parametrize("entry", ["Planner", "RockmateModule", "sweep", "torch.compile"])
@pytest.mark.parametrize("name", choices_of(PlanOptions))
def test_a_value_that_is_none_is_told_before_a_capture(entry: str, name: str) -> None:
    if entry == "torch.compile" and name == "outputs":  # which graphs of Dynamo's have not
        return
    with pytest.raises(ValueError, match=f"{name} is 'none'; choose '"):
        ENTRIES[entry](**{name: "none"})


def test_what_a_fit_or_a_graph_has_not_is_told() -> None:
    for name in ("kernels", "mesh"):
        with pytest.raises(UnknownOptionError, match=f"a fit has no option '{name}'"):
            ENTRIES["fit"](**{name: None})
    with pytest.raises(UnknownOptionError, match="backend \"rockmate\" has no option 'machine'"):
        ENTRIES["torch.compile"](machine="h100")


def test_one_object_stands_for_keywords() -> None:
    model, x, options = net(), torch.ones(2, 4), PlanOptions(machine="h100", differentiable="all")
    planner = Planner(model, x, options, in_flight=2)
    assert planner.options == PlanOptions(machine="h100", differentiable="all", in_flight=2)
    assert planner.plan(1.0).options == StepOptions(differentiable="all", in_flight=2, hooked=())


def test_a_file_holds_the_options() -> None:
    options = PlanOptions(
        untraced=["a", "b"], marks={"aten.mm": "save"}, mesh=[2, 8], machine="h100",
        time_limit_s=5, host_budget="1GiB", numerics="bitwise",
    )  # fmt: skip
    assert PlanOptions(**json.loads(json.dumps(asdict(options)))) == options


def test_the_command_line_has_the_defaults() -> None:
    for command in (["sweep", "gpt2"], ["plan", "gpt2", "--budget", "1"]):
        assert planning_options(main._parser().parse_args(command)) == PlanOptions()
    given = ["--time-limit", "5", "--mesh", "2x8", "--untraced", "a,b", "--save", "aten.mm"]
    found = planning_options(main._parser().parse_args(["sweep", "gpt2", *given]))
    assert found.changed == {
        "untraced": ("a", "b"), "time_limit_s": 5.0, "marks": {"aten.mm": "save"}, "mesh": (2, 8),
    }  # fmt: skip


# --- the options of a step ------------------------------------------------------------------------


def test_options_of_a_step_survive_a_file() -> None:
    written = json.loads(json.dumps(OLD_OPTIONS.to_json()))
    assert StepOptions.from_json(written) == OLD_OPTIONS
    assert written["untraced"] == ["a.b", "c"]
    assert written["in_flight"] == 3
    assert StepOptions(hooked=()).to_json() == {
        "differentiable": "loss", "outputs": "all", "gradients": "accumulated"
    }  # fmt: skip


def test_texts_of_earlier_releases_are_read() -> None:
    assert StepOptions.from_json(OLD_TEXTS) == OLD_OPTIONS


def test_a_plan_of_an_earlier_release_is_read() -> None:
    plan = Plan.load(OLD_PLAN)
    assert plan.options == StepOptions(
        in_flight=3,
        hooked=("head.weight",),
        marks=MarkRequest(
            patterns=(("aten.tanh", "save"), ("inner", "recompute")), honours_checkpoints=True
        ),
    )
    assert plan.snapshot.num_in_flight == 3
    assert Plan.from_text(plan.to_text()).options == plan.options
