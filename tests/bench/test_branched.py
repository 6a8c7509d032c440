"""The models that are no chain, and the page that tells of them, from lines made by hand."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from bench import branched, branched_page, models
from bench.comparison.result import ModelResult
from bench.models.branched import modules_at

MACHINE = {
    "processor": "P",
    "machine": "M",
    "num_cores": 2,
    "num_threads": 1,
    "load_average": 0.5,
    "python": "3",
    "torch": "2",
    "transformers": "5",
    "commit": "abc",
    "gpu": None,
}
PLANNER = {
    "kind": "planner",
    "timings_s": {"capture": 9.0, "costs": 2.0, "solve": 3.0},
    "baseline_peak_bytes": 1000,
    "minimum_peak_bytes": 290,
    "num_ops": 9,
    "num_forward_ops": 4,
    "num_blocks": 2,
    "largest_block_ops": 50,
    "largest_part_ops": 50,
}


def measured(method: str, owner: str, peak_bytes: int, ratio: float, **plan: Any) -> list[Any]:
    own = {
        "kind": "point",
        "method": method,
        "owner": owner,
        "family": method.partition(":")[0],
        "peak_bytes": peak_bytes,
        "resident_bytes": None,
        "prepare_s": 0.0,
        "same_as": None,
        "gradients": {"largest_relative": 0.0},
    }
    time = {"kind": "time", "method": method, "round": 0, "ms": 10 * ratio, "eager_ms": 10.0}
    return [
        own,
        time,
        *(
            [{"kind": "plan", "method": method, "plan_s": 1.0, "predicted_ms": 10.0, **plan}]
            if plan
            else []
        ),
    ]


def result(*points: list[Any]) -> ModelResult:
    run = {"kind": "run", "options": {"rounds": 1, "tiny": False}, **MACHINE}
    return ModelResult(
        "unet",
        [
            {"model": "unet", **record}
            for record in [run, PLANNER, *(r for own in points for r in own)]
        ],
    )


def test_page_tells_hits_from_misses() -> None:
    half = {
        "budget_bytes": 500,
        "predicted_peak_bytes": 480,
        "predicted_ratio": 1.06,
        "optimality_gap": 0.031,
    }
    least = {
        "budget_bytes": 300,
        "predicted_peak_bytes": 290,
        "predicted_ratio": 1.4,
        "optimality_gap": 0.3,
    }
    text = "\n".join(
        branched_page.page(
            [
                result(
                    measured("eager", "peer", 1000, 1.0),
                    measured("checkpoint", "peer", 400, 1.3),
                    measured("checkpoint: stages", "peer", 380, 1.4),
                    measured("rockmate: 0.5", "ours", 501, 1.1, **half),
                    measured("rockmate: minimum", "ours", 290, 1.5, **least),
                )
            ]
        )
    )
    assert "| measured peak within the budget | all | 1 of 2 |  | **miss** |" in text
    assert "| predicted peak within 2 % of the measured one | all | 1 of 2 |  | **miss** |" in text
    assert "| half of the peak is feasible | all | 1 of 1 |  | hit |" in text
    assert "| measured time there, over eager's: largest | <= 1.10 | 1.100 | unet | hit |" in text
    assert (
        "| measured time there, over eager's: U-Net | <= 1.05 | 1.100 | unet | **miss** |" in text
    )
    assert (
        "| predicted time there, over the baseline's: largest | <= 1.10 | 1.060 | unet | hit |"
        in text
    )
    assert (
        "over the baseline's: U-Net | <= 1.05 | 1.060 | unet, where no schedule is below 1.029 | "
        "**miss** |" in text
    )
    assert (
        "| gap to the bound down to 0.35: largest | <= 0.03 | 0.031 | unet, 0.5 | **miss** |"
        in text
    )  # the minimum is below
    assert f"of that of checkpoints: largest | <= 0.80 | {290 / 380:.3f} | unet | hit |" in text
    assert "| planning without capture, in s: largest | <= 20.00 | 6.000 | unet | hit |" in text
    assert "| unet | 0.35 | infeasible: the least peak is 0.00029 MB |" in text


def test_every_model_that_is_no_chain_is_in_the_table_and_most_have_natural_modules() -> None:
    assert set(models.BRANCHED) <= models.REGISTRY.keys()
    workload = models.build("hrnet", tiny=True)
    assert workload.stages is not None
    assert [
        len(found) for found in (workload.layers(workload.model), workload.stages(workload.model))
    ] == [4, 2]
    inside = workload.with_loss_inside()
    assert inside.stages is not None
    assert len(inside.stages(inside.model)) == 2


def test_patterns_match_whole_paths_and_a_wrong_one_is_told() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), nn.Linear(1, 1))
    assert modules_at(model, ("*",)) == [model[0], model[1]]
    assert modules_at(model, ("0.*",)) == list(model[0])
    with pytest.raises(
        ValueError, match=r"no submodule of Sequential has a path like 'layers\.\*'"
    ):
        modules_at(model, ("layers.*",))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--tiny"], "--output"), (["--rounds", "0"], "at least 1"), (["--model", "gpt2"], "unet")],
)
def test_the_command_refuses_what_it_cannot_do(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        branched.main(arguments)
    assert text in capsys.readouterr().err
