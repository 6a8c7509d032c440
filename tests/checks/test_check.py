"""`rockmate check`: each row holds on this machine, and a fault in any row is told."""

from __future__ import annotations

import json
import tempfile
from importlib import metadata
from typing import Any

import pytest
import torch

from rockmate import RockmateModule
from rockmate.capture import behaviour
from rockmate.checks.cases import cases
from rockmate.checks.run import check_case
from rockmate.cli.main import main

CPU = torch.device("cpu")
CASES = {case.name: case for case in cases(CPU, tempfile.gettempdir())}
COLUMNS = ("gradients", "peak, predicted -> measured", "time")


@pytest.mark.parametrize("name", list(CASES))
def test_a_row_holds_and_a_fault_in_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, held = RockmateModule.forward, []

    def faulty(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A loss that is off by a thousandth, and memory of another step."""
        result = forward(self, *args, **kwargs)
        held[:] = [torch.empty(1 << 28, dtype=torch.uint8)]
        if isinstance(result, torch.Tensor):
            return result * 1.001
        result.loss = result.loss * 1.001
        return result

    assert check_case(CASES[name], CPU).failures == ()
    monkeypatch.setattr(RockmateModule, "forward", faulty)
    failures = check_case(CASES[name], CPU).failures
    if name == "frames":  # which measure that memory, and refuse the budget
        assert "is below" in failures[0]
        return
    assert any("the gradient of" in each for each in failures)
    assert any("were predicted" in each for each in failures)


def test_an_error_is_the_failure_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(RockmateModule, "forward", refuse)
    assert check_case(CASES["dropout"], CPU).failures == ("ZeroDivisionError: planted",)


def test_a_row_whose_package_is_missing_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    row = check_case(CASES["Llama with LoRA"], CPU)
    assert not row.failures
    assert "peft" in row.skipped


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--only", "ResNet", "--device", "cpu", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert all(column in text for column in COLUMNS)
    assert "ResNet" in text
    assert text.endswith("2 of 2 hold.\n")


def test_json_and_exit_code(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = ["planted"]

    def missing() -> None:
        assert not faults, faults.pop()  # at the first try alone: the captures go on

    monkeypatch.setattr(behaviour, "_passed", set())
    monkeypatch.setitem(behaviour._CHECKS, "torch.manual_seed", missing)
    assert main(["check", "--only", "ResNet", "--device", "cpu", "--json", "--quiet"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["machine"]["versions"]["torch"] == metadata.version("torch")
    interfaces, images = record["rows"]
    assert "planted" in interfaces["failures"][0]
    assert images["failures"] == []
    assert images["measured_peak_bytes"] <= images["predicted_peak_bytes"] * 1.02
