"""The command line: what each command prints, draws and writes, and how it refuses."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rockmate import Plan
from rockmate._torch.allocator import Timeline
from rockmate.cli import demo, demo_report
from rockmate.cli.main import main

SIZES = "--layers 3 --width 64 --batch 2 --tokens 64 --steps 3 --budget 0.7"
TINY = SIZES.split()


def test_demo_prints_one_table_and_draws(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--threads", "1", "--quiet", "--out", str(tmp_path / "out")]
    assert main(["demo", *TINY, *options]) == 0
    printed, noise = capfd.readouterr()
    assert noise == ""
    assert "3 layers, width 64" in printed
    losses = r"^loss of step \d +\d+\.\d{7} +\d+\.\d{7} +identical$"
    assert len(re.findall(losses, printed, re.MULTILINE)) == 3
    for row in (
        "activation budget",
        "activation peak, predicted",
        "activation peak, measured",
        "step time, predicted",
    ):
        assert len(re.findall(f"^{row} ", printed, re.MULTILINE)) == 1
    assert re.search(
        r"^step time, measured \(median\) +[\d.]+ ms +[\d.]+ ms +[\d.]+$", printed, re.MULTILINE
    )
    assert re.search(r"^planning time +[\d.]+ s$", printed, re.MULTILINE)
    assert "bit by bit" in printed
    assert "inside the budget" in printed

    picture = (tmp_path / "out" / "memory.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width >= 800
    assert height >= 500
    assert len(picture) > 20_000  # curves, not an empty frame


def test_progress_goes_to_standard_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.get_num_threads()
    assert main(["demo", *TINY, "--threads", str(before + 1), "--out", str(tmp_path)]) == 0
    assert torch.get_num_threads() == before
    printed, progress = capfd.readouterr()
    assert "3/3" in progress
    assert "planning for" in progress
    assert "planning for" not in printed


# --- refusals -------------------------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    assert main(["demo", "--quiet", *arguments]) == 2
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said.startswith("rockmate demo: error: ")
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--width 200 --out FOLDER", "--width 200"),
        ("--steps 1000000 --layers 1 --width 64 --out FOLDER", "too few"),
        ("--out FOLDER/file/folder", "cannot write .*another"),
    ],
)
def test_options_of_a_demo_that_are_refused(
    arguments: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    said = refusal(capsys, arguments.replace("FOLDER", str(tmp_path)).split())
    assert re.search(told, said, re.DOTALL)


@pytest.mark.parametrize(
    ("package", "extra"),
    [("transformers", "hf"), ("matplotlib", "plot"), ("transformers matplotlib", "hf,plot")],
)
def test_missing_extra(
    package: str,
    extra: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hide(package, monkeypatch)
    said = refusal(capsys, ["--out", str(tmp_path)])
    assert all(name in said for name in package.split())
    assert f"pip install '.[{extra}]'" in said


def hide(packages: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> object:
        return None if name.partition(".")[0] in packages.split() else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)


def test_budget_below_the_minimum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, [*TINY, "--budget", "0.0001", "--out", str(tmp_path)])
    smallest = re.search(r"--budget (\d\.\d+)", said)
    assert smallest is not None
    assert main(["demo", *TINY, "--quiet", "--budget", smallest[1], "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        *("", "fly", "demo --budget 1.5", "demo --budget nan", "demo --steps 0", "demo --tokens 1"),
        "check --threads 0",
        *("sweep", "sweep a:b --steps 0", "sweep a:b --dtype float8", "plan a:b"),
        *(f"plan a:b --budget 1.0 --in-flight {number}" for number in ("0", "-1", "two")),
        *(f"fit a:b --memory 1GiB --{text}" for text in ("sizes 2,0", "tokens 1", "steps -1")),
        *(f"fit a:b --memory 1GiB --batch-axis {text}" for text in ("q", "q=", "=1", "q=one")),
    ],
)
def test_arguments_that_cannot_be_read(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments.split())
    assert stopped.value.code == 2
    assert "usage: rockmate" in capsys.readouterr().err


# --- sweep and plan -------------------------------------------------------------------------------


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A function of a module in the working directory, as a user has it."""
    name = f"nets_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "class Wrong(nn.Linear):\n"
        "    def forward(self, x):\n        return super().forward(x) * (1.0 if "
        "torch.compiler._is_compiling_flag else 2.0)\n"
        "def net():\n"
        "    layers = [nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in "
        "range(2)]\n"
        "    return nn.Sequential(*layers), torch.randn(32, 16)\n"
        "def wrong():\n    return Wrong(16, 16), torch.randn(32, 16)\n"
        "class Halting(nn.Module):\n"
        "    def forward(self, x):\n        return x.tanh() if x.sum() > 0 else x\n"
        "def halting():\n    return nn.Sequential(nn.Linear(16, 64), Halting(), nn.Linear(64, "
        "16)), torch.randn(32, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    return f"{name}:net"


