"""Random training scripts of all kinds: eager's bits in the budget, or a refusal that helps.

    RANDOM_SCRIPTS=200 python -m pytest tests/scripts/test_random_scripts.py

`python -m bench.scripts` counts thousands.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import random_scripts
import torch
from random_scripts import KINDS, Script

from bench import script_outcome, scripts
from bench.script_outcome import RIGHT, outcome
from rockmate.entry.plan_cache import PlanCache

pytestmark = pytest.mark.filterwarnings("ignore")  # of hooks and schedulers in the scripts


def test_the_first_seeds_have_one_kind_each_which_eager_trains() -> None:
    scripts = [Script.of(seed) for seed in range(len(KINDS))]
    assert [script.kinds for script in scripts] == [(kind,) for kind in KINDS]
    for script in scripts:
        for record in random_scripts.run_of(script).train():
            assert all(loss.isfinite() for loss in record["loss"]), script


@pytest.mark.parametrize(
    "drawn",
    [
        *((1000 + seed,) for seed in range(int(os.environ.get("RANDOM_SCRIPTS", "6")))),
        (31_374, "frames", ("toggled", "batch in a dataclass")),
        (50_193, "plan", ("python random", "parameter replaced", "buffer of another size",
                          "kernels of attention", "other method")),
        (560_040, "auto", ("toggled in the script", "accumulation", "autocast in some steps",
                           "two calls in flight")),
        (910_010, "auto", ("no grad part", "cache of a length", "autocast in some steps",
                           "momentum", "tensor attribute of the input")),
    ],
)  # fmt: skip
def test_a_wrapped_script_is_eagers_or_is_advised(drawn: Any) -> None:
    script = Script.of(*drawn)
    found = outcome(script)
    assert found["verdict"] in (*RIGHT, script_outcome.NOT_COUNTED), (script, found)


PLANNED = (
    "autocast, gradients scaled, gradients clipped", "autocast, tied weight",
    "autocast, two calls in flight", "backward in a thread", "batch norm, eval call between",
    "buffer replaced", "cache of a length", "cached function", "class attribute in a backward",
    "embedding bag of offsets", "global that is read", "gradient of the input by the script",
    "input is an activation", "judge of another", "made by the first call",
    "noise of hooks, autocast", "noise of hooks, tied weight", "segments", "torch random",
    "tuple of a class of its own", "two calls in flight, judged by another",
    "weight replaced, layer swapped",
)  # fmt: skip


@pytest.mark.parametrize("mode", random_scripts.MODES)
@pytest.mark.parametrize(
    ("kinds", "advice"),
    [
        *((kinds, "") for kinds in PLANNED),
        ("cached function, activation that is read", "reads the value of a tensor"),
        ("carried state", "reads layers.0"),
        ("fake quantized", "resizes layers.0.fake.scale"),
        ("counter that is read", "reads layers.0.counter and leaves it with another value"),
        ("generator of its own", "uses a Generator object"),
        ("gradient penalty", "create_graph=True asks for a second derivative"),
        ("layer drop", 'mode="frames"'),
        ("recurrent, python random", "Python's"),
        ("retained gradient", "calls retain_grad on a tensor of shape"),
    ],
)
def test_a_kind_is_eagers_or_its_plan_is_refused(kinds: str, advice: str, mode: str) -> None:
    found = outcome(Script.of(0, mode, tuple(kinds.split(", "))))
    assert found["verdict"] in ("equal", "advised"), found
    reasons = [each for each in found["advices"] if "smallest peak" not in each]
    assert bool(reasons) == (bool(advice) and mode == "plan"), found
    assert all(advice in each for each in reasons)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"a": torch.ones(2)}, ""),
        ({"a": torch.tensor([1.0, 1.0 + 2**-23])}, ".a: differs by 1.2e-07 of 1"),
        ({"a": torch.ones(3)}, ".a: torch.Size([2])"),
        ({"b": torch.ones(2)}, "['a', 'b'] in one of both"),
        ({"a": 1.0}, ".a: a tensor of shape (2,), 1.0 in eager"),
    ],
)
def test_a_difference_of_one_bit_is_named(theirs: Any, expected: str) -> None:
    assert expected in random_scripts.difference({"a": torch.ones(2)}, theirs)


def test_losses_of_the_first_step_do_not_round() -> None:
    theirs = {"loss": torch.ones(1), "gradients": torch.ones(1)}
    for name in theirs:
        ours = theirs | {name: torch.tensor([1.0 + 2**-23])}
        found = [random_scripts.difference([ours] * n, [theirs] * n, rounding=1e-6) for n in (1, 2)]
        assert all(each.startswith("[0].loss") for each in found) is (name == "loss")
    assert not random_scripts.difference([theirs, ours], [theirs, theirs], rounding=1e-6)


def test_a_wrong_number_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = script_outcome.RockmateModule.__call__

    def spoiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs) * 1.0001

    monkeypatch.setattr(script_outcome.RockmateModule, "__call__", spoiled)
    found = outcome(Script.of(0, "plan", ("adam",)))
    assert found["verdict"] == "DIFFERS"
    assert found["detail"].startswith("[0].loss[0]: differs by")


def test_a_gradient_inside_beside_a_recurrent_layer_is_planned() -> None:
    assert outcome(Script.of(0, "plan", ("gradient inside", "recurrent")))["verdict"] == "equal"


def test_autocasts_cache_in_a_planned_call_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(self: PlanCache, args: Any, kwargs: Any, _: Any) -> Any:
        return self._model(*args, **kwargs)

    monkeypatch.setattr(PlanCache, "run", run)
    found = outcome(Script.of(0, "plan", ("autocast", "two calls in flight")))
    assert found["verdict"] == "DIFFERS"


def test_a_step_above_the_budget_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(torch.nn.Module):
        frames, plan_cache = None, PlanCache(torch.nn.Identity())

        def __init__(self, model: Any, *_: Any, **__: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, **given: Any) -> Any:
            return self.model(**given)

    monkeypatch.setattr(script_outcome, "RockmateModule", Plain)
    scripts_of_adam = (Script.of(seed, "plan", ("adam",)) for seed in range(100))
    script = next(each for each in scripts_of_adam if each.share < 1)
    assert outcome(script)["verdict"] == "OVER BUDGET"


def test_the_page_counts_and_names(tmp_path: Path) -> None:
    head = scripts.machine_record("bench.scripts")
    own = {"kinds": ["adam"], "mode": "plan", "detail": "why"}
    verdicts = ("equal", "advised", "DIFFERS", script_outcome.NOT_COUNTED)
    records = [{**head, **own, "seed": s, "verdict": v} for s, v in enumerate(verdicts)]
    lines = "\n".join(scripts.page(records))
    assert "| scripts without differs | all | 2 of 3 |  | **miss** |" in lines
    assert "| plan | 3 | 1 | 0 | 1 | 1 | 0 | 0 | 0 | 0 | 0 |" in lines
    command = "`python -m bench.scripts --show --count 1 --seed 2 --mode plan`"
    assert f"| DIFFERS | adam | {command} | why |" in lines
