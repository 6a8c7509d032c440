"""Marks, existing checkpoints and forwards in flight on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rockmate import Plan
from rockmate.cli.main import main

NETWORK = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import rockmate


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 64)
        self.outer = nn.Linear(64, 16)

    def forward(self, x):
        return self.outer(rockmate.name(torch.tanh(self.inner(x)).exp(), "hidden"))


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def net():
    return nn.Sequential(Block(), Block()), torch.randn(32, 16)


def checkpointed():
    return nn.Sequential(Checkpointed(), Checkpointed()), torch.randn(32, 16)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's in the working directory."""
    name = f"marked_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(NETWORK, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return name


def planned(module: str, function: str, *arguments: str) -> Plan:
    command = ["plan", f"{module}:{function}", "--budget", "1.0", "--quiet", "--out", "plan.json"]
    assert main([*command, *arguments]) == 0
    return Plan.load("plan.json")


def marks_of(plan: Plan) -> dict[str, str]:
    return {storage.name: storage.mark for storage in plan.snapshot.storages if storage.mark}


def test_plan_keeps_the_marks(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(module, "net", "--save", "aten.tanh", "--recompute", "hidden,1.inner")
    # A second word for the submodule's result would contradict nothing: it is read outside of it.
    assert marks_of(plan) == {
        "tanh": "save", "tanh_1": "save", "exp": "recompute", "exp_1": "recompute",
    }  # fmt: skip
    assert plan.schedule.num_recomputations() == 2
    assert "'hidden'" in capsys.readouterr().out


def test_options_that_are_repeated_add_up(module: str) -> None:
    plan = planned(module, "net", "--save", "aten.tanh", "--save", "0.inner")
    assert plan.options.marks.patterns == (("aten.tanh", "save"), ("0.inner", "save"))


def test_without_marks_a_plan_has_none(module: str) -> None:
    plan = planned(module, "net")
    assert not marks_of(plan)
    assert not {"marks", "existing_checkpoints", "in_flight"} & plan.options.to_json().keys()


def test_checkpoints_are_lifted_or_honoured(module: str) -> None:
    assert not marks_of(planned(module, "checkpointed"))
    honoured = planned(module, "checkpointed", "--existing-checkpoints", "honour")
    assert set(marks_of(honoured).values()) == {"recompute"}
    assert honoured.schedule.num_recomputations()


def test_several_forwards_in_flight(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, three = planned(module, "net"), planned(module, "net", "--in-flight", "3")
    assert three.options.in_flight == 3
    saved = three.simulation.saved_bytes
    assert three.predicted_peak_bytes == one.predicted_peak_bytes + 2 * saved
    assert "3 forwards" in capsys.readouterr().out


def test_a_measured_sweep_runs_as_many_forwards(
    module: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The peak is that of all of them, eager's too; times are of one."""
    for number in ("1", "3"):
        command = ["sweep", f"{module}:net", "--budgets", "1.0", "--measure", "--steps", "1"]
        given = ["--in-flight", number, "--recompute", "hidden", "--out", f"out{number}"]
        assert main([*command, *given, "--quiet", "--threads", "1"]) == 0
        assert "bitwise" in capsys.readouterr().out
    one, three = (
        json.loads((tmp_path / f"out{number}" / "sweep.jsonl").read_text().splitlines()[0])
        for number in ("1", "3")
    )
    assert three["measured_peak_bytes"] <= three["predicted_peak_bytes"]
    assert three["measured_peak_bytes"] > 0.8 * three["predicted_peak_bytes"]
    assert three["eager_peak_bytes"] > one["eager_peak_bytes"]


def test_fit_counts_marks_and_forwards(module: str, tmp_path: Path) -> None:
    def rows(*arguments: str) -> list[dict]:
        given = ["--memory", "1MiB", "--reserve", "4KiB", "--machine", "cpu-avx2", "--quiet"]
        command = ["fit", f"{module}:net", "--sizes", "32", "--numerics", "bitwise"]
        assert main([*command, *given, "--json", "fit.json", *arguments]) == 0
        return json.loads((tmp_path / "fit.json").read_text())["rows"]

    plain = rows()
    saved = rows("--save", "aten.*")
    flight = rows("--in-flight", "3")
    assert saved[-1]["batch_size"] < plain[-1]["batch_size"]
    assert flight[-1]["batch_size"] < plain[-1]["batch_size"]
    assert flight[0]["input_bytes"] == 3 * plain[0]["input_bytes"]
    assert rows("--recompute", "hidden")[0]["num_recomputations"] == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--save", "hiden"], "hidden"),
        (["--save", "0.iner"], "0.inner"),
        (["--save", "hidden", "--recompute", "hidden"], "--save and --recompute both name"),
        (["--save", "hidden", "--recompute", "aten.exp"], "contradict each other"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "sweep", "fit"])
def test_refusals(
    command: str, arguments: list[str], text: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {
        "plan": ["--budget", "1.0"],
        "sweep": [],
        "fit": ["--memory", "1GiB", "--reserve", "1MiB", "--machine", "cpu-avx2"],
    }
    assert main([command, f"{module}:net", "--quiet", *needed[command], *arguments]) == 2
    printed, said = capsys.readouterr()
    assert printed == ""
    assert text in said