def test_sweep_prints_a_table_and_writes_its_files(
    network: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    options = "--budgets 1KiB,0.8,1.0 --measure --steps 1 --out out --threads 1 --quiet"
    arguments = ["sweep", network, *options.split()]
    assert main(arguments) == 0
    printed, noise = capfd.readouterr()
    assert noise == ""
    assert printed.startswith(f"{network}: ")
    table = printed.split("\n\n")[1].splitlines()
    assert len(table) == 5
    assert max(map(len, table)) <= 72
    assert "needs" in table[2]
    assert re.search(r" \d\.\d{3}x .*bitwise", table[3])
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written == {"plans", *(f"sweep.{ending}" for ending in ("json", "jsonl", "csv", "html"))}
    assert main(arguments) == 0
    recompute = capfd.readouterr().out.split("\n\n")[1].splitlines()
    assert recompute == table, "measured rows are kept"


def test_sweep_of_a_configuration(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}
    config |= {"n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = "--machine h100 --budgets 0.9 --batch 3 --tokens 16"
    assert main(["sweep", str(tmp_path), *options.split()]) == 0
    printed, progress = capfd.readouterr()
    assert "GPT2LMHeadModel" in printed
    assert "input_ids 3 x 16" in printed
    assert "1/1" in progress


def test_sweep_without_a_feasible_budget(network: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", network, "--budgets", "1KiB", "--quiet"]) == 1
    assert "needs" in capsys.readouterr().out


def test_sweep_of_a_model_whose_plan_is_wrong(
    network: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = network.replace(":net", ":wrong")
    assert main(["sweep", wrong, "--budgets", "1.0", "--measure", "--steps", "1", "--quiet"]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_a_submodule_that_cannot_be_captured_is_left_as_it_is(
    network: str, capsys: pytest.CaptureFixture[str]
) -> None:
    halting = network.replace(":net", ":halting")
    assert main(["plan", halting, "--budget", "1.0", "--quiet"]) == 2
    (told,) = re.findall(r"--untraced [\w.]+", capsys.readouterr().err)
    assert (
        main(["plan", halting, "--budget", "1.0", "--quiet", "--explain", "1", *told.split()]) == 0
    )
    assert "untraced_forward" in capsys.readouterr().out
    options = f"--budgets 1.0 --measure --steps 1 --quiet {told}"
    assert main(["sweep", halting, *options.split()]) == 0


def test_interrupted_sweep(
    network: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rockmate.curves.measure.SideBySide.measure", interrupt)
    options = "--budgets 1.0 --measure --quiet --out out"
    assert main(["sweep", network, *options.split()]) == 130
    assert "goes on from there" in capsys.readouterr().err
    assert len((tmp_path / "out" / "sweep.jsonl").read_text().splitlines()) == 1


def test_plan_is_printed_explained_and_saved(
    network: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", network, "--budget", "0.8", "--quiet", "--out", "plan.json"]) == 0
    printed = capsys.readouterr().out
    assert "activation budget" in printed
    assert "<- peak" in printed
    plan = Plan.load(tmp_path / "plan.json")
    assert plan.summary() in printed
    assert main(["plan", network, "--budget", "0.8", "--quiet", "--explain", "0.1"]) == 0
    assert "gelu" in capsys.readouterr().out


def test_plan_takes_the_smallest_peak_if_asked(
    network: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    asked_for = ["plan", network, "--budget", "1KiB", "--quiet"]
    assert main(asked_for) == 2
    assert "--on-infeasible least" in capsys.readouterr().err
    assert main([*asked_for, "--on-infeasible", "least"]) == 0
    assert "<- peak" in capsys.readouterr().out
    assert "no schedule fits the budget of 1.0 KiB" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["sweep", "NET", "--budgets", "0.5:2GiB:3"], "fraction to a size"),
        (["sweep", "NET", "--strategies", "best"], "'best' is not known"),
        (["sweep", "NET", "--out", "file/folder"], "Give another --out"),
        (["sweep", "NET", "--machine", "abacus"], "'abacus' is not known"),
        (["sweep", "NET", "--machine", "l4", "--measure"], "not measured from here"),
        (["sweep", "NET", "--tokens", "8"], "--tokens"),
        (["sweep", "nowhere:net"], "no module 'nowhere'"),
        (["sweep", "./nowhere"], "no file or folder"),
        (["sweep", "NET", "--untraced", "0,7"], "names '7', which is no submodule"),
        (["plan", "NET", "--budget", "0.5,0.6"], "2 budgets"),
        (["plan", "NET", "--budget", "1KiB"], "the smallest peak found"),
        (["plan", "NET", "--budget", "1.0", "--explain", "nothing"], "'nothing' is neither"),
        (["plan", "NET", "--budget", "1.0", "--out", "nowhere/plan.json"], "no folder nowhere"),
        (["fit", "NET", "--memory", "1GiB", "--json", "nowhere/x.json"], "no folder nowhere"),
        (["run", "--budget=2.0", "file"], "as a float is a fraction"),
        (["run", "--budget=0.5,0.6", "file"], "--budget has several budgets"),
        (["run", "--memory=x", "file"], "--memory 'x' cannot be read"),
        (["plan", "NET", "--budget", "1.0", "--strategy", "best"], "'best' is not known"),
        (["check", "--device", "nowhere"], "device 'nowhere' cannot be used here"),
        (["check", "--only", "nothing", "--device", "cpu"], "there are GPT-2, "),
    ],
)
def test_sweeps_and_plans_that_are_refused(
    arguments: list[str],
    text: str,
    network: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").write_text("")
    assert main([network if word == "NET" else word for word in [*arguments, "--quiet"]]) == 2
    printed, said = capsys.readouterr()
    assert printed == ""
    assert said.startswith(f"rockmate {arguments[0]}: error: ")
    assert text in said


def test_an_error_after_progress_stands_on_a_line_of_its_own(
    network: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep.json").write_text("{}")
    for arguments in (
        ["plan", network, "--budget", "1KiB"],
        ["sweep", network, "--budgets", "0.9", "--out", "out"],
    ):
        assert main(arguments) == 2
        assert re.fullmatch(rf"rockmate {arguments[0]}: error: [^\r\n]+\n", capfd.readouterr().err)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_stages_and_bars_that_clear_themselves_are_for_a_terminal(
    is_terminal: bool,
    network: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setattr("rockmate._util.STAGE_DELAY_S", 0.0)
    assert main(["plan", network, "--budget", "1.0"]) == 0
    stages, _, bars = capsys.readouterr().err.partition("measuring ops")
    assert bool(bars) == ("loading PyTorch" in stages) == is_terminal
    assert "capturing" not in bars, "a bar takes the place of the stages"


def test_missing_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide("transformers", monkeypatch)
    (tmp_path / "config.json").write_text("{}")
    assert main(["sweep", str(tmp_path), "--quiet"]) == 2
    assert "pip install '.[hf]'" in capsys.readouterr().err


# --- a promise that does not hold -----------------------------------------------------------------


def example_result() -> demo.DemoResult:
    memory = Timeline(
        points=[(0.0, 0), (0.1, 1000), (0.2, 0)], marks={demo.BACKWARD_MARK: 0.1}, duration_s=0.2
    )
    run = demo.Run(losses=[2.0, 1.0], times_ms=[10.0, 20.0], memory=memory)
    plan: Any = SimpleNamespace(
        budget_bytes=1000,
        predicted_peak_bytes=990,
        predicted_ms=12.0,
        baseline_peak_bytes=2000,
        baseline_ms=10.0,
    )
    return demo.DemoResult(
        title="a model",
        eager=run,
        planned=dataclasses.replace(run, times_ms=[12.0, 22.0]),
        plan=plan,
        planning_s=1.0,
        stage_s={"capture": 0.5},
        equal_weights=True,
    )


def test_success_is_all_three_promises() -> None:
    result = example_result()
    assert result.succeeded
    assert result.measured_ratio == pytest.approx((1.2 + 1.1) / 2)
    assert "FAILED" not in demo_report.report(result)


@pytest.mark.parametrize(
    ("of_the_run", "others", "told"),
    [
        ({"losses": [2.0, 1.0000001]}, {}, "FAILED: the losses"),
        ({}, {"equal_weights": False}, "the weights after them are not"),
        (
            {"memory": Timeline(points=[(0.0, 1234)], marks={}, duration_s=0.1)},
            {},
            "FAILED: the measured peak is 234 bytes above the budget",
        ),
    ],
)
def test_a_promise_that_does_not_hold_is_told(
    of_the_run: dict[str, Any], others: dict[str, Any], told: str
) -> None:
    result = example_result()
    planned = dataclasses.replace(result.planned, **of_the_run)
    result = dataclasses.replace(result, planned=planned, **others)
    assert not result.succeeded
    assert told in demo_report.report(result)
    assert ("DIFFERENT" in demo_report.report(result)) == ("losses" in of_the_run)


# --- a mesh ---------------------------------------------------------------------------------------


def test_plans_of_a_mesh(network: str, capfd: pytest.CaptureFixture[str]) -> None:
    options = [network, "--machine", "h100", "--quiet"]
    assert main(["plan", *options, "--budget", "1.0", "--mesh", "2x8"]) == 0
    printed = capfd.readouterr().out
    assert re.search(r"^ +estimated for +h100, 2 x 8 ranks \(replicate, shard\)$", printed, re.M)
    assert re.search(r"^ +with overlap +[\d.]+ ms", printed, re.MULTILINE)
    assert main(["sweep", *options, "--budgets", "1.0", "--mesh", "8"]) == 0
    assert "1.000x" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--mesh", "8"], 'machine="h100"'),
        (["--mesh", "8", "--machine", "h100", "--measure"], "not measured from here"),
        (["--mesh", "0x8", "--machine", "h100"], "0 is below 1"),
        (["--mesh", "2x2x2", "--machine", "h100"], "give N or MxN"),
    ],
)
def test_a_mesh_that_cannot_be_planned(
    options: list[str], told: str, network: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["sweep", network, *options])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert told in capfd.readouterr().err
